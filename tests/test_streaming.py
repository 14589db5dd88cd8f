import pytest
import torch
from helpers import FAMILIES, left_padded, random_ids, tiny_model

import kvcompress
from kvcompress import StreamingCache, attach, prefill


def attached(*args, **kwargs):
    model = tiny_model(*args, **kwargs)
    attach(model)
    return model


def plain_streaming(model, ids, sinks, window):
    """StreamingLLM token by token with loops: unrotated keys, positions by slot, rotated anew at every step."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    base = model.model
    held = [(torch.empty(1, 2, 0, 16), torch.empty(1, 2, 0, 16)) for _ in base.layers]
    with torch.no_grad():
        for token in ids[0]:
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
                cos, sin = base.rotary_emb(x, torch.arange(T)[None])
                qr, _ = apply_rotary_pos_emb(q, q, cos[:, -1:], sin[:, -1:])
                kr, _ = apply_rotary_pos_emb(k, k, cos, sin)
                attended = (qr @ repeat_kv(kr, 2).transpose(2, 3) / 4).softmax(-1)
                h = h + attention.o_proj((attended @ repeat_kv(v, 2)).transpose(1, 2).flatten(2))
                h = h + layer.mlp(layer.post_attention_layernorm(h))
        return model.lm_head(base.norm(h))[:, -1]


@pytest.mark.parametrize(("sinks", "window"), [(4, 12), (0, 9), (3, 1), (1, 40), (4, 200)])
def test_decoding_and_prefill_are_what_the_definition_says(sinks, window):
    model, ids = attached(), random_ids(120)
    expected = plain_streaming(model, ids, sinks, window)
    for read in (1, 60, 119):  # that many tokens in one pass, the rest one by one
        cache = StreamingCache(model.config, window_size=window, num_sink_tokens=sinks, chunk_size=50)
        prefill(model, ids[:, : read + 1], cache)
        with torch.no_grad():
            for t in range(read, 120):
                logits = model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)
        assert cache.stored_lengths() == [[[min(120, sinks + window)] * 2]] * 3


def test_the_ring_is_moved_back_often_without_loss():
    model, ids = attached(), random_ids(700)  # positions are bounded by 2 * (2 + 6) + 256
    expected = plain_streaming(model, ids, 2, 6)
    cache = StreamingCache(model.config, window_size=6, num_sink_tokens=2, chunk_size=90)
    prefill(model, ids[:, :350], cache)
    with torch.no_grad():
        for t in range(349, 700):
            logits = model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)
    assert max(layer.base[0] for layer in cache.layers) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_as_large_as_the_text_gives_the_dense_model(family):
    model, ids = attached(family), random_ids(50)
    dense = model.generate(ids, max_new_tokens=10, do_sample=False)
    cache = StreamingCache(model.config, window_size=100, chunk_size=16)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=10, do_sample=False), dense)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_prompt_of_a_padded_batch_gives_what_it_gives_alone(family):
    model = attached(family)
    prompts = [random_ids(length, seed=length) for length in (70, 33, 9, 1)]
    ids, mask = left_padded(prompts)

    def new_cache():
        return StreamingCache(model.config, window_size=10, num_sink_tokens=2, chunk_size=16)

    together = kvcompress.generate(model, ids, new_cache(), mask, max_new_tokens=30, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = kvcompress.generate(model, prompt, new_cache(), max_new_tokens=30, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == alone[0, prompt.shape[1] :].tolist()


def test_memory_does_not_grow_with_the_text():
    model = attached()
    cache = StreamingCache(model.config, window_size=10, num_sink_tokens=2)
    kvcompress.generate(model, random_ids(30), cache, max_new_tokens=100, do_sample=False)
    assert cache.nbytes() == 3 * 2 * 2 * 12 * 16 * 4
    assert cache.get_seq_length() == 129


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reading_is_as_accurate_as_decoding_with_large_logits(dtype):
    model = attached().to(dtype)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data *= 6 if dtype == torch.float16 else 2
    ids = random_ids(30)
    read, decoded = (StreamingCache(model.config, window_size=8, num_sink_tokens=2) for _ in range(2))
    prefill(model, ids, read)
    with torch.no_grad():
        for t in range(29):
            model(ids[:, t : t + 1], past_key_values=decoded)
    held = [cache.layers[-1].values.float() for cache in (read, decoded)]
    assert held[0].isfinite().all()
    error = (held[0] - held[1]).abs().max() / held[1].abs().max()
    assert error < 200 * torch.finfo(dtype).eps


def test_a_models_sliding_window_is_not_overrun():
    model, ids = attached("mistral", sliding_window=40), random_ids(30)
    prefill(model, ids, StreamingCache(model.config, window_size=36))
    with pytest.raises(ValueError, match="40 tokens is shorter than the 41 keys in sight; use a smaller window_size"):
        prefill(model, ids, StreamingCache(model.config, window_size=37))


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
    with pytest.raises(ValueError, match="guide has no effect with StreamingCache"):
        prefill(model, random_ids(40), StreamingCache(model.config), guide=ids[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_size": 0}, "window_size must be an integer of at least 1, got 0"),
        ({"num_sink_tokens": -1}, "num_sink_tokens must be an integer of at least 0, got -1"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1, got 0"),
        ({"window_size": 16.5}, "window_size must be an integer"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        StreamingCache(tiny_model().config, **arguments)
