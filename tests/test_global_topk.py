"""One budget for all layers and heads, in one reading."""

import math
from dataclasses import dataclass, field

import oracle
import pytest
import torch
from helpers import KINDS, attached, covering, kind_model, left_padded, random_ids, tiny_gates, tiny_model

import kvcompress
from kvcompress import GlobalTopK, IterativeCache, PrunedCache, RemoteGap, prefill
from kvcompress.budgets import CacheShape
from kvcompress.caches.contest import Contest
from kvcompress.caches.pruned_layer import PrunedLayer
from kvcompress.pruners import (
    H2O,
    TOVA,
    Gate,
    KeyDiff,
    LeverageScore,
    Pruner,
    Random,
    Replay,
    SnapKV,
    StreamingLLM,
    Successor,
)
from kvcompress.support.units import Keep

PRUNERS = [
    SnapKV(window=6), Replay(chunk=16, last=4), Successor(last=4), KeyDiff(last=4), H2O(0.2), TOVA(), Random(),
    StreamingLLM(), Gate(tiny_gates(), last=4),
]  # fmt: skip


def name_of(x):
    return type(x).__name__


@dataclass(frozen=True)
class Uneven(Pruner):
    """Scores that differ by layer and head, noted with the keys that they are of."""

    last: int = 3
    num_sink_tokens: int = 2
    noted: list = field(default_factory=list)

    def recent(self, keep, chunk_length):
        return min(self.last, keep - min(self.num_sink_tokens, keep))

    def scores(self, candidates, keep):
        generator = torch.Generator().manual_seed(candidates.layer)
        scores = torch.rand(candidates.heads, candidates.count, generator=generator)
        scores = scores * torch.tensor([[0.3], [1.0]]) * (1 + candidates.layer % 2)
        self.noted.append((scores, candidates.keys[0].clone()))
        return scores


@pytest.mark.parametrize("floor", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [12, 0.25])
def test_what_stays_is_one_top_k_over_all_rows(size, floor):
    model, ids, pruner = attached(num_hidden_layers=4), random_ids(50), Uneven()
    cache = prefill(model, ids, PrunedCache(model.config, pruner, GlobalTopK(floor=floor), keep=size, page_size=4))
    keep = 12 if size == 12 else 13
    ranks = torch.cat([scores for scores, _ in pruner.noted])
    ranks[:, :2] = ranks[:, -3:] = float("inf")
    indices, kept = GlobalTopK(floor=floor).divide(0, ranks, keep, 8 * 49)
    # the definition, in loops
    sure = max(int(floor * keep), 1)
    order = [sorted(range(49), key=lambda t, r=r: (-float(ranks[r, t]), t)) for r in range(8)]
    rows = [set(order[r][:sure]) for r in range(8)]
    rest = sorted(((float(ranks[r, t]), r, t) for r in range(8) for t in range(49) if t not in rows[r]), reverse=True)
    for _, r, t in rest[: 8 * keep - sum(map(len, rows))]:
        rows[r].add(t)
    assert [set(indices[r, : kept[r]].tolist()) for r in range(8)] == rows
    assert sum(map(len, rows)) == 8 * keep
    for layer, (_, keys) in zip(cache.layers, pruner.noted, strict=True):
        held, counts = layer.pool.gather(max(layer.pool.counts))[0], layer.pool.counts
        for h in range(2):
            expected = keys[h, sorted(rows[2 * layer.index + h])]
            torch.testing.assert_close(held[h, : counts[h]], expected, rtol=0, atol=0)


def first_of_all_rows(scores, budget, sure):
    """The definition: tokens of each row [layer][head] of one top-k over all; ties to the first token, then the row."""
    found = []
    for layer, ranks in enumerate(scores):
        for head, row in enumerate(ranks.tolist()):
            order = sorted((t for t, x in enumerate(row) if x > -math.inf), key=lambda t, row=row: (-row[t], t))
            found += [(-math.inf if i < sure else -row[t], t, layer, head) for i, t in enumerate(order)]
    rows = [[[] for _ in ranks] for ranks in scores]
    for _, t, layer, head in sorted(found)[:budget]:
        rows[layer][head].append(t)
    return [[sorted(row) for row in layer] for layer in rows]


@pytest.mark.parametrize("waits", [0.0, 0.3, math.inf])
@pytest.mark.parametrize("seed", range(8))
def test_ties_leave_after_every_layer_what_one_top_k_would(seed, waits):
    """Or after the last one, and not much more before it, where what layers are to lose waits."""
    generator = torch.Generator().manual_seed(seed)
    heads, keep, floor, T = [2, 3, 1, 2, 2], 4 + seed % 3, 0.5 * (seed % 2), 19
    scores = [torch.randint(0, 1 + seed % 4, (rows, T), generator=generator).float() for rows in heads]
    for ranks in scores:  # what must stay and what must go, and rows of lengths of their own
        ranks[:, 0], ranks[0, T - seed :] = math.inf, -math.inf
    contest, held = Contest([0], sum(heads), floor, trims=True, waits=waits), []
    assert contest.keep(0, keep, T, 1, called=True) == keep
    for layer, ranks in enumerate(scores):
        left = {layer: contest.enter(layer, 0, ranks)}
        left |= {number: lost[0] for number, lost in contest.lost().items()}
        held.append([list(range(T))] * len(ranks))
        for number, own in left.items():
            slots = [row[:count] for row, count in zip(own.slots.tolist(), own.kept, strict=True)]
            held[number] = [[row[i] for i in some] for row, some in zip(held[number], slots, strict=True)]
        budget, sure = keep * sum(heads), max(int(floor * keep), 1)
        if waits == 0 or layer + 1 == len(scores):
            assert held == first_of_all_rows(scores[: layer + 1], budget, sure)
        elif waits < math.inf:
            surplus = sum(len(row) for rows in held for row in rows) - budget
            assert surplus <= waits * budget
    indices, kept = GlobalTopK(floor=floor).divide(0, torch.cat(scores), keep, sum(heads) * T)
    every = [row for layer in held for row in layer]
    assert [row[:count] for row, count in zip(indices.tolist(), kept, strict=True)] == every


def test_equal_scores_leave_layers_alike():
    model = attached(num_hidden_layers=4)
    cache = prefill(
        model, random_ids(17), PrunedCache(model.config, LeverageScore(), GlobalTopK(floor=0.0), keep=6, page_size=4)
    )
    assert cache.stored_lengths() == [[[6, 6]]] * 4  # it scores nothing in a call this short


def test_no_more_is_held_than_the_budget_an_eighth_of_it_and_one_layer(monkeypatch):
    """Pages of what earlier layers lose go back while the prompt is read."""
    model, ids, peaks = attached(num_hidden_layers=6), random_ids(129), []
    settle = PrunedLayer.settle

    def noted(self, offers, step, facts, **kwargs):
        settle(self, offers, step, facts, **kwargs)
        peaks.append(sum(x.pool.reserved_nbytes() for x in step.layers if x.pool is not None))

    monkeypatch.setattr(PrunedLayer, "settle", noted)
    slot, rows = 2 * 16 * 4, 12
    cache = prefill(model, ids, PrunedCache(model.config, Replay(last=4), GlobalTopK(), keep=24, page_size=1))
    assert len(peaks) == 6
    slack = rows * 160 * 8  # tables and reference counts
    assert max(peaks) <= rows * 27 * slot + slack
    assert peaks[-1] <= rows * 24 * slot + slack
    lengths = [n for (row,) in cache.stored_lengths() for n in row]
    assert sum(lengths) == rows * 24 and len(set(lengths)) > 2
    assert cache.reserved_nbytes() <= rows * 24 * (slot + 4) + slack


@pytest.mark.parametrize(
    ("pruner", "size", "every"),
    covering(PRUNERS, [20, 0.4, "48KiB"], [None, 4]),
)
def test_prompts_turns_and_decoding_stay_within_the_budget(pruner, size, every):
    model, ids = attached(), random_ids(61)
    cache = PrunedCache(model.config, pruner, GlobalTopK(), keep=size, every=every, page_size=8)
    out = kvcompress.generate(model, ids, cache, max_new_tokens=14, do_sample=False)

    def held():
        return sum(sum(row) for (row,) in cache.stored_lengths())

    mean = {20: 20, 0.6: 30}.get(size)
    if mean is None:
        assert sum(layer.pool.nbytes() for layer in cache.layers) <= 48 * 1024 + (0 if every else 14 * 6 * 8 * 128)
        return
    if every:
        assert 6 * mean <= held() <= 6 * (mean + 4)
    else:
        assert held() == 6 * ((24 if size == 0.6 else 20) + 14)
    turn = torch.cat([out, random_ids(30, seed=1)], 1)
    with torch.no_grad():
        model(turn[:, 74:], past_key_values=cache)
    assert held() == 6 * (20 if size == 20 else 42)
    assert all(n > 0 for (row,) in cache.stored_lengths() for n in row)


@pytest.mark.parametrize("pruner", [*PRUNERS[:4], H2O(0.2)], ids=name_of)
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_each_sequence_has_a_budget_of_its_own(pruner, chunk_size):
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (70, 9, 41)]
    ids, mask = left_padded(prompts)
    settings = {"every": 5, "chunk_size": chunk_size, "page_size": 8}
    cache = PrunedCache(model.config, pruner, GlobalTopK(), keep=15, **settings)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=12, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = PrunedCache(model.config, pruner, GlobalTopK(), keep=15, **settings)
        expected = kvcompress.generate(model, prompt, alone, max_new_tokens=12, do_sample=False)
        assert torch.equal(together[b, -12:], expected[0, -12:]), b
        assert [layer[b] for layer in cache.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]


@pytest.mark.parametrize("every", [None, 4])
def test_layers_compete_for_decoded_tokens_only_where_those_compress(monkeypatch, every):
    model, opened = attached(), []
    cache = PrunedCache(model.config, H2O(0.2), GlobalTopK(), keep=12, every=every)
    assert cache.every == every and IterativeCache(model.config, every=every).every == every
    contest = PrunedCache._contest
    monkeypatch.setattr(PrunedCache, "_contest", lambda *given, **named: opened.append(1) or contest(*given, **named))
    kvcompress.generate(model, random_ids(40), cache, max_new_tokens=5, do_sample=False)
    assert len(opened) == (1 if every is None else 6)  # of the prompt, and of each token that follows


def test_a_budget_that_holds_everything_changes_nothing():
    model, ids = attached(), random_ids(61)
    dense = model.generate(ids, max_new_tokens=12, do_sample=False)
    for size in (61, 1.0, "64MiB"):
        cache = PrunedCache(model.config, Replay(), GlobalTopK(), keep=size)
        assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=12, do_sample=False), dense)
        assert cache.stored_lengths() == [[[72, 72]]] * 3


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_family_keeps_and_reads_what_the_definition_says(kind):
    """Replay's scores, one budget of them, and the logits that follow: those of transformers' own model with a mask per
    layer and head. Layers with a window keep it and take no part; rotations, norms and softmaxes of every kind."""
    model, ids, noted = kind_model(kind), random_ids(51), {}
    kvcompress.attach(model)

    class Noting(Replay):
        def scores(self, candidates, keep):
            scores = super().scores(candidates, keep)
            noted[len(noted)] = candidates, scores
            return scores

    cache = prefill(model, ids, PrunedCache(model.config, Noting(chunk=16, last=4), GlobalTopK(), keep=12))
    numbers = [layer.index for layer in cache.compressing]
    assert numbers == ([1, 3] if KINDS[kind].get("sliding_window") else [0, 1, 2, 3])
    places = (torch.arange(50) % 16 + 50)[None].to(torch.int32)
    for asked, scores in noted.values():
        again = asked.rotary.rotate(asked.unrotated, places, 66, [50])
        x = (y.double() for y in (asked.queries, again, asked.keys))
        expected = oracle.replay_scores(*x, chunk=16, **asked.softmax.options)[0]
        torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-3)
        scores[:, -4:] = math.inf
    heads = len(noted[0][1])
    rows = first_of_all_rows([scores for _, scores in noted.values()], len(numbers) * heads * 12, 1)
    assert [cache.stored_lengths()[number][0] for number in numbers] == [list(map(len, layer)) for layer in rows]
    ours = model(ids[:, -1:], past_key_values=cache).logits[0, -1]

    plain = kind_model(kind)
    plain.set_attn_implementation("eager")
    attentions = [module for module in plain.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]
    for number, kept in zip(numbers, rows, strict=True):
        gone = torch.ones(heads, 51, dtype=torch.bool)
        for head, row in enumerate(kept):
            gone[head, [*row, 50]] = False

        def hide(module, args, kwargs, gone=gone):
            mask = kwargs["attention_mask"].repeat(1, plain.config.num_attention_heads, 1, 1)
            mask[0, :, -1].masked_fill_(gone.repeat_interleave(len(mask[0]) // heads, 0), torch.finfo(mask.dtype).min)
            return args, kwargs | {"attention_mask": mask}

        attentions[number].register_forward_pre_hook(hide, with_kwargs=True)
    torch.testing.assert_close(ours, plain(ids).logits[0, -1], atol=1e-4, rtol=1e-3)
    dense = kind_model(kind)(ids).logits[0, -1]
    assert (ours - dense).abs().max() > 1e-3  # what went was not without meaning


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_family_decodes_within_the_budget(kind):
    model, ids = kind_model(kind), random_ids(50)
    kvcompress.attach(model)
    cache = PrunedCache(model.config, Replay(chunk=16, last=4), GlobalTopK(), keep=12, every=3)
    assert kvcompress.generate(model, ids, cache, max_new_tokens=10, do_sample=False).shape == (1, 60)
    stored = [cache.stored_lengths()[layer.index][0] for layer in cache.compressing]
    heads = sum(map(len, stored))
    assert 12 * heads <= sum(map(sum, stored)) <= 15 * heads


def test_forks_go_on_alone():
    model, ids = attached(), random_ids(61)
    settings = {"every": 4, "page_size": 8}
    cache = prefill(model, ids, PrunedCache(model.config, Replay(last=4), GlobalTopK(), keep=20, **settings))
    before = cache.stored_lengths()
    for seed in range(3):
        question = torch.cat([ids, random_ids(15, seed=seed)], 1)
        alone = prefill(model, ids, PrunedCache(model.config, Replay(last=4), GlobalTopK(), keep=20, **settings))
        expected = model.generate(question, past_key_values=alone, max_new_tokens=9, do_sample=False)
        found = model.generate(question, past_key_values=cache.fork(), max_new_tokens=9, do_sample=False)
        assert torch.equal(found, expected)
    assert cache.stored_lengths() == before


@pytest.mark.parametrize("growth", [0, 5])
@pytest.mark.parametrize("size", ["16KiB", "33000B", "40 KiB"])
def test_bytes_hold_pages_and_tables(size, growth):
    shape = CacheShape(layers=4, rows=2, slot_nbytes=128, page_size=4, growth=growth)
    number, rows = {"16KiB": 16384, "33000B": 33000, "40 KiB": 40960}[size], 8

    def worst(mean):
        total = rows * (mean + growth)
        return ((rows - 1) + -(-(total - rows + 1) // 4)) * (4 * 128 + 8) + rows * 4

    mean = GlobalTopK().mean_tokens(Keep.of(size), 500, shape)
    assert 1 <= mean < 500
    assert worst(mean) <= number < worst(mean + 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda config: PrunedCache(config, budget=GlobalTopK(), keep=0), "keep must be at least 1, got 0"),
        (lambda config: GlobalTopK(floor=1.1), "floor must be between 0 and 1, got 1.1"),
        (lambda config: PrunedCache(config, SnapKV(), GlobalTopK(), keep=9, positions=RemoteGap()), "be 'original'"),
        (lambda config: IterativeCache(config, memory_size=9, budget=GlobalTopK()), "must divide memory over"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build(tiny_model().config)
