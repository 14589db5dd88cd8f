"""DMCCache with models: reading, padding, decoding, and what it refuses."""

import copy

import pytest
import torch
from dmc_definition import definition
from helpers import DMC_MODES, FAMILIES, covering, deciding_model, left_padded, logits_of, random_ids, tiny_model, turns

import kvcompress
from kvcompress import DMCCache, attach, prefill

modes = pytest.mark.parametrize("dmc", DMC_MODES.values(), ids=DMC_MODES)
both = pytest.mark.parametrize("dmc", [DMC_MODES["dmc"], DMC_MODES["dms"]], ids=["dmc", "dms"])


def attached(*args, **kwargs):
    model = deciding_model(*args, **kwargs)
    attach(model)
    return model


def new_cache(model, **options):
    return DMCCache(model.config, **{"page_size": 4, **options})


def plain(model, ids):
    """Logits of every token and entries of every head, by the algorithm's loops in float64."""
    config = kvcompress.dmc.DMCConfig.from_dict(model.config.kvcompress)
    base, lengths = copy.deepcopy(model).double().model, []
    frequencies = base.rotary_emb.inv_freq
    with torch.no_grad():
        h = base.embed_tokens(ids)
        for layer in base.layers:
            attention, x = layer.self_attn, layer.input_layernorm(h)
            projected = []
            for kind in "qkv":
                y = getattr(attention, f"{kind}_proj")(x).unflatten(-1, (-1, 16))
                norm = getattr(attention, f"{kind}_norm", None)
                projected.append((y if norm is None else norm(y)).transpose(1, 2)[0])
            result = definition(*projected, config, frequencies)
            lengths.append([row[-1] for row in result.lengths])
            h = h + attention.o_proj(result.out.transpose(0, 1).flatten(1)[None])
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return (base.norm(h) @ model.lm_head.weight.double().T).float(), lengths


# ---- what is computed ----


@pytest.mark.parametrize(("dmc", "family"), turns(DMC_MODES.values(), FAMILIES))
def test_a_model_of_any_family_computes_what_the_algorithm_says(family, dmc):
    model, ids = attached(family, dmc=dmc), random_ids(40)
    expected, lengths = plain(model, ids)
    cache = new_cache(model)
    torch.testing.assert_close(logits_of(model, ids, cache), expected, atol=2e-3, rtol=2e-3)
    assert [layer[0] for layer in cache.stored_lengths()] == lengths
    assert 1.2 < cache.compression_ratio() < 20
    one_by_one = new_cache(model)
    for t in range(40):
        logits = logits_of(model, ids[:, t : t + 1], one_by_one)
        torch.testing.assert_close(logits[:, 0], expected[:, t], atol=2e-3, rtol=2e-3)
    assert one_by_one.stored_lengths() == cache.stored_lengths()


@modes
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 39])
def test_chunks_do_not_change_the_answer(dmc, chunk_size):
    model, ids = attached(dmc=dmc), random_ids(50)
    expected = kvcompress.generate(model, ids, new_cache(model), max_new_tokens=12, do_sample=False)
    cache = new_cache(model, chunk_size=chunk_size)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=12, do_sample=False), expected)
    plainly = new_cache(model)
    assert torch.equal(model.generate(ids, past_key_values=plainly, max_new_tokens=12, do_sample=False), expected)
    assert plainly.stored_lengths() == cache.stored_lengths()
    further = torch.cat([expected, random_ids(9, seed=5)], 1)  # a further turn
    mask = torch.ones_like(further)  # the pad token may be an answer, too
    answers = [
        kvcompress.generate(model, further, each, mask, max_new_tokens=5, do_sample=False)
        for each in (cache, plainly, new_cache(model))
    ]
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[2])


@pytest.mark.parametrize(("dmc", "family", "chunk_size"), covering(DMC_MODES.values(), FAMILIES, [None, 16]))
def test_each_prompt_of_a_padded_batch_gives_what_it_gives_alone(family, dmc, chunk_size):
    model = attached(family, dmc=dmc)
    prompts = [random_ids(length, seed=length) for length in (60, 33, 9, 1)]
    ids, mask = left_padded(prompts)
    cache = new_cache(model, chunk_size=chunk_size)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=15, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = new_cache(model, chunk_size=chunk_size)
        out = kvcompress.generate(model, prompt, alone, max_new_tokens=15, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == out[0, prompt.shape[1] :].tolist()
        assert [layer[b] for layer in cache.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_whose_neurons_are_silent_is_the_dense_one(family, dmc):
    model, ids = deciding_model(family, dmc=dmc | {"shift": 5.0}), random_ids(50)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            for parameter in projection.parameters():
                # rotation turns coordinate 7 into the neuron, which would be left out
                parameter.data[7::16] = parameter.data[15::16] = 0
    dense = model.generate(ids, max_new_tokens=10, do_sample=False)
    attach(model)
    cache = new_cache(model, chunk_size=16)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=10, do_sample=False), dense)
    assert cache.compression_ratio() == 1


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reads_and_decodes_alike(dtype, dmc):
    model, ids = attached(dmc=dmc).to(dtype), random_ids(40)
    cache, stepwise = new_cache(model), new_cache(model)
    whole = logits_of(model, ids[:, :12], cache)
    steps = torch.cat([logits_of(model, ids[:, t : t + 1], stepwise) for t in range(12)], 1)
    first = [c.layers[0].pool.k_pages.dtype for c in (cache, stepwise)]
    assert first == [dtype] * 2
    error = (whole.float() - steps.float()).norm() / whole.float().norm()
    assert error < 40 * torch.finfo(dtype).eps
    out = kvcompress.generate(model, ids, new_cache(model), max_new_tokens=8, do_sample=False)
    assert out.shape == (1, 48)


@both
@pytest.mark.parametrize("kind", ["dynamic", "yarn", "llama3"])
def test_rotary_embeddings_of_any_kind(dmc, kind):
    parameters = {
        "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
        "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    }[kind]  # fmt: skip
    model = attached(dmc=dmc, rope_parameters=parameters, max_position_embeddings=32)
    prompts = [random_ids(length, seed=length) for length in (60, 45, 12)]
    ids, mask = left_padded(prompts)
    cache = new_cache(model, chunk_size=16)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=15, do_sample=False)
    for b, prompt in enumerate(prompts):  # with "dynamic" each has frequencies of its own
        out = kvcompress.generate(model, prompt, new_cache(model), max_new_tokens=15, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == out[0, prompt.shape[1] :].tolist()


# ---- what is refused ----


def test_a_model_that_is_not_converted_is_refused():
    model, ids = tiny_model(), random_ids(10)
    with pytest.raises(
        ValueError, match=r"config\.kvcompress must be that of a model converted to DMC or DMS, got none"
    ):
        DMCCache(model.config)
    attach(model)
    with pytest.raises(ValueError, match=r"config\.kvcompress must be that of a model converted"):
        logits_of(model, ids, DMCCache(deciding_model().config))


def test_a_model_with_other_settings_is_refused():
    model, ids = attached(), random_ids(10)
    cache = DMCCache(deciding_model(dmc={"window": 12, "shift": 5.0}).config)
    with pytest.raises(ValueError, match=r"config\.kvcompress with shift = 5\.0, window = 12, but that of LlamaModel"):
        prefill(model, ids, cache)
    with pytest.raises(ValueError, match="layers"):
        prefill(model, ids, DMCCache(deciding_model(num_hidden_layers=2).config))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"method": "pod"}, "must be of the method dmc, got 'pod'"),
        ({"method": "dmc", "neuron_scale": 0.25}, "neuron_scale 0.25: the model is still being annealed"),
        ({"method": "dmc", "neuron": 16}, "neuron must be between -16 and 15, got 16"),
        ({"method": "dmc", "colour": 1}, "unknown fields colour"),
    ],
)
def test_a_config_that_no_cache_serves_is_named(saved, message):
    model = tiny_model()
    model.config.kvcompress = saved
    with pytest.raises(ValueError, match=message):
        DMCCache(model.config)


@pytest.mark.parametrize("chunk_size", [0, 2.5])
def test_wrong_settings_are_named(chunk_size):
    model = deciding_model()
    with pytest.raises(
        ValueError, match=r"chunk_size must be (at least 1, got 0|a number of tokens \(1024, '1k'\), got 2.5)"
    ):
        DMCCache(model.config, chunk_size=chunk_size)
    with pytest.raises(ValueError, match="page_size must be a power of two, an integer such as 64, got 3"):
        DMCCache(model.config, page_size=3)


@both
def test_what_cannot_be_done_says_so(dmc):
    model, ids = attached(dmc=dmc), random_ids(30)
    cache = prefill(model, ids, new_cache(model))
    with pytest.raises(NotImplementedError, match="assisted decoding is not supported by DMCCache"):
        model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=2, max_new_tokens=5)
    with pytest.raises(NotImplementedError, match="DMCCache cannot take back tokens"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="guide has no effect with DMCCache"):
        prefill(model, random_ids(40), new_cache(model), guide=ids[0])
    with pytest.raises(RuntimeError, match="update"):
        cache.update(None, None, 0)


def test_a_model_that_sees_a_window_in_every_layer_is_refused():
    model = deciding_model("mistral", sliding_window=40)
    with pytest.raises(ValueError, match="MistralModel is not supported by DMC: none of its layers sees all tokens"):
        attach(model)


@both
def test_a_prompt_without_end_is_read_in_chunks(dmc):
    model, ids = attached(dmc=dmc), random_ids(70)
    cache = prefill(model, iter(ids[0].tolist()), new_cache(model, chunk_size=16))
    other = new_cache(model)
    logits_of(model, ids, other)
    assert cache.stored_lengths() == other.stored_lengths()
    with pytest.raises(ValueError, match="input_ids of unknown length need a DMCCache with a chunk_size"):
        prefill(model, iter(ids[0].tolist()), new_cache(model))
