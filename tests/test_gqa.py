"""The GQA baseline: averaged KV heads in a plain transformers model, and the command that trains it on."""

import json
from itertools import pairwise

import pytest
import torch
from helpers import FAMILIES, KINDS, LATENT, forward, kind_model, random_ids, tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.dmc import convert
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.plain import use_plain_attention
from kvcompress.pruners import SnapKV
from kvcompress.retrofit.gqa import PlainRecipe, convert_to_gqa


def blocks(linear, head_dim=16):
    """A projection's weight and bias (column -1) by head: [H, D, in + 1]."""
    bias = torch.zeros(linear.out_features) if linear.bias is None else linear.bias
    return torch.cat([linear.weight, bias[:, None]], 1).detach().unflatten(0, (-1, head_dim))


def with_biases(model):
    for parameter in (p for name, p in model.named_parameters() if name.endswith("proj.bias")):
        torch.nn.init.normal_(parameter)
    return model


def logits(model, **given):
    with torch.no_grad():
        return model(random_ids(40, 2), **given).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("had", "kv_heads"), [(4, 2), (4, 1), (2, 1)])
def test_heads_become_the_mean_of_consecutive_ones(family, had, kv_heads):
    model = with_biases(tiny_model(family, num_key_value_heads=had))
    old = {(i, name): blocks(getattr(layer.self_attn, name)).clone()
           for i, layer in enumerate(model.model.layers) for name in ("q_proj", "k_proj", "v_proj")}  # fmt: skip
    assert convert_to_gqa(model, kv_heads) is model
    assert model.config.num_key_value_heads == kv_heads
    for (i, name), before in old.items():
        after = blocks(getattr(model.model.layers[i].self_attn, name))
        if name == "q_proj":
            assert torch.equal(after, before)
            continue
        r = had // kv_heads
        for head in range(kv_heads):
            expected = torch.stack(list(before[head * r : (head + 1) * r])).mean(0)
            torch.testing.assert_close(after[head], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_identical_heads_give_the_same_logits(family):
    model = with_biases(tiny_model(family, num_key_value_heads=4))
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("k_proj", "v_proj"):
                linear = getattr(layer.self_attn, name)
                for parameter in linear.parameters():
                    parameter.unflatten(0, (2, 2, 16))[:, 1] = parameter.unflatten(0, (2, 2, 16))[:, 0]
    expected = logits(model)
    torch.testing.assert_close(logits(convert_to_gqa(model, 2)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_saved_and_loaded_as_a_plain_model(family, tmp_path):
    model = convert_to_gqa(with_biases(tiny_model(family, num_key_value_heads=4)), 1)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.num_key_value_heads == 1
    assert torch.equal(logits(loaded), logits(model))
    given = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(loaded.generate(random_ids(9), **given), model.generate(random_ids(9), **given))


def test_caches_of_an_attached_model_hold_fewer_heads():
    model = tiny_model(num_key_value_heads=4)
    kvcompress.attach(model)
    before = kvcompress.PrunedCache(model.config, SnapKV(), keep=1.0)
    logits(model, past_key_values=before)
    after = kvcompress.PrunedCache(convert_to_gqa(model, 2).config, SnapKV(), keep=1.0)
    torch.testing.assert_close(logits(model, past_key_values=after), logits(model), rtol=1e-4, atol=1e-4)
    assert after.nbytes() == before.nbytes() / 2


def test_as_many_heads_change_nothing_and_gradients_flow_to_the_averaged():
    model = tiny_model()
    expected = logits(model)
    assert torch.equal(logits(convert_to_gqa(model, 2)), expected)
    model.model.layers[0].self_attn.v_proj.weight.requires_grad_(False)
    convert_to_gqa(model, 1)
    model(random_ids(20), labels=random_ids(20)).loss.backward()
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.grad.abs().sum() > 0
    assert attention.v_proj.weight.grad is None


@pytest.mark.parametrize("kv_heads", [0, 3, 8, -1, 2.0, True])
def test_other_numbers_of_heads_are_refused(kv_heads):
    model = tiny_model(num_key_value_heads=4)
    with pytest.raises(ValueError, match="kv_heads must divide the model's 4 KV heads"):
        convert_to_gqa(model, kv_heads)
    assert model.config.num_key_value_heads == 4


def test_what_cannot_be_averaged_is_refused_untouched():
    model = tiny_model()
    model.model.layers[2].self_attn.v_proj = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"v_proj must be nn\.Linear"):
        convert_to_gqa(model, 1)
    assert model.model.layers[0].self_attn.k_proj.out_features == 32
    converted = tiny_model()
    convert(converted)
    with pytest.raises(ValueError, match="must not be converted yet"):
        convert_to_gqa(converted, 1)


def test_the_learning_rate_warms_up_stays_and_falls_by_a_cosine():
    recipe = PlainRecipe(steps=100, warmup_steps=9, decay_steps=20, end_rate=0.1)
    rates = [recipe.learning_rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[4] == pytest.approx(0.5)
    assert rates[9:81] == [1.0] * 72
    assert rates[90] == pytest.approx(0.55) and rates[100] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[80:]))


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"warmup_steps": -1}, {"steps": 5, "decay_steps": 6}, {"end_rate": 1.5}, {"steps": 2.0}]
)
def test_recipes_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=" must be "):
        PlainRecipe(**{"decay_steps": 0} | wrong)


def test_the_command_leaves_a_trained_plain_model(tmp_path):
    result = CliRunner().invoke(app, [
        "retrofit", "gqa", "--kv-heads", "1", "--out", str(tmp_path), "--steps", "3", "--length", "512", "--rows", "2",
        "--float32", "--save-steps", "1", "--keep-all",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert all((tmp_path / f"checkpoint-{step}").is_dir() for step in (1, 2, 3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.num_key_value_heads == 1
    started = convert_to_gqa(kvcompress.load_example_model()[0], 1)
    moved = model.model.layers[0].self_attn.k_proj.weight - started.model.layers[0].self_attn.k_proj.weight
    assert 0 < moved.abs().max() < 0.01
    assert json.loads((tmp_path / "training.json").read_text())["recipe"]["kind"] == "PlainRecipe"


def test_the_command_says_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["retrofit", "gqa", "--kv-heads", "3", "--out", str(tmp_path), "--steps", "1"])
    assert result.exit_code == 2
    assert "kv_heads must divide" in " ".join(result.output.replace("│", " ").split())


def test_the_kernel_under_a_plain_model_gives_what_transformers_gives():
    model, ids = tiny_model(), random_ids(70, 2)
    expected, (names, grads) = model(ids, labels=ids), ([], [])
    expected.loss.backward()
    for name, x in model.named_parameters():
        names.append(name)
        grads.append(x.grad.clone())
    model.zero_grad()
    use_plain_attention(model)
    found = model(ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    found.loss.backward()
    for name, grad, x in zip(names, grads, model.parameters(), strict=True):
        torch.testing.assert_close(x.grad, grad, rtol=1e-3, atol=1e-4, msg=name)
    for places in (torch.arange(35).repeat(2), torch.arange(1, 71)):
        with pytest.raises(ValueError, match="without padding"):
            model(ids, position_ids=places[None].expand(2, -1))
    with pytest.raises(ValueError, match="without padding"):
        model(ids, attention_mask=(torch.arange(70) > 3).long().expand(2, -1))
    model(ids, attention_mask=torch.ones_like(ids))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids, labels=ids).loss.isfinite()
    with pytest.raises(ValueError, match="without padding"):
        model.generate(ids, max_new_tokens=3)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "mixtral"])
def test_heads_of_other_families_are_averaged(kind, tmp_path):
    model, ids = kind_model(kind), random_ids(20, 2)
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            for parameter in getattr(layer.self_attn, name).parameters():
                parameter.data[16:] = parameter.data[:16]
    expected = forward(model, ids)
    torch.testing.assert_close(forward(convert_to_gqa(model, 1), ids), expected, rtol=1e-3, atol=1e-3)
    with kvcompress.attach(model, verify=True):
        assert {x.kv_heads for x in facts_of(base_model(model)).values()} == {1}
    model.save_pretrained(tmp_path)
    assert torch.equal(forward(AutoModelForCausalLM.from_pretrained(tmp_path), ids), forward(model, ids))


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("phi3", {}, "each must come from a linear layer of its own"),
        ("olmo2", {}, "norms all heads of its keys together"),
        ("deepseek_v3", LATENT | {"v_head_dim": 24}, "each must come from a linear layer of its own"),
    ],
)
def test_heads_that_cannot_be_averaged_are_refused(kind, settings, reason, monkeypatch):
    monkeypatch.setitem(KINDS, kind, {})
    model = kind_model(kind, **settings)
    with pytest.raises(ValueError, match=reason):
        convert_to_gqa(model, 1)
    assert model.config.num_key_value_heads == settings.get("num_key_value_heads", 2)
