"""Gates that are trained on from a fit, with a model that stays as it is."""

import pytest
import torch
from helpers import attached, kind_model, random_ids, tiny_gates, tiny_model, weaker
from typer.testing import CliRunner

import kvcompress
from kvcompress import GatedCache, KVzip, SnapKV
from kvcompress.cli import app
from kvcompress.dmc.costs import said_again
from kvcompress.gates import train_gates
from kvcompress.gates.fitting import QueriesPass
from kvcompress.gates.training import _GatedPass, _Learned
from kvcompress.hf.attach import is_attached
from kvcompress.hf.reading import plain_decoder, read
from kvcompress.pruners import Gates

ASKED = KVzip(num_sink_tokens=3, lead_in=2, prompt=(5, 6), next_prompt=(7, 8), suffix=(9,))
TEXTS = [random_ids(60, seed=seed)[0] for seed in range(10)]
FEW = {"steps": 4, "window": 8, "num_sink_tokens": 2, "held_out": 1}


def lost(model, gates, texts, share=0.3):
    """(divergence in nats a token from the dense model, share of tokens held), means over texts."""
    found, held = [], []
    with kvcompress.attach(model), torch.no_grad():
        for ids in (text[None] for text in texts):
            whole = model(ids).logits.log_softmax(-1)
            cache = GatedCache(model.config, gates, keep=share, window=8, num_sink_tokens=2)
            cut = model(ids, past_key_values=cache).logits.log_softmax(-1)
            found.append(float((whole.exp() * (whole - cut)).sum(-1).mean()))
            held.append(cache.kept_share())
    return sum(found) / len(found), sum(held) / len(held)


def test_training_lowers_what_a_cut_cache_loses():
    model = tiny_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    small = weaker(tiny_gates(), 0.03)
    start = train_gates(model, small, TEXTS, ASKED, **FEW | {"steps": 1, "lr": 1e-9})  # levels of its own texts
    reported = []
    found = train_gates(
        model, start, TEXTS, ASKED, **FEW | {"steps": 100, "lr": 0.03}, keep=(0.3,),
        report=lambda step, nats: reported.append((step, nats)),
    )  # fmt: skip
    assert [step for step, _ in reported] == list(range(100))
    for texts, most in ((TEXTS[:9], 0.85), ([random_ids(60, seed=seed)[0] for seed in range(20, 26)], 0.97)):
        (before_, held), (behind, left) = (lost(model, gates, texts) for gates in (start, found))
        assert behind < most * before_
        assert left == pytest.approx(held, abs=0.05)  # nothing is won by keeping more
    assert "trained on: 100 steps, lr 0.03, to 0.3, window 8" in found.measured
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.requires_grad for x in model.parameters()) and not is_attached(model)
    assert all(x.grad is None for x in model.parameters())


def test_learned_weights_are_gates_again():
    model, gates = attached(), tiny_gates()
    with plain_decoder(model) as (decoder, facts):
        passed = QueriesPass(facts)
        read(decoder, TEXTS[0], passed)
        learned = _Learned(gates, passed.seen)
    for own, wanted in zip(learned.layers(), gates.layers, strict=True):
        torch.testing.assert_close(own.tensors(), wanted.tensors(), rtol=1e-3, atol=1e-3)
    queries = torch.randn(1, 4, 5, 16)
    torch.testing.assert_close(learned.says(1, queries), gates.says(1, queries), rtol=1e-3, atol=1e-2)


def test_levels_are_those_of_what_was_learned():
    model = tiny_model()
    found = train_gates(model, tiny_gates(), TEXTS, ASKED, **FEW | {"held_out": 4})
    with kvcompress.attach(model), torch.no_grad():
        kept = []
        for text in TEXTS[-4:]:
            cache = GatedCache(model.config, found, keep=0.4, window=1, num_sink_tokens=3)
            model(text[None], past_key_values=cache)
            kept.append(cache.kept_share())
    assert sum(kept) / 4 == pytest.approx(0.4, abs=0.1)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3"])
def test_every_kind_of_attention_is_trained_through(kind):
    model = kind_model(kind)
    with plain_decoder(model) as (decoder, facts):
        passed = QueriesPass(facts)
        read(decoder, TEXTS[0], passed)
        layers = [layer for layer in sorted(facts) if not facts[layer].is_local]
        made = [torch.randn(facts[x].kv_heads, passed.seen[x].shape[1] + 1) for x in layers]
    start = Gates(tuple(made), (-9.0, 9.0))
    found = train_gates(model, start, TEXTS, ASKED, **FEW)
    assert all(not torch.allclose(a.weight, b.weight) for a, b in zip(start.layers, found.layers, strict=True))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"pruner": SnapKV()}, "pruner must be a KVzip, got SnapKV"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1"),
        ({"lr": 0.0}, "lr must be"),
        ({"keep": ()}, "keep must have at least one share"),
        ({"keep": (1.5,)}, "keep must be"),
        ({"held_out": 10}, "samples must be more than the 10 that are held out, got 10"),
        ({"window": 80}, r"samples\[0\] must have at least 84 tokens, for 2 first and 80 last ones that stay"),
        ({"gates": tiny_gates(layers=2)}, "gates must be of this model"),
        ({"gates": Gates(tiny_gates().layers)}, "gates must have levels"),
    ],
)
def test_bad_settings_are_refused_and_leave_the_model_plain(given, error):
    model = tiny_model()
    with pytest.raises(ValueError, match=error):
        train_gates(model, **{"gates": tiny_gates(), "samples": TEXTS, "pruner": ASKED, **FEW, **given})
    assert not is_attached(model) and all(x.requires_grad for x in model.parameters())


def test_the_command_trains_behind_the_fit(tmp_path):  # 5 s: imports what reads text, and reads four texts twice
    out = tmp_path / "gates"
    given = ["fit", "gates", "--out", str(out), "--samples", "4", "--length", "200", "--steps", "6"]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    assert "Trained on for 6 steps" in found.output
    assert "trained on: 6 steps" in Gates.load(out).measured


def test_a_fit_is_not_lost_where_training_ends_early(tmp_path, monkeypatch):
    monkeypatch.setattr("kvcompress.gates.run_fit.train_gates", lambda *args, **given: 1 / 0)
    given = ["fit", "gates", "--out", str(tmp_path / "gates"), "--samples", "4", "--length", "128", "--steps", "6"]
    assert isinstance(CliRunner().invoke(app, given).exception, ZeroDivisionError)
    assert len(Gates.load(tmp_path / "gates").layers) == 4


def test_every_row_meets_every_share(monkeypatch):
    met, now = set(), []

    class Noting(_GatedPass):
        def __init__(self, facts, gates, threshold, *rest):
            super().__init__(facts, gates, threshold, *rest)
            if now:
                met.add((now.pop(), threshold > 0))

    def noting(pruner, row, length):
        now.append(int(row[0]))
        return said_again(pruner, row, length)

    monkeypatch.setattr("kvcompress.gates.training._GatedPass", Noting)
    monkeypatch.setattr("kvcompress.gates.training.said_again", noting)
    start = Gates(tiny_gates().layers, (-100.0, 100.0))  # thresholds of 80 and -80
    found = train_gates(tiny_model(), start, TEXTS[:3], ASKED, **FEW | {"steps": 8}, keep=(0.1, 0.9))
    assert met == {(int(row[0]), high) for row in TEXTS[:2] for high in (True, False)}
    assert found.r2 == ()
