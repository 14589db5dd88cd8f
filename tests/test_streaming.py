import pytest
import torch
from helpers import FAMILIES, attached, left_padded, random_ids, tiny_model

import kvcompress
from kvcompress import StreamingCache, prefill
from kvcompress.caches import streaming

both_distances = pytest.mark.parametrize("sink_distance", ["slot", "window"])


def plain_streaming(model, ids, sinks, window, sink_distance="slot"):
    """Token by token with loops over unrotated keys, rotated anew at every step.

    "slot": positions by slot (StreamingLLM). "window": key j is min(i - j, window) away from query i (LM-Infinite).
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    base = model.model
    held = [(torch.empty(1, 2, 0, 16), torch.empty(1, 2, 0, 16)) for _ in base.layers]
    with torch.no_grad():
        for i, token in enumerate(ids[0]):
            numbers = [j for j in range(i + 1) if j < sinks or j > i - window]
            h = base.embed_tokens(token[None])[None]
            for j, layer in enumerate(base.layers):
                attention, x = layer.self_attn, layer.input_layernorm(h)
                q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2)
                           for p in (attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
                k, v = torch.cat([held[j][0], k], 2), torch.cat([held[j][1], v], 2)
                if k.shape[2] > sinks + window:
                    k, v = (torch.cat([x[:, :, :sinks], x[:, :, sinks + 1 :]], 2) for x in (k, v))
                held[j] = (k, v)
                T = k.shape[2]
                distance = torch.arange(T - 1, -1, -1)
                if sink_distance == "window":
                    distance = torch.tensor([min(i - number, window) for number in numbers])
                # a key at 0 and the query at their distance, for each key
                cos, sin = base.rotary_emb(x, distance[None])
                qr, _ = apply_rotary_pos_emb(q.expand(-1, -1, T, -1), q, cos, sin)
                first = base.rotary_emb(x, torch.zeros_like(distance)[None])
                kr, _ = apply_rotary_pos_emb(k, k, *first)
                attended = ((qr * repeat_kv(kr, 2)).sum(-1)[:, :, None] / 4).softmax(-1)
                h = h + attention.o_proj((attended @ repeat_kv(v, 2)).transpose(1, 2).flatten(2))
                h = h + layer.mlp(layer.post_attention_layernorm(h))
        return model.lm_head(base.norm(h))[:, -1]


@both_distances
@pytest.mark.parametrize(("sinks", "window"), [(4, 12), (0, 9), (3, 1), (1, 40), (30, 7), (4, 200)])
def test_decoding_and_prefill_are_what_the_definition_says(sinks, window, sink_distance):
    model, ids = attached(), random_ids(120)
    expected = plain_streaming(model, ids, sinks, window, sink_distance)
    for read in (1, 9, 34, 60, 119):  # that many tokens in one pass, the rest one by one
        cache = StreamingCache(
            model.config, window_size=window, num_sink_tokens=sinks, chunk_size=50, sink_distance=sink_distance
        )
        prefill(model, ids[:, : read + 1], cache)
        with torch.no_grad():
            for t in range(read, 120):
                logits = model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)
        assert cache.stored_lengths() == [[[min(120, sinks + window)] * 2]] * 3


@both_distances
def test_the_ring_is_moved_back_often_without_loss(monkeypatch, sink_distance):
    monkeypatch.setattr(streaming, "_LEAST_BLOCK", 256)
    model, ids = attached(), random_ids(700)  # positions are bounded by 2 * (2 + 6) + 256
    expected = plain_streaming(model, ids, 2, 6, sink_distance)
    cache = StreamingCache(model.config, window_size=6, num_sink_tokens=2, chunk_size=90, sink_distance=sink_distance)
    prefill(model, ids[:, :350], cache)
    with torch.no_grad():
        for t in range(349, 700):
            logits = model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)
    assert max(layer.base[0] for layer in cache.layers) > 0


@both_distances
def test_keys_at_position_zero_carry_the_scaling_of_their_rotation(sink_distance):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    model, ids = attached(rope_parameters=yarn), random_ids(50)
    expected = plain_streaming(model, ids, 3, 12, sink_distance)
    cache = StreamingCache(model.config, window_size=12, num_sink_tokens=3, sink_distance=sink_distance)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits[:, -1]
    assert cache.facts[0].key_rotary.scaling != 1
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)


@both_distances
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_as_large_as_the_text_gives_the_dense_model(family, sink_distance):
    model, ids = attached(family), random_ids(50)
    dense = model.generate(ids, max_new_tokens=10, do_sample=False)
    cache = StreamingCache(model.config, window_size=100, chunk_size=16, sink_distance=sink_distance)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=10, do_sample=False), dense)


@both_distances
@pytest.mark.parametrize("family", FAMILIES)
def test_each_prompt_of_a_padded_batch_gives_what_it_gives_alone(family, sink_distance):
    model = attached(family)
    prompts = [random_ids(length, seed=length) for length in (70, 33, 9, 1)]
    ids, mask = left_padded(prompts)

    def new_cache():
        return StreamingCache(
            model.config, window_size=10, num_sink_tokens=5, chunk_size=16, sink_distance=sink_distance
        )

    together = kvcompress.generate(model, ids, new_cache(), mask, max_new_tokens=30, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = kvcompress.generate(model, prompt, new_cache(), max_new_tokens=30, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == alone[0, prompt.shape[1] :].tolist()


@both_distances
def test_sequences_can_be_chosen_and_repeated(sink_distance):
    model, ids = attached(), random_ids(60, batch=2)

    def read(rows):
        cache = StreamingCache(model.config, window_size=10, sink_distance=sink_distance)
        return prefill(model, ids[rows], cache)

    cache = read([0, 1])
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    with torch.no_grad():
        logits = model(ids[[1, 0, 1], 59:], past_key_values=cache).logits[:, 0]
        for b, of in enumerate((1, 0, 1)):
            alone = model(ids[[of], 59:], past_key_values=read([of])).logits[0, 0]
            torch.testing.assert_close(logits[b], alone, atol=1e-4, rtol=1e-4)


def test_memory_does_not_grow_with_the_text():
    model = attached()
    cache = StreamingCache(model.config, window_size=10, num_sink_tokens=2)
    kvcompress.generate(model, random_ids(30), cache, max_new_tokens=100, do_sample=False)
    assert cache.nbytes() == 3 * 2 * 2 * 12 * 16 * 4
    assert cache.get_seq_length() == 129
    ceiling = StreamingCache(model.config, window_size=10, num_sink_tokens=2, sink_distance="window")
    kvcompress.generate(model, random_ids(30), ceiling, max_new_tokens=100, do_sample=False)
    assert ceiling.nbytes() == 3 * 2 * 2 * (12 + 2) * 16 * 4  # the first tokens at position 0 besides


@both_distances
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reading_is_as_accurate_as_decoding_with_large_logits(dtype, sink_distance):
    model = attached().to(dtype)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data *= 6 if dtype == torch.float16 else 2
    ids = random_ids(30)
    read, decoded = (
        StreamingCache(model.config, window_size=8, num_sink_tokens=2, sink_distance=sink_distance) for _ in range(2)
    )
    prefill(model, ids, read)
    with torch.no_grad():
        for t in range(29):
            model(ids[:, t : t + 1], past_key_values=decoded)
    held = [cache.layers[-1].values.float() for cache in (read, decoded)]
    assert held[0].isfinite().all()
    error = (held[0] - held[1]).abs().max() / held[1].abs().max()
    assert error < 200 * torch.finfo(dtype).eps


@both_distances
def test_a_layer_with_a_window_of_its_own_keeps_that(sink_distance):
    model, ids = attached("mistral", sliding_window=20), random_ids(70)
    with torch.no_grad():
        dense = model(ids).logits
        cache = StreamingCache(model.config, window_size=8, num_sink_tokens=2, sink_distance=sink_distance)
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, dense, atol=5e-4, rtol=5e-4)
    assert cache.stored_lengths() == [[[20, 20]]] * 3


def test_first_tokens_in_another_order_are_at_one_distance():
    """Once all of them have left the window, a layer's output does not depend on which stood where."""
    model, ids = attached(num_hidden_layers=1), random_ids(40)
    swapped = ids.clone()
    swapped[0, :4] = ids[0, [2, 0, 3, 1]]
    outputs = {}
    for sink_distance in ("slot", "window"):
        caches = [StreamingCache(model.config, window_size=10, sink_distance=sink_distance) for _ in range(2)]
        with torch.no_grad():
            outputs[sink_distance] = [
                model(x, past_key_values=cache).logits[:, 14:] for x, cache in zip((ids, swapped), caches, strict=True)
            ]
    torch.testing.assert_close(*outputs["window"], atol=1e-4, rtol=1e-4)
    assert (outputs["slot"][0] - outputs["slot"][1]).abs().max() > 0.1


def test_what_cannot_be_done_says_so():
    model, ids = attached(), random_ids(30)
    cache = StreamingCache(model.config, window_size=10)
    prefill(model, ids, cache)
    with pytest.raises(NotImplementedError, match="assisted decoding is not supported by StreamingCache"):
        model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=2, max_new_tokens=5)
    with torch.no_grad():
        model(ids[:, -1:], past_key_values=cache)
    with pytest.raises(NotImplementedError, match="StreamingCache cannot take back tokens"):
        cache.crop(-1)
    for move in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(NotImplementedError, match="offloading is not supported by compressed caches"):
            move()
    with pytest.raises(ValueError, match="guide has no effect with StreamingCache"):
        prefill(model, random_ids(40), StreamingCache(model.config), guide=ids[0])


def test_a_window_that_no_memory_holds_is_refused_before_it_is_taken():
    model, ids = attached(), random_ids(30)
    with pytest.raises(RuntimeError, match=r"window_size = 1,000,000,000 is too large: [\d,.]+ GiB are needed in one"):
        prefill(model, ids, StreamingCache(model.config, window_size=10**9))
    prefill(model, ids, StreamingCache(model.config))  # the model is as it was


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_size": 0}, "window_size must be at least 1, got 0"),
        ({"num_sink_tokens": -1}, "num_sink_tokens must be at least 0, got -1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"window_size": 16.5}, "window_size must be a number of tokens .* got 16.5$"),
        ({"sink_distance": "far"}, "sink_distance must be 'slot' or 'window', got 'far'"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        StreamingCache(tiny_model().config, **arguments)
