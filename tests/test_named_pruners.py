"""Pruners that others have named: each against its definition, written out."""

from dataclasses import replace

import pytest
import torch
from helpers import attached, kind_model, left_padded, random_ids, tiny_model

import kvcompress
from kvcompress import AdaKV, GlobalTopK, PrunedCache, PyramidKV, prefill
from kvcompress.ops.softmax import Softmax
from kvcompress.positions import RotaryTables
from kvcompress.pruners import (
    H2O,
    RKV,
    TOVA,
    Candidates,
    ChunkKV,
    Compactor,
    CriticalKV,
    CurDKV,
    KeyDiff,
    LagKV,
    LeverageScore,
    ObservedAttention,
    Replay,
    SnapKV,
)

PRUNERS = [
    LagKV(lag=8, num_sink_tokens=2), ChunkKV(SnapKV(window=4), chunk=5),
    ChunkKV(Replay(chunk=16, last=4), heads="per_kv_head"), RKV(window=4), LeverageScore(sketch=None),
    Compactor(num_sink_tokens=2, chunk=16), CriticalKV(SnapKV(window=4)), ObservedAttention(window=8),
]  # fmt: skip


def name_of(x):
    return type(x).__name__


def text(T=50, heads=2, group=2, softmax=None):
    """(candidates of a first call, unrotated keys)."""
    rotary = RotaryTables(tiny_model().model.rotary_emb)
    queries, keys, values = (torch.randn(1, n, T, 16) for n in (heads * group, heads, heads))
    offer = Candidates(
        rotary.rotate(queries, None, T, [T]), rotary.rotate(keys, None, T, [T]), T, T, 0, softmax or Softmax(0.25),
        values=values, unrotated=queries, position=T, rotary=rotary, in_sight=T,
    )  # fmt: skip
    return offer, keys[0]


@pytest.mark.parametrize("compare", [False, True])
def test_lagkv_is_what_its_definition_says(compare):
    offer, _ = text(T=53)
    scores = LagKV(lag=10, num_sink_tokens=4, compare=compare).scores(offer, 20)
    for h in range(2):
        for first in (4, 14, 24):  # the parts that have one behind them
            expected = torch.zeros(10)
            for x in (offer.keys[0, h], offer.values[0, h]):
                behind = x[first + 10 : first + 20]
                scaled = (x[first : first + 10] - behind.min(0)[0]) / (behind.max(0)[0] - behind.min(0)[0])
                expected += torch.stack([row.std() for row in scaled]).softmax(0)
            if not compare:
                expected = torch.tensor([float((expected < one).sum()) for one in expected]) / 10
            torch.testing.assert_close(scores[h, first : first + 10], expected, atol=1e-6, rtol=1e-5)
        assert (scores[h, [*range(4), *range(34, 53)]] >= 2).all()  # sinks, the last part and what follows
        assert (scores[h, 35:] > scores[h, 34:-1]).all()
    chosen = LagKV(lag=10, num_sink_tokens=4, compare=compare).select(offer, 29)
    assert [set(range(4)) | set(range(34, 53)) < set(row.tolist()) for row in chosen] == [True, True]
    if not compare:
        assert [[sum(a <= t < a + 10 for t in row.tolist()) for a in (4, 14, 24)] for row in chosen] == [[2, 2, 2]] * 2
    short = LagKV(lag=30, num_sink_tokens=2).select(offer, 12)
    assert short.tolist() == [[0, 1, *range(43, 53)]] * 2


@pytest.mark.parametrize("heads", ["shared", "per_kv_head"])
def test_chunkkv_keeps_chunks_of_the_best_mean(heads):
    offer, _ = text()
    inner = SnapKV(window=5)
    scores = inner.scores(offer, 20)
    means = torch.stack([part.mean(1) for part in scores[:, :45].split(10, 1)], 1)
    if heads == "shared":  # the last chunk ends with the window, which has no score
        means = torch.stack([scores[:, i : i + 10].mean() for i in range(0, 50, 10)])[None].expand(2, -1)
    ours = ChunkKV(inner, heads=heads).scores(offer, 20)
    for i in range(4):
        torch.testing.assert_close(ours[:, 10 * i : 10 * i + 10], means[:, i : i + 1].expand(-1, 10))
    chosen = ChunkKV(inner, heads=heads).select(offer, 25)
    for h, row in enumerate(chosen.tolist()):
        whole = sorted(range(5), key=lambda i, h=h: -float(ours[h, 10 * i]))[:2]
        assert set(range(45, 50)) < set(row)
        assert all(set(range(10 * i, min(10 * i + 10, 50))) <= set(row) for i in whole)


def test_rkv_is_what_its_definition_says():
    offer, _ = text(softmax=Softmax(0.25, softcap=2.0))
    offer.keys[0, :, 30] = 1.5 * offer.keys[0, :, 12]  # said twice: the earlier one is redundant
    pruner = RKV(window=6, kernel_size=3, mix=0.3, threshold=0.4)
    scores = pruner.scores(offer, 20)
    for h in range(2):
        k = offer.keys[0, h]
        unit = k / k.norm(dim=1, keepdim=True)
        redundancy = torch.zeros(50)
        for i in range(50):
            alike = [float(unit[i] @ unit[j]) if j != i else 0.0 for j in range(50)]
            above = [j for j in range(50) if alike[j] > 0.4]
            for j in range(50):
                redundancy[j] += 0.0 if above and j == above[-1] else alike[j] / 50
        logits = torch.stack([k[:44] @ q.T for q in offer.queries[0, 2 * h : 2 * h + 2, -6:]]).amax(0).T * 0.25
        attention = (2 * torch.tanh(logits / 2)).softmax(-1).mean(0)
        pooled = [max(attention[max(t - 1, 0) : t + 2].tolist()) for t in range(44)]
        expected = -0.7 * redundancy.softmax(0)
        expected[:44] += 0.3 * torch.tensor(pooled)
        torch.testing.assert_close(scores[h], expected, atol=1e-6, rtol=1e-4)
        assert scores[h, 12] < scores[h, 30]


def leverage(keys):
    """Of keys [T, D] by the projection's matrix."""
    x = (keys - keys.mean(0)).double()
    return (x @ torch.linalg.inv(x.T @ x + 1e-2 * torch.eye(x.shape[1])) @ x.T).diagonal()


def spread(x):
    return (x - x.mean()) / x.std()


def test_leverage_is_what_its_definition_says():
    offer, keys = text()
    expected = spread(torch.stack([leverage(own) for own in keys])).float()
    torch.testing.assert_close(LeverageScore(sketch=None).scores(offer, 20), expected, atol=1e-4, rtol=1e-3)
    sketched = LeverageScore(sketch=12).scores(offer, 20)
    assert torch.equal(sketched, LeverageScore(sketch=12).scores(offer, 20))
    assert not torch.equal(sketched, LeverageScore(sketch=12, seed=1).scores(offer, 20))
    assert torch.corrcoef(torch.stack([sketched.flatten(), expected.flatten()]))[0, 1] > 0.6


def test_compactor_is_what_its_definition_says():
    offer, keys = text()
    pruner = Compactor(sketch=None, num_sink_tokens=3, last=2, chunk=20, blending=0.5)
    expected = torch.zeros(2, 45)
    for h in range(2):
        for begin in range(3, 48, 20):
            end = min(begin + 20, 48)
            for g in range(2):
                q, k = offer.queries[0, 2 * h + g, begin:end], offer.keys[0, h, begin:end]
                expected[h, begin - 3 : end - 3] += (q @ k.T / 4).softmax(-1).sum(0) / 2
        expected[h] *= offer.values[0, h, 3:48].norm(dim=1)
    expected = torch.nn.functional.avg_pool1d(expected, 3, 1, 1)
    expected = spread(expected) + 0.5 * spread(torch.stack([leverage(own[3:48]) for own in keys])).float()
    torch.testing.assert_close(pruner.scores(offer, 20)[:, 3:48], expected, atol=1e-4, rtol=1e-3)
    chosen = pruner.select(offer, 20)
    assert all({0, 1, 2, 48, 49} < set(row.tolist()) for row in chosen)


def test_compactor_blends_by_what_goes(monkeypatch):
    """The share of what is there that a budget drops; the paper's 0.35 where all stays."""
    offer, _ = text()
    pruner = Compactor(num_sink_tokens=3, last=2, chunk=20)
    for keep, share in ((20, 0.6), (5, 0.9), (50, 0.35)):
        by_share = replace(pruner, blending=share)
        torch.testing.assert_close(pruner.scores(offer, keep), by_share.scores(offer, keep))
        assert torch.equal(pruner.votes(replace(offer, keep=keep)), pruner.scores(offer, keep))
    assert pruner.uses_keep and not by_share.uses_keep
    model, ids, seen = attached(), random_ids(81), []
    blending = Compactor._blending
    monkeypatch.setattr(Compactor, "_blending", lambda *given: seen.append(blending(*given)) or seen[-1])
    prefill(model, ids, PrunedCache(model.config, Compactor(num_sink_tokens=2, chunk=16, sketch=4), keep=0.25))
    assert seen == pytest.approx([0.75] * 3)  # 60 of 80 go, in each layer
    seen.clear()
    cache = PrunedCache(model.config, Compactor(num_sink_tokens=2, chunk=16, sketch=4), keep=40, chunk_size=30)
    prefill(model, ids, cache)  # 30 of 30 stay, then 40 of 60, then 40 of 60
    assert seen == pytest.approx([0.35] * 3 + [1 / 3] * 6)


@pytest.mark.parametrize("pruner", [*PRUNERS[:4], CurDKV(local=8)], ids=name_of)
def test_heads_of_unequal_length_score_as_each_alone(pruner):
    offer, _ = text(heads=3)
    if isinstance(pruner, ChunkKV):
        pruner = ChunkKV(SnapKV(window=4), chunk=5, heads="per_kv_head")
    lengths = [50, 22, 31]
    ragged = replace(
        offer, queries=offer.queries[:, :, -10:], unrotated=offer.unrotated[:, :, -10:], chunk_length=10,
        lengths=torch.tensor(lengths, dtype=torch.int32), shortest=22,
    )  # fmt: skip
    scores = pruner.scores(ragged, 20)
    for h, n in enumerate(lengths):
        group = slice(2 * h, 2 * h + 2)
        alone = replace(
            ragged, queries=ragged.queries[:, group], keys=offer.keys[:, h : h + 1, :n], count=n, lengths=None,
            values=offer.values[:, h : h + 1, :n], shortest=None,
        )  # fmt: skip
        torch.testing.assert_close(scores[h, : n - 4], pruner.scores(alone, 20)[0, : n - 4], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("budget", [AdaKV(), GlobalTopK()], ids=name_of)
@pytest.mark.parametrize("pruner", PRUNERS, ids=name_of)
def test_batches_turns_and_decoding(pruner, budget):
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (50, 9, 31)]
    ids, mask = left_padded(prompts)
    settings = {"every": 4, "page_size": 8, "chunk_size": 20}
    cache = PrunedCache(model.config, pruner, budget, keep=14, **settings)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=12, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = PrunedCache(model.config, pruner, budget, keep=14, **settings)
        expected = kvcompress.generate(model, prompt, alone, max_new_tokens=12, do_sample=False)
        assert torch.equal(together[b, -12:], expected[0, -12:]), b
        rows = [layer[0] for layer in alone.stored_lengths()]
        assert [layer[b] for layer in cache.stored_lengths()] == rows
        assert sum(map(sum, rows)) <= 6 * 18


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_criticalkv_is_what_its_definition_says(norm):
    offer, _ = text()
    offer = replace(offer, output=torch.randn(4, 16, 24))
    pruner = CriticalKV(SnapKV(window=5, kernel_size=1), norm=norm)
    scores, inner = pruner.scores(offer, 20), pruner.pruner.scores(offer, 20)
    for h in range(2):
        best = set(inner[h].topk(10).indices.tolist())
        for t in range(50):
            added = [offer.values[0, h, t] @ offer.output[2 * h + g] for g in range(2)]
            size = sum(float(x.norm(p=1 if norm == "l1" else 2)) for x in added) / 2
            expected = torch.finfo(torch.float32).max if t in best else (float(inner[h, t]) + 1e-4) * size
            assert scores[h, t].item() == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma2", "glm", "gpt_neox", "gpt_oss"])
def test_output_projections_are_found(kind):
    """A head's result times these, summed over the heads, is what the projection gives."""
    model = kind_model(kind)
    kvcompress.attach(model)
    noted = []

    class Spy(CriticalKV):
        def scores(self, candidates, keep):
            noted.append((candidates.layer, candidates.output))
            return super().scores(candidates, keep)

    kvcompress.prefill(model, random_ids(30), PrunedCache(model.config, Spy(SnapKV(window=4)), keep=12))
    layers = model.get_decoder().layers if hasattr(model, "get_decoder") else model.gpt_neox.layers
    assert noted
    for index, weights in noted:
        attention = getattr(layers[index], "self_attn", None) or layers[index].attention
        dense = getattr(attention, "o_proj", None) or attention.dense
        x = torch.randn(4, 16)
        plain = dense(x.flatten()) - (0 if dense.bias is None else dense.bias)
        torch.testing.assert_close(torch.einsum("hd,hdn->n", x, weights), plain, atol=1e-5, rtol=1e-4)


def test_values_that_pass_a_gate_cannot_be_weighed():
    model = attached(num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    attention.o_proj = torch.nn.Sequential(torch.nn.Sigmoid(), attention.o_proj)
    with pytest.raises(ValueError, match="layer 0 of LlamaModel: no linear layer of its own takes the result"):
        kvcompress.prefill(model, random_ids(30), PrunedCache(model.config, CriticalKV(), keep=12))


def test_criticalkv_hides_no_nan():
    offer, _ = text()
    offer = replace(offer, output=torch.randn(4, 16, 24))
    offer.keys[0, 1, 7] = float("nan")
    assert CriticalKV(SnapKV(window=5)).scores(offer, 20)[1].isnan().any()
    offer = replace(text()[0], output=torch.full((4, 16, 24), float("nan")))
    assert CriticalKV(SnapKV(window=5)).scores(offer, 20).isnan().any(1).all()


@pytest.mark.parametrize("combine", ["product", "mean", "key", "value"])
def test_curdkv_is_what_its_definition_says(combine):
    offer, _ = text()
    scores = CurDKV(local=16, combine=combine).scores(offer, 20)
    for h in range(2):
        k2, v2 = ((x[0, h] ** 2).sum(1) for x in (offer.keys, offer.values))
        k2, v2 = (torch.cat([part / part.sum() for part in x.split(16)]) for x in (k2, v2))
        expected = {"product": k2 * v2, "mean": (k2 + v2) / 2, "key": k2, "value": v2}[combine]
        torch.testing.assert_close(scores[h], expected / expected.sum())
    whole = CurDKV(local=None, combine="key").scores(offer, 20)
    torch.testing.assert_close(whole[0], (offer.keys[0, 0] ** 2).sum(1) / (offer.keys[0, 0] ** 2).sum())


def test_tova_and_observed_attention_are_kvpresss():
    offer, _ = text()
    weights = torch.zeros(4, 50, 50)
    for head in range(4):
        logits = offer.queries[0, head] @ offer.keys[0, head // 2].T / 4
        weights[head] = logits.masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf")).softmax(-1)
    observed = (weights.sum(1) / torch.arange(50, 0, -1)).view(2, 2, 50)
    assert H2O.preset("kvpress") == ObservedAttention()
    torch.testing.assert_close(ObservedAttention().scores(offer, 20), observed.sum(1), atol=1e-5, rtol=1e-4)
    kept = H2O.preset("kvpress").select(offer, 20)
    assert torch.equal(kept.long(), observed.mean(1).topk(20)[1].sort()[0])
    last = weights[:, -1].mean(0)
    last[-1] = 1  # TOVAPress pads with the largest score
    assert torch.equal(TOVA.preset("kvpress").select(offer, 20)[0].long(), last.topk(20)[1].sort()[0])


def test_observed_attention_of_a_later_call_is_of_its_queries():
    offer, _ = text()
    later = replace(offer, queries=offer.queries[:, :, -10:], chunk_length=10, whole=False)
    scores = ObservedAttention().scores(later, 20)
    expected = later.attention(10) / torch.tensor([10.0] * 40 + [*range(10, 0, -1)])
    torch.testing.assert_close(scores, expected)


def test_presets():
    assert TOVA.preset("kvpress") == TOVA(last=1)
    assert LagKV.preset("kvpress") == LagKV(lag=128, num_sink_tokens=4)
    assert ChunkKV.preset("kvpress").chunk == 20
    assert Compactor.preset("kvpress", last=3) == Compactor(scaled=False, last=3)
    assert ChunkKV(SnapKV(num_sink_tokens=3)).with_sinks(1).pruner.num_sink_tokens == 1
    assert H2O.preset("kvpress", window=5) == ObservedAttention(window=5)


@pytest.mark.parametrize("made", [ChunkKV, Compactor, H2O, KeyDiff, LagKV, PyramidKV, SnapKV, TOVA])
def test_a_preset_names_what_it_cannot_take(made):
    name = "paper" if made is KeyDiff else "kvpress"
    with pytest.raises(TypeError, match=r"^(\w+) has no 'size'; known are \w+(, \w+)*$"):
        made.preset(name, size=3)
    with pytest.raises(ValueError, match=rf"^preset must be (one of )?.*{name}.*, got \['{name}'\]$"):
        made.preset([name])
    said = r"kvpress's compression_ratio is keep = 1 - compression_ratio here: PrunedCache\(config, .*\(\), keep=0.3\)$"
    with pytest.raises(TypeError, match=said):
        made.preset(name, compression_ratio=0.7)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TOVA.preset("paper"), "preset must be kvpress, got 'paper'"),
        (lambda: H2O.preset("paper"), "preset must be kvpress, got 'paper'"),
        (lambda: TOVA(last=-1), "last must be at least 0, got -1"),
        (lambda: CurDKV(local=0), "local must be at least 1, got 0"),
        (lambda: CurDKV(combine="sum"), "combine must be one of product, mean, key, value, got 'sum'"),
        (lambda: ObservedAttention(window=0), "window must be at least 1, got 0"),
        (lambda: LagKV(lag=1), "lag must be at least 2, got 1"),
        (lambda: LagKV.preset("paper"), "preset must be kvpress, got 'paper'"),
        (lambda: ChunkKV("SnapKV"), "pruner must be one of kvcompress.pruners, got the text 'SnapKV'"),
        (lambda: CriticalKV(SnapKV), r"got the class SnapKV, not an instance: SnapKV\(\)"),
        (lambda: ChunkKV(ChunkKV()), "pruner must be one of kvcompress.pruners, got ChunkKV"),
        (lambda: ChunkKV(chunk=0), "chunk must be at least 1, got 0"),
        (lambda: ChunkKV(heads="all"), "heads must be one of shared, per_kv_head, got 'all'"),
        (lambda: CriticalKV(CriticalKV()), "pruner must be one of kvcompress.pruners, got CriticalKV"),
        (lambda: CriticalKV(first_stage=2), "first_stage must be between 0 and 1, got 2"),
        (lambda: CriticalKV(epsilon=-1), "epsilon must be at least 0, got -1"),
        (lambda: CriticalKV(norm="l3"), "norm must be one of l1, l2, got 'l3'"),
        (lambda: RKV(kernel_size=4), "kernel_size must be odd, got 4"),
        (lambda: RKV(mix=1.5), "mix must be between 0 and 1, got 1.5"),
        (lambda: LeverageScore(sketch=0), "sketch must be at least 1, got 0"),
        (lambda: LeverageScore(jitter=0.0), "jitter must be above 0, got 0.0"),
        (lambda: Compactor(blending=-1), "blending must be a number of at least 0 or None, got -1"),
    ],
)
def test_wrong_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
