"""Measuring how alike layers attend, grouping them, and the file that says so."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers import FAMILIES, deciding_model, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvcompress import attach, reference
from kvcompress.cli import app
from kvcompress.hf.attach import is_attached
from kvcompress.models import load_example_model
from kvcompress.models.text import training_text
from kvcompress.pod.plan import PoDPlan, delta_for_share, follower_share, lead_table
from kvcompress.pod.similarity import LayerSimilarity, agreement, measure_similarity
from kvcompress.reference.similarity import divergence_bits

# the worked example: rows of four layers
ROWS = torch.tensor(
    [[0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5], [0.0, 0.0, 0.25, 0.75]]
).double()
WORKED = 1 - divergence_bits(ROWS[:, None], ROWS[None])[None]


def random_similarity(L, Hkv=1, seed=0, levels=None):
    """Symmetric, 0..1; few levels make equal entries."""
    generator = torch.Generator().manual_seed(seed)
    sim = torch.rand(Hkv, L, L, generator=generator, dtype=torch.float64)
    sim = sim.tril(-1) if levels is None else ((sim * levels).round() / levels).tril(-1)
    return sim + sim.mT + torch.eye(L).double()


def plan_of(lead, **fields):
    return PoDPlan(**{"lead": lead, "sinks": 1, "recent": 2, "query_heads": 2 * len(lead[0]), "head_dim": 16} | fields)


def blocks_of(lead, head=0):
    return [list(block) for block in plan_of(lead).blocks(head)]


# ---- grouping ----


def test_the_worked_example():
    expected = {
        (0, 1): 0.938722,
        (0, 2): 0.795566,
        (0, 3): 0.431037,
        (1, 2): 0.795566,
        (1, 3): 0.431037,
        (2, 3): 0.856844,
    }
    for (a, b), value in expected.items():
        assert WORKED[0, a, b].item() == pytest.approx(value, abs=1e-6)
    for delta, blocks in (
        (0.5, [[0, 1, 2], [3]]), (0.8, [[0, 1], [2, 3]]), (0.9, [[0, 1], [2], [3]]), (0.25, [[0, 1, 2, 3]]),
        (0.0, [[0, 1, 2, 3]]), (1.01, [[0], [1], [2], [3]]),
    ):  # fmt: skip
        assert blocks_of(lead_table(WORKED, delta)) == blocks
    plan = plan_of(lead_table(WORKED, 0.5))
    assert plan.share == 0.5 and plan.followers == 2
    assert plan.saved(10) == pytest.approx(0.175) and plan.saved(100) == pytest.approx(0.2425)
    dense = plan.dense_nbytes(10, torch.float32)
    assert dense == 2 * 4 * 10 * 16 * 4 and plan.nbytes(10, torch.float32) == dense - (40 - 26) * 16 * 4
    assert plan.nbytes(100) == plan.dense_nbytes(100) - (400 - 206) * 16 * 2
    assert plan.saved(3) == 0 and plan.nbytes(3) == plan.dense_nbytes(3) and plan.nbytes(0) == 0


def test_the_figures_of_a_large_model():
    """LLaMA3-8B: 128 KiB per token in bfloat16; 35% at 32K needs a share of 0.8."""
    lead = [(layer // 5 * 5,) * 8 for layer in range(32)]
    plan = plan_of(lead, sinks=16, recent=4080, query_heads=32, head_dim=128)
    assert plan.dense_nbytes(1) == 128 << 10
    assert plan.saved(32768) == pytest.approx(0.5 * plan.share * 0.875)
    assert 1 - plan.nbytes(32768) / plan.dense_nbytes(32768) == pytest.approx(plan.saved(32768))


def test_equal_layers_join_at_delta_1_and_equality_joins():
    sim = random_similarity(3)
    sim[0, 0, 1] = sim[0, 1, 0] = 1.0
    assert blocks_of(lead_table(sim, 1.0)) == [[0, 1], [2]]
    assert lead_table(sim, sim[0, 1, 2].item())[2][0] == (0 if sim[0, 0, 2] >= sim[0, 1, 2] else 2)


def fewest_blocks(alike):
    """By trying every way to cut 0..L-1 into runs whose pairs are all alike."""
    L = len(alike)
    for cuts in range(L):
        for chosen in itertools.combinations(range(1, L), cuts):
            runs = [range(a, b) for a, b in itertools.pairwise((0, *chosen, L))]
            if all(alike[a][b] for run in runs for a, b in itertools.combinations(run, 2)):
                return cuts + 1
    raise AssertionError


@settings(deadline=None, max_examples=60)
@given(
    L=st.integers(1, 9), Hkv=st.integers(1, 3), seed=st.integers(0, 2**31), delta=st.floats(0, 1),
    levels=st.sampled_from([None, 4]),
)  # fmt: skip
def test_blocks_are_runs_of_alike_layers_and_the_fewest(L, Hkv, seed, delta, levels):
    sim = random_similarity(L, Hkv, seed, levels)
    lead = lead_table(sim, delta)
    for head in range(Hkv):
        blocks, alike = blocks_of(lead, head), (sim[head] >= delta).tolist()
        assert list(itertools.chain(*blocks)) == list(range(L))
        assert all(lead[layer][head] == block[0] for block in blocks for layer in block)
        assert all(alike[a][b] for block in blocks for a, b in itertools.combinations(block, 2))
        for block, after in itertools.pairwise(blocks):
            assert not all(alike[after[0]][layer] for layer in block)
        assert len(blocks) == fewest_blocks(alike)


@settings(deadline=None, max_examples=60)
@given(L=st.integers(2, 12), seed=st.integers(0, 2**31), low=st.floats(0, 1), high=st.floats(0, 1))
def test_blocks_never_become_fewer_as_delta_rises(L, seed, low, high):
    sim = random_similarity(L, 2, seed)
    low, high = min(low, high), max(low, high)
    for head in range(2):
        assert len(blocks_of(lead_table(sim, low), head)) <= len(blocks_of(lead_table(sim, high), head))


@settings(deadline=None, max_examples=60)
@given(L=st.integers(1, 10), seed=st.integers(0, 2**31), part=st.floats(0, 1), levels=st.sampled_from([None, 5]))
def test_delta_for_share_is_the_largest_that_reaches_it(L, seed, part, levels):
    sim = random_similarity(L, 2, seed, levels)
    target = part * (L - 1) / L
    delta = delta_for_share(sim, target)
    assert follower_share(lead_table(sim, delta)) >= target
    rows, columns = torch.tril_indices(L, L, -1)
    for entry in sim[:, rows, columns].unique().tolist():
        assert entry <= delta or follower_share(lead_table(sim, entry)) < target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sim: sim[0], r"similarity must be \[Hkv, L, L\], got shape \(4, 4\)"),
        (lambda sim: sim.index_fill(1, torch.tensor(2), float("nan")), r"between 0 and 1, got nan at \[0, 2, 0\]"),
        (lambda sim: sim * 1.5, "similarity must be between 0 and 1, got 1.5"),
        (lambda sim: sim.triu(), "similarity must be symmetric"),
        (lambda sim: sim * 0.5, "similarity must be 1 on the diagonal"),
    ],
)
def test_a_similarity_that_is_none_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        lead_table(change(WORKED.clone()), 0.5)


def test_wrong_thresholds_are_named():
    with pytest.raises(ValueError, match="delta must be a number, got nan"):
        lead_table(WORKED, float("nan"))
    with pytest.raises(ValueError, match=r"share must be between 0 and \(layers - 1\) / layers = 0.75, got 0.8"):
        delta_for_share(WORKED, 0.8)


# ---- the plan ----


@pytest.mark.parametrize(
    ("lead", "message"),
    [
        ([[0, 0], [0, 1], [0, 0]], r"lead\[2\]\[1\] must be 1 or 2 .*got 0"),  # a closed block
        ([[0, 0], [0, 2], [0, 2]], r"lead\[1\]\[1\] must be 0 or 1 .*got 2"),  # above itself
        ([[0, 1], [0, 1]], r"lead\[0\]\[1\] must be 0 .*got 1"),
        ([[0, 0], [0, -1]], r"lead\[1\]\[1\] must be"),
        ([[0, 0], [0]], r"lead\[1\] must have 2 KV heads as lead\[0\], got 1"),
        ([[0, 0], [0, 0.0]], r"lead\[1\]\[1\] must be a layer, got 0.0"),
        ([], r"lead must be \[L\]\[Hkv\]"),
        ("0", r"lead must be \[L\]\[Hkv\]"),
    ],
)
def test_a_lead_table_that_breaks_the_rules_is_refused_by_layer_and_head(lead, message):
    with pytest.raises(ValueError, match=message):
        PoDPlan(lead=lead, sinks=1, recent=2, query_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"recent": 0}, "recent must be at least 1, got 0"),
        ({"recent": 2.0}, "recent must be an integer, got 2.0"),
        ({"query_heads": 3}, "query_heads must be a multiple of the lead table's 2 KV heads, got 3"),
        ({"reduce": "max"}, "reduce must be one of mean, min, got 'max'"),
        ({"delta": float("nan")}, "delta must be a number or None, got nan"),
        ({"similarity": random_similarity(3, 2)}, r"similarity must have shape \(2, 2, 2\) as lead, got \(2, 3, 3\)"),
        ({"model": 3}, "model must be a text, got 3"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        plan_of([[0, 0], [0, 1]], **fields)


def test_a_plan_comes_back_as_it_was_saved(tmp_path):
    sim = random_similarity(5, 2, seed=3)
    plan = plan_of(
        lead_table(sim, 0.4), similarity=sim, delta=0.4, samples=3, data="texts", model="some/model", reduce="min",
        standard_error=0.01, queries=16, sample_length=100,
    )  # fmt: skip
    path = plan.save(tmp_path / "plan.json")
    assert PoDPlan.load(path) == plan
    assert lead_table(PoDPlan.load(path).similarity, 0.4) == plan.lead  # no digit is lost
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.pop("recent"), "plan.json must have the field recent"),
        (lambda saved: saved.update(extra=1), "plan.json must have the fields lead, .* alone, got extra"),
        (lambda saved: saved.update(format="other"), "format of plan.json must be .*, got 'other'"),
        (lambda saved: saved.update(lead=[[0], [1], [0]]), r"plan.json is no valid plan: lead\[2\]\[0\]"),
        (lambda saved: saved.update(lead=3), r"plan.json is no valid plan: lead must be"),
        (lambda saved: saved.update(sinks="16"), "sinks must be an integer, got '16'"),
    ],
)
def test_a_plan_that_was_changed_is_refused_by_field(tmp_path, change, message):
    path = plan_of([[0], [0], [2]]).save(tmp_path / "plan.json")
    saved = json.loads(path.read_text())
    change(saved)
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=message):
        PoDPlan.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"lead": [[0'])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json must be a plan"):
        PoDPlan.load(path)


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = plan_of([[0], [0]]).save(tmp_path / "plan.json")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        plan_of([[0], [1]]).save(path)
    assert PoDPlan.load(path).lead == ((0,), (0,)) and len(list(tmp_path.iterdir())) == 1


def test_a_plan_of_another_model_is_refused_by_what_differs():
    config = tiny_model().config  # 3 layers, 4 query heads, 2 KV heads of 16
    plan_of([[0, 0]] * 3).check_model(config)
    for plan, message in (
        (plan_of([[0, 0]] * 2), "2 layers, the model 3"),
        (plan_of([[0]] * 3, query_heads=4), "1 KV heads, the model 2"),
        (plan_of([[0, 0]] * 3, query_heads=8), "8 query heads, the model 4"),
        (plan_of([[0, 0]] * 3, head_dim=8, model="large"), "8 head dim, the model 16; it was made for large"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.check_model(config)


# ---- measuring ----


def rows_of(model, ids):
    """Attention of every layer, as transformers gives it: [L, Hq, T, T]."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(model(ids, output_attentions=True).attentions)[:, 0].double()


@pytest.mark.parametrize("family", FAMILIES)
def test_measured_similarity_is_that_of_the_models_own_attention(family):
    model, texts = tiny_model(family), [random_ids(n, seed=n) for n in (40, 9, 3)]
    measured = measure_similarity(model, texts, queries=5)
    assert not is_attached(model)
    total, rows = torch.zeros(4, 3, 3).double(), 0
    for ids in texts:
        attention = rows_of(model, ids)[:, :, -5:]
        total += divergence_bits(attention[:, None], attention[None]).sum(-1).permute(2, 0, 1)
        rows += attention.shape[2]
    assert (measured.samples, measured.rows) == (3, rows) == (3, 13)
    expected = 1 - total / rows
    torch.testing.assert_close(measured.per_query_head(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(measured.similarity(), expected.view(2, 2, 3, 3).mean(1), atol=2e-5, rtol=0)
    torch.testing.assert_close(measured.similarity("min"), expected.view(2, 2, 3, 3).amin(1), atol=2e-5, rtol=0)
    assert expected.min() < 0.9  # else all would be alike
    for sim in (measured.similarity(), measured.similarity("min"), measured.per_query_head()):
        assert torch.equal(sim, sim.mT) and (sim.diagonal(dim1=1, dim2=2) == 1).all()
        lead_table(sim, 0.5)


def test_distant_tokens_alone_are_renormalised():
    model, ids = tiny_model(), random_ids(40)
    measured = measure_similarity(model, [ids], queries=30, distant_only=True, sinks=3, recent=12)
    attention = rows_of(model, ids)
    total, rows = torch.zeros(4, 3, 3).double(), 0
    for i in range(10, 40):
        p = attention[:, :, i, 3 : max(i - 12 + 1, 0)]
        if p.shape[-1]:
            p = p / p.sum(-1, keepdim=True)
            total, rows = total + divergence_bits(p[:, None], p[None]).permute(2, 0, 1), rows + 1
    assert measured.rows == rows == 25
    torch.testing.assert_close(measured.per_query_head(), 1 - total / rows, atol=1e-4, rtol=0)
    nothing = measure_similarity(model, [ids], distant_only=True, sinks=30, recent=12)
    with pytest.raises(ValueError, match="at least one row that counts"):
        nothing.similarity()


def test_measurements_add_up_over_samples():
    model, texts = tiny_model(), [random_ids(20 + n, seed=n) for n in range(4)]
    whole = measure_similarity(model, texts, queries=4)
    parts = measure_similarity(model, texts[:1], queries=4) + measure_similarity(model, texts[1:], queries=4)
    assert (whole.rows, whole.samples) == (parts.rows, parts.samples) == (16, 4)
    torch.testing.assert_close(whole.similarity(), parts.similarity())
    torch.testing.assert_close(whole.standard_error("min"), parts.standard_error("min"))
    with pytest.raises(ValueError, match="both must be of one model"):
        whole + measure_similarity(tiny_model(num_hidden_layers=2), texts[:1])


def test_standard_error_is_that_of_the_samples_means():
    generator = torch.Generator().manual_seed(0)
    sums = 4 * torch.rand(6, 2, 2, 2, generator=generator).double()  # [samples, Hq, L, L] of 4 rows
    one = LayerSimilarity.of(sums[0], 4, 1)
    assert one.standard_error().isnan().all()
    joined = one
    for each in sums[1:]:
        joined = joined + LayerSimilarity.of(each, 4, 1)
    means = sums.mean(1) / 4
    torch.testing.assert_close(joined.standard_error(), means.std(0)[None] / 6**0.5)
    least = (sums.mean(0) / 4).argmax(0)  # the head that is least similar
    own = (sums / 4).std(0) / 6**0.5
    torch.testing.assert_close(joined.standard_error("min")[0], own.gather(0, least[None])[0])


def test_the_model_is_left_as_it_was():
    model, ids = tiny_model(), random_ids(20)
    model.train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    measure_similarity(model, [ids])
    assert model.training and not is_attached(model)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    with attach(model):
        measure_similarity(model, [ids])
        assert is_attached(model)
    with pytest.raises(ValueError, match="samples must hold at least one"):
        measure_similarity(model, [])
    assert not is_attached(model)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.zeros(2, 5, dtype=torch.long)], r"samples\[0\] must be token ids \[T\]"),
        ([[1, 2], [3, 97]], r"samples\[1\] must be token ids between 0 and 96, got 3..97"),
        ([[]], r"samples\[0\] must be token ids"),
        ([torch.ones(4)], r"samples\[0\] must be token ids"),
    ],
)
def test_samples_that_are_no_texts_are_named(samples, message):
    with pytest.raises(ValueError, match=message):
        measure_similarity(tiny_model(), samples)


def test_models_that_cannot_be_measured_are_refused():
    converted = deciding_model()
    with pytest.raises(ValueError, match="model must not be converted, got one of method 'dmc'"):
        measure_similarity(converted, [random_ids(9)])
    windowed = tiny_model("mistral", sliding_window=8)
    measure_similarity(windowed, [random_ids(8)])
    with pytest.raises(ValueError, match=r"samples\[0\] must have at most sliding_window = 8 tokens, got 9"):
        measure_similarity(windowed, [random_ids(9)])
    broken = tiny_model()
    broken.model.layers[1].self_attn.q_proj.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="got NaN"):
        measure_similarity(broken, [random_ids(9)])


def test_agreement_compares_predictions_with_near_tokens_alone():
    model, texts = tiny_model(), [random_ids(60, seed=n) for n in (1, 2)]
    sizes = (2, 20, 60)
    found = agreement(model, texts, sizes, sinks=4, positions=30)
    assert found.sizes == sizes and found.samples == 2 and not is_attached(model)
    expected = []
    for size in sizes:
        first = min(4, size - 1)
        seen = reference.visible(60, 60, window=size - first, sinks=first)[None]
        with torch.no_grad():
            pairs = [
                (model(ids).logits, model(ids, attention_mask=torch.where(seen, 0.0, -1e30)).logits) for ids in texts
            ]
        expected.append([float((a.argmax(-1) == b.argmax(-1))[0, -30:].double().mean()) for a, b in pairs])
    assert found.share == pytest.approx([sum(pair) / 2 for pair in expected])
    assert found.error == pytest.approx([abs(a - b) / 2 for a, b in expected])
    assert found.share[-1] == 1 and found.share[0] < 1
    assert math.isnan(agreement(model, texts[:1], [8]).error[0])
    with pytest.raises(ValueError, match=r"sizes\[1\] must be at least 1, got 0"):
        agreement(model, texts, [4, 0])
    with pytest.raises(ValueError, match="model must predict tokens"):
        agreement(model.model, texts, [4])


# ---- the command ----


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", "pod", *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_command_measures_groups_and_saves(tmp_path):
    out, figures = tmp_path / "plan.json", tmp_path / "figures"
    result = run("--samples", 3, "--length", 256, "--share", 0.2, "--out", out, "--figure", figures, "--seed", 1)
    assert result.exit_code == 0, result.output
    plan = PoDPlan.load(out)
    model, _ = load_example_model()
    plan.check_model(model.config)
    assert plan.share >= 0.2 and (plan.sinks, plan.recent) == (16, 16)
    assert (plan.samples, plan.sample_length, plan.queries) == (3, 256, 16) and "training" in plan.data
    assert plan.delta == delta_for_share(plan.similarity, 0.2) and plan.lead == lead_table(plan.similarity, plan.delta)
    assert sorted(path.name for path in figures.iterdir()) == ["blocks.png", "memory.png", "similarity.png"]
    assert f"phi = {plan.share:.3f}" in result.output and "KV head 1:" in result.output
    assert f"{plan.saved(256):.1%}" in result.output
    assert max(map(len, result.stdout.replace(str(out), "").replace(str(figures), "").splitlines())) <= 80
    again = tmp_path / "again.json"
    assert run("--samples", 3, "--length", 256, "--share", 0.2, "--out", again, "--seed", 1).exit_code == 0
    assert again.read_text() == out.read_text()


def test_the_command_reads_files_and_other_models(tmp_path):
    pytest.importorskip("datasets")
    load_example_model()[0].save_pretrained(tmp_path / "model")
    load_example_model()[1].save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_bytes(training_text(np.random.default_rng(0))[:3000])
    result = run("--model", tmp_path / "model", "--text", text, "--samples", 2, "--length", 128, "--delta", 0.9,
                 "--recent", 8, "--distant-only", "--reduce", "min", "--out", tmp_path / "plan.json")  # fmt: skip
    assert result.exit_code == 0, result.output
    plan = PoDPlan.load(tmp_path / "plan.json")
    assert (plan.data, plan.delta, plan.recent, plan.distant_only, plan.reduce) == ("text.txt", 0.9, 8, True, "min")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--delta", 0.5, "--share", 0.5), "share must not be given beside delta"),
        (("--length", 4096), "length must be at most the 2,048 positions"),
        (("--model", "nowhere/at-all"), "text must be given"),
        (("--reduce", "max"), "reduce must be one of mean, min"),
        (("--device", "tpu"), "device must be one of"),
        (("--share", 0.9, "--samples", 1, "--length", 64), "share must be between 0 and"),
        (("--samples", 100_000_000, "--length", 64), "samples must be at most the"),
    ],
)
def test_wrong_options_are_named(tmp_path, arguments, message):
    result = run(*arguments, "--out", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
