"""The seam with transformers: what is learned of a model, what is refused, and that nothing else changes."""

import copy
import dataclasses
import threading

import pytest
import torch
from helpers import attached, forward, left_padded, needs_transformers, random_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvcompress
from kvcompress import QuestCache, StreamingCache, attach, detach
from kvcompress.hf.argument import CACHE, cache_of
from kvcompress.hf.attach import base_model, facts_of

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
ALTERNATING = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2}
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def model_of(kind, **settings):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **settings})).eval()


def facts(model):
    with attach(model):
        return facts_of(base_model(model))


def multimodal_model():
    torch.manual_seed(0)
    text = {**SIZES, **ALTERNATING, "query_pre_attn_scalar": 16, "rope_scaling": None}
    config = CONFIG_MAPPING["gemma3"](
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=90, boi_token_index=91,
        eoi_token_index=92,
    )  # fmt: skip
    return AutoModelForImageTextToText.from_config(config).eval()


# ---- what is learned ----


def test_windows_are_learned_by_layer():
    found = facts(model_of("gemma3_text", **ALTERNATING))
    assert [x.window for x in found.values()] == [12, None, 12, None]
    # local and global layers rotate by frequencies of their own
    cos = [x.key_rotary.tables(8, 8, torch.device("cpu"))[0] for x in found.values()]
    assert torch.equal(cos[0], cos[2]) and torch.equal(cos[1], cos[3]) and not torch.equal(cos[0][:8], cos[1][:8])


def test_chunks_and_layers_without_rotation_are_learned():
    settings = {"no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 16, "intermediate_size_mlp": 96,
                "num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"] * 2}  # fmt: skip
    found = facts(model_of("llama4_text", **settings))
    assert [x.chunk for x in found.values()] == [16, None, 16, None]
    assert [x.rotates for x in found.values()] == [True, False, True, False]


def test_layers_that_read_others_are_learned():
    shared = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
              "global_head_dim": 32}  # fmt: skip
    found = facts(model_of("gemma4_text", **ALTERNATING, **shared))
    assert [x.reads for x in found.values()] == [None, None, 0, 1]
    assert [x.readers for x in found.values()] == [(2,), (3,), (), ()]
    assert [x.head_dim for x in found.values()] == [16, 32, 16, 32]


def test_sizes_of_keys_and_values_are_learned():
    settings = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 2, "num_experts_per_tok": 1,
                "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "head_dim": 8}  # fmt: skip
    found = facts(model_of("deepseek_v3", **settings))[0]
    assert (found.head_dim, found.value_dim, found.query_heads, found.kv_heads) == (24, 12, 4, 4)
    assert found.order is not None  # only the last 8 coordinates rotate


def test_a_norm_behind_the_rotation_keeps_its_live_weights():
    model, ids = model_of("hunyuan_v1_dense"), random_ids(40)
    attach(model)  # while all weights of the norms are 1
    for name, parameter in model.named_parameters():
        if "layernorm" in name or "norm" in name:
            parameter.data += 0.5 * torch.rand_like(parameter)
    dense = forward(model, ids)
    torch.testing.assert_close(
        forward(model, ids, past_key_values=QuestCache(model.config)), dense, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "cohere2", "glm4", "gpt_neox", "qwen3"])
def test_what_was_learned_is_verified(kind):
    model = model_of(kind, **(ALTERNATING if kind in ("gemma3_text", "cohere2") else {}))
    with attach(model, verify=True):
        pass


@pytest.mark.parametrize("kind", ["llama", "llama4_text"])
def test_autocast_changes_nothing_of_what_is_learned(kind):
    model = model_of(kind, **({"intermediate_size_mlp": 96, "num_local_experts": 2} if kind == "llama4_text" else {}))
    with torch.autocast("cpu", torch.bfloat16), attach(model, verify=True):
        pass


def test_roundings_of_16_bits_that_add_up_over_many_layers_are_no_fault():
    model = tiny_model(num_hidden_layers=24).to(torch.bfloat16)
    with attach(model, verify=True):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verifying_names_the_first_layer_that_differs(dtype):
    model = tiny_model().to(dtype)
    with attach(model):
        found = facts_of(base_model(model))
        found[1] = dataclasses.replace(found[1], window=5)
        with pytest.raises(RuntimeError, match="layer 1 of LlamaModel attends otherwise than the dense model"):
            attach(model, verify=True)
    assert not base_model(model)._forward_pre_hooks


@pytest.mark.parametrize("name", ["past_key_values", CACHE])
def test_a_cache_is_taken_by_either_of_its_names(name):
    model, ids = attached(), random_ids(9)
    cache = QuestCache(model.config)
    with torch.no_grad():
        assert torch.equal(model(ids, **{name: cache}).logits, model(ids, **{CACHE: QuestCache(model.config)}).logits)
    assert cache.get_seq_length() == 9
    assert cache_of({name: cache}) is cache and cache_of({}) is None and cache_of({name: None}) is None
    mine = QuestCache(model.config)
    twice = f"{name} must not be given where a cache is already, got QuestCache|multiple values for argument '{name}'"
    with pytest.raises(TypeError, match=twice):
        kvcompress.generate(model, ids, mine, max_new_tokens=2, **{name: cache})
    assert mine.get_seq_length() == 0


def test_the_name_by_which_our_functions_take_a_cache_is_said():
    model, ids = attached(), random_ids(9)
    for function in (kvcompress.generate, kvcompress.prefill):
        said = rf"^past_key_values is model.generate's; here it is cache: kvcompress.{function.__name__}\(model, "
        with pytest.raises(TypeError, match=said):
            function(model, ids, past_key_values=QuestCache(model.config))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mamba", {"num_hidden_layers": 1}, "(takes no past_key_values|nothing to compress)"),
        ("doge", {"num_hidden_layers": 1}, "use the mask of their attention themselves"),
        ("diffllama", {"num_hidden_layers": 1}, "(attends more than once|use the mask of their attention)"),
    ],
)
def test_a_family_that_cannot_work_is_refused_with_the_reason(kind, settings, reason):
    model = model_of(kind, **settings)
    with pytest.raises(ValueError, match=f"{type(model).__name__} is not supported: .*{reason}"):
        attach(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not model.config._attn_implementation.startswith("kvcompress")


def test_what_a_refused_model_gives_is_as_before():
    model, ids = model_of("diffllama", num_hidden_layers=1), random_ids(12)
    before = forward(model, ids)
    with pytest.raises(ValueError, match="not supported"):
        attach(model)
    assert torch.equal(forward(model, ids), before)


def test_an_attention_dropout_is_refused_where_it_would_be_left_out():
    model = model_of("llama", attention_dropout=0.1)
    with attach(model), torch.no_grad():
        model.train()
        with pytest.raises(ValueError, match=r"attention_dropout must be 0 where kvcompress attends, got 0\.1"):
            model(random_ids(4), past_key_values=QuestCache(model.config))


# ---- attaching ----


def test_attachments_are_counted():
    model, ids = tiny_model(), random_ids(20)
    first, second = attach(model), attach(model)
    with first:
        pass
    kvcompress.prefill(model, ids, StreamingCache(model.config))  # the second still is
    with second:
        pass
    with pytest.raises(RuntimeError, match="not attached"):
        kvcompress.prefill(model, ids, StreamingCache(model.config))


def test_an_implementation_set_while_attached_serves_and_stays():
    model, ids = tiny_model(), random_ids(30)
    attach(model)
    with torch.no_grad():
        for name in ("eager", "sdpa"):
            model.set_attn_implementation(name)
            plain = copy.deepcopy(tiny_model())
            plain.set_attn_implementation(name)
            assert torch.equal(model(ids).logits, plain(ids).logits)
            ours = model(ids, past_key_values=QuestCache(model.config)).logits
            torch.testing.assert_close(ours, plain(ids).logits, rtol=1e-4, atol=1e-4)
    detach(model)
    assert model.config._attn_implementation == "sdpa"


def test_attention_weights_of_the_eager_implementation_are_as_before():
    model, ids = tiny_model(), random_ids(12)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        before = model(ids, output_attentions=True).attentions
        with attach(model):
            after = model(ids, output_attentions=True).attentions
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_models_of_one_config_are_apart():
    model, ids = tiny_model(), random_ids(20)
    other = type(model)(model.config).eval()
    before = forward(other, ids)
    with attach(model):
        assert torch.equal(forward(other, ids), before)
        with pytest.raises(RuntimeError, match=r"attach\(model\)"):
            forward(other, ids, past_key_values=StreamingCache(model.config))
    assert torch.equal(forward(other, ids), before)


@needs_transformers(5, 13)
def test_frequencies_that_depend_on_length_are_left_as_they_were():
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    models = [tiny_model(rope_parameters=dynamic, max_position_embeddings=32) for _ in range(2)]
    attach(models[0])
    out = []
    for model in models:
        found = [forward(model, random_ids(90))]
        if model is models[0]:
            forward(model, random_ids(50), past_key_values=QuestCache(model.config))
        out.append([*found, forward(model, random_ids(40)), forward(model, random_ids(20))])
    assert all(torch.equal(x, y) for x, y in zip(*out, strict=True))


def test_threads_attach_and_detach():
    model, ids = tiny_model(), random_ids(20)
    before, errors = forward(model, ids), []
    start = threading.Barrier(4)

    def work():
        start.wait()
        try:
            for _ in range(8):
                with attach(model):
                    ours = forward(model, ids, past_key_values=QuestCache(model.config))
                    torch.testing.assert_close(ours, before, rtol=1e-4, atol=1e-4)
                    assert torch.equal(forward(model, ids), before)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(forward(model, ids), before)


def test_passes_of_several_threads_are_apart():
    """One thread reads with a cache of ours while another runs the model without."""
    model, ids = attached(), random_ids(60)
    want, errors, stop = forward(model, ids), [], threading.Event()

    def plain():
        while not stop.is_set():
            if not torch.equal(forward(model, ids), want):
                errors.append("another result")

    thread = threading.Thread(target=plain)
    thread.start()
    for _ in range(20):
        torch.testing.assert_close(
            forward(model, ids, past_key_values=QuestCache(model.config)), want, rtol=1e-4, atol=1e-4
        )
    stop.set()
    thread.join()
    assert not errors


# ---- calls ----


@pytest.mark.parametrize("cache", [StreamingCache, QuestCache])
def test_nan_of_a_model_is_an_error(cache):
    model, ids = attached(), random_ids(20)
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="hidden states hold NaN"):
        kvcompress.generate(model, ids, cache(model.config), max_new_tokens=2)


def test_positions_of_images_are_refused():
    model, ids = attached(), random_ids(6)
    at = torch.arange(6).expand(3, 1, 6).clone()
    at[1, 0, 3] = 1
    cache = StreamingCache(model.config)
    with pytest.raises(ValueError, match="position_ids must be the same on every axis, got those of an image"):
        forward(model, ids, past_key_values=cache, position_ids=at)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_multimodal_model_reads_text():
    model = multimodal_model()
    prompts = [random_ids(n, seed=n) % 80 + 2 for n in (30, 17)]
    ids, mask = left_padded(prompts)
    given = {"attention_mask": mask}
    dense = model(ids, **given, past_key_values=DynamicCache(config=model.config)).logits
    tokens = model.generate(ids, **given, max_new_tokens=6, do_sample=False)
    with attach(model):
        ours = model(ids, **given, past_key_values=QuestCache(model.config)).logits
        torch.testing.assert_close(ours[mask == 1], dense[mask == 1], rtol=1e-4, atol=1e-4)
        cache = QuestCache(model.config)
        assert torch.equal(kvcompress.generate(model, ids, cache, mask, max_new_tokens=6, do_sample=False), tokens)
        assert torch.equal(model(ids, **given).logits, model(ids, **given).logits)
    assert torch.equal(model(ids, **given, past_key_values=DynamicCache(config=model.config)).logits, dense)


@pytest.mark.parametrize("which", ["the same model", "its inner model", "its decoder", "another model"])
@torch.no_grad()
def test_an_interrupted_pass_leaves_nothing_to_the_next(which):
    model, other = multimodal_model(), multimodal_model()
    following = {"the same model": model, "its inner model": model.model, "its decoder": base_model(model)}
    follows = following.get(which, base_model(other))  # of the same weights
    ids, mask = left_padded([random_ids(n, seed=n) % 80 + 2 for n in (30, 17)])

    def hidden(cache):
        return follows(ids, attention_mask=mask, past_key_values=cache, use_cache=True)[0][mask == 1]

    def interrupt(*args):
        raise KeyboardInterrupt

    dense = hidden(DynamicCache(config=model.config))
    with attach(model), attach(other):
        for make in (DynamicCache, QuestCache):
            hook = base_model(model).layers[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, :12], attention_mask=torch.ones(2, 12), past_key_values=QuestCache(model.config))
            hook.remove()
            torch.testing.assert_close(hidden(make(config=model.config)), dense, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_images_that_are_read_in_both_directions_are_refused():
    model = multimodal_model()
    ids = random_ids(20) % 80 + 2
    ids[0, 5:9] = 90
    types = (ids == 90).long()
    cache = QuestCache(model.config)
    with attach(model), pytest.raises(ValueError, match="lets tokens of this call see what follows them"):
        model(ids, pixel_values=torch.randn(1, 3, 28, 28), token_type_ids=types, past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        pytest.param("gemma2", {"final_logit_softcapping": 0.5}, marks=needs_transformers(5, 23)),
        ("cohere2", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        pytest.param(
            "falcon_h1",
            {"mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4, "lm_head_multiplier": 0.3},
            marks=needs_transformers(5, 23),
        ),
    ],
)
@torch.no_grad()
def test_logits_of_a_prompt_are_the_models_own(kind, given):
    """Whatever the family does behind its output layer."""
    model, ids, kept = model_of(kind, **given), random_ids(21), kvcompress.logits.AllLogits()
    wanted = model(ids[:, :-1]).logits[0]
    with kvcompress.attach(model):
        kvcompress.prefill(model, ids, kvcompress.PrunedCache(model.config, keep=64), logits=kept)
    torch.testing.assert_close(kept.logits(), wanted, atol=2e-5, rtol=1e-4)
