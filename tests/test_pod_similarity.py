"""Measuring how alike layers attend, and the command that makes a plan of it."""

import math

import numpy as np
import oracle
import pytest
import torch
from helpers import FAMILIES, deciding_model, random_ids, tiny_model
from oracle.similarity import divergence_bits
from typer.testing import CliRunner

from kvcompress import attach
from kvcompress.cli import app
from kvcompress.hf.attach import is_attached
from kvcompress.models import EXAMPLE, load_example_model
from kvcompress.models.text import training_text
from kvcompress.pod.plan import PoDPlan, delta_for_share, lead_table
from kvcompress.pod.similarity import LayerSimilarity, agreement, measure_similarity

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
    with pytest.raises(ValueError, match="none of its layers sees all tokens"):
        measure_similarity(tiny_model("mistral", sliding_window=8), [random_ids(8)])
    broken = tiny_model()
    broken.model.layers[0].self_attn.v_proj.weight.data.fill_(float("nan"))
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
        seen = oracle.visible(60, 60, window=size - first, sinks=first)[None]
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
    halves, most = (delta_for_share(plan.similarity, share) for share in (0.5, 0.75))
    assert f"0.5: {halves:.4g}, 0.75: {most:.4g}\n" in result.stdout
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
    assert plan.followers == 0 and "No layer follows another" in result.stdout and "training" not in result.stdout
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    result = run("--model", tmp_path / "model", "--text", text, "--out", tmp_path / "plan.json")
    assert "model must come with a tokenizer" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--delta", 0.5, "--share", 0.5), "share must not be given beside delta"),
        (("--length", 4096), "length must be at most the 2,048 positions"),
        (("--model", "nowhere/at-all"), "text must be given"),
        (("--reduce", "max"), "reduce must be one of mean, min"),
        (("--device", "tpu"), "device must be one of"),
        (("--length", 256, "--recent", 240, "--refine", 1), "length must be above sinks + recent = 256 for refine"),
        (("--delta", 1.5), "delta must be between 0 and 1, got 1.5"),
        (("--delta", "nan"), "delta must be between 0 and 1, got nan"),
        (("--share", 1.5, "--samples", 1, "--length", 128), "share must be between 0 and (layers - 1) / layers = 0.75"),
        (("--figure", __file__), "figure must be a folder, got the file"),
        (("--out", "."), "out must be a file, got the folder ."),
        (("--model", EXAMPLE.parent / "example_pod", "--text", __file__), "must not be converted yet"),
        (("--share", 0.9, "--samples", 1, "--length", 128), "share must be between 0 and"),
        (("--samples", 100_000_000, "--length", 64, "--held-out"), "samples must be at most the"),
    ],
)
def test_wrong_options_are_named(tmp_path, arguments, message):
    result = run("--out", tmp_path / "plan.json", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
