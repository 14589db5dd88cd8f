"""Choosing what stays: sinks that are the prompt's own, batches at once, and every family under compression."""

import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from helpers import attached, left_padded, random_ids

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import AdaKV, GlobalTopK, IterativeCache, PrunedCache, RemoteGap, ops, prefill
from kvcompress.caches.choose import judges_by_head
from kvcompress.hf.argument import CACHE
from kvcompress.pruners import (
    H2O,
    TOVA,
    CenterOfGravity,
    ExpectedAttention,
    KeyNorm,
    Pruner,
    Random,
    Replay,
    SnapKV,
    StreamingLLM,
)

FAMILIES = [
    "gemma2/sliding",
    "gemma4_text/shared",
    "gpt_oss/sliding",
    "cohere2/sliding",
    "glm4",
    "deepseek_v3",
    "falcon_h1",
]


# ---- sinks, and memory to begin with ----


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("initial", [0, 1, 3])
@pytest.mark.parametrize(
    "pruner",
    [StreamingLLM(4), SnapKV(window=2, num_sink_tokens=4), CenterOfGravity(8, 8, 4, window=4), H2O(num_sink_tokens=4)],
    ids=lambda x: type(x).__name__,
)
def test_only_the_prompts_own_first_tokens_are_sinks(pruner, initial, append):
    """Memory begins smaller than the sinks: the first tokens of later chunks are tokens as all others."""
    model, ids = attached(num_hidden_layers=1), random_ids(129)
    cache = IterativeCache(
        model.config, memory_size=24, chunk_size=16, pruner=pruner, schedule="linear", initial_memory=initial,
        append=append, track=True,
    )  # fmt: skip
    kept = []
    prefill(model, ids, cache)
    for reading in cache.track.readings[0]:
        kept.append([places.tolist() for places in reading.layers[0].positions])
        assert all(row[:initial] == list(range(initial)) for row in kept[-1])
    if isinstance(pruner, StreamingLLM) and not append:  # its own firsts, and the last ones
        for i, rows in enumerate(kept):
            assert rows == [[*range(initial), *range(16 * (i + 1) - len(rows[0]) + initial, 16 * (i + 1))]] * 2


def test_a_share_that_grows_keeps_the_sinks_that_it_had():
    model, ids = attached(num_hidden_layers=1), random_ids(81)
    cache = PrunedCache(model.config, StreamingLLM(4), keep=0.1, chunk_size=16)
    prefill(model, ids, cache)  # 2, then 4, 5, 7, 8 tokens are kept
    keys = cache.layers[0].pool.gather(8)[0]
    layer = model.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(model.model.embed_tokens(ids[:, :80]))
        every = layer.self_attn.k_proj(x).unflatten(-1, (2, 16)).transpose(1, 2)
    every = cache.facts[0].key_rotary.rotate(every, None, 80, [80])[0]
    torch.testing.assert_close(keys, every[:, [0, 1, *range(74, 80)]], atol=1e-5, rtol=1e-5)


def test_memory_begins_with_room_for_what_stands_early():
    config = attached().config

    def first(length, **settings):
        settings = {"memory_size": 1024, "chunk_size": 256, "schedule": "linear", **settings}
        return IterativeCache(config, **settings).plan_prompt(length).memory[0]

    paper = kvcompress.plan(65536, chunk_size=256, memory_size=1024, schedule="linear", least_memory=0).memory[0]
    assert paper == 4
    assert first(65536) == 64  # SnapKV's window and 32 more
    assert first(65536, pruner=SnapKV(window=64, num_sink_tokens=4)) == 100
    assert first(65536, pruner=TOVA(), schedule="square-sqrt") == 64
    assert first(65536, memory_size=48) == 48
    assert first(1024) == 256  # 4 chunks
    assert first(65536, initial_memory=4) == paper
    assert first(100, schedule="adaptive") == 1024


# ---- what is said, and how often ----


def test_a_kind_of_warning_comes_once():
    model = attached(max_position_embeddings=64)
    cache = IterativeCache(model.config, memory_size=8, chunk_size=8)
    gap = PrunedCache(
        model.config,
        SnapKV(window=4),
        AdaKV(),
        keep=16,
        positions=RemoteGap(60, headroom=8, on_overflow="warn"),
        every=2,
    )
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for length in (10, 11, 12):
            model(random_ids(length), **{CACHE: cache})
        kvcompress.generate(model, random_ids(40), gap, max_new_tokens=30, do_sample=False)
    kinds = Counter(str(warning.message)[:12] for warning in said)
    assert kinds == {"a prompt of ": 1, "gap 60 needs": 1, "positions re": 1}


# ---- batches ----


@dataclass(frozen=True)
class Summed(SnapKV):
    """A user's pruner that looks across heads, made from one that does not."""

    def scores(self, candidates, keep):
        scores = super().scores(candidates, keep)
        return scores.sum(0, keepdim=True).expand_as(scores)


def test_pruners_that_look_across_heads_are_known():
    known = [SnapKV(), StreamingLLM(), KeyNorm(), H2O(), ExpectedAttention(), CenterOfGravity()]
    assert all(map(judges_by_head, known))
    others = [TOVA(), Random(), CenterOfGravity(heads="shared"), Summed()]
    assert not any(map(judges_by_head, others))


@pytest.mark.parametrize("budget", [None, AdaKV()], ids=["uniform", "adakv"])
@pytest.mark.parametrize(
    "pruner",
    [SnapKV(window=4), H2O(), TOVA(), Summed(window=4), CenterOfGravity(8, 8, 2, window=4),
     StreamingLLM(), ExpectedAttention(8)],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_a_batch_is_compressed_in_few_calls_and_as_each_sequence_alone(pruner, budget, monkeypatch):
    model, ids = attached(num_hidden_layers=2), random_ids(50, batch=5)
    cache = prefill(model, ids, PrunedCache(model.config, pruner, budget, keep=16, every=4))
    calls = Counter()
    for name in ("window_scores", "select_topk"):
        plain = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, n=name, f=plain, **k: (calls.update([n]), f(*a, **k))[1])
    out = []
    with torch.no_grad():
        for t in range(49, 61):
            out.append(model(random_ids(70, batch=5)[:, [t]], past_key_values=cache).logits)
    compressions = 2 * 3  # layers, and once in 4 tokens
    assert calls["select_topk"] == compressions * (2 if isinstance(budget, AdaKV) else 1)
    if judges_by_head(pruner) and budget is None:  # else rows have lengths of their own
        assert calls["window_scores"] in (0, compressions)
    monkeypatch.undo()
    for b in range(5):
        alone = prefill(model, ids[b : b + 1], PrunedCache(model.config, pruner, budget, keep=16, every=4))
        with torch.no_grad():
            for i, t in enumerate(range(49, 61)):
                logits = model(random_ids(70, batch=5)[b : b + 1, [t]], past_key_values=alone).logits
                torch.testing.assert_close(out[i][b], logits[0], atol=2e-4, rtol=2e-4)
        assert [rows[b] for rows in cache.stored_lengths()] == [rows[0] for rows in alone.stored_lengths()]


class Watching(Pruner):
    """Keeps the last tokens, and notes whether it was shown values."""

    def __init__(self, uses_values):
        self.uses_values, self.shown = uses_values, []

    def scores(self, candidates, keep):
        self.shown.append(candidates.values is not None)
        return torch.arange(candidates.count).float().expand(candidates.heads, -1)


@pytest.mark.parametrize("uses_values", [False, True])
def test_values_are_gathered_only_for_pruners_that_look_at_them(uses_values, monkeypatch):
    model, pruner = attached(), Watching(uses_values)
    cache = prefill(model, random_ids(40), PrunedCache(model.config, pruner, keep=16, every=2))
    gathered, pool = [], type(cache.layers[0].pool)
    gather = pool.gather
    monkeypatch.setattr(
        pool,
        "gather",
        lambda self, capacity, names=None, *rows: (gathered.append(names), gather(self, capacity, names, *rows))[1],
    )
    with torch.no_grad():
        for _ in range(6):
            model(random_ids(1), past_key_values=cache)
    assert gathered and all((names is None or "values" in names) == uses_values for names in gathered)
    assert set(pruner.shown) == {uses_values}


# ---- families ----


@pytest.mark.parametrize(
    "new_cache",
    [
        lambda config: PrunedCache(config, SnapKV(window=4), keep=12, every=3),
        lambda config: PrunedCache(config, SnapKV(window=4), AdaKV(floor=0.0), keep=12, every=3),
        lambda config: PrunedCache(config, Replay(chunk=16, last=4), GlobalTopK(), keep=12, every=3),
        lambda config: PrunedCache(config, H2O(), keep=12, every=3, positions=RemoteGap(8, near_length=4, headroom=24)),
        lambda config: IterativeCache(config, memory_size=12, chunk_size=40, pruner=SnapKV(window=4)),
        lambda config: IterativeCache(config, memory_size=12, budget=AdaKV(), chunk_size=40, pruner=H2O(), every=4),
    ],
    ids=["pruned", "adakv", "global", "gap", "iterative", "iterative-adakv"],
)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_family_is_compressed_in_a_padded_batch_as_alone(name, new_cache):
    """Softcaps, sinks, layers that read others' keys, windows, recurrent layers."""
    model = CONFIGURATIONS[name].model()
    texts = [torch.randint(3, 97, (1, n), generator=torch.Generator().manual_seed(n)) for n in (38, 21)]
    ids, mask = left_padded(texts)
    given = {"max_new_tokens": 10, "do_sample": False}
    with kvcompress.attach(model):
        cache = new_cache(model.config)
        together = kvcompress.generate(model, ids, cache, mask, **given)
        for b, text in enumerate(texts):
            alone = new_cache(model.config)
            ours = kvcompress.generate(model, text, alone, **given)
            assert torch.equal(together[b, 38:], ours[0, text.shape[1] :])
            assert [rows[b] for rows in cache.stored_lengths() if rows] == [r[0] for r in alone.stored_lengths() if r]
