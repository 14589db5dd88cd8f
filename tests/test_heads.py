"""Which heads retrieve: gates trained as in DuoAttention, and the mass that streaming loses."""

import pytest
import torch
from helpers import attached, random_ids, tiny_model
from typer.testing import CliRunner

from kvcompress import PrunedCache, prefill
from kvcompress.analysis import measure_heads, pass_keys
from kvcompress.analysis.heads import _GatedPass
from kvcompress.analysis.passkeys import PassKeys
from kvcompress.cli import app
from kvcompress.heads import HeadProfile
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.reading import read
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.pruners import KVzip

SIZES = {"sinks": 2, "recent": 6}


def sample(n=40, seed=0):
    ids = random_ids(n, seed=seed)[0]
    asked = torch.zeros(n, dtype=torch.bool)
    asked[-8:-2] = True
    return PassKeys(ids, asked)


@torch.no_grad()
def weights_of(model, ids):
    """[L][Hq, T, T]: eager attention weights."""
    plain = tiny_model()
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("eager")
    return [x[0] for x in plain(ids[None], output_attentions=True).attentions]


def test_mass_is_what_lies_between_the_first_and_the_latest():
    model, texts = attached(), [sample(), sample(31, seed=3)]
    profile = measure_heads(model, texts, method="mass", **SIZES)
    expected = torch.zeros(3, 2)
    for text in texts:
        for layer, weights in enumerate(weights_of(model, text.ids)):
            i, j = torch.meshgrid(*[torch.arange(len(text.ids))] * 2, indexing="ij")
            lost = (weights * ((j >= 2) & (j <= i - 6))).sum(-1)[:, text.asked].mean(-1)
            expected[layer] += lost.view(2, 2).amax(1) / 2
    torch.testing.assert_close(torch.tensor(profile.gates), expected, atol=1e-5, rtol=1e-4)
    assert (profile.sinks, profile.recent) == (2, 6) and "mass lost, 2 texts" in profile.measured


def test_heads_by_the_best_key_of_a_second_reading():
    model, texts, noted = attached(vocab_size=256), [sample(), sample(31, seed=3)], torch.zeros(2, 3, 2)
    words = byte_tokenizer()

    class Spy(KVzip):
        def scores(self, candidates, keep):
            scores = super().scores(candidates, keep)
            noted[self.chunk - 2000, candidates.layer] = scores[:, 2:].amax(1)
            return scores

    for j, text in enumerate(texts):
        spy = Spy(2000 + j, 2).with_tokenizer(words)
        prefill(model, torch.cat([text.ids, text.ids[:1]])[None], PrunedCache(model.config, spy, keep=9))
    read = [PassKeys(torch.cat([t.ids, t.ids[:1]]), torch.cat([t.asked, t.asked[:1]])) for t in texts]
    profile = measure_heads(model, read, method="kvzip", tokenizer=words, **SIZES)
    torch.testing.assert_close(torch.tensor(profile.gates), noted.amax(0), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_gates_mix_what_a_head_sees_with_what_it_sees_streaming():
    model, ids = attached(num_hidden_layers=1), random_ids(30)[0]
    decoder = base_model(model)
    noted = []
    hook = decoder.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: noted.append(args[0][0]))
    for gates in ([1.0, 1.0], [0.0, 0.0], [0.25, 1.0]):
        read(decoder, ids, _GatedPass(facts_of(decoder), [0], torch.tensor([gates]), 2, 6))
    hook.remove()
    full, near, mixed = (x.view(30, 4, 16) for x in noted)
    torch.testing.assert_close(mixed[:, :2], 0.25 * full[:, :2] + 0.75 * near[:, :2])
    torch.testing.assert_close(mixed[:, 2:], full[:, 2:])
    torch.testing.assert_close(full[:8], near[:8])
    assert not torch.allclose(full[20:], near[20:], atol=1e-2)


def test_training_changes_the_gates_alone():
    model = attached()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.lm_head.weight.requires_grad_(False)
    learned, seen = [p.requires_grad for p in model.parameters()], []
    profile = measure_heads(
        model, [sample(seed=s) for s in range(3)], steps=6, lr=0.1, report=lambda *x: seen.append(x), **SIZES
    )
    gates = torch.tensor(profile.gates)
    assert gates.shape == (3, 2) and bool(((gates >= 0) & (gates <= 1)).all()) and bool((gates < 1).any())
    assert [step for step, _, _ in seen] == [*range(6)] and seen[0][1:] == (0.0, pytest.approx(0.95, abs=0.06))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == learned
    assert all(p.grad is None for p in model.parameters()) and not model.training


def test_a_head_that_matters_keeps_its_gate():
    """One layer in which one KV head is heard and the other is not: only the first can change what is asked."""
    model = attached(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, 32:] = 0
    profile = measure_heads(model, [sample(seed=s) for s in range(4)], steps=40, lr=0.1, weight=0.02, **SIZES)
    (heard, unheard), *_ = profile.gates
    assert heard > 0.6 and unheard < 0.05


def test_pass_keys_are_planted_and_asked_for():
    tokenizer = byte_tokenizer()
    texts = [torch.full((400,), ord("x")), torch.full((300,), ord("y"))]
    planted = pass_keys(tokenizer, texts, facts=3, seed=1)
    for text, one in zip(texts, planted, strict=True):
        assert len(one.ids) == len(one.asked) == len(text)
        words = bytes(one.ids.tolist())
        assert int(one.asked.sum()) == 15 and words.count(b"# The pass key of ") == 6
        following = bytes(one.ids[1:][one.asked[:-1]].tolist())
        assert all(words.count(following[i : i + 5]) == 2 for i in (0, 5, 10)) and following.isdigit()
        assert not one.asked[: len(text) // 2].any()
    assert torch.equal(pass_keys(tokenizer, texts, facts=3, seed=1)[1].ids, planted[1].ids)
    with pytest.raises(ValueError, match=r"texts\[0\] must have more than \d+ tokens for 5 facts, got 300"):
        pass_keys(tokenizer, texts[1:], facts=5)


def test_the_command_writes_a_profile(tmp_path):
    out = tmp_path / "heads.json"
    call = ["analyze", "heads", "--out", str(out), "--samples", "1", "--length", "320", "--facts", "2", "--sinks", "4"]
    done = CliRunner().invoke(app, [*call, "--recent", "16", "--method", "mass", "--held-out"])
    assert done.exit_code == 0, done.output
    profile = HeadProfile.load(out)
    assert [len(row) for row in profile.gates] == [2] * 4 and (profile.sinks, profile.recent) == (4, 16)
    wrong = CliRunner().invoke(app, [*call, "--recent", "900", "--held-out"])
    assert wrong.exit_code != 0 and "longer than sinks" in " ".join(wrong.output.split())


def test_wrong_settings_are_named():
    model, texts = attached(), [sample()]
    for settings, message in (
        ({"method": "kvzip"}, "tokenizer must be given with method='kvzip', which asks .* in words, got None"),
        ({"method": "guess"}, "method must be one of gates, mass, kvzip, got 'guess'"),
        ({"recent": 0}, "recent must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"weight": -1.0}, "weight must be a number between"),
        ({"recent": 38}, r"samples\[0\] must be longer than sinks \+ recent = 40, got 40 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_heads(model, texts, **(SIZES | settings))
    with pytest.raises(ValueError, match="samples must hold at least one, got none"):
        measure_heads(model, [])
    with pytest.raises(ValueError, match=r"samples\[0\] must ask for something"):
        measure_heads(model, [PassKeys(texts[0].ids, torch.zeros(40, dtype=torch.bool))])
