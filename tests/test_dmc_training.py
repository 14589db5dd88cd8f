"""A model converted to DMC or DMS without a cache: how it attends, decides, is trained, saved and loaded."""

import copy

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

import kvcompress
from kvcompress import dmc, ops
from kvcompress.dmc import CompressionLoss, DMCConfig, LastDecisions
from kvcompress.hf.attach import is_attached
from kvcompress.ops.softmax import Softmax


def converted(family="llama", scale=0.0, spread=2.0, **config):
    """A tiny model whose neurons hold random weights, so that about half of its tokens merge."""
    model = tiny_model(family)
    dmc.convert(model, DMCConfig(**{"shift": 0.0, **config}), anneal=False)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                rows = getattr(layer.self_attn, name).weight.unflatten(0, (-1, 16))
                rows[:, -1] = torch.randn(rows.shape[0], rows.shape[2]) * spread / 8
    if scale:
        dmc.state(model).set_neuron_scale(model.model, scale)
    return model


# ---- conversion ----


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_adds_no_parameter_and_changes_nothing_before_it_is_annealed(family):
    model, ids = tiny_model(family), random_ids(40, 2)
    before, names = forward(model, ids), {name: x.clone() for name, x in model.state_dict().items()}
    dmc.convert(model)
    torch.testing.assert_close(forward(model, ids), before, rtol=1e-4, atol=1e-4)
    assert model.state_dict().keys() == names.keys()
    assert all(torch.equal(x, names[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_annealed_neurons_are_zero_and_decisions_begin_at_the_shift(family):
    model = tiny_model(family)
    dmc.convert(model, DMCConfig(shift=5.0))
    dmc.set_neuron_scale(model, 0.5)
    dmc.set_neuron_scale(model, 0.0)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            linear = getattr(layer.self_attn, name)
            for x in (linear.weight, linear.bias):
                if x is not None:
                    assert not x.unflatten(0, (-1, 16))[:, -1].any()
    forward(model.train(), random_ids(200, 16))
    # tau 0.1: half of the relaxed decisions are above 1/2 where the noise exceeds 5, with probability 0.0067
    share = dmc.last_decisions(model).hard.mean().item()
    assert abs(share - 0.0067) < 4 * (0.0067 / (200 * 16 * 6)) ** 0.5


def test_half_annealed_attention_is_plain_attention_with_scaled_neurons():
    model, ids = tiny_model(), random_ids(30)
    scaled = copy.deepcopy(model)
    dmc.convert(model)
    dmc.set_neuron_scale(model, 0.5)
    attention = model.model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 30, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16)
    run = dmc.state(model).begin(call_of(model, ids))
    out = run.attend(0, q, k, v, Softmax(attention.scaling))
    rotary = scaled.model.rotary_emb(v, torch.arange(30)[None])
    half = torch.ones(16).index_fill_(0, torch.tensor([15]), 0.5)
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    qr, kr = (x * half for x in apply_rotary_pos_emb(q * half, k * half, *rotary))
    plain = torch.nn.functional.scaled_dot_product_attention(qr, kr, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)


def test_a_model_that_never_merges_attends_as_the_same_kernel_without_decisions_bit_for_bit():
    model = converted(shift=1e4)
    q, k, v = torch.randn(2, 4, 70, 16), torch.randn(2, 2, 70, 16), torch.randn(2, 2, 70, 16)
    run = dmc.state(model).begin(call_of(model, random_ids(70, 2)))
    live = torch.ones(16).index_fill_(0, torch.tensor([15]), 0.0)
    qr, kr = (run.facts[0].key_rotary.rotate(x * live, None, 70, [70]) for x in (q, k))
    plain = ops.attention(qr * live, kr * live, v, scale=0.25)[0]
    assert torch.equal(run.attend(0, q, k, v, Softmax(0.25)), plain)
    with pytest.raises(RuntimeError, match="no decisions were made in layer 1, 2 in the last forward pass"):
        dmc.last_decisions(model)
    assert all(torch.equal(run.attend(layer, q, k, v, Softmax(0.25)), plain) for layer in (1, 2))
    assert not dmc.last_decisions(model).hard.any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["dmc", "dms"])
def test_training_with_and_without_hard_decisions_gives_finite_gradients_everywhere(family, mode):
    model = converted(family, mode=mode, dms_window=4).train()
    ids = random_ids(50, 2)
    loss = model(ids, labels=ids).loss + CompressionLoss()(dmc.last_decisions(model), 4.0)
    loss.backward()
    for name, x in model.named_parameters():
        assert x.grad is not None and x.grad.isfinite().all(), name
    for layer in model.model.layers:
        rows = layer.self_attn.k_proj.weight.grad.unflatten(0, (-1, 16))[:, -1]
        assert (rows != 0).any(1).all()  # every head's decisions learn
        if mode == "dmc":
            assert layer.self_attn.q_proj.weight.grad.unflatten(0, (-1, 16))[:, -1].any()


# ---- documents ----


@pytest.mark.parametrize("mode", ["dmc", "dms"])
def test_padding_on_either_side_changes_nothing(mode):
    model = converted(mode=mode, dms_window=3)
    assert_padding_changes_nothing(model)
    ids, mask = left_padded([random_ids(9), random_ids(4)])
    forward(model, ids, attention_mask=mask)
    assert torch.equal(dmc.last_decisions(model).valid, mask.bool())


@pytest.mark.parametrize("mode", ["dmc", "dms"])
def test_packed_documents_know_nothing_of_each_other(mode):
    assert_packed_documents_are_apart(converted(mode=mode, dms_window=3))


def test_gradients_of_packed_documents_are_those_of_each_alone():
    model = converted().eval()
    documents = [random_ids(12, seed=1), random_ids(20, seed=2)]
    packed = torch.cat(documents, 1)
    places = torch.cat([torch.arange(12), torch.arange(20)])[None]
    weights = torch.randn(1, 32, 97)
    (model(packed, position_ids=places).logits * weights).sum().backward()
    together = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    for document, part in zip(documents, weights.split([12, 20], 1), strict=True):
        (model(document).logits * part).sum().backward()
    for name, x in model.named_parameters():
        torch.testing.assert_close(together[name], x.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("given", "message"), REFUSED_BATCHES)
def test_what_a_batch_cannot_be_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        forward(converted(), random_ids(4), **given)


# ---- noise, checkpointing, determinism ----


def test_training_draws_anew_in_each_pass_and_the_same_from_the_same_numbers():
    model, ids = converted().train(), random_ids(40, 2)
    found = dmc.state(model)
    first, second = forward(model, ids), forward(model, ids)
    assert not torch.equal(first, second)
    found.begin_step(0)
    assert torch.equal(forward(model, ids), first)
    found.seed = 7
    found.begin_step(0)
    assert not torch.equal(forward(model, ids), first)


@pytest.mark.parametrize("mode", ["dmc", "dms"])
def test_gradient_checkpointing_changes_no_gradient(mode):
    model, ids = converted(mode=mode, dms_window=4).train(), random_ids(40, 2)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        dmc.state(model).begin_step(3)
        # two passes before the backward pass: what is computed again must draw what its own pass drew
        losses = []
        for _ in range(2):
            loss = model(ids, labels=ids).loss
            losses.append(loss + CompressionLoss()(dmc.last_decisions(model), 4.0))
        sum(losses).backward()
        grads.append({name: x.grad.clone() for name, x in model.named_parameters()})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-5, atol=1e-6)


def test_reentrant_checkpointing_is_refused_where_it_would_lose_the_gradient():
    model, ids = converted().train(), random_ids(20)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model(ids, labels=ids)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        dmc.last_decisions(model)


def test_future_tokens_change_no_output():
    model, ids = converted().train(), random_ids(40)
    before = forward(model, ids)
    dmc.state(model).begin_step(0)
    changed = ids.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 97
    after = forward(model, changed)
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=0)
    assert not torch.equal(before[:, 25:], after[:, 25:])


def test_shared_heads_decide_alike_and_others_do_not():
    for share in ("mean", "head0"):
        model = converted(share_heads=share).train()
        forward(model, random_ids(40, 2))
        alpha = dmc.last_decisions(model).alpha
        assert torch.equal(alpha[:, :, 0], alpha[:, :, 1])
    forward(model := converted(), random_ids(40, 2))
    alpha = dmc.last_decisions(model).alpha
    assert not torch.equal(alpha[:, :, 0], alpha[:, :, 1])


def test_a_stride_decides_by_place_alone():
    model = converted(stride=4, omega="uniform")
    ids, mask = left_padded([random_ids(22), random_ids(10)])
    forward(model, ids, attention_mask=mask)
    hard = dmc.last_decisions(model).hard
    for b, n in enumerate((22, 10)):
        assert torch.equal(hard[0, b, 0, -n:], (torch.arange(n) % 4 != 0).float())


# ---- saving and loading, other caches ----


def test_a_saved_model_comes_back_converted(tmp_path):
    model, ids = converted(shift=0.25, mode="dms", dms_window=5), random_ids(30, 2)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    kvcompress.attach(again)
    assert dmc.state(again).config == dmc.state(model).config
    assert torch.equal(forward(again, ids), forward(model, ids))
    twin = copy.deepcopy(model.train())
    model(ids).logits.sum().backward()
    copy.deepcopy(model)  # with a graph in its last pass
    assert torch.equal(forward(twin.eval(), ids), forward(again, ids))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert not torch.allclose(forward(plain, ids), forward(model.eval(), ids))


@pytest.mark.parametrize(
    ("saved", "message"),
    [({"method": "other"}, "must name a method"), ({"method": "dmc", "later": 1}, "unknown fields later"), (3, "name")],
)
def test_conversions_of_other_versions_are_refused(saved, message):
    model = tiny_model()
    model.config.kvcompress = saved
    with pytest.raises(ValueError, match=message):
        kvcompress.attach(model)


def test_caches_that_know_nothing_of_decisions_are_refused():
    model, ids = converted(), random_ids(8)
    for cache in (DynamicCache(config=model.config), kvcompress.StreamingCache(model.config)):
        with pytest.raises(ValueError, match="DMCCache"):
            model(ids, past_key_values=cache)


def test_what_cannot_be_converted_is_named():
    with pytest.raises(ValueError, match="must not be converted yet"):
        dmc.convert(converted())
    with pytest.raises(ValueError, match="neuron must be between -16 and 15"):
        dmc.convert(model := tiny_model(), DMCConfig(neuron=16))
    assert not hasattr(model.config, "kvcompress") and not is_attached(model)
    model.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(
        torch.zeros(32, 64, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ValueError, match="quantised"):
        dmc.convert(model)
    assert not hasattr(model.config, "kvcompress") and not is_attached(model)
    with pytest.raises(ValueError, match="must be converted to DMC"):
        dmc.set_neuron_scale(tiny_model(), 0.5)
    with pytest.raises(RuntimeError, match="no decisions were made"):
        dmc.last_decisions(converted())


@pytest.mark.parametrize(
    ("field", "value"),
    [("mode", "x"), ("temperature", 0.0), ("window", 65), ("omega_eps", -1.0), ("dms_window", -1), ("dms_scale", 0.0),
     ("neuron_scale", 1.5), ("shift", float("nan")), ("window", True),
     ("gqa_omega", "max"), ("share_heads", "all"), ("neuron", 1.5), ("stride", 0)],
)  # fmt: skip
def test_config_fields_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        DMCConfig(**{field: value})


def test_neurons_are_zeroed_once_and_keep_what_they_learn():
    model = tiny_model()
    dmc.convert(model, DMCConfig(shift=1.0))
    for scale in (0.5, 0.0):
        dmc.set_neuron_scale(model, scale)
    rows = model.model.layers[0].self_attn.k_proj.weight.data.unflatten(0, (-1, 16))[:, -1]
    rows += 1.0
    dmc.set_neuron_scale(model, 0.0)
    assert (rows == 1).all()


def test_ratios_of_training_are_those_of_inference_and_not_of_the_noise():
    model, ids = converted(shift=0.4, spread=0.0), random_ids(100, 4)  # every logit is -0.4: noise merges 40 %
    forward(model.train(), ids)
    found = dmc.compression_ratios(dmc.last_decisions(model))
    assert found["hard"] == 1.0 and abs(found["soft"] - 1.67) < 0.1
    assert dmc.last_decisions(model).hard.mean() > 0.3
    forward(model.eval(), ids)
    assert dmc.compression_ratios(dmc.last_decisions(model))["hard"] == 1.0


def test_documents_have_their_own_rotation_where_it_depends_on_length():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model(max_position_embeddings=16, rope_parameters=rope)
    dmc.convert(model, DMCConfig(shift=0.0), anneal=False)
    prompts = [random_ids(30, seed=1), random_ids(20, seed=2)]
    ids, mask = left_padded(prompts)
    together = forward(model, ids, attention_mask=mask)
    torch.testing.assert_close(together[1, -20:], forward(model, prompts[1])[0], rtol=1e-4, atol=1e-4)


def test_positions_of_padding_may_be_anything():
    model = converted()
    ids, mask = left_padded([random_ids(5), random_ids(9)])
    places = mask.cumsum(1) - 1
    expected = forward(model, ids, attention_mask=mask)
    assert torch.equal(forward(model, ids, attention_mask=mask, position_ids=places), expected)


def test_dora_is_refused():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["k_proj"], use_dora=True))
    with pytest.raises(ValueError, match="k_proj must not have a DoRA adapter"):
        dmc.convert(model)


def test_lora_trains_the_decisions():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], r=4))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.normal_()
    dmc.convert(model, DMCConfig(shift=1.0), anneal=False)
    ids = random_ids(40, 2)
    model.train()
    loss = model(input_ids=ids, labels=ids).loss + CompressionLoss()(dmc.last_decisions(model), 4.0)
    assert abs(dmc.last_decisions(model).hard.mean().item() - 0.269) < 0.06  # sigmoid(-1): the neurons are zero
    loss.backward()
    rows = model.base_model.model.model.layers[0].self_attn.k_proj.lora_B["default"].weight.grad
    assert rows.unflatten(0, (-1, 16))[:, -1].any()


# ---- losses ----


def test_training_without_the_loss_on_the_ratio_warns_once(recwarn):
    model, ids = converted().train(), random_ids(20)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        dmc.last_decisions(model)
    with torch.no_grad():  # of which nothing is learned
        model(ids), model(ids)
    assert not [x for x in recwarn if "stop compressing" in str(x.message)]
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
    assert len([x for x in recwarn if "stop compressing" in str(x.message)]) == 1


def decisions(alpha, valid=None):
    hard = (alpha > 0.5).float()
    return LastDecisions(alpha, hard, hard, valid)


def test_the_loss_on_the_ratio_is_one_sided():
    alpha = torch.tensor([0.731059, 0.622459, 0.574443, 0.425557, 0.401312, 0.574443]).view(1, 1, 1, 6)
    assert CompressionLoss()(decisions(alpha), 2.0) == 0
    torch.testing.assert_close(CompressionLoss()(decisions(alpha), 4.0).item(), 0.195121, rtol=0, atol=1e-5)
    torch.testing.assert_close(CompressionLoss(of="hard")(decisions(alpha), 4.0).item(), 0.083333, rtol=0, atol=1e-5)
    alpha.requires_grad_()
    CompressionLoss(weight=2.0)(decisions(alpha), 4.0).backward()
    torch.testing.assert_close(alpha.grad, torch.full_like(alpha, -2 / 6))
    alpha.grad = None
    CompressionLoss()(decisions(alpha), 2.0).backward()
    assert not alpha.grad.any()
    even = torch.full((2, 3, 2, 4), 0.5, requires_grad=True)
    for hinge in ("global", "sequence", "layer"):  # at the target itself too
        CompressionLoss(hinge=hinge)(decisions(even), 2.0).backward()
        assert not even.grad.any()


def test_hinges_are_what_they_are_called():
    alpha = torch.rand(3, 4, 2, 11)
    valid = torch.rand(4, 11) > 0.3
    found = {
        hinge: CompressionLoss(hinge=hinge)(decisions(alpha, valid), 2.2) for hinge in ("global", "sequence", "layer")
    }
    share, kept = 1 - 1 / 2.2, alpha.permute(1, 3, 0, 2)[valid]  # [tokens, L, H]
    expected = max(share - kept.mean().item(), 0)
    torch.testing.assert_close(found["global"].item(), expected, rtol=1e-5, atol=1e-6)
    layers = (share - kept.mean((0, 2))).clamp(min=0).mean()
    torch.testing.assert_close(found["layer"], layers, rtol=1e-5, atol=1e-6)
    rows = torch.stack([(share - alpha[:, b, :, valid[b]].mean()).clamp(min=0) for b in range(4)]).mean()
    torch.testing.assert_close(found["sequence"], rows, rtol=1e-5, atol=1e-6)
    full = [CompressionLoss(hinge=hinge)(decisions(alpha), 2.2).item() for hinge in ("global", "sequence", "layer")]
    assert full[1] >= full[0] - 1e-6 and full[2] >= full[0] - 1e-6


def test_equal_heads_cost_nothing_and_others_what_they_differ():
    alpha = torch.rand(3, 4, 1, 11).expand(-1, -1, 2, -1)
    loss = CompressionLoss(weight=0.0, equal_weight=1.5)
    assert loss(decisions(alpha), 2.0) == 0
    alpha, valid = torch.rand(3, 4, 2, 11), torch.rand(4, 11) > 0.3
    kept = alpha.permute(1, 3, 0, 2)[valid]
    apart = (kept - kept.mean(2, keepdim=True)).abs().mean()
    torch.testing.assert_close(loss(decisions(alpha, valid), 2.0), 1.5 * apart, rtol=1e-5, atol=1e-6)
    printed = CompressionLoss(weight=0.0, equal_weight=1.0, equal_centre="sum")(decisions(alpha), 2.0)
    torch.testing.assert_close(printed, (alpha - alpha.sum(2, keepdim=True)).abs().mean(), rtol=1e-5, atol=1e-6)
    heads = CompressionLoss(weight=0.0, equal_weight=1.0, equal_per="head")(decisions(alpha), 2.0)
    per_head = alpha.mean(3)
    torch.testing.assert_close(heads, (per_head - per_head.mean(2, keepdim=True)).abs().mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"hinge": "global"}, {"hinge": "sequence"}, {"hinge": "layer"},
     {"weight": 0.0, "equal_weight": 1.0}, {"weight": 0.0, "equal_weight": 1.0, "equal_per": "head"}],
)  # fmt: skip
def test_sequences_of_padding_alone_count_in_no_mean(settings):
    loss, alpha, valid = CompressionLoss(**settings), torch.rand(3, 5, 2, 11), torch.rand(5, 11) > 0.3
    valid[3] = False
    others = torch.tensor([0, 1, 2, 4])
    expected = loss(decisions(alpha[:, others], valid[others]), 2.2)
    assert expected > 0
    torch.testing.assert_close(loss(decisions(alpha.requires_grad_(), valid), 2.2), expected)
    loss(decisions(alpha, valid), 2.2).backward()
    assert alpha.grad[:, others].any() and not alpha.grad[:, 3].any()


def test_ratios_are_tokens_over_entries():
    hard = torch.zeros(1, 1, 2, 8)
    hard[..., 0, 1:] = 1
    found = dmc.compression_ratios(LastDecisions(hard * 0.5, 1 - hard, hard, None))
    assert found["hard"] == pytest.approx(16 / 9)
    assert found["layers"] == [[pytest.approx(8.0), pytest.approx(1.0)]]
    assert found["soft"] == pytest.approx(1 / (1 - 7 / 32))


@pytest.mark.parametrize(
    ("field", "value"), [("of", "x"), ("hinge", "x"), ("weight", -1.0), ("equal_centre", "x"), ("equal_per", "x")]
)
def test_loss_fields_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        CompressionLoss(**{field: value})
    with pytest.raises(ValueError, match="target_ratio"):
        CompressionLoss()(decisions(torch.rand(1, 1, 1, 4)), 0.5)


# ---- training and inference agree ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "config",
    [{}, {"window": 3}, {"mode": "dms", "dms_window": 5}, {"share_heads": "mean", "omega": "uniform"}, {"stride": 3}],
)
def test_logits_without_a_cache_are_those_of_the_cache_step_by_step(family, config):
    model, ids = converted(family, **config), random_ids(60, 2)
    whole = forward(model, ids)
    cache = kvcompress.DMCCache(model.config)
    steps = [forward(model, ids[:, :20], past_key_values=cache)]
    steps += [forward(model, ids[:, t : t + 1], past_key_values=cache) for t in range(20, 40)]
    steps.append(forward(model, ids[:, 40:], past_key_values=cache))
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-3, atol=1e-3)
    assert cache.compression_ratio() > 1.2
