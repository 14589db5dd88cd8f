"""Tiny models of many families with room for every token: as the dense model, before, during and after attach.

benchmarks/quality/families.py does the same with all configurations; here are those that differ in kind.
"""

import pytest
import torch
from helpers import and_others
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvcompress
from benchmarks.quality.parts import families_checks
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS, LEFT_OUT, QUICK, names
from kvcompress.hf.argument import CACHE
from kvcompress.hf.attach import base_model, facts_of

REFUSED = names(
    """deepseek_v4 diffllama doge gemma3_text/bidirectional inkling_text mamba
    minimax minimax_m3_vl_text/sparse openai-gpt paligemma/multimodal qwen4_exp_text unlimited_ocr/multimodal"""
)
# from transformers 5.24 on GPT-J attends as others do
REFUSED += ["gptj"] if CACHE == "past_key_values" else ["dory", "inkling2_loop_text"]
# one configuration for each kind of layer; all of QUICK in make test-all, all that there are in the benchmark
KINDS = names(
    """llama llama/longrope llama/dynamic/beyond llama/one_kv_head mistral/sliding phi3 glm gpt_neox stablelm/norm
    hunyuan_v1_dense smollm3/no_rope gemma2/softcap gemma3_text/sliding gpt_oss/sliding gemma3n_text/shared
    gemma4_text/shared mixtral deepseek_v3/yarn deepseek_v32 qwen3_next falcon_h1 jamba gpt2 qwen3_vl/multimodal
    kosmos-2.5/multimodal bart/decoder recurrent_gemma llama4_text/chunked falcon/new bloom
    mpt/alibi falcon/alibi gpt_neo xglm bart/encoder led pegasus_x whisper moonshine t5gemma"""
)
# biases, a cache of its own kind, code of their own, both ways, no keys
KINDS_REFUSED = names(
    """deepseek_v4 diffllama gemma3_text/bidirectional mamba minimax_m3_vl_text/sparse
    unlimited_ocr/multimodal t5 t5gemma2"""
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", and_others(KINDS, [name for name in QUICK if name not in REFUSED]))
def test_caches_with_room_for_everything_equal_the_dense_model(name):
    result = families_checks.check(CONFIGURATIONS[name])
    assert result.outcome == "right", result.reason
    assert result.worst <= result.tolerance <= 1e-3


@pytest.mark.parametrize("name", and_others(KINDS_REFUSED, REFUSED))
def test_what_cannot_work_is_refused_and_left_as_it_was(name):
    result = families_checks.check(CONFIGURATIONS[name])
    assert result.outcome == "refused", result.reason
    assert result.worst is None
    assert not any(word in result.reason for word in ("Error:", "object has no", "unsupported operand", "positional"))


def test_a_cache_without_room_is_noticed(monkeypatch):
    monkeypatch.setattr(families_checks, "ROOM", 20)
    result = families_checks.check(CONFIGURATIONS["llama"], caches=("StreamingCache",))
    assert result.outcome == "wrong"
    assert "StreamingCache, at once" in result.reason


def test_a_trace_of_attach_is_noticed(monkeypatch):
    def left(model):
        model.lm_head.register_forward_hook(lambda *given: None)

    def attach(model):
        left(model)
        raise ValueError("not supported")

    monkeypatch.setattr(families_checks.kvcompress, "attach", attach)
    result = families_checks.check(CONFIGURATIONS["llama"])
    assert result.outcome == "wrong"
    assert result.reason == "detach leaves other hooks"


def test_every_causal_language_model_of_transformers_is_known():
    kinds = {configuration.kind for configuration in CONFIGURATIONS.values()}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - kinds == set(LEFT_OUT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "reads_chunks"), [("jamba", False), ("recurrent_gemma", False), ("qwen3_next", True)])
@torch.no_grad()
def test_families_that_begin_anew_in_every_call_are_known_in_every_dtype(name, reads_chunks, dtype):
    model = CONFIGURATIONS[name].model().to(dtype)
    with kvcompress.attach(model):
        assert facts_of(base_model(model)).reads_chunks is reads_chunks
