"""A model converted to PoD without a cache: how it attends, is trained, saved and loaded; and its baselines."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import (
    FAMILIES,
    REFUSED_BATCHES,
    assert_packed_documents_are_apart,
    assert_padding_changes_nothing,
    call_of,
    forward,
    left_padded,
    random_ids,
    tiny_model,
)
from transformers import AutoModelForCausalLM, DynamicCache
from typer.testing import CliRunner

import kvcompress
from kvcompress import pod
from kvcompress.cli import app
from kvcompress.hf.attach import base_model, is_attached
from kvcompress.hf.plain import use_plain_attention
from kvcompress.ops.softmax import Softmax
from kvcompress.pod import PoDConfig, PoDRecipe
from kvcompress.pod.plan import PoDPlan
from kvcompress.pod.retrofit import freeze_unused

ONE = ((0, 0), (0, 0), (0, 0), (0, 0))  # one block
SELF = ((0, 0), (1, 1), (2, 2), (3, 3))
MIXED = ((0, 0), (0, 1), (2, 1), (2, 1))  # the heads' blocks differ
TABLES = {"one": ONE, "mixed": MIXED}
tables = pytest.mark.parametrize("lead", TABLES.values(), ids=TABLES)
MODES = ("pod", "window", "cla")


def converted(family="llama", lead=MIXED, sinks=2, recent=6, mode="pod", **settings):
    model = tiny_model(family, num_hidden_layers=4, **settings)
    pod.convert(model, PoDConfig(lead, sinks, recent, mode=mode))
    return model


def plainly(model, ids, config):
    """Logits of one sequence by the whole matrix of logits of every head, in float64."""
    base = copy.deepcopy(model).double()
    kvcompress.detach(base)
    T = ids.shape[1]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    near = (j < config.sinks) | (j > i - config.recent)
    rotated, values = {}, {}
    with torch.no_grad():
        h = base.model.embed_tokens(ids)
        cos, sin = (x[0] for x in base.model.rotary_emb(h, torch.arange(T)[None]))
        for index, layer in enumerate(base.model.layers):
            attention, x = layer.self_attn, layer.input_layernorm(h)
            projected = {}
            for kind in "qkv":
                y = getattr(attention, f"{kind}_proj")(x).unflatten(-1, (-1, 16))
                norm = getattr(attention, f"{kind}_norm", None)
                projected[kind] = (y if norm is None else norm(y)).transpose(1, 2)[0]
            q, k = (y * cos + torch.cat([-y[..., 8:], y[..., :8]], -1) * sin for y in (projected["q"], projected["k"]))
            rotated[index], values[index] = (q, k), projected["v"]
            heads = []
            for head in range(4):
                c = head // 2
                a = config.lead[index][c]
                own, led = (rotated[x][0][head] @ rotated[x][1][c].T / 4 for x in (index, a))
                logits, v = torch.where(near, own, led), values[index][c]
                if config.mode == "window":
                    logits = own.masked_fill(~near, float("-inf"))
                elif config.mode == "cla":
                    logits, v = q[head] @ rotated[a][1][c].T / 4, values[a][c]
                heads.append(logits.masked_fill(j > i, float("-inf")).softmax(-1) @ v)
            h = h + attention.o_proj(torch.cat(heads, -1)[None])
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return base.lm_head(base.model.norm(h)).float()


# ---- what is computed ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@tables
def test_a_model_of_any_family_computes_what_the_method_says(family, lead, mode):
    model, ids = converted(family, lead, mode=mode), random_ids(40)
    expected = plainly(model, ids, pod.state(model).config)
    torch.testing.assert_close(forward(model, ids), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mode", ["pod", "cla"])
def test_where_every_layer_leads_itself_it_is_the_plain_kernel_bit_for_bit(mode):
    model, ids = tiny_model(num_hidden_layers=4), random_ids(40, 2)
    dense = forward(model, ids)
    use_plain_attention(model)
    grads, outs = [], []
    for convert in (False, True):
        if convert:
            pod.convert(model, PoDConfig(SELF, 2, 6, mode=mode))
        model.zero_grad()
        outs.append(model(ids).logits)
        outs[-1].square().sum().backward()
        grads.append({name: x.grad.clone() for name, x in model.named_parameters()})
    torch.testing.assert_close(outs[1], dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    q, k, v = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    run = pod.state(model).begin(call_of(model, ids))
    qr, kr = (run.facts[0].key_rotary.rotate(x, None, 40, [40]) for x in (q, k))
    for layer in range(4):
        assert torch.equal(
            run.attend(layer, q, k, v, Softmax(0.25)), kvcompress.ops.attention(qr, kr, v, scale=0.25)[0]
        )
    for name in grads[0]:
        assert (grads[0][name] - grads[1][name]).norm() < 1e-4 * grads[0][name].norm()


@tables
def test_a_window_that_holds_all_is_the_dense_model(lead):
    model, ids = tiny_model(num_hidden_layers=4), random_ids(40, 2)
    dense = forward(model, ids)
    pod.convert(model, PoDConfig(lead, 4, 36))
    torch.testing.assert_close(forward(model, ids), dense, rtol=1e-4, atol=1e-4)
    assert all(gate in (None, 1.0) for gate in pod.mean_gates(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_changes_no_parameter(family):
    model = tiny_model(family, num_hidden_layers=4)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    pod.convert(model, PoDConfig(MIXED))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_gates_are_the_probability_of_near_tokens():
    model, ids = converted(lead=ONE), random_ids(60, 2)
    forward(model, ids)
    gates = pod.state(model).last_gates
    assert sorted(gates) == [1, 2, 3]
    for gate in gates.values():
        assert gate.shape == (2, 4, 60) and (gate[:, :, :8] == 1).all() and (gate[:, :, 8:] < 1).all()
    found = pod.mean_gates(model)
    assert found[0] is None and all(0 < gate < 1 for gate in found[1:])
    ids, mask = left_padded([ids[:1], ids[1:, :20]])
    forward(model, ids, attention_mask=mask)
    gate = pod.state(model).last_gates[2]
    assert gate.shape == (2, 4, 60) and gate[1, :, :40].isnan().all() and not gate[1, :, 40:].isnan().any()


# ---- gradients ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_training_gives_finite_gradients_everywhere(family, mode):
    model, ids = converted(family, mode=mode).train(), random_ids(50, 2)
    model(ids, labels=ids).loss.backward()
    for name, x in model.named_parameters():
        if mode == "cla" and any(f"3.self_attn.{kind}" in name for kind in ("k_", "v_")):
            assert x.grad is None or not x.grad.any()  # all heads of layer 3 use the keys and values of others
        else:
            assert x.grad is not None and x.grad.isfinite().all(), name


def test_a_leads_gradient_is_the_sum_over_its_block():
    model, ids = converted(lead=ONE), random_ids(30)
    run = pod.state(model).begin(call_of(model, ids))
    states = [[torch.randn(1, H, 30, 16, requires_grad=True) for H in (4, 2, 2)] for _ in range(4)]
    weights = torch.randn(4, 1, 4, 30, 16)
    outs = [run.attend(layer, *states[layer], Softmax(0.25)) for layer in range(4)]
    parts = [
        torch.autograd.grad((out * w).sum(), states[0][:2], retain_graph=True)
        for out, w in zip(outs, weights, strict=True)
    ]
    whole = torch.autograd.grad(sum((o * w).sum() for o, w in zip(outs, weights, strict=True)), states[0][:2])
    for i in range(2):
        torch.testing.assert_close(whole[i], sum(part[i] for part in parts), rtol=1e-5, atol=1e-5)
        assert all(part[i].any() for part in parts)
        for part in parts[1:]:  # sinks 2, recent 6
            assert not part[0][:, :, :8].any() and not part[1][:, :, :2].any() and not part[1][:, :, -6:].any()


@pytest.mark.parametrize("mode", MODES)
@tables
def test_gradient_checkpointing_changes_no_gradient(lead, mode):
    model, ids = converted(lead=lead, mode=mode).train(), random_ids(40, 2)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        # two passes before the backward pass: what is computed again must use the leads of its own pass
        sum(model(x, labels=x).loss for x in (ids, ids.flip(1))).backward()
        grads.append({name: None if x.grad is None else x.grad.clone() for name, x in model.named_parameters()})
    for name in grads[0]:
        assert (grads[0][name] is None) == (grads[1][name] is None)
        if grads[0][name] is not None:
            torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-5, atol=1e-6)


def test_reentrant_checkpointing_is_refused():
    model, ids = converted().train(), random_ids(20)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="use_reentrant"):
        model(ids, labels=ids)


def test_nothing_of_a_pass_but_its_gates_is_kept():
    model, ids = converted(), random_ids(20)
    with torch.no_grad():
        run = pod.state(model).begin(call_of(model, ids))
        for layer in range(4):
            run.attend(layer, *(torch.randn(1, H, 20, 16) for H in (4, 2, 2)), Softmax(0.25))
            assert set(run.leads) <= {0, 1, 2}
    assert not run.leads
    model(ids, labels=ids).loss.backward()
    assert not any(x.requires_grad for x in pod.state(model).last_gates.values())


# ---- documents, precision ----


@pytest.mark.parametrize("mode", MODES)
def test_padding_on_either_side_changes_nothing(mode):
    assert_padding_changes_nothing(converted(mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_packed_documents_know_nothing_of_each_other(mode):
    assert_packed_documents_are_apart(converted(mode=mode))


def test_shifted_positions_change_nothing():
    model, ids = converted(), random_ids(40)
    shifted = forward(model, ids, position_ids=torch.arange(100, 140)[None])
    torch.testing.assert_close(shifted, forward(model, ids), rtol=2e-4, atol=2e-4)


def test_future_tokens_change_no_output():
    model, ids = converted(), random_ids(40)
    changed = ids.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 97
    before, after = forward(model, ids), forward(model, changed)
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=0)
    assert not torch.equal(before[:, 25:], after[:, 25:])


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_close_and_learns_under_autocast(mode):
    model, ids = converted(mode=mode, initializer_range=0.05), random_ids(40, 2)
    exact = forward(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())
    half = forward(copy.deepcopy(model).bfloat16(), ids).float()
    assert (half - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("given", "message"), REFUSED_BATCHES)
def test_what_a_batch_cannot_be_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        forward(converted(), random_ids(4), **given)


def test_a_model_that_sees_a_window_in_every_layer_is_refused():
    with pytest.raises(ValueError, match="MistralModel is not supported by PoD: none of its layers sees all tokens"):
        converted("mistral", sliding_window=30)


# ---- saving and loading, other caches, wrong tables ----


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_model_comes_back_converted(tmp_path, mode):
    model, ids = converted(mode=mode), random_ids(30, 2)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    kvcompress.attach(again)
    assert pod.state(again).config == pod.state(model).config
    assert torch.equal(forward(again, ids), forward(model, ids))
    model(ids).logits.sum().backward()
    twin = copy.deepcopy(model)  # after a pass with a graph
    assert torch.equal(forward(twin, ids), forward(again, ids))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert not torch.allclose(forward(plain, ids), forward(model, ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"later": 1}, "unknown fields later"), ({"lead": [[0, 0]] * 3}, r"lead must be \[4 layers\]\[2 KV heads\]"),
     ({"lead": [[0, 0], [0, 2], [0, 0], [0, 0]]}, r"lead\[1\]\[1\] must be .*, got 2")],
)  # fmt: skip
def test_saved_conversions_that_do_not_fit_are_refused(changes, message):
    model = tiny_model(num_hidden_layers=4)
    model.config.kvcompress = PoDConfig(MIXED).to_dict() | changes
    with pytest.raises(ValueError, match=message):
        kvcompress.attach(model)


def test_caches_that_know_nothing_of_leads_are_refused():
    model, ids = converted(), random_ids(8)
    caches = (
        DynamicCache(config=model.config),
        kvcompress.StreamingCache(model.config),
        kvcompress.PrunedCache(model.config, kvcompress.pruners.SnapKV(), keep=8),
    )
    for cache in caches:
        with pytest.raises(ValueError, match="PoDCache"):
            model(ids, past_key_values=cache)


@pytest.mark.parametrize(
    ("lead", "message"),
    [
        ((), r"lead must be \[L\]\[Hkv\]"),
        (((0, 0), (0,)), r"lead\[1\] must have 2 KV heads as lead\[0\], got 1"),
        (((0, 0), (0, 2)), r"lead\[1\]\[1\] must be 0 or 1 .*, got 2"),
        (((1, 0), (0, 0)), r"lead\[0\]\[0\] must be 0 .*, got 1"),
        (((0, 0), (0, -1)), r"lead\[1\]\[1\] must be .*, got -1"),
        (((0,), (0,), (1,)), r"lead\[2\]\[0\] must be 0 or 2 .*, got 1"),
        (((0,), (0.5,)), r"lead\[1\]\[0\] must be a layer, got 0.5"),
    ],
)
def test_tables_that_are_none_are_refused_with_their_place(lead, message):
    with pytest.raises(ValueError, match=message):
        PoDConfig(lead)


@pytest.mark.parametrize(("name", "value"), [("sinks", -1), ("recent", 0), ("tau", 1.5), ("mode", "x")])
def test_config_fields_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        PoDConfig(MIXED, **{name: value})


def test_a_config_counts_its_followers():
    config = PoDConfig(MIXED, 2, 6)
    assert (config.followers, config.share, config.window) == (4, 0.5, 8)
    assert config.led_by(3) == [(1, [1]), (2, [0])] and config.led_by(0) == [(0, [0, 1])]
    assert [config.last_follower(layer) for layer in range(4)] == [1, 3, 3, 3]
    assert PoDConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_plan_converts_as_its_config_does():
    model = tiny_model(num_hidden_layers=4)
    pod.convert(model, PoDPlan(MIXED, sinks=2, recent=6, query_heads=4, head_dim=16))
    assert pod.state(model).config == PoDConfig(MIXED, 2, 6)
    with pytest.raises(TypeError, match="config must be a PoDConfig or a PoDPlan, got dict"):
        pod.convert(tiny_model(), {"lead": MIXED})
    with pytest.raises(ValueError, match="plan must be of this model: it has 8 head dim, the model 16"):
        pod.convert(tiny_model(num_hidden_layers=4), PoDPlan(MIXED, sinks=2, recent=6, query_heads=4, head_dim=8))


def test_a_table_that_jumps_over_a_layer_of_the_same_kind_is_refused():
    table = ((0, 0), (1, 1), (2, 0), (3, 3))
    model = tiny_model(num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"lead\[2\]\[1\] must be 1 or 2 .*, got 0"):
        pod.convert(model, PoDConfig(table))
    assert not hasattr(model.config, "kvcompress") and not is_attached(model)


def test_what_cannot_be_converted_is_named():
    with pytest.raises(ValueError, match="must not be converted yet"):
        pod.convert(converted(), PoDConfig(MIXED))
    model = tiny_model()
    with pytest.raises(ValueError, match=r"lead must be \[3 layers\]\[2 KV heads\] for this model, got \[4\]\[2\]"):
        pod.convert(model, PoDConfig(MIXED))
    assert not hasattr(model.config, "kvcompress") and not is_attached(model)
    with pytest.raises(ValueError, match="must be converted to PoD"):
        pod.state(model)
    kinds = ["full_attention", "sliding_attention"] * 2
    model = tiny_model("qwen3", num_hidden_layers=4, layer_types=kinds, sliding_window=100, use_sliding_window=True)
    with pytest.raises(
        ValueError, match=r"lead\[1\]\[0\] must be 1 \(the layer itself: it does not see all tokens\), got 0"
    ):
        pod.convert(model, PoDConfig(ONE))


# ---- retrofitting ----


def test_the_recipe_warms_up_and_falls_by_a_cosine():
    recipe = PoDRecipe(steps=1000)
    rates = [recipe.learning_rate(step) for step in range(1000)]
    assert max(rates) == rates[10] == 1 and rates[0] == pytest.approx(1 / 11)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4) and rates[505] == pytest.approx(0.55, abs=1e-3)
    for name, value in (("steps", 0), ("warmup", 1.0), ("end_rate", -1)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            PoDRecipe(**{name: value})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_trained_is_what_gets_a_gradient(family, mode):
    """DistributedDataParallel waits for the gradient of every parameter that is to be trained."""
    model = converted(family, lead=((0, 0), (0, 0), (2, 0), (2, 0)), mode=mode)
    freeze_unused(base_model(model), pod.state(model).config)
    ids = random_ids(40, 2)
    model(ids, labels=ids).loss.backward()
    frozen = [name for name, x in model.named_parameters() if not x.requires_grad]
    assert frozen == [name for name, x in model.named_parameters() if x.grad is None]
    assert any("layers.1" in name for name in frozen) == (mode == "cla")


@pytest.mark.parametrize("mode", MODES)
def test_the_command_trains_saves_and_resumes(tmp_path, mode):
    tiny_model(num_hidden_layers=4, vocab_size=300).save_pretrained(tmp_path / "model")
    kvcompress.load_example_model()[1].save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a text of some words, again and again. " * 40)
    plan = PoDPlan(MIXED, sinks=2, recent=6, query_heads=4, head_dim=16)
    plan.save(tmp_path / "plan.json")
    out = tmp_path / "out"
    options = [
        "retrofit", "pod", "--out", str(out), "--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"),
        "--steps", "10", "--length", "32", "--rows", "1", "--save-steps", "5", "--mode", mode, "--float32",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*options, "--plan", str(tmp_path / "plan.json"), "--checkpointing"])
    assert result.exit_code == 0, result.output
    again = AutoModelForCausalLM.from_pretrained(out)
    kvcompress.attach(again)
    assert pod.state(again).config == PoDConfig(MIXED, 2, 6, mode=mode)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][:1] == [10]
    if mode == "pod":
        first, *others = lines[0]["gate_layers"]
        assert first is None  # every head of layer 0 leads itself
        assert all(0 < gate <= 1 for gate in others)
    shutil.rmtree(out / "checkpoint-10")  # as if the run had been cut off
    resume = [*options, "--plan", str(tmp_path / "plan.json"), "--checkpointing", "--resume"]
    result = CliRunner().invoke(app, resume)
    assert result.exit_code == 0, result.output
    assert (out / "checkpoint-10").is_dir()
    replace(plan, recent=5).save(tmp_path / "changed.json")
    changed = [*options, "--plan", str(tmp_path / "changed.json"), "--checkpointing", "--resume"]
    result = CliRunner().invoke(app, changed)
    assert result.exit_code != 0 and "recent must be 6 as in the run that is resumed" in " ".join(result.output.split())
    on = [*options, "--model", str(out), "--out", str(tmp_path / "on"), "--steps", "1"]  # needs no plan
    result = CliRunner().invoke(app, on)
    assert result.exit_code == 0, result.output
    replace(plan, recent=7).save(tmp_path / "other.json")
    result = CliRunner().invoke(app, [*on, "--plan", str(tmp_path / "other.json")])
    assert result.exit_code != 0 and "plan must be that of" in " ".join(result.output.split())
    other = "window" if mode == "pod" else "pod"
    result = CliRunner().invoke(app, [*on, "--mode", other])
    assert result.exit_code != 0 and f"mode must be '{mode}'" in " ".join(result.output.split())
    result = CliRunner().invoke(app, options)
    assert result.exit_code != 0 and "plan must be given" in " ".join(result.output.split())
    replace(plan, lead=SELF).save(tmp_path / "self.json")
    result = CliRunner().invoke(app, [*options, "--out", str(tmp_path / "s"), "--plan", str(tmp_path / "self.json")])
    assert (result.exit_code == 0) == (mode == "window")
    if mode != "window":
        assert "plan must have heads that follow" in " ".join(result.output.split())
    gone = [*options, "--out", str(tmp_path / "gone"), "--plan", str(tmp_path / "none.json")]
    result = CliRunner().invoke(app, gone)
    assert result.exit_code != 0 and "plan must be a file" in " ".join(result.output.split())
    replace(plan, head_dim=8).save(tmp_path / "foreign.json")
    new = [*options, "--out", str(tmp_path / "foreign"), "--plan", str(tmp_path / "foreign.json")]
    result = CliRunner().invoke(app, new)
    assert result.exit_code != 0 and "plan must be of this model" in " ".join(result.output.split())
