"""What attention is like, measured in blocks, against its definition over the model's own [T, T] rows."""

import json
import math

import pytest
import torch
from helpers import kind_model, random_ids, tiny_model
from oracle.similarity import divergence_bits
from typer.testing import CliRunner

from kvcompress import analysis, attach
from kvcompress.analysis import AttentionStatistics, statistics
from kvcompress.cli import app
from kvcompress.hf.attach import is_attached

MEASURES = (
    "sparsity", "sparsity_pooled", "mass_share", "head_gravity", "tail_gravity", "center", "cosine", "cosine_rotated",
    "similarity", "overlap", "drift",
)  # fmt: skip


def seen_by(model, ids):
    """Attention [L, Hq, T, T] as transformers gives it, and the queries before rotation [L, Hq, T, D]."""
    queries, hooks = [], []
    for layer in model.model.layers:
        attention = layer.self_attn
        heads = (ids.shape[-1], -1, attention.head_dim)
        module = getattr(attention, "q_norm", attention.q_proj)
        hooks.append(module.register_forward_hook(lambda *x, heads=heads: queries.append(x[2].view(heads))))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    return torch.stack(attentions)[:, 0].double(), torch.stack(queries).transpose(1, 2).double()


def defined(A, q, chosen, head, tail, top_k, local, distances):
    """Of one head: A [T, T], q [T, D]; plain loops over IntelLLM's section 3."""
    T = len(A)
    found = {name: [] for name in MEASURES}
    centers = [sum(j * float(A[i, j]) for j in range(i + 1)) / float(A[i].sum()) for i in range(T)]
    counts = [sum(float(A[i, j]) > 1 / (i + 1) for j in range(i + 1)) for i in range(T)]
    for i in chosen:
        n, row = i + 1, A[i, : i + 1]
        found["sparsity"].append(1 - counts[i] / n)
        shares = []
        for share in (0.5, 0.9, 0.99):
            weights = sorted(row.tolist(), reverse=True)
            used = next(k for k in range(1, n + 1) if sum(weights[:k]) >= share * sum(weights))
            shares.append(used / n)
        found["mass_share"].append(shares)
        found["head_gravity"].append(float(row[:head].sum()))
        found["tail_gravity"].append(float(row[max(n - tail, 0) :].sum()) if tail else 0.0)
        found["center"].append(centers[i] / i)
    result = {name: torch.tensor(x, dtype=torch.float64).mean(0) for name, x in found.items() if x}
    result["sparsity_pooled"] = torch.tensor(1 - sum(counts[i] for i in chosen) / sum(i + 1 for i in chosen)).double()
    pairs = {name: [] for name in ("cosine", "similarity", "overlap", "drift")}
    for d in distances:
        of = {name: [] for name in pairs}
        for i in range(max(T - local, 0), T - d):
            a, b = (A[place] / A[place].sum() for place in (i, i + d))
            of["cosine"].append(float(torch.nn.functional.cosine_similarity(q[i], q[i + d], dim=0)))
            of["similarity"].append(1 - float(divergence_bits(a, b)))
            of["drift"].append(abs(centers[i + d] - centers[i]))
            if i >= top_k:
                tops = [set(A[place].topk(top_k).indices.tolist()) for place in (i, i + d)]
                of["overlap"].append(len(tops[0] & tops[1]) / len(tops[0] | tops[1]))
        for name, values in of.items():
            pairs[name].append(sum(values) / len(values) if values else math.nan)
    return result | {name: torch.tensor(values, dtype=torch.float64) for name, values in pairs.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [None, 7])
def test_measured_is_the_definition(family, rows, monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK_NUMBERS", 100)  # blocks of a few rows
    model, ids = tiny_model(family), random_ids(41)
    settings = {"head": 3, "tail": 6, "top_k": 5, "local": 12}
    measured = analysis.attention(model, [ids], rows=rows, **settings)
    assert not is_attached(model)
    assert (measured.layers, measured.samples, measured.tokens) == ((0, 1, 2), 1, 41)
    assert measured.distances == (1, 2, 4, 8)
    chosen = range(1, 41) if rows is None else [round(1 + 39 * n / 7) for n in range(1, 8)]
    A, q = seen_by(model, ids)
    for layer in range(A.shape[0]):
        for head in range(A.shape[1]):
            expected = defined(A[layer, head], q[layer, head], chosen, **settings, distances=measured.distances)
            for name, value in expected.items():
                found = getattr(measured, name).mean[layer, head]
                torch.testing.assert_close(found, value, atol=2e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    assert measured.sparsity.mean.std() > 0  # else any of them would do
    assert measured.sparsity.error.isnan().all()


def test_rotated_queries_have_cosines_of_their_own():
    measured = analysis.attention(tiny_model(), [random_ids(30)], local=8)
    plain, rotated = measured.cosine.mean, measured.cosine_rotated.mean
    assert not torch.allclose(plain, rotated, atol=1e-3)
    assert (plain.abs() <= 1 + 1e-6).all()


def test_means_and_errors_are_over_samples():
    model, samples = tiny_model(), [random_ids(20 + 5 * n, seed=n) for n in range(3)]
    shown: list[tuple[int, int | None]] = []
    whole = analysis.attention(model, samples, local=4, top_k=3, progress=lambda *done: shown.append(done))
    assert shown == [(20, 75), (45, 75), (75, 75)]  # so that what is left can be estimated
    alone = [analysis.attention(model, [ids], local=4, top_k=3) for ids in samples]
    for name in MEASURES:
        values = torch.stack([getattr(one, name).mean for one in alone])
        torch.testing.assert_close(getattr(whole, name).mean, values.mean(0))
        torch.testing.assert_close(getattr(whole, name).error, values.std(0) / 3**0.5)


def test_sinks_softcap_and_windows_are_the_models_own():
    """gpt_oss has learned sinks and windows in every other layer, gemma2 a softcap: rows of whole layers alone."""
    for family in ("gpt_oss", "gemma2"):
        model, ids = kind_model(family), random_ids(24)
        measured = analysis.attention(model, [ids], head=2, local=4, top_k=3)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            attentions = model(ids, output_attentions=True).attentions
        assert 0 < len(measured.layers) < len(attentions)
        for place, layer in enumerate(measured.layers):
            expected = attentions[layer][0, :, 1:, :2].double().sum(-1).mean(-1)
            torch.testing.assert_close(measured.head_gravity.mean[place], expected, atol=1e-5, rtol=0)


def test_short_samples_have_no_pairs_far_apart():
    measured = analysis.attention(tiny_model(), [random_ids(3)], local=16, top_k=8)
    assert measured.drift.mean[..., :2].isfinite().all() and measured.drift.mean[..., 2:].isnan().all()
    assert measured.overlap.mean.isnan().all()


def test_what_is_saved_comes_back(tmp_path):
    measured = analysis.attention(tiny_model(), [random_ids(9), random_ids(12)], local=16, top_k=4)
    path = measured.save(tmp_path / "attention.json")
    loaded = AttentionStatistics.load(path)
    assert loaded.layers == measured.layers and loaded.distances == measured.distances
    for name in MEASURES:
        torch.testing.assert_close(getattr(loaded, name).mean, getattr(measured, name).mean, equal_nan=True)
        torch.testing.assert_close(getattr(loaded, name).error, getattr(measured, name).error, equal_nan=True)
    for broken in ("{}", "[1", json.dumps({"format": "kvcompress.attention/1", "layers": [0]})):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"attention\.json must be what AttentionStatistics\.save wrote"):
            AttentionStatistics.load(path)


def test_bad_input_is_named():
    model = tiny_model()
    for given, message in (
        ({"samples": []}, "samples must hold at least one"),
        ({"samples": [[1]]}, r"samples\[0\] must have at least 2 tokens, got 1"),
        ({"samples": [[1.5, 2.0]]}, r"samples\[0\] must be token ids"),
        ({"samples": [[1, 2]], "rows": 0}, "rows must be"),
        ({"samples": [[1, 2]], "local": 1}, "local must be"),
        ({"samples": [[1, 2]], "top_k": 0}, "top_k must be"),
        ({"samples": [[1, 2]], "head": -1}, "head must be"),
    ):
        with pytest.raises(ValueError, match=message):
            analysis.attention(model, **given)
    attach(model)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"got NaN in samples\[0\]"):
        analysis.attention(model, [random_ids(5)])


def test_command_writes_json_and_figures(tmp_path):
    out, figures = tmp_path / "attention.json", tmp_path / "figures"
    arguments = ["analyze", "attention", "--samples", "2", "--length", "160", "--rows", "8", "--local", "16"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out), "--figure", str(figures)])
    assert result.exit_code == 0, result.output
    measured = AttentionStatistics.load(out)
    assert (measured.samples, measured.tokens, measured.rows) == (2, 320, 8)
    assert {path.name for path in figures.iterdir()} == {"sparsity.png", "gravity.png", "neighbours.png"}
    assert all(path.stat().st_size > 5000 for path in figures.iterdir())
    assert f"{float(measured.sparsity.mean[0].mean()):.1%}" in result.output
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "missing" / "x.json")])
    assert result.exit_code == 2 and "out must be in a folder that exists" in result.output
