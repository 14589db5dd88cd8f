"""Decoders that attend to an encoder besides: which cache holds what, and what can be done with a model of both.

tests/test_families.py has more of them with room for everything, tests/test_dropping_families.py with less.
"""

import copy

import pytest
import torch
from helpers import forward
from test_dropping_families import hiding
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GPT2Config,
    MvpConfig,
    MvpForConditionalGeneration,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
    SpeechT5Config,
    SpeechT5ForSpeechToText,
    TrOCRConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    XGLMConfig,
)
from transformers.models.vision_encoder_decoder import VisionEncoderDecoderConfig

import kvcompress
from benchmarks.quality.parts.families_checks import TOLERANCE, difference
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from benchmarks.quality.parts.families_models import VOCABULARY, enlarge
from kvcompress.hf.argument import cache_of
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.retrofit.gqa import convert_to_gqa
from kvcompress.serve import batching

LENGTH, SINKS, WINDOW = 40, 4, 8


def tokens(batch=2, length=LENGTH):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def whole(model):
    return kvcompress.PrunedCache(model.config, keep=64)


def step_by_step(model, ids, cache, prompt=30):
    """Logits, where what the model returns is handed on."""
    out = [model(ids[:, :prompt], past_key_values=cache, use_cache=True)]
    for part in ids[:, prompt:].split(1, 1):
        out.append(model(part, past_key_values=out[-1].past_key_values, use_cache=True))
    return torch.cat([x.logits for x in out], 1), out[-1].past_key_values


@pytest.mark.parametrize("name", ["whisper", "bart/encoder"])
@torch.no_grad()
def test_a_stream_forgets_and_knows_where_it_is(name):
    model, ids = CONFIGURATIONS[name].model(), tokens()
    with kvcompress.attach(model):
        held = kvcompress.StreamingCache(model.config, window_size=WINDOW, num_sink_tokens=SINKS)
        ours, _ = step_by_step(model, ids, held)
    assert held.get_seq_length() == LENGTH and held.stored_lengths()[0][0][0] == SINKS + WINDOW
    at = torch.arange(LENGTH)
    hidden = (at[:, None] - at >= WINDOW) & (at >= SINKS)
    with hiding(model, lambda module, heads: hidden.expand(len(ids), heads, -1, -1)):
        dense = forward(model, ids, use_cache=False)
    assert difference(ours, dense) <= 2 * TOLERANCE
    assert difference(dense, forward(model, ids, use_cache=False)) > 100 * TOLERANCE  # what is dropped matters


@torch.no_grad()
def test_the_encoder_keys_are_transformers_own_and_made_once():
    model, ids = CONFIGURATIONS["whisper"].model(), tokens()
    dense, calls = forward(model, ids), []
    across = base_model(model).layers[0].encoder_attn
    across.k_proj.register_forward_hook(lambda *given: calls.append(1))
    with kvcompress.attach(model):
        for made, cache in ((1, whole(model)), (1, EncoderDecoderCache(whole(model), DynamicCache()))):
            calls.clear()
            ours, both = step_by_step(model, ids, cache)
            assert difference(ours, dense) <= TOLERANCE and len(calls) == made
            assert type(both) is EncoderDecoderCache and type(both.cross_attention_cache) is DynamicCache
            own = both.self_attention_cache
            assert own.stored_lengths() == [[[LENGTH] * 4] * 2] * 2
            assert both.cross_attention_cache.get_seq_length() == 8
        calls.clear()
        alone, parts = whole(model), ids.split(20, 1)
        ours = torch.cat([forward(model, part, past_key_values=alone) for part in parts], 1)
        assert difference(ours, dense) <= TOLERANCE and len(calls) == len(parts)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {}])
@pytest.mark.parametrize("name", ["bart/encoder", "t5gemma", "mvp", "led"])
@torch.no_grad()
def test_generate_takes_a_cache_alone(name, how):
    model, ids, said = CONFIGURATIONS[name].model(), tokens(length=12), []
    with kvcompress.attach(model):
        for cache in (None, whole(model)):
            torch.manual_seed(3)
            said.append(model.generate(ids, past_key_values=cache, max_new_tokens=10, **{"do_sample": False} | how))
    assert torch.equal(*said)
    assert cache.get_seq_length() >= 12 + 9


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {}])
@torch.no_grad()
def test_whisper_writes_behind_a_prompt_what_it_would_without_us(how):
    model, said = CONFIGURATIONS["whisper"].model(), []
    given = {"prompt_ids": tokens(1, 12)[0], "do_sample": False, "max_new_tokens": 10} | how
    with kvcompress.attach(model):
        for cache in (None, whole(model)):
            torch.manual_seed(3)
            said.append(type(model).generate(model, torch.randn(2, 16, 16), past_key_values=cache, **given))
    assert torch.equal(*said)
    assert cache.get_seq_length() >= 12 + 9


LENGTHS = (torch.arange(40) < torch.tensor([[40], [20]])).long()
LONG = {  # a sound that Whisper reads in three pieces, or in one that it tries again
    "alone": ((1, 16, 40), {}),
    "with its length": ((1, 16, 40), {"attention_mask": LENGTHS[:1]}),
    "beside a shorter one": ((2, 16, 40), {"attention_mask": LENGTHS}),
    "in beams": ((2, 16, 40), {"attention_mask": LENGTHS, "num_beams": 2}),
    "with its scores": ((2, 16, 40), {"attention_mask": LENGTHS, "return_dict_in_generate": True}),
    "again": ((2, 16, 16), {"temperature": (0.0, 0.5, 1.0), "logprob_threshold": 0.0}),
}


@pytest.mark.parametrize("how", LONG)
@torch.no_grad()
def test_whisper_begins_the_cache_anew_in_each_of_its_calls(how):
    model, said, calls = CONFIGURATIONS["whisper"].model(), [], []
    model.generation_config.no_timestamps_token_id = VOCABULARY - 10  # behind it times, of which a piece has eight
    shape, options = LONG[how]
    heard = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    given = {"return_timestamps": True, "do_sample": False, "max_new_tokens": 10} | options
    with kvcompress.attach(model):
        base_model(model).register_forward_hook(lambda *given: calls.append(1))
        for cache in (None, whole(model)):
            torch.manual_seed(3)
            out = type(model).generate(model, heard, past_key_values=cache, **given)
            said.append(out if isinstance(out, torch.Tensor) else out["sequences"])
    assert torch.equal(*said)
    assert len(calls) > 2 * cache.get_seq_length()  # of the last call alone


@pytest.mark.parametrize("cache", [whole, lambda model: kvcompress.StreamingCache(model.config, window_size=60)])
@torch.no_grad()
def test_whisper_returns_scores_without_the_cache_that_it_was_given(cache):
    model, said = CONFIGURATIONS["whisper"].model(), []
    given = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False, "max_new_tokens": 10}
    heard = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(2))
    with kvcompress.attach(model):
        for held in (None, cache(model)):
            said.append(type(model).generate(model, heard, past_key_values=held, **given))
    assert torch.equal(said[0].sequences, said[1].sequences)
    assert all(difference(*scores) <= TOLERANCE for scores in zip(said[0].scores, said[1].scores, strict=True))
    assert cache_of(said[0]) is not None and cache_of(said[1]) is None


@pytest.mark.parametrize("both", [False, True])
@torch.no_grad()
def test_generate_for_another_source_begins_the_cache_anew(both):
    model, first, second = CONFIGURATIONS["bart/encoder"].model(), tokens(length=12), tokens(length=20)
    given = {"do_sample": False, "max_new_tokens": 10}
    dense = type(model).generate(model, second, **given)
    with kvcompress.attach(model):
        cache = whole(model)
        handed = EncoderDecoderCache(cache, DynamicCache()) if both else cache
        assert not torch.equal(type(model).generate(model, first, past_key_values=handed, **given)[:2], dense)
        assert torch.equal(type(model).generate(model, second, past_key_values=handed, **given), dense)
        assert cache.get_seq_length() == dense.shape[1] - 1
        later = {"decoder_input_ids": dense[:, -2:], "decoder_attention_mask": torch.ones_like(dense)}
        with pytest.raises(ValueError, match="must hold the whole conversation"):
            type(model).generate(model, second, past_key_values=handed, **given, **later)


TEXTS = {
    "GPT-2": GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "TrOCR": TrOCRConfig(vocab_size=VOCABULARY, d_model=64, decoder_layers=2, decoder_attention_heads=4,
                         decoder_ffn_dim=64, cross_attention_hidden_size=32),
    "XGLM": XGLMConfig(vocab_size=VOCABULARY, d_model=64, num_layers=2, attention_heads=4, ffn_dim=64),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@torch.no_grad()
def test_a_vision_model_around_a_decoder_that_may_stand_alone(text):
    images = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28,
                       patch_size=14)  # fmt: skip
    torch.manual_seed(0)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, copy.deepcopy(TEXTS[text]))
    model = VisionEncoderDecoderModel(config).eval()
    enlarge(model)
    given = {"pixel_values": torch.randn(2, 3, 28, 28), "decoder_input_ids": tokens()}
    dense = model(**given).logits
    with kvcompress.attach(model, verify=True):
        ours = model(**given, past_key_values=whole(model)).logits
    assert difference(ours, dense) <= TOLERANCE


@torch.no_grad()  # 4 s: a prompt and a token are traced, with each of two kinds of cache
def test_a_compiled_model_takes_both_caches_and_one_alone():
    model, ids = CONFIGURATIONS["bart/encoder"].model(), tokens()
    dense = forward(model, ids)
    with kvcompress.attach(model):
        compiled = torch.compile(model, backend="eager")
        for cache in (whole(model), EncoderDecoderCache(whole(model), DynamicCache())):
            ours, _ = step_by_step(compiled, ids, cache, prompt=LENGTH - 1)
            assert difference(ours, dense) <= TOLERANCE


@torch.no_grad()
def test_verify_compares_what_the_decoder_attends_to_itself():
    model = CONFIGURATIONS["t5gemma"].model()
    with kvcompress.attach(model, verify=True):
        facts = facts_of(base_model(model))
        object.__setattr__(facts[0], "window", 2)
        with pytest.raises(RuntimeError, match="layer 0 of T5GemmaDecoder attends otherwise"):
            kvcompress.attach(model, verify=True)


BESIDES = "needs a decoder alone, and this model's attends to an encoder besides: give a cache to model.generate"
ALONE = {
    "kvcompress.prefill": lambda model, ids, cache: kvcompress.prefill(model, ids, cache),
    "kvcompress.generate": lambda model, ids, cache: kvcompress.generate(
        model, ids.index_fill(1, torch.tensor(LENGTH - 1), model.config.pad_token_id), cache
    ),
    "a pass without encoder_hidden_states": lambda model, ids, cache: base_model(model)(ids, past_key_values=cache),
    "kvcompress.serve.batching": lambda model, ids, cache: batching(model, "dense", memory="1MiB"),
    "conversion to DMC": lambda model, ids, cache: kvcompress.dmc.convert(model, kvcompress.dmc.DMCConfig()),
    "convert_to_gqa": lambda model, ids, cache: convert_to_gqa(model, 2),
    "StepGraph": lambda model, ids, cache: kvcompress.StepGraph(
        model, step_by_step(model, ids, whole(model))[1].self_attention_cache
    ),
}


@pytest.mark.parametrize("wish", ALONE)
@torch.no_grad()
def test_what_would_read_the_decoder_alone_is_refused(wish):
    model, ids = CONFIGURATIONS["whisper"].model(), tokens()
    with kvcompress.attach(model):
        cache = whole(model)
        with pytest.raises(ValueError, match=f"{wish} {BESIDES}"):
            ALONE[wish](model, ids, cache)
        assert (
            difference(forward(model, ids, past_key_values=cache), forward(model, ids)) <= TOLERANCE
        )  # nothing was stored


OWN_CODE = "layer 0 attends by code of its own"
REFUSED = {
    FSMTForConditionalGeneration: (
        OWN_CODE,
        lambda: FSMTConfig(langs=["a", "b"], src_vocab_size=99, tgt_vocab_size=99, d_model=32, encoder_layers=1,
                           decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2),
    ),
    ProphetNetForConditionalGeneration: (
        OWN_CODE,
        lambda: ProphetNetConfig(vocab_size=99, hidden_size=32, num_encoder_layers=1, num_encoder_attention_heads=2,
                                 num_decoder_layers=1, num_decoder_attention_heads=2),
    ),
    SpeechT5ForSpeechToText: (
        "SpeechT5DecoderWithTextPrenet takes no input_ids, by which decoders are given their tokens",
        lambda: SpeechT5Config(vocab_size=99, hidden_size=32, encoder_layers=1, encoder_attention_heads=2,
                               decoder_layers=1, decoder_attention_heads=2, conv_dim=(16,), conv_stride=(5,),
                               conv_kernel=(10,), num_conv_pos_embedding_groups=2),
    ),
    MvpForConditionalGeneration: (
        r"its layers attend to a prompt of their own beside the tokens \(use_prompt\)",
        lambda: MvpConfig(vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                          decoder_attention_heads=2, use_prompt=True, prompt_length=3, prompt_mid_dim=8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_attached_is_named_with_the_reason(kind):
    reason, config = REFUSED[kind]
    with pytest.raises(ValueError, match=f"^{kind.__name__} is not supported: {reason}"):
        kvcompress.attach(kind(config()))
