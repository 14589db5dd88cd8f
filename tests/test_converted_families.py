"""Models of families that differ in kind, converted to DMC, DMS and PoD: against plain loops, and in every use."""

import copy

import helpers
import pytest
import torch
from dmc_definition import Logits, definition, local
from helpers import (
    ALTERNATING,
    KINDS,
    LATENT,
    assert_packed_documents_are_apart,
    assert_padding_changes_nothing,
    covering,
    forward,
    kind_model,
    left_padded,
    logits_of,
    random_ids,
    turns,
)
from transformers import AutoModelForCausalLM

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import DMCCache, PoDCache, dmc, pod
from kvcompress.dmc.neurons import neurons_of
from kvcompress.hf.attach import base_model, facts_of, is_attached
from kvcompress.hf.method import KEYWORD, Pass, method_of
from kvcompress.hf.now import coming
from kvcompress.pod.kinds import kinds_of
from kvcompress.pod.plan import lead_table
from kvcompress.pod.similarity import measure_similarity

METHODS = {
    "dmc": {},
    "window": {"window": 3},
    "first neuron": {"neuron": 0},
    "uniform": {"omega": "uniform", "share_heads": "mean"},
    "dms": {"mode": "dms", "dms_window": 4},
    "pod": {"mode": "pod"},
    "near": {"mode": "window"},
    "cla": {"mode": "cla"},
}
MAIN = ["dmc", "dms", "pod"]
OTHERS = [name for name in METHODS if name not in MAIN]
every = pytest.mark.parametrize(  # kinds with the main methods, and with the others by turns
    ("kind", "method"),
    covering(KINDS, METHODS) if helpers.full_products else covering(KINDS, MAIN) + turns(KINDS, OTHERS),
)
main = pytest.mark.parametrize(("kind", "method"), covering(KINDS, MAIN))
SINKS, RECENT = 2, 6


def neurons(model):
    """Weights and biases that feed the neurons, each with the index of those numbers in it."""
    decoder = base_model(model)
    found = neurons_of(decoder, dmc.state(model).rows(decoder, facts_of(decoder)))
    return [(tensor, (slice(None),) * dim + (rows,)) for _, tensor, dim, rows in found]


def lead_of(model):
    """Its second KV head shares all that it may, its first has a border in the middle."""
    decoder = base_model(model)
    with kvcompress.attach(model):
        own, heads = kinds_of(decoder, facts_of(decoder)), max(x.kv_heads for x in facts_of(decoder).values())
    similarity = torch.ones(heads, len(own), len(own))
    similarity[0, :2, 2:] = similarity[0, 2:, :2] = 0
    return lead_table(similarity, 0.5, own)


def converted(kind, method, model=None, **settings):
    model, config = kind_model(kind) if model is None else model, METHODS[method] | settings
    if method in ("pod", "near", "cla"):
        pod.convert(model, pod.PoDConfig(lead_of(model), SINKS, RECENT, **config))
        return model
    dmc.convert(model, dmc.DMCConfig(**{"shift": 0.0, **config}), anneal=False)
    with torch.no_grad():
        for weight, index in neurons(model):
            weight[index] = torch.randn_like(weight[index]) / 4
    return model


def cache_of(model, **options):
    cls = DMCCache if base_model(model).config.kvcompress["method"] == "dmc" else PoDCache
    return cls(model.config, **{"page_size": 4, **options})


class Definition(Pass):
    """Attends as the method's page says, in float64, one sequence after the other; what else the model does is its."""

    def __init__(self, model):
        decoder = base_model(model)
        self.facts, self.config = facts_of(decoder), decoder.config.kvcompress
        self.lengths, self.held = {}, {}

    def attend(self, layer, queries, keys, values, softmax):
        own, T = self.facts[layer], queries.shape[2]
        turning = own.key_rotary.tables(T, T, queries.device)
        logits = Logits(softmax.scale, softmax.softcap, softmax.sink_logits)
        out = []
        for q, k, v in zip(queries, keys, values, strict=True):
            if own.is_local:
                found = local(q, k, v, turning, logits, own.window)
            elif self.config["method"] == "dmc":
                config = dmc.DMCConfig.from_dict(self.config)
                result = definition(q, k, v, config, turning, logits)
                self.lengths.setdefault(layer, []).append([row[-1] for row in result.lengths])
                found = result.out
            else:
                found = self.shared(layer, len(out), q, k, v, turning, logits)
            out.append(found)
        return torch.stack(out).to(queries.dtype)

    def shared(self, layer, b, q, k, v, turning, logits):
        config, T, G = pod.PoDConfig.from_dict(self.config), q.shape[1], q.shape[0] // k.shape[0]
        cos, sin = (x[:T].double() for x in turning)
        half = cos.shape[1]

        def turned(x):
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

        self.held[layer, b] = turned(q.double()), turned(k.double()), v.double()
        i, j = torch.arange(T)[:, None], torch.arange(T)
        near, out = (j < config.sinks) | (j > i - config.recent), []
        for head in range(q.shape[0]):
            c = head // G
            a = config.lead[layer][c]
            (own_q, own_k, values), (lead_q, lead_k, lead_v) = self.held[layer, b], self.held[a, b]
            own, led = own_q[head] @ own_k[c].T, lead_q[head] @ lead_k[c].T
            products = torch.where(near, own, led)
            if config.mode == "window":
                products = own.masked_fill(~near, float("-inf"))
            elif config.mode == "cla":
                products, values = own_q[head] @ lead_k[c].T, lead_v
            out.append(logits.probabilities(products.masked_fill(j > i, float("-inf")), head) @ values[c])
        return torch.stack(out)


def defined(model, ids):
    """Logits by the method's definition, and entries of each converted layer."""
    run = Definition(model)
    with coming(run):
        return forward(model, ids), run.lengths


# ---- what is computed ----


@every
def test_training_and_cache_compute_what_the_method_says(kind, method):
    assert_it_computes_what_the_method_says(converted(kind, method))


@pytest.mark.parametrize(
    ("name", "method"),
    [("falcon/new", "dmc"), ("falcon", "dms"), ("falcon/every_kv_head", "pod"), ("bloom", "pod"), ("gpt_neo", "dmc"),
     ("mpt/alibi", "near")],
)  # fmt: skip
def test_families_with_attention_code_of_their_own_compute_what_the_method_says(name, method):
    assert_it_computes_what_the_method_says(converted(None, method, CONFIGURATIONS[name].model()))


def assert_it_computes_what_the_method_says(model):
    ids = random_ids(40, 2)
    expected, lengths = defined(model, ids)
    size = expected.abs().max()
    assert (forward(model, ids) - expected).abs().max() < 2e-3 * size
    for chunks in ([40], [1] * 40, [7, 1, 13, 1, 1, 17]):
        cache = cache_of(model)
        found = torch.cat([logits_of(model, part, cache) for part in ids.split(chunks, 1)], 1)
        assert (found - expected).abs().max() < 2e-3 * size
        if lengths:
            assert cache.converted_layers == list(lengths)
            assert {layer: cache.stored_lengths()[layer] for layer in lengths} == lengths
            assert 1.1 < cache.compression_ratio() < 20


@pytest.mark.parametrize(("kind", "method", "chunk_size"), covering(KINDS, MAIN, [None, 7]))
def test_each_prompt_of_a_padded_batch_gives_what_it_gives_alone(kind, method, chunk_size):
    model = converted(kind, method)
    prompts = [random_ids(length, seed=length) for length in (40, 9, 1)]
    ids, mask = left_padded(prompts)
    cache = cache_of(model, chunk_size=chunk_size)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=6, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = cache_of(model)
        out = kvcompress.generate(model, prompt, alone, max_new_tokens=6, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == out[0, prompt.shape[1] :].tolist()
        assert [layer[b] for layer in cache.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]


@main
def test_padding_and_other_documents_change_nothing(kind, method):
    model = converted(kind, method)
    assert_padding_changes_nothing(model)
    assert_packed_documents_are_apart(model)


# ---- training ----


@main
def test_everything_learns_and_checkpointing_changes_no_gradient(kind, method):
    model, ids, grads = converted(kind, method).train(), random_ids(40, 2), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        if method != "pod":
            dmc.state(model).begin_step(3)
        losses = []
        for x in (ids, ids.flip(1)):  # what is computed again must be of its own pass
            losses.append(model(x, labels=x).loss)
            if method != "pod":
                losses.append(dmc.CompressionLoss()(dmc.last_decisions(model), 4.0))
        sum(losses).backward()
        grads.append({name: x.grad for name, x in model.named_parameters()})
    for name, grad in grads[0].items():
        assert grad is not None and grad.isfinite().all(), name
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-5)
    if method == "dmc":
        assert all(weight.grad[index].any() for weight, index in neurons(model) if weight.ndim == 2)
    for name, grad in grads[0].items():
        if name.endswith("sinks"):
            assert grad.any()


@pytest.mark.parametrize(("kind", "mode"), turns(KINDS, ["dmc", "dms"]))
def test_neurons_leave_attention_and_decisions_begin_at_the_shift(kind, mode):
    model, ids = kind_model(kind), random_ids(40, 2)
    before, weights = forward(model, ids), {name: x.clone() for name, x in model.state_dict().items()}
    dmc.convert(model, dmc.DMCConfig(mode=mode, shift=1.0))
    torch.testing.assert_close(forward(model, ids), before, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    dmc.set_neuron_scale(model, 0.5)
    dmc.set_neuron_scale(model, 0.0)
    arrived = {}

    class Looking(Definition):
        def attend(self, layer, queries, keys, values, softmax):
            arrived[layer] = queries[..., -1], keys[..., -1]
            return torch.zeros_like(queries)

    forward(model, ids, **{KEYWORD: Looking(model)})
    decoder = base_model(model)
    for layer, own in facts_of(decoder).items():
        q, k = arrived[layer]
        assert k.any() == q.any() == own.is_local or (mode == "dms" and q.any() and not k.any())
    forward(model.train(), random_ids(64, 8))
    last = dmc.last_decisions(model)
    assert (
        last.alpha.shape[0] == len(dmc.state(model).layers) == sum(not x.is_local for x in facts_of(decoder).values())
    )
    share, n = last.hard.mean().item(), last.hard.numel()
    assert abs(share - 0.2689) < 5 * (0.2 / n) ** 0.5  # sigmoid(-1)


@pytest.mark.parametrize(("kind", "method"), turns(KINDS, MAIN))
def test_a_saved_model_comes_back_converted(kind, method, tmp_path):
    model, ids = converted(kind, method), random_ids(30, 2)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    kvcompress.attach(again)
    assert torch.equal(forward(again, ids), forward(model, ids))
    cache = cache_of(again)
    kvcompress.generate(again, ids, cache, max_new_tokens=4, do_sample=False)
    assert cache.seen_lengths() == [33, 33]


# ---- what is refused ----


def refused(model, method, reason):
    heads, layers = model.config.num_key_value_heads, range(model.config.num_hidden_layers)
    convert, given = dmc.convert, ()
    if method == "pod":
        convert, given = pod.convert, (pod.PoDConfig([[layer] * heads for layer in layers]),)
    with pytest.raises(ValueError, match=reason):
        convert(model, *given)
    assert not is_attached(model) and not hasattr(model.config, "kvcompress")


SHARED = {
    **ALTERNATING, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    "global_head_dim": 32,
}  # fmt: skip
HYBRID = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4, "n_mamba_heads": 4,
    "mamba_headdim": 32, "mamba_d_state": 8, "mamba_ngroups": 1, "chunk_size": 16, "adapter_rank": 8,
}  # fmt: skip
EVERY = {"sliding_window": 12, "layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}
REFUSED = {
    "latents": ("deepseek_v3", LATENT | {"v_head_dim": 12}, "dmc", "24 and values of 12 .*latents, MLA"),
    "latents of one size": ("deepseek_v3", LATENT | {"v_head_dim": 24}, "dmc", "several linear layers .*latents"),
    "a norm with a mean": ("cohere", {"use_qk_norm": True}, "dmc", "a norm that subtracts a mean"),
    "a norm behind": ("hunyuan_v1_dense", {}, "dmc", "norms its keys behind their rotation"),
    "windows alone": ("qwen3", EVERY | {"use_sliding_window": True}, "dmc", "none of its layers sees all tokens"),
    "windows alone, pod": ("qwen3", EVERY | {"use_sliding_window": True}, "pod", "none of its layers sees all tokens"),
    "shared keys": ("gemma4_text", SHARED, "dmc", "reads the keys of layer 1"),
    "shared keys, pod": ("gemma4_text", SHARED, "pod", "read the keys of others"),
    "one module for several layers": ("zamba2", HYBRID, "pod", "one attention module serves several layers"),
    "own attention": ("diffllama", {}, "dmc", "attends more than once"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "method", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_converted_is_refused_with_the_reason(kind, settings, method, reason, monkeypatch):
    monkeypatch.setitem(KINDS, kind, {})
    refused(kind_model(kind, **settings), method, reason)


def test_documents_of_one_row_are_refused_where_layers_recur(monkeypatch):
    monkeypatch.setitem(KINDS, "lfm2", {})
    model = kind_model("lfm2", layer_types=["conv", "full_attention"] * 2)
    dmc.convert(model, dmc.DMCConfig(shift=0.0), anneal=False)
    assert_padding_changes_nothing(model)
    with pytest.raises(ValueError, match="position_ids must not begin anew within a row"):
        forward(model, random_ids(8), position_ids=torch.arange(4).repeat(2)[None])


def test_layers_that_share_must_rotate_alike(monkeypatch):
    """Layers of smollm3 without rotation are of another kind than those with it."""
    monkeypatch.setitem(KINDS, "smollm3", {})
    model = kind_model("smollm3", no_rope_layers=[1, 0, 1, 0])
    with kvcompress.attach(model):
        assert kinds_of(base_model(model), facts_of(base_model(model))) == (0, 1, 0, 1)
    with pytest.raises(ValueError, match=r"lead\[1\]\[0\] must be 1 \(the layer itself\), got 0"):
        pod.convert(model, pod.PoDConfig(((0, 0), (0, 0), (0, 0), (0, 0)), SINKS, RECENT))
    pod.convert(model, pod.PoDConfig(((0, 0), (1, 1), (0, 0), (1, 1)), SINKS, RECENT))
    ids = random_ids(30, 2)
    torch.testing.assert_close(logits_of(model, ids, cache_of(model)), forward(model, ids), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", MAIN)
def test_checkpointing_is_refused_where_a_pass_does_not_arrive(method, monkeypatch):
    monkeypatch.setitem(KINDS, "nemotron", {})
    model, ids = converted("nemotron", method).train(), random_ids(12, 2)
    model(ids, labels=ids).loss.backward()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(ValueError, match="gradient checkpointing is not supported for NemotronModel"):
        model(ids, labels=ids)


def test_a_copy_of_the_pass_goes_not_unnoticed():
    """What FSDP2 does to dataclasses among a layer's arguments."""
    model, ids = converted("llama", "dmc"), random_ids(12, 2)
    layer = model.model.layers[2]

    def copied(module, args, kwargs):
        other = copy.copy(kwargs[KEYWORD])
        other.alpha, other.hard, other.bare = {}, {}, {}
        return args, kwargs | {KEYWORD: other}

    layer.register_forward_pre_hook(copied, with_kwargs=True)
    forward(model, ids)
    with pytest.raises(RuntimeError, match="no decisions were made in layer 2"):
        dmc.last_decisions(model)


# ---- what users see is of the converted layers, by the model's numbers ----


def test_ratios_and_figures_are_of_converted_layers():
    from kvcompress import plots

    model, ids = converted("gemma3_text", "dmc"), random_ids(40, 2)
    forward(model.train(), ids)
    found = dmc.compression_ratios(dmc.last_decisions(model))
    assert len(found["layers"]) == 2
    recipe = dmc.DMCRecipe(anneal_steps=0)
    loss, figures = recipe.loss(model, 0)
    figures = recipe.summary(figures)
    assert figures["layers"] == [1, 3] and len(figures["ratio_layers"]) == 2
    model.eval()
    cache = cache_of(model, track=True)
    logits_of(model, ids, cache)
    assert cache.converted_layers == [1, 3] and len(cache.compression_ratios()) == 2
    with pytest.raises(ValueError, match=r"layer must be one of \[1, 3\], which decide, got 0"):
        cache.decisions(0)
    assert cache.decisions(3).shape == (2, 2, 40)
    axes = plots.head_ratios(cache)
    axes.figure.canvas.draw()
    assert [axes.xaxis.get_major_formatter()(x) for x in (0, 1)] == ["1", "3"]
    plots.ratio_over_length(cache)
    plots.decision_over_position(cache)
    line = {"step": 1, "ratio_hard": 1.5, "ratio_layers": [[1.5, 2.0], [1.0, 1.5]], "layers": [1.0, 3.0]}
    (panel,) = plots.ratios_over_training([line])
    assert panel.xaxis.get_major_formatter()(1) == "3"


def test_layers_are_compared_with_those_of_their_kind(monkeypatch):
    monkeypatch.setitem(KINDS, "smollm3", {})
    model = kind_model("smollm3", no_rope_layers=[1, 0, 1, 0])
    measured = measure_similarity(model, [random_ids(40), random_ids(30)], queries=5)
    assert measured.kinds == (0, 1, 0, 1)
    sim = measured.similarity()
    assert (sim[:, 0, [1, 3]] == 0).all() and (sim[:, 0, 2] > 0).all() and (sim[:, 1, 3] > 0).all()
    windowed = kind_model("gemma3_text")
    measured = measure_similarity(windowed, [random_ids(40)], queries=5)
    assert measured.kinds == (None, 1, None, 1)
    plan = pod.PoDPlan(
        lead_table(measured.similarity(), 0.0, measured.kinds), SINKS, RECENT, query_heads=4, head_dim=16,
        similarity=measured.similarity().tolist(), kinds=measured.kinds,
    )  # fmt: skip
    assert plan.lead == ((0, 0), (1, 1), (2, 2), (1, 1)) and plan.blocks(0) == [[1, 3]]
    assert (plan.share, plan.dense_nbytes(10)) == (0.5, 2 * 2 * 2 * 10 * 16 * 2)
    pod.convert(windowed, plan)
    assert pod.state(windowed).config.lead == plan.lead
    with pytest.raises(ValueError, match=r"lead\[2\]\[0\] must be 2 \(the layer itself"):
        pod.PoDPlan(((0, 0), (1, 1), (0, 2), (1, 1)), SINKS, RECENT, query_heads=4, head_dim=16, kinds=measured.kinds)


def test_a_measured_plan_of_some_layers_is_saved_and_refined(tmp_path):
    model = kind_model("gemma3_text", num_hidden_layers=6, layer_types=ALTERNATING["layer_types"][:2] * 3)
    lead, kinds = ((0, 0), (1, 1), (2, 2), (1, 3), (4, 4), (1, 3)), (None, 1, None, 1, None, 1)
    plan = pod.PoDPlan(lead, SINKS, RECENT, query_heads=4, head_dim=16, kinds=kinds)
    assert pod.PoDPlan.load(plan.save(tmp_path / "plan.json")) == plan
    ids, losses = random_ids(40), {}
    for border in (3, 5):  # the one move of a border that there is
        table = [list(row) for row in lead]
        table[3][1], table[5][1] = (3, 3) if border == 3 else (1, 5)
        moved = kind_model("gemma3_text", num_hidden_layers=6, layer_types=ALTERNATING["layer_types"][:2] * 3)
        pod.convert(moved, pod.PoDConfig(table, SINKS, RECENT))
        losses[border] = moved(ids, labels=ids).loss.item()
    refined = pod.refine(model, plan, [ids[0]], rounds=1)
    assert refined.kinds == kinds
    assert refined.lead[5][1] == min(losses, key=losses.get)


ONE_LEAD = pod.PoDConfig([[0, 0]] * 4)


@pytest.mark.parametrize("change", [lambda m: dmc.convert(m, anneal=False), lambda m: pod.convert(m, ONE_LEAD)])
def test_a_converted_model_can_be_verified_and_stays_converted(change):
    model = kind_model("llama")
    method = change(model)
    kvcompress.attach(model, verify=True)
    assert method_of(base_model(model)) is method


def test_one_model_takes_one_method():
    model = kind_model("llama")
    pod.convert(model, ONE_LEAD)
    with pytest.raises(ValueError, match="must be converted to DMC, got one that is converted to PoD"):
        dmc.state(model)


def test_a_second_conversion_is_refused_as_such_whatever_the_weights_are():
    model = kind_model("llama")
    dmc.convert(model, anneal=False)
    kvcompress.detach(model)
    for linear in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
        linear.weight = torch.nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="must not be converted yet"):
        dmc.convert(model)


def test_a_field_that_does_not_fit_is_named_and_the_model_left_as_it_was():
    model = kind_model("llama")
    with pytest.raises(ValueError, match="neuron must be between"):
        dmc.convert(model, dmc.DMCConfig(neuron=99))
    assert not is_attached(model) and getattr(model.config, "kvcompress", None) is None
