"""dmc.fit: decisions of DMS that say what a pruner's scores would be."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import kind_model, random_ids, tiny_model
from typer.testing import CliRunner

import kvcompress
from kvcompress import DMCCache, KVzip, PrunedCache, Replay, dmc, prefill
from kvcompress.cli import app
from kvcompress.demo import make_task
from kvcompress.dmc import DMCConfig
from kvcompress.hf.attach import is_attached
from kvcompress.pruners import CenterOfGravity, KeyNorm

DMS = DMCConfig(mode="dms", shift=0.0)
TEXTS = [random_ids(60, seed=seed)[0] for seed in range(7)]


def seen_and_scored(model, ids, pruner):
    """(what enters the keys' linear layer [T, d], scores [Hkv, T]) of each layer, of a text read alone."""
    inputs, hooks = [], []
    with kvcompress.attach(model):
        cache = PrunedCache(model.config, pruner, keep=1.0, later="keep")
        prefill(model, torch.cat([ids, ids[-1:]])[None], cache)
    for layer in model.model.layers:
        hooks.append(layer.self_attn.k_proj.register_forward_pre_hook(lambda _, x: inputs.append(x[0][0])))
    with torch.no_grad():
        model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [(x, layer.chooser.held.scores[:, : len(ids)]) for x, layer in zip(inputs, cache.compressing, strict=True)]


@pytest.mark.parametrize("decides", ["own", "successor"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
def test_neurons_are_the_ridge_regression_of_the_scores_logarithms(family, decides):
    model, pruner = tiny_model(family), Replay()
    if family == "qwen2":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.bias.normal_()
    ratio, slope, ridge, held_out = 3.0, 1.5, 1e-2, 2
    found = [seen_and_scored(model, ids, pruner) for ids in TEXTS]
    config = DMCConfig(mode="dms", dms_window=4, dms_decides=decides, shift=0.0, dms_scale=2.0)
    fitted = dmc.fit(
        model, config, iter(TEXTS), pruner, ratio=ratio, slope=slope, ridge=ridge, held_out=held_out
    )  # fmt: skip
    every, expected = [], []
    for number, layer in enumerate(model.model.layers):
        pairs = []
        for text in found:
            x, y = text[number][0].double(), text[number][1].T.double().log()
            if family == "qwen2":
                x = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
            pairs.append((x, y) if decides == "own" else (x[1:], y[:-1]))
        x, y = (torch.cat([pair[part] for pair in pairs[:-held_out]]) for part in (0, 1))
        # as least squares of more rows: the ridge
        damping = (ridge * x.square().sum(0).mean()).sqrt() * torch.eye(x.shape[1], dtype=torch.float64)
        targets = torch.cat([y, torch.ones(len(y), 1, dtype=torch.float64)], 1)
        wide = torch.cat([targets, torch.zeros(x.shape[1], targets.shape[1], dtype=torch.float64)])
        weights = torch.linalg.lstsq(torch.cat([x, damping]), wide).solution
        x, y = (torch.cat([pair[part] for pair in pairs[-held_out:]]) for part in (0, 1))
        said, one = (x @ weights).split([y.shape[1], 1], 1)
        every.append((said / one.clamp(min=0.1)).flatten())
        r2 = 1 - (said - y).square().sum(0) / (y - y.mean(0)).square().sum(0)
        torch.testing.assert_close(torch.tensor(fitted.r2[number]), r2.float(), rtol=1e-3, atol=1e-3)
        neuron = layer.self_attn.k_proj(x[:, : layer.self_attn.k_proj.in_features].float())
        expected.append((said, one, neuron.unflatten(-1, (-1, 16))[..., -1]))
    below = (torch.cat(every) < fitted.threshold(ratio)).double().mean()
    assert abs(float(below) - (1 - 1 / ratio)) < 0.01
    for said, one, neuron in expected:
        logits = slope * (fitted.threshold(ratio) * one - said)
        torch.testing.assert_close(neuron * 2.0, logits.float(), rtol=1e-3, atol=1e-3)


def test_a_fitted_model_drops_what_the_pruner_would_and_keeps_its_ratio():
    model, _ = kvcompress.load_example_model()
    texts = [make_task(500, depth=0.5, seed=seed, device="cpu").ids[0] for seed in range(9)]
    new = make_task(500, depth=0.3, seed=77, device="cpu").ids
    scores = [y for _, y in seen_and_scored(model, new[0], KVzip(mass=True))]
    config = DMCConfig(mode="dms", dms_window=16, dms_decides="own", shift=0.0)
    fitted = dmc.fit(model, config, texts, KVzip(mass=True), ratio=2.0, held_out=3)
    assert torch.tensor(fitted.r2).mean() > 0.3
    cache = DMCCache(model.config, track=True)
    prefill(model, torch.cat([new, new[:, -1:]], 1), cache)
    assert 1.6 < cache.compression_ratio() < 2.4
    fitted.set_ratio(model, 4.0)
    smaller = DMCCache(model.config)
    prefill(model, torch.cat([new, new[:, -1:]], 1), smaller)
    assert smaller.compression_ratio() > 1.4 * cache.compression_ratio()
    ahead = []
    for layer, own in zip(cache.kept_positions(), scores, strict=True):
        for kept, of_head in zip(layer[0], own, strict=True):
            old = torch.ones(new.shape[1], dtype=torch.bool)
            old[-20:] = old[:4] = False  # the newest stay in any case
            stays = torch.zeros_like(old)
            stays[kept] = True
            if (old & stays).any() and (old & ~stays).any():
                ahead.append(of_head[old & stays].log().mean() - of_head[old & ~stays].log().mean())
    assert torch.tensor(ahead).mean() > 1  # the kept ones score e times as much, and more


def test_behind_a_norm_of_keys_decisions_have_their_signs():
    """One whose weight is negative, too."""
    model, pruner = tiny_model("qwen3"), Replay()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_norm.weight.uniform_(0.5, 1.5)
            layer.self_attn.k_norm.weight[-1] = -0.7
    before = copy.deepcopy(model)
    with torch.no_grad():
        for layer in before.model.layers:
            layer.self_attn.k_proj.weight.unflatten(0, (-1, 16))[:, -1] = 0
    config = DMCConfig(mode="dms", dms_window=4, dms_decides="own", shift=0.0, dms_scale=100.0)
    with pytest.raises(ValueError, match=r"dms_scale must be at least 10\.0 for a model that norms its keys"):
        dmc.fit(model, replace(config, dms_scale=1.0), TEXTS, pruner)
    fitted = dmc.fit(model, config, TEXTS, pruner, ratio=2.0, slope=1.0)
    for number, (layer, plain) in enumerate(zip(model.model.layers, before.model.layers, strict=True)):
        x = torch.randn(1, 30, model.config.hidden_size)
        weights = fitted.weights[number]
        said, one = (x[0] @ weights).split([weights.shape[1] - 1, 1], 1)
        keys, old = (
            own.self_attn.k_norm(own.self_attn.k_proj(x).unflatten(-1, (-1, 16))) for own in (layer, plain)
        )  # fmt: skip
        logits = fitted.threshold(2.0) * one - said
        assert torch.equal(keys[0, ..., -1] > 0, logits > 0)
        # what they are with neurons of zero
        torch.testing.assert_close(keys[..., :-1], old[..., :-1], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "given", "texts", "error"),
    [
        (DMCConfig(), {}, TEXTS, "config must have mode = 'dms' to be fitted, got 'dmc'"),
        (DMCConfig(mode="dms"), {}, TEXTS, "config must have shift = 0 to be fitted, got 5.0"),
        (replace(DMS, decision_margin=1.0), {}, TEXTS, "config must have decision_margin = 0 to be fitted, got 1.0"),
        (replace(DMS, share_heads="mean"), {}, TEXTS, "config must have share_heads = 'none' to be fitted, got 'mean'"),
        (DMS, {"ratio": 0.5}, TEXTS, "ratio must be a number between 1 and 1000000.0, got 0.5"),
        (DMS, {"ridge": 0}, TEXTS, "ridge must be a number between 1e-12 and 1000000.0, got 0"),
        (DMS, {"held_out": 0}, TEXTS, "held_out must be at least 1, got 0"),
        (DMS, {"held_out": 7}, TEXTS, "texts must be more than the 7 that are held out, got 7"),
        (DMS, {"pruner": KeyNorm()}, TEXTS, "pruner must score tokens above 0, but KeyNorm did not for 60 of 60 in"),
        (DMS, {"pruner": CenterOfGravity()}, TEXTS, "pruner must score alike for every budget, but CenterOfGravity"),
    ],
)
def test_what_cannot_be_fitted_is_refused_and_leaves_the_model_plain(config, given, texts, error):
    model = tiny_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    pruner = given.pop("pruner", Replay())
    with pytest.raises(ValueError, match=error):
        dmc.fit(model, config, texts, pruner, **given)
    assert not is_attached(model) and getattr(model.config, "kvcompress", None) is None
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_model_with_adapters_is_refused():
    peft = pytest.importorskip("peft")
    try:
        model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj", "k_proj"]))
    except ImportError as error:  # an older peft beside a newer transformers
        pytest.skip(str(error))
    with pytest.raises(ValueError, match=r"fitted before it gets adapters, got one at layers\.0.*k_proj"):
        dmc.fit(model, DMS, TEXTS, Replay())


def test_a_decision_of_its_own_is_of_dms_alone():
    with pytest.raises(ValueError, match="dms_decides must be 'successor' with mode='dmc', got 'own'"):
        DMCConfig(dms_decides="own")


@pytest.mark.parametrize(
    ("family", "mode"), [("llama", "dmc"), ("gemma2", "dms"), ("qwen3", "dms"), ("qwen3", "dmc")]
)  # layers of a window are not converted
def test_what_a_neuron_costs_is_the_loss_without_it(family, mode):
    model, ids = kind_model(family), random_ids(40, 2)
    if family == "qwen3":  # one that carries much of what its norm divides by, and counts little behind it
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.unflatten(0, (-1, 16))[:, 5] *= 4
                layer.self_attn.k_norm.weight[5] = 0.01
    before = {name: x.clone() for name, x in model.state_dict().items()}
    costs = dmc.neuron_costs(model, ids, mode=mode)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert costs.shape == (model.config.head_dim,) and not is_attached(model)
    with torch.no_grad():
        before = model(ids, labels=ids, use_cache=False).loss
        dmc.convert(model, DMCConfig(neuron=5, shift=1e4, mode=mode), anneal=False)  # decides for nothing
        after = model(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(costs[5], after - before, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="model must not be converted yet"):
        dmc.neuron_costs(model, ids)


# ---- the command ----


def run(*options):
    return CliRunner().invoke(app, ["fit", "dms", *map(str, options)], env={"COLUMNS": "80"})


def test_the_command_leaves_a_model_that_is_loaded_and_trained_on(tmp_path):
    said = run("--out", tmp_path / "small", "--samples", 5, "--length", 200, "--window", 8, "--target-ratio", 3)
    assert said.exit_code == 0, said.output
    assert "Fitted on 5 texts of 200 tokens" in said.output and "Decisions take coordinate" in said.output
    model = kvcompress.from_pretrained(tmp_path / "small")
    config = dmc.state(model).config
    assert (config.mode, config.dms_window, config.dms_decides, config.neuron_scale) == ("dms", 8, "own", 0.0)
    new = make_task(400, depth=0.3, seed=7, device="cpu").ids
    cache = DMCCache(model.config)
    prefill(model, new, cache)
    assert cache.compression_ratio() > 1.8
    model.train()
    recipe = dmc.DMCRecipe(target_ratio=3.0, anneal_steps=0, ramp_steps=0, solidify_steps=1)
    recipe.begin_step(model, 0, passes=1)
    loss = model(new, labels=new).loss
    (loss + recipe.loss(model, 0)[0]).backward()
    assert all(layer.self_attn.k_proj.weight.grad.abs().sum() > 0 for layer in model.model.layers)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ((), "Missing option '--out'"),
        (("--out", "."), "out must be a folder that does not exist"),
        (("--out", "x", "--model", "smollm2"), "text must be given"),
        (("--out", "x", "--length", 1_500), "length must be at most 98"),
        (("--out", "x", "--text", "none.txt"), "none.txt"),
    ],
)
def test_what_the_command_cannot_do_is_said_and_leaves_no_folder(tmp_path, monkeypatch, options, error):
    monkeypatch.chdir(tmp_path)
    said = run(*options)
    assert said.exit_code == 2 and error in " ".join(said.output.replace("│", " ").split())
    assert not (tmp_path / "x").exists()
