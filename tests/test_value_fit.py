"""PrunedCache(fit_values=True): values of what stays answer for what went."""

import pytest
import torch
from helpers import attached, kind_model, left_padded, random_ids
from oracle.value_fit import SEGMENTS, fitted, missing_of, ridge

import kvcompress
from kvcompress import AdaKV, CacheSpec, GlobalTopK, KVzip, PrunedCache, RemoteGap, Replay, SnapKV, prefill
from kvcompress.caches import value_fit
from kvcompress.positions import RotaryTables

REPLAY = Replay(chunk=16, last=4)
METHODS = {
    "a size": (REPLAY, 24), "AdaKV": (REPLAY, AdaKV(24)), "GlobalTopK": (REPLAY, GlobalTopK(24)),
    "KVzip": (KVzip(chunk=32), GlobalTopK(24)), "SnapKV": (SnapKV(window=6), 0.75),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return attached()


def held(cache):
    """Of each layer (keys [R, K, D], values, kept positions of each row)."""
    found = []
    for layer in cache.compressing:
        places = cache.kept_positions()[layer.index]
        keys, values = layer.pool.gather(max(layer.pool.counts))[:2]
        found.append((keys, values, [row for sequence in places for row in sequence]))
    return found


@torch.no_grad()
def projected(model, ids):
    """Of each layer queries and values [heads, T, D] before rotation, and keys, as the model reads one text."""
    noted, hooks = {}, []
    for number, layer in enumerate(model.model.layers):
        for name in "qkv":

            def note(module, given, out, key=(number, name)):
                noted[key] = out[0].unflatten(-1, (-1, model.config.head_dim)).transpose(0, 1)

            hooks.append(getattr(layer.self_attn, f"{name}_proj").register_forward_hook(note))
    model(ids)
    for hook in hooks:
        hook.remove()
    return [[noted[number, name] for name in "qkv"] for number in range(len(model.model.layers))]


def check_values(model, ids, cache, *, sequence=0, queries=value_fit.QUERIES):
    """Of a sequence whose text was ids: its values are what the definition says. Other tokens behind it are left out.
    Returns how many heads have other values than they had."""
    T, rotary, changed = ids.shape[1], RotaryTables(model.model.rotary_emb), 0
    for (q, k, v), (keys, values, places) in zip(projected(model, ids), held(cache), strict=True):
        at = torch.full((1, T), T - 1, dtype=torch.int32)
        q, k = rotary.rotate(q[None], at, T, [T])[0], rotary.rotate(k[None], None, T, [T])[0]
        heads, G = len(k), len(q) // len(k)
        count = min(T, max(queries // G, 2 * SEGMENTS))
        asked = torch.arange(count) * T // count
        folds = (torch.arange(count) * SEGMENTS // count % 2).bool().repeat(G)
        for head in range(heads):
            row = sequence * heads + head
            kept = [int(place) for place in places[row] if place < T]
            x = (y.double() for y in (q[head * G : (head + 1) * G][:, asked].flatten(0, 1), k[head], v[head]))
            torch.testing.assert_close(keys[row, : len(kept)], k[head, kept])
            more = fitted(*missing_of(*x, torch.tensor(kept), q.shape[-1] ** -0.5), folds)
            changed += int(more.abs().max() > 1e-3)
            torch.testing.assert_close(values[row, : len(kept)].double(), v[head, kept] + more, atol=2e-4, rtol=1e-3)
    return changed


@pytest.mark.parametrize("method", METHODS)
def test_values_are_what_the_definition_says(model, method):
    ids = random_ids(75)
    cache = PrunedCache(model.config, *METHODS[method], fit_values=True, page_size=8)
    prefill(model, ids, cache)
    assert check_values(model, ids[:, :-1], cache)  # prefill leaves the last token to be decoded


def test_references_of_long_prompts_are_spread_over_them(model, monkeypatch):
    monkeypatch.setattr(value_fit, "QUERIES", 64)
    monkeypatch.setattr(value_fit, "LOGITS", 1000)
    prompts = [random_ids(n, seed=n) for n in (200, 131)]
    ids, mask = left_padded(prompts)
    cache = PrunedCache(model.config, REPLAY, GlobalTopK(12), fit_values=True)
    prefill(model, ids, cache, mask)
    assert all(check_values(model, prompt[:, :-1], cache, sequence=b, queries=64) for b, prompt in enumerate(prompts))


def test_what_is_fitted_misses_less():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 256, 16, generator=generator).double()
    weights, missing = missing_of(q, k, v, torch.arange(0, 256, 4), 0.5)
    more = fitted(weights, missing, torch.arange(256) * SEGMENTS // 256 % 2 == 1)
    assert (missing - weights @ more).square().sum() < 0.9 * missing.square().sum()
    # the normal equations of the strongest pull that is allowed
    gram = weights.T @ weights
    torch.testing.assert_close(
        gram @ ridge(weights, missing, 0.1) + 0.1 * gram.diagonal().mean() * ridge(weights, missing, 0.1),
        weights.T @ missing,
    )


def test_noise_that_no_reference_shares_is_not_fitted():
    generator = torch.Generator().manual_seed(1)
    weights, missing = torch.rand(64, 8, generator=generator).double(), torch.randn(64, 4, generator=generator).double()
    held_out = torch.arange(64) % 2 == 1
    missing[held_out] = -missing[~held_out]
    weights[held_out] = weights[~held_out]
    assert not fitted(weights, missing, held_out).any()
    assert not value_fit._ridge(weights, missing, held_out).any()


def test_references_are_no_more_than_they_may_be(model, monkeypatch):
    monkeypatch.setattr(value_fit, "QUERIES", 64)
    noted, whole = [], value_fit.References.of

    def of(*given):
        noted.append(whole(*given))
        return noted[-1]

    monkeypatch.setattr(value_fit.References, "of", staticmethod(of))
    prefill(model, random_ids(200), PrunedCache(model.config, REPLAY, 24, fit_values=True))
    assert {one.queries.shape[1] for one in noted} == {64} and {one.tokens for one in noted} == {199}


def test_a_prompt_that_loses_nothing_keeps_its_values(model):
    ids, caches = random_ids(40), []
    for fit in (False, True):
        caches.append(PrunedCache(model.config, REPLAY, 64, fit_values=fit))
        prefill(model, ids, caches[-1])
    for (_, plain, _), (_, other, _) in zip(*map(held, caches), strict=True):
        assert torch.equal(plain, other)


@pytest.mark.parametrize("budget", [20, GlobalTopK(20)])
def test_a_padded_batch_is_fitted_as_each_alone(model, budget):
    prompts = [random_ids(n, seed=n) for n in (70, 31, 50)]
    ids, mask = left_padded(prompts)
    together = PrunedCache(model.config, REPLAY, budget, fit_values=True, later="keep")
    out = model.generate(ids, attention_mask=mask, past_key_values=together, max_new_tokens=4, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = PrunedCache(model.config, REPLAY, budget, fit_values=True, later="keep")
        own = model.generate(prompt, past_key_values=alone, max_new_tokens=4, do_sample=False)
        assert out[b, -4:].tolist() == own[0, -4:].tolist()
        for layer, single in zip(together.compressing, alone.compressing, strict=True):
            heads = layer.heads
            count = single.pool.counts
            assert layer.pool.counts[b * heads : (b + 1) * heads] == count
            values = layer.pool.gather(max(layer.pool.counts))[1][b * heads : (b + 1) * heads, : max(count)]
            torch.testing.assert_close(values, single.pool.gather(max(count))[1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3", "glm"])
def test_other_families_are_fitted(kind):
    model, caches = kind_model(kind), []
    kvcompress.attach(model)
    for fit in (False, True):
        caches.append(PrunedCache(model.config, REPLAY, 16, fit_values=fit))
        prefill(model, random_ids(60), caches[-1])
        with torch.no_grad():
            assert model(random_ids(1), past_key_values=caches[-1].fork()).logits.isfinite().all()
    assert caches[0].nbytes() == caches[1].nbytes()
    for (k, v, places), (k2, v2, places2) in zip(*map(held, caches), strict=True):
        assert all(map(torch.equal, places, places2))
        assert torch.equal(k, k2) and not torch.equal(v, v2)


def test_a_guide_has_no_part_in_it(model):
    text, guide = random_ids(60), random_ids(9, seed=4)
    cache = PrunedCache(model.config, SnapKV(window=6), 16, fit_values=True)
    prefill(model, text, cache, guide=guide[0])
    assert {len(row) for layer in cache.kept_positions() for one in layer for row in one} == {16}
    assert all(not layer.references for layer in cache.compressing)
    check_values(model, text[:, :-1], cache)


def test_a_fit_that_is_cut_off_leaves_no_cache_that_goes_on(model, monkeypatch):
    cache, calls = PrunedCache(model.config, REPLAY, 16, fit_values=True), []

    def cut(*given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ridge_of(*given)

    ridge_of = value_fit._ridge
    monkeypatch.setattr(value_fit, "_ridge", cut)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(random_ids(60), past_key_values=cache)
    with torch.no_grad(), pytest.raises(RuntimeError, match="incomplete"):
        model(random_ids(1), past_key_values=cache)


def test_a_prompt_of_one_token_leaves_nothing_to_be_fitted(model):
    cache = PrunedCache(model.config, KVzip(chunk=32), GlobalTopK(24), fit_values=True)
    with torch.no_grad():
        model(random_ids(1, batch=2), past_key_values=cache)
    assert all(not layer.references for layer in cache.compressing)
    cache.select_sequences([1])
    prefill(model, random_ids(60), cache)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fit_values": 1}, "fit_values must be True or False, got 1"),
        ({"chunk_size": 32}, "chunk_size must be None with fit_values"),
        ({"positions": RemoteGap(headroom=8)}, "positions must be 'original' with fit_values"),
    ],
)
def test_settings_that_cannot_be(model, given, message):
    with pytest.raises(ValueError, match=message):
        PrunedCache(model.config, SnapKV(window=6), 24, **{"fit_values": True, **given})


def test_what_it_cannot_serve(model):
    cache = PrunedCache(model.config, REPLAY, 0.5, fit_values=True, later="keep")
    prefill(model, random_ids(40), cache)
    with pytest.raises(ValueError, match="fit_values must be False for compress"):
        cache.compress(8)
    with pytest.raises(ValueError, match="fit_values must be False for a cache that is served"):
        kvcompress.serve.batching(model, cache="pruned,pruner=snapkv,budget=24,fit_values=true", pages=64)


def test_it_is_a_setting_of_the_command_line(model):
    cache = CacheSpec.parse("pruned,pruner=replay,budget=globaltopk:24,fit_values=true").make(model.config)
    assert cache.policy.fit_values
