"""PoD combined with a pruner: distant tokens are chosen once per block, at its lead."""

import math
from dataclasses import dataclass

import pytest
import torch
from helpers import covering, left_padded, logits_of, random_ids
from test_pod_cache import SETTINGS, converted, new_cache, read, trained

import kvcompress
from kvcompress import PoDCache, prefill
from kvcompress.pruners import H2O, ExpectedAttention, Pruner, SnapKV

PROMPT = 40


@dataclass(frozen=True)
class Latest(Pruner):
    """The later a token, the better."""

    def scores(self, candidates, keep):
        return torch.arange(candidates.count, dtype=torch.float32).expand(candidates.heads, -1)


@dataclass(frozen=True)
class Drawn(Pruner):
    """Scores of a candidate by layer, head and place alone."""

    def scores(self, candidates, keep):
        generator = torch.Generator().manual_seed(candidates.layer)
        return torch.rand(candidates.heads, candidates.count, generator=generator)


def chosen_by_drawn(setting, heads, n, keep, page):
    """bool [L, Hkv, n]: the prompt's tokens that later queries of each layer see."""
    lead, sinks, recent, _ = setting
    far = n - sinks - recent
    stay = far - max(far - keep, 0) // page * page
    seen = torch.ones(len(lead), heads, n, dtype=torch.bool)
    for layer, row in enumerate(lead):
        for head, a in enumerate(row):
            led = [h for h, other in enumerate(lead[a]) if other == a]
            scores = torch.rand(len(led), n, generator=torch.Generator().manual_seed(a))[led.index(head)]
            dropped = scores[sinks : n - recent].argsort(descending=True)[stay:] + sinks
            seen[layer, head, dropped] = False
    return seen


@pytest.mark.parametrize(
    ("page_size", "keep", "name"),
    covering([1, 4], [0, 7, 20, 100], ["one", "mixed", "no sinks"]),
)
def test_later_tokens_see_what_the_lead_chose(name, keep, page_size, monkeypatch):
    """Against a forward pass without a cache, with masks."""
    setting = SETTINGS[name]
    lead, sinks, recent, _ = setting
    model, ids = converted(setting), random_ids(60, 2)
    seen = chosen_by_drawn(setting, 2, PROMPT, keep, page_size)
    layers = iter(range(4))

    def masked(q, k, v, lead_q, lead_k, *, sinks, recent, scale):
        G, T, layer = q.shape[1] // k.shape[1], q.shape[2], next(layers)
        i, j = torch.arange(T)[:, None], torch.arange(T)
        near = (j <= i) & ((j < sinks) | (j > i - recent))
        far = ((j <= i) & ~near).expand(2, T, T).clone()
        far[:, PROMPT:, :PROMPT] &= seen[layer][:, None]
        logits = [x @ y.repeat_interleave(G, 1).mT * scale for x, y in ((q, k), (lead_q, lead_k))]
        far = far.repeat_interleave(G, 0)
        every = torch.where(near, logits[0], logits[1]).masked_fill(~(near | far), -math.inf)
        return every.softmax(-1) @ v.repeat_interleave(G, 1), every.logsumexp(-1), (every.softmax(-1) * near).sum(-1)

    def masked_plain(q, k, v, scale):  # of layers that lead for every head: layer 0
        out = masked(q, k, v, q, k, sinks=sinks, recent=recent, scale=scale)
        return out[0], out[1]

    with monkeypatch.context() as patch:
        patch.setattr(kvcompress.ops, "pod_attention", masked)
        patch.setattr(kvcompress.ops, "attention", masked_plain)
        expected = trained(model, ids)
    # what a call of several tokens drops at its end, later calls lack: only the last one may be such
    for reuse, calls in ((True, [1] * 20), (False, [1] * 20), (None, [20]), (None, [1] * 7 + [13])):
        cache = new_cache(model, page_size=page_size, pruner=Drawn(), distant=keep, reuse=reuse)
        found = read(model, ids, cache, [PROMPT, *calls])
        torch.testing.assert_close(found[:, PROMPT:], expected[:, PROMPT:], rtol=1e-3, atol=1e-3)
        if calls[-1] == 1:
            gone = PROMPT - int(seen[0, 0].sum())
            assert all(row == [60 - gone] * 2 for layer in cache.stored_lengths() for row in layer)
            assert (gone == 0) == (keep == 100)


@pytest.mark.parametrize("pruner", [SnapKV(window=8), ExpectedAttention()])
def test_chunks_and_batches_choose_alike(pruner):
    model = converted()
    prompts = [random_ids(length, seed=length) for length in (48, 31, 14, 2)]
    ids, mask = left_padded(prompts)
    given = {"pruner": pruner, "distant": 6}
    cache = new_cache(model, chunk_size=11, **given)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=12, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = new_cache(model, **given)
        out = kvcompress.generate(model, prompt, alone, max_new_tokens=12, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == out[0, prompt.shape[1] :].tolist()
        assert [layer[b] for layer in cache.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]


def test_a_tie_goes_to_the_first_ones_in_keys_and_values():
    """prefill reads 40 of 41; the lead's queries are 0, so that equal votes go to the first distant tokens."""
    model = converted(SETTINGS["one"])
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[:] = 0
    cache = new_cache(model, page_size=1, pruner=SnapKV(window=4, kernel_size=1), distant=3)
    prefill(model, random_ids(41), cache)
    kept = cache.layers[0].keys
    assert kept.tokens == [40]
    assert cache.stored_keys()[0][0] == [11, 11]
    whole = new_cache(model, page_size=1)
    prefill(model, random_ids(41), whole)
    rows = [0, 1]
    slots = [0, 1, 2, 3, 4, *range(34, 40)]
    for ours, all_ in ((kept, whole.layers[0].keys), (cache.layers[2].values, whole.layers[2].values)):
        assert torch.equal(ours.first_slots(rows, 11), all_.first_slots(rows, 40)[:, slots])


def test_a_second_prompt_is_chosen_from_again():
    model, ids = converted(), random_ids(71)
    cache = new_cache(model, page_size=1, pruner=SnapKV(window=8), distant=5)
    prefill(model, ids[:, :41], cache)
    assert cache.stored_lengths()[2][0] == [12 + 5] * 2
    logits_of(model, ids[:, 40:41], cache)
    assert cache.stored_lengths()[2][0] == [12 + 6] * 2
    prefill(model, ids, cache)
    assert cache.stored_lengths()[2][0] == [12 + 5] * 2
    assert cache.seen_lengths() == [70]
    assert bool(logits_of(model, ids[:, 70:], cache).isfinite().all())


def test_a_prompt_of_one_new_token_chooses_nothing():
    model, ids = converted(), random_ids(61)
    cache = new_cache(model, page_size=1, pruner=SnapKV(window=8), distant=5)
    prefill(model, ids[:, :41], cache)
    for t in range(40, 60):
        logits_of(model, ids[:, t : t + 1], cache)
    prefill(model, ids, cache)  # all but the last token is there
    assert cache.stored_lengths()[0][0] == [12 + 5 + 20] * 2
    assert bool(logits_of(model, ids[:, 60:], cache).isfinite().all())


@pytest.mark.parametrize("pruner", [SnapKV(window=8), ExpectedAttention()])
def test_a_sequence_without_tokens_in_a_call_stays_as_it_is(pruner):
    model, ids = converted(), random_ids(40, 2)
    caches = [new_cache(model, page_size=1, pruner=pruner, distant=5) for _ in range(2)]
    for cache in caches:
        prefill(model, ids, cache)
        for step in range(9):
            logits_of(model, random_ids(1, 2, seed=step), cache)
    before = caches[0].stored_lengths()[2]
    mask = torch.tensor([[1] * 6, [0] * 6])
    with torch.no_grad():
        model(random_ids(6, 2, seed=20), attention_mask=mask, past_key_values=caches[0])
    assert caches[0].stored_lengths()[2][0] == [12 + 5] * 2
    assert caches[0].stored_lengths()[2][1] == before[1] == [12 + 5 + 9] * 2
    token = random_ids(1, 2, seed=21)
    torch.testing.assert_close(
        logits_of(model, token, caches[0])[1], logits_of(model, token, caches[1])[1], rtol=1e-4, atol=1e-4
    )


def test_bytes_of_what_went_are_given_back():
    model = converted()
    whole, cache = new_cache(model), new_cache(model, pruner=SnapKV(window=8), distant=8)
    for each in (whole, cache):
        prefill(model, random_ids(200), each)
    assert cache.nbytes() < whole.nbytes() / 3
    for layer in cache.layers:
        assert layer.recent is None


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize(
    ("sinks", "recent", "distant", "prompt", "more"), [(1, 2, 0, 67, 70), (1, 1, 0, 299, 3), (1, 40, 3, 110, 70)]
)
def test_followers_find_values_where_fewer_pages_of_them_are_left_than_of_near_keys(
    sinks, recent, distant, prompt, more, trim
):
    """Near keys fill pages that began before them; values that were chosen are packed."""
    model, ids = converted((SETTINGS["one"][0], sinks, recent, "pod")), random_ids(prompt + more)
    far = prompt - sinks - recent
    stay, found = far - (far - distant) // 64 * 64, []  # whole pages go
    assert stay < far
    for page_size, keep in ((1, stay), (64, distant)):
        cache = new_cache(model, page_size=page_size, pruner=Latest(), distant=keep)
        prefill(model, ids[:, : prompt + 1], cache)
        if trim:
            cache.trim()
        found.append([logits_of(model, ids[:, t : t + 1], cache) for t in range(prompt, prompt + more)])
    torch.testing.assert_close(torch.cat(found[1]), torch.cat(found[0]), rtol=1e-4, atol=1e-4)


def test_beams_and_forks():
    model = converted()
    ids, given = random_ids(40), {"pruner": SnapKV(window=8), "distant": 5}
    cache = new_cache(model, **given)
    prefill(model, ids, cache)
    fork = cache.fork()
    tokens = random_ids(1, seed=9)
    assert torch.equal(logits_of(model, tokens, cache), logits_of(model, tokens, fork))
    cache.batch_repeat_interleave(3)
    next_ = random_ids(1, 3, seed=10)
    three = logits_of(model, next_, cache)
    torch.testing.assert_close(three[1:2], logits_of(model, next_[1:2], fork), rtol=1e-4, atol=1e-4)


def test_what_was_chosen_cannot_be_taken_back():
    model = converted()
    cache = new_cache(model, pruner=SnapKV(window=8), distant=5)
    logits_of(model, random_ids(40), cache)  # a call of several tokens without prefill
    for step in range(3):
        logits_of(model, random_ids(1, seed=step), cache)
    cache.crop(-3)
    assert cache.seen_lengths() == [40]
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-1)


def test_scores_that_are_no_numbers_change_nothing():
    @dataclass(frozen=True)
    class Broken(Pruner):
        def scores(self, candidates, keep):
            return torch.full((candidates.heads, candidates.count), math.nan)

    model = converted()
    cache = new_cache(model, pruner=Broken(), distant=5)
    with pytest.raises(RuntimeError, match="scores of Broken in layer 0 hold NaN"):
        prefill(model, random_ids(40), cache)
    assert cache.stored_lengths()[0][0] == [39, 39]
    with pytest.raises(RuntimeError, match="incomplete"):
        logits_of(model, random_ids(1), cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pruner": SnapKV()}, "pruner and distant go together"),
        ({"distant": 4}, "pruner and distant go together"),
        ({"pruner": H2O(), "distant": 4}, "pruner must be a Pruner that needs the latest queries alone"),
        ({"pruner": "snapkv", "distant": 4}, "pruner must be a Pruner"),
        ({"pruner": SnapKV(), "distant": -1}, "distant must be at least 0"),
        ({"pruner": SnapKV(), "distant": 0.5}, "distant must be a number of tokens"),
        ({"pruner": SnapKV(window=13), "distant": 4}, "leave some of 4 distant tokens .* its last 13 .* 9 are near"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PoDCache(converted().config, **options)


@pytest.mark.parametrize("name", ["window", "cla"])
def test_baselines_take_no_pruner(name):
    with pytest.raises(ValueError, match="pruner must be None with mode"):
        PoDCache(converted(SETTINGS[name]).config, pruner=SnapKV(), distant=4)
