import copy
import pickle

import numpy as np
import pytest
import torch
from helpers import FAMILIES, attached, forward, kind_model, left_padded, needs_transformers, random_ids, tiny_model
from test_positions import scaled_model
from transformers import CONFIG_MAPPING, BatchEncoding, MambaConfig

import kvcompress
from kvcompress import IterativeCache, PrunedCache, StreamingCache, attach, detach
from kvcompress.hf import config as hf_config
from kvcompress.hf.attach import is_attached
from kvcompress.hf.config import cache_layers, check_version
from kvcompress.pruners import H2O

families = pytest.mark.parametrize("family", FAMILIES)


def cache_of_tiny():
    return IterativeCache(tiny_model().config)


@families
def test_outputs_with_other_caches_and_after_detach_are_bit_identical(family):
    model, ids = tiny_model(family), random_ids(40, batch=2)
    with torch.no_grad():
        before = model(ids).logits
        with attach(model):
            assert torch.equal(model(ids).logits, before)  # DynamicCache
            assert torch.equal(model(ids, use_cache=False).logits, before)
            kvcompress.generate(model, ids, IterativeCache(model.config, memory_size=8, chunk_size=8), max_new_tokens=3)
            assert torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)
    assert type(model.model.layers[0].self_attn).__name__ == type(tiny_model(family).model.layers[0].self_attn).__name__


@families
def test_attach_adds_no_parameters(family):
    model = tiny_model(family)
    keys = list(model.state_dict())
    attach(model)
    assert list(model.state_dict()) == keys


def test_a_model_attached_twice_is_detached_twice():
    model, ids = tiny_model(), random_ids(20)
    with torch.no_grad():
        before = model(ids).logits
        attach(model)
        attach(model)
        detach(model)
        kvcompress.prefill(model, ids, StreamingCache(model.config))
        detach(model)
        assert torch.equal(model(ids).logits, before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("before", [0, 20, 100])
@pytest.mark.parametrize("kind", [pytest.param("dynamic", marks=needs_transformers(5, 13)), "longrope"])
def test_frequencies_that_follow_length_are_the_models_own_after_detach(kind, before):
    """before: tokens that the model had read without a cache of ours; 64 are the first with other frequencies."""
    model = scaled_model(kind)
    if before:
        forward(model, random_ids(before))
    untouched, attributes = copy.deepcopy(model), set(vars(model.model.rotary_emb))
    with attach(model):
        for length in (20, 100):
            kvcompress.prefill(model, random_ids(length), StreamingCache(model.config))
    assert set(vars(model.model.rotary_emb)) == attributes
    for length in (20, 100, 30):
        assert torch.equal(forward(model, random_ids(length)), forward(untouched, random_ids(length)))


def test_detach_of_a_model_that_is_not_attached_does_nothing():
    detach(tiny_model())


def test_an_error_inside_the_context_detaches_too():
    model = tiny_model()
    with pytest.raises(KeyError), attach(model):
        raise KeyError
    assert not model.model._forward_pre_hooks


def test_the_decoder_without_head_can_be_attached():
    model, ids = tiny_model(), random_ids(20)
    attach(model.model)
    cache = IterativeCache(model.config, memory_size=8, chunk_size=8)
    kvcompress.prefill(model.model, ids, cache)
    assert cache.get_seq_length() == 19


def test_training_without_cache_works_while_attached():
    model, ids = tiny_model(), random_ids(20)
    plain = copy.deepcopy(model)
    for m in (model, plain):
        m.train()
    attach(model)
    for m in (model, plain):
        m(ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("trained", ["q_proj", "v_proj", "down_proj"])
def test_a_compressed_cache_refuses_gradients_and_stays_usable(trained):
    model, ids = tiny_model(), random_ids(20)
    attach(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    cache = kvcompress.prefill(model, ids, IterativeCache(model.config))
    with pytest.raises(RuntimeError, match="do not carry gradients"):
        model(ids[:, -1:], past_key_values=cache)
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids[:, -1:], past_key_values=cache).logits[:, -1], model(ids).logits[:, -1], atol=1e-4, rtol=1e-4
        )


def test_attention_weights_are_refused():
    model, ids = tiny_model(), random_ids(20)
    attach(model)
    with pytest.raises(ValueError, match="output_attentions must be False"), torch.no_grad():
        model(ids, past_key_values=IterativeCache(model.config), output_attentions=True)


@pytest.mark.parametrize("order", ["dispatch first", "attach first"])
def test_models_dispatched_by_accelerate(order):
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny_model(), random_ids(40)
    dense = model.generate(ids, max_new_tokens=6, do_sample=False)

    def dispatch():
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)

    steps = [dispatch, lambda: attach(model)]
    for step in steps if order == "dispatch first" else reversed(steps):
        step()
    cache = IterativeCache(model.config, memory_size=64, chunk_size=16)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=6, do_sample=False), dense)
    assert cache.stored_lengths()[0] == [[45, 45]]
    detach(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), dense)


def test_an_attached_model_can_be_pickled():
    model, ids = tiny_model(), random_ids(20)
    attach(model)
    copied = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, model(ids).logits)


@families
def test_autocast(family):
    model, ids = tiny_model(family), random_ids(40)
    attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        for cache in (IterativeCache(model.config, memory_size=16, chunk_size=8), StreamingCache(model.config)):
            assert kvcompress.generate(model, ids, cache, max_new_tokens=4, do_sample=False).shape == (1, 44)


@pytest.mark.parametrize("kind", [IterativeCache, StreamingCache])
def test_a_cache_filled_in_inference_mode_is_used_outside(kind):
    model, ids = tiny_model(), random_ids(40)
    attach(model)
    dense = model.generate(ids, max_new_tokens=70, do_sample=False)
    cache = kind(model.config)
    with torch.inference_mode():
        kvcompress.prefill(model, ids[:, :30], cache)
        model(ids[:, 29:35], past_key_values=cache)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=70, do_sample=False), dense)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("name", ["streaming", "iterative", "pruned"])
def test_beams_in_inference_mode_change_nothing(kind, name):
    model, ids = kind_model(kind), random_ids(30, 2)
    caches = {
        "streaming": lambda: StreamingCache(model.config, window_size=9),
        "iterative": lambda: IterativeCache(model.config, memory_size=10, chunk_size=7, every=3),
        "pruned": lambda: PrunedCache(model.config, H2O(), keep=10, every=3),
    }
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    attach(model)
    expected = kvcompress.generate(model, ids, caches[name](), **settings)
    with torch.inference_mode():
        cache = caches[name]()
        assert torch.equal(kvcompress.generate(model, ids, cache, **settings), expected)
    forward(model, torch.full((6, 1), 5), past_key_values=cache)


def test_a_model_that_is_not_attached_says_so():
    model, ids = tiny_model(), random_ids(20)
    cache = IterativeCache(model.config)
    with pytest.raises(RuntimeError, match=r"attach\(model\)"):
        model(ids, past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"attach\(model\)"):
        kvcompress.prefill(model, ids, cache)


@pytest.mark.parametrize("is_attached", [True, False])
def test_update_says_how_a_cache_is_filled(is_attached):
    model = tiny_model()
    if is_attached:
        attach(model)
    keys = torch.randn(1, 2, 3, 16)
    message = r"an attached model fills them .* call kvcompress.attach\(model\) first.*model\(input_ids, .*=cache\)"
    with pytest.raises(RuntimeError, match=message):
        IterativeCache(model.config).update(keys, keys, 0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_hidden_layers": 2}, "layers = 2, but LlamaModel has layers = 3"),
        ({"num_hidden_layers": 4}, "layers = 4, but LlamaModel has layers = 3"),
        ({"num_key_value_heads": 4}, "KV heads = 4, but LlamaModel has KV heads = 2"),
        ({"head_dim": 8}, "head dim = 8, but LlamaModel has head dim = 16"),
    ],
)
@pytest.mark.parametrize("kind", [IterativeCache, StreamingCache])
def test_a_cache_of_another_models_shape_is_refused(kind, other, message):
    model, ids = tiny_model(), random_ids(20)
    attach(model)
    cache = kind(tiny_model(**other).config)
    for use in (lambda: kvcompress.prefill(model, ids, cache), lambda: model(ids, past_key_values=cache)):
        with pytest.raises(ValueError, match=f"cache was made from a config with {message}"), torch.no_grad():
            use()
    assert kvcompress.prefill(attached(**other), ids, cache).get_seq_length() == 19


@pytest.mark.parametrize("kind", [IterativeCache, StreamingCache])
def test_what_is_no_config_is_refused(kind):
    with pytest.raises(
        TypeError, match=r"config must be a transformers config .*got the model itself: pass model.config"
    ):
        kind(tiny_model())
    with pytest.raises(TypeError, match=r"config must be a transformers config .*got dict"):
        kind({"num_hidden_layers": 2})


@pytest.mark.parametrize("call", [attach, detach, lambda x: kvcompress.prefill(x, random_ids(4), cache_of_tiny())])
@pytest.mark.parametrize("model", [None, tiny_model().config], ids=["None", "config"])
def test_what_is_no_model_is_refused(call, model):
    with pytest.raises(TypeError, match=f"model must be a transformers model, got {type(model).__name__}"):
        call(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [[1, 2, 3]]}, "input_ids must be a torch.Tensor, got list"),
        ({"input_ids": None}, "input_ids must be a torch.Tensor, got NoneType"),
        (
            {"input_ids": BatchEncoding({"input_ids": [[1, 2]]})},
            'input_ids must be tensors, got a BatchEncoding of list: the tokenizer makes them with return_tensors="pt"',
        ),
        ({"input_ids": "text"}, "input_ids must be a torch.Tensor, got str; .* which kvcompress.read takes as it is"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask must be a torch.Tensor, got list"),
        ({"attention_mask": np.ones((1, 20))}, "attention_mask must be a torch.Tensor, got ndarray"),
        ({"guide": [1, 2, 3]}, "guide must be a torch.Tensor, got list"),
        ({"guide": np.arange(3)}, "guide must be a torch.Tensor, got ndarray"),
    ],
)
@pytest.mark.parametrize("function", [kvcompress.prefill, kvcompress.generate])
def test_arguments_that_are_no_tensors_are_named(function, arguments, message):
    cache = cache_of_tiny()
    with pytest.raises(TypeError, match=message):
        function(attached(), **{"input_ids": random_ids(20), "cache": cache, **arguments})
    assert cache.get_seq_length() == 0
    cache.check_complete()


@pytest.mark.parametrize(
    ("given", "further", "message"),
    [
        ({"pixel_values": 1}, {}, "input_ids must be of text alone, got a BatchEncoding with pixel_values"),
        (
            {"attention_mask": torch.ones(1, 4)},
            {"attention_mask": torch.ones(1, 4)},
            "attention_mask must be None where input_ids bring their own",
        ),
    ],
)
@pytest.mark.parametrize("function", [kvcompress.prefill, kvcompress.generate])
def test_what_a_tokenizer_returns_is_of_text_and_has_one_mask(function, given, further, message):
    with pytest.raises(ValueError, match=message):
        function(attached(), BatchEncoding({"input_ids": random_ids(4), **given}), cache_of_tiny(), **further)


def test_what_a_tokenizer_returns_is_taken_as_it_is():
    model = attached()
    ids, mask = left_padded([random_ids(30, seed=1), random_ids(21, seed=2)])
    given = BatchEncoding({"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)})
    wanted = kvcompress.generate(model, ids, cache_of_tiny(), mask, max_new_tokens=5, do_sample=False)
    for tokens in (given, dict(given)):
        out = kvcompress.generate(model, tokens, cache_of_tiny(), max_new_tokens=5, do_sample=False)
        assert torch.equal(out, wanted)
    cache = kvcompress.prefill(model, given, cache_of_tiny())
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("iterative", r"got str: CacheSpec.parse\('iterative'\).make\(model.config\) makes one of text"),
        (kvcompress.IterativeCache, "got the class IterativeCache, not one of it"),
        (None, "got NoneType$"),
    ],
)
def test_what_is_no_cache_is_named(cache, message):
    with pytest.raises(ValueError, match=f"cache must be a kvcompress cache, {message}"):
        kvcompress.generate(attached(), random_ids(20), cache)


def test_a_model_called_with_a_batch_encoding_says_so():
    with pytest.raises(TypeError, match=r"input_ids must be a torch.Tensor, got BatchEncoding"):
        attached()(BatchEncoding({"input_ids": random_ids(4)}), past_key_values=cache_of_tiny())


def test_lora_trains_and_generates_while_attached():
    peft = pytest.importorskip("peft")
    model, ids = tiny_model(), random_ids(40)
    attach(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    tuned = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(4):
        loss = tuned(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    tuned.eval()
    dense = tuned.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    cache = IterativeCache(model.config, memory_size=64, chunk_size=16)
    ours = kvcompress.generate(tuned, ids, cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, dense)


def test_a_nested_attachment_leaves_the_outer_one_alone():
    model = tiny_model()
    with attach(model):
        with attach(model):
            pass
        kvcompress.prefill(model, random_ids(9), IterativeCache(model.config))
    with pytest.raises(RuntimeError, match="not attached"):
        kvcompress.prefill(model, random_ids(9), IterativeCache(model.config))


def test_an_additive_mask_is_refused():
    model, ids = attached(), random_ids(20)
    with pytest.raises(ValueError, match="attention_mask must hold zeros and ones"), torch.no_grad():
        model(ids, past_key_values=IterativeCache(model.config), attention_mask=torch.full((1, 20), -1e9))


def test_a_prompt_without_prefill_is_warned_about():
    model, ids = attached(), random_ids(20)
    with pytest.warns(UserWarning, match="20 tokens came without kvcompress.prefill"), torch.no_grad():
        model(ids, past_key_values=IterativeCache(model.config, memory_size=8, chunk_size=8))


def test_what_attach_returns_detaches():
    model = tiny_model()
    attach(model).detach()
    assert not is_attached(model)


def test_a_config_without_attention_is_refused():
    with pytest.raises(ValueError, match="config must be of a model with attention layers, got MambaConfig"):
        PrunedCache(MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=97), keep=20)


def test_a_model_that_was_cast_since_it_filled_a_cache_is_named():
    model, ids = attached(), random_ids(20)
    cache = kvcompress.prefill(model, ids, kvcompress.PrunedCache(model.config, keep=0.5))
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"LlamaModel must be torch.float32 as .* got torch.bfloat16: cast"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    cache.reset()
    kvcompress.generate(model, ids, cache, max_new_tokens=2)
    assert cache.seen_lengths() == [21]


@pytest.mark.parametrize(
    ("kind", "settings", "what", "first"),
    [
        ("gemma2", {}, "softcapped attention", "5.23"),
        ("qwen3_next", {}, "recurrent layers", "5.23"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic RoPE",
            "5.13",
        ),
    ],
)
def test_what_an_older_transformers_does_otherwise_is_refused_with_it(monkeypatch, kind, settings, what, first):
    config = CONFIG_MAPPING[kind](**settings)
    numbers = tuple(map(int, first.split(".")))
    for version, refused in ((f"{first}.0", False), (f"{numbers[0]}.{numbers[1] - 1}.3", True)):
        monkeypatch.setattr(hf_config, "__version__", version)
        if refused:
            with pytest.raises(
                ValueError, match=f"^models with {what} need transformers {first} or newer, got {version}$"
            ):
                check_version(config, cache_layers(config))
        else:
            check_version(config, cache_layers(config))
    check_version(CONFIG_MAPPING["llama"](), [])
