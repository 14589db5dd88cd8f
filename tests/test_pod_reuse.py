"""Probabilities that followers take over from their lead, and distant tokens that they skip."""

import math

import pytest
import torch
from helpers import left_padded, logits_of, random_ids
from test_pod_cache import SETTINGS, converted, new_cache, read, trained

import kvcompress
from kvcompress import prefill
from kvcompress.pod.skips import SkipShares


@pytest.mark.parametrize("setting", [SETTINGS[name] for name in ("one", "mixed", "no sinks")])
def test_followers_that_reuse_compute_what_followers_without_do(setting):
    model = converted(setting)
    prompts = [random_ids(length, seed=length) for length in (40, 23, 3, 1)]
    ids, mask = left_padded(prompts)
    found = {}
    for reuse in (False, True):
        cache = new_cache(model, reuse=reuse)
        prefill(model, ids, cache, mask)
        found[reuse] = torch.cat([logits_of(model, random_ids(1, 4, seed=step), cache) for step in range(12)], 1)
        assert any(layer.reuses for layer in cache.layers) == reuse
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[True], found[False])  # two ways to compute it, not one


def test_reuse_is_taken_where_it_moves_fewer_bytes():
    model = converted(SETTINGS["one"], num_attention_heads=16, num_key_value_heads=2, head_dim=16)
    for dtype, expected in ((torch.float32, True), (torch.bfloat16, False)):  # 4 * 8 * (1 + 3) against 3 * 16 * bytes
        cache = new_cache(model.to(dtype))
        prefill(model, random_ids(20), cache)
        assert [layer.reuses for layer in cache.layers] == [expected, False, False, False]


@pytest.mark.parametrize("tau", [0.0, 0.4, 0.7, 1.0])
def test_heads_that_skip_take_their_near_keys_alone(tau, monkeypatch):
    """Against a forward pass without a cache, in which decoded tokens of followers drop the distant branch."""
    setting = SETTINGS["mixed"]
    lead, sinks, recent, _ = setting
    model, ids, prompt = converted(setting), random_ids(45, 2), 25
    gates = {"follower": [], "near": []}
    whole = kvcompress.ops.pod_attention
    layers = iter([1, 2, 3] * 9)  # in which a head follows

    def dropping(q, k, v, lead_q, lead_k, **given):
        out, lse, gate = whole(q, k, v, lead_q, lead_k, **given)
        near = kvcompress.ops.attention(q, k, v, window=recent, sinks=sinks, scale=given["scale"])[0]
        layer, at = next(layers), torch.arange(q.shape[2])
        follows = torch.tensor([a != layer for a in lead[layer]]).repeat_interleave(q.shape[1] // 2)
        decoded = (at >= max(prompt, sinks + recent))[None, None] & follows[None, :, None]
        skip = decoded & (gate >= tau) & (tau < 1)
        gates["follower"].append((skip * (at + 1 - sinks - recent))[:, follows].sum())
        gates["near"].append((decoded * (at + 1 - sinks - recent)).sum() * q.shape[0])
        return torch.where(skip[..., None], near, out), lse, gate

    with monkeypatch.context() as patch:
        patch.setattr(kvcompress.ops, "pod_attention", dropping)
        expected = trained(model, ids)
    cache = new_cache(model, tau=tau)
    torch.testing.assert_close(read(model, ids, cache, [prompt] + [1] * 20), expected, rtol=1e-3, atol=1e-3)
    dense = trained(model, ids)
    assert torch.allclose(expected, dense, atol=1e-3) == (tau == 1)
    if tau == 1:
        assert cache.skip_shares() == SkipShares(0.0, 0.0, 1.0)
        return
    shares, skipped, all_far = cache.skip_shares(), int(sum(gates["follower"])), int(sum(gates["near"]))
    heads, far = 4 * model.config.num_attention_heads, sum(range(26 - 12, 46 - 12))
    assert shares.followers == skipped / all_far and 0 < shares.followers <= 1
    assert (shares.followers == 1) == (tau == 0)
    assert shares.distant == skipped / (2 * heads * far)
    work = 2 * 2 * heads * (20 * 12 + far) - all_far
    assert shares.work == (work - skipped) / work
    cache.reset()
    assert math.isnan(cache.skip_shares().followers)


def test_a_prompts_tokens_are_never_skipped_however_it_is_read():
    model, ids = converted(SETTINGS["one"]), random_ids(20, 2)
    found = []
    for chunk_size in (None, 1, 18, 7):
        cache = new_cache(model, tau=0.0, chunk_size=chunk_size)
        prefill(model, ids, cache)
        assert math.isnan(cache.skip_shares().followers)
        found.append(logits_of(model, ids[:, -1:], cache))
        assert cache.skip_shares().followers == 1
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


def test_near_pairs_are_counted_from_the_first_token_on():
    """Whether another sequence of the batch has no token, and so goes another way, or not."""
    model, ids = converted(SETTINGS["one"]), random_ids(6, 2)
    caches = [new_cache(model, tau=0.5) for _ in range(2)]
    for t in range(6):
        logits_of(model, ids[:1, t : t + 1], caches[0])
        with torch.no_grad():
            mask = torch.tensor([[1] * (t + 1), [0] * (t + 1)])
            model(ids[:, t : t + 1], attention_mask=mask, past_key_values=caches[1])
    heads = 4 * model.config.num_attention_heads
    assert (
        caches[0].skips.pairs == caches[1].skips.pairs == {"near": heads * sum(range(1, 7)), "lead": 0, "follower": 0}
    )


@pytest.mark.parametrize("tau", [0.0, 0.6])
def test_what_a_token_skips_does_not_depend_on_its_neighbours(tau):
    """A step in which another sequence has no token."""
    model, ids, token = converted(), random_ids(30, 2), random_ids(1, 2, seed=7)
    caches = [new_cache(model, tau=tau) for _ in range(2)]
    for cache in caches:
        prefill(model, ids, cache)
    both = logits_of(model, token, caches[0])
    with torch.no_grad():
        one = model(token, attention_mask=torch.tensor([[1], [0]]), past_key_values=caches[1]).logits
    torch.testing.assert_close(one[0], both[0], rtol=1e-4, atol=1e-4)
    alone = new_cache(model, tau=tau)
    prefill(model, ids[:1], alone)
    logits_of(model, token[:1], alone)
    assert alone.skip_shares() == caches[1].skip_shares()
