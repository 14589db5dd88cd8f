"""Compressed caches under vLLM: tokens, pages, preemption, and vLLM as it was where nothing is asked."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import alone
from helpers import deciding_model, tiny_gates_folder, tiny_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)  # fmt: skip
from vllm import SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.llama import LlamaForCausalLM as TheirLlama
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from benchmarks.quality.parts.families_models import BASE
from kvcompress.models import EXAMPLE
from kvcompress.serve.served_pass import ServedPass
from kvcompress.serve.vllm.scheduler import _bytes_of

ROOT = Path(__file__).parents[2]
PRUNED = "pruned,pruner=snapkv,window=16,keep=64"
WHOLE = "pruned,pruner=observedattention,keep=64"
STREAMING = "streaming,window_size=60"
CODED = ["quantized,dtype=int8", "quantized,dtype=k8v4", PRUNED + ",dtype=int8,every=8", STREAMING + ",dtype=k8v4"]
PROMPTS = [[(7 * i * i + 3 * i * n) % 128 for i in range(1, n)] for n in (90, 33, 150)]
CACHES = ["dense", "dmc", PRUNED, STREAMING, *CODED]


def example(cache):
    return kvcompress.load_example_model(retrofit="dmc" if cache == "dmc" else None)[0]


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_are_those_of_generate_alone_and_pages_come_back(serve, folders, prompts, cache):
    new = [3 + 5 * i % 17 for i in range(len(prompts))]
    served = serve(folders["dmc" if cache == "dmc" else "plain"], cache)
    found, _ = served.generate(prompts, new)
    assert found == alone(example(cache), cache, prompts, new)
    assert served.engine.requests.pages_in_use() == 0 and served.engine.decoding == []
    assert served.scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize(
    ("cache", "blocks", "tokens", "new", "swap"),
    [
        ("dense", 18, 80, 70, "1GiB"), ("dense", 18, 80, 70, 0), ("dmc", 8, 120, 200, "1GiB"),
        (PRUNED, 8, 80, 70, "1GiB"), (PRUNED, 8, 80, 70, 0), (PRUNED + ",every=8", 7, 80, 70, None),
    ],
)  # fmt: skip
def test_a_wrong_guess_ends_in_preemption_and_no_token_is_lost(
    serve, folders, prompts, cache, blocks, tokens, new, swap
):
    dmc = cache == "dmc"
    served = serve(folders["dmc" if dmc else "plain"], cache, blocks=blocks, ratio=100 if dmc else None, swap=swap)
    served.engine.requests.coming_pages = lambda prompts: 0  # as if there were room
    served.engine.bounds.note = lambda *_: None  # and the guess stayed
    short = [prompt[:tokens] for prompt in prompts]
    found, reasons = served.generate(short, new)
    assert served.engine.preempted > 0 and set(reasons) == {"length"}
    if swap is not None:
        assert served.engine.requests.swap.count == (served.engine.preempted if swap else 0)
    assert found == alone(example(cache), cache, short, new)
    assert served.engine.requests.pages_in_use() == 0


@pytest.mark.parametrize(("cache", "blocks"), [("dense", 18), (PRUNED, 8)])
def test_what_waits_in_swap_is_read_again_after_a_reset_and_goes_with_its_request(
    serve, folders, prompts, cache, blocks
):
    served = serve(folders["plain"], cache, blocks=blocks, swap="1GiB")
    served.engine.requests.coming_pages = lambda prompts: 0  # as if there were room
    engine, swap, short, found = served.llm.llm_engine, served.engine.requests.swap, [x[:80] for x in prompts], {}
    for i, prompt in enumerate(short):
        params = SamplingParams(temperature=0, max_tokens=70, detokenize=False, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    events = ["reset", "abort"]
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
        if not events or not (names := [name for name in served.scheduler.requests if name in swap]):
            continue
        if events.pop(0) == "reset":
            assert engine.reset_prefix_cache(reset_running_requests=True)
            assert swap.used == 0
        else:
            engine.abort_request([names[0]], internal=True)
            assert names[0] not in swap
    assert not events and swap.used == 0 and served.engine.requests.pages_in_use() == 0
    assert len(found) == len(short) - 1
    assert list(found.values()) == alone(example(cache), cache, [short[i] for i in found], 70)


@pytest.mark.parametrize(("cache", "ratio"), [("dense", None), ("dmc", 2), (PRUNED, None)])
def test_who_comes_in_finds_its_pages_until_the_end(serve, folders, prompts, cache, ratio):
    dmc = cache == "dmc"
    served = serve(folders["dmc" if dmc else "plain"], cache, blocks=24, ratio=ratio)
    short = [prompt[:60] for prompt in prompts]
    found, reasons = served.generate(short, [40 + 20 * (i % 4) for i in range(len(short))])
    assert served.engine.preempted == 0 and set(reasons) == {"length"} and len(found) == len(short)


def test_one_call_of_a_layer_serves_all_that_decode(serve, folders, prompts, monkeypatch):
    served, seen, attend = serve(folders["plain"], PRUNED), [], ServedPass.attend_to

    def noted(self, layer, queries, *rest):
        seen.append((layer, self.decoding, len(self.parts)))
        return attend(self, layer, queries, *rest)

    monkeypatch.setattr(ServedPass, "attend_to", noted)
    served.generate(prompts, 8)
    decoding = [n for layer, n, parts in seen if layer == 0 and not parts]
    assert max(decoding) == len(prompts)
    assert len(seen) == len(served.engine.facts) * sum(layer == 0 for layer, *_ in seen)


def test_a_request_that_outgrows_all_pages_ends_alone(serve, folders, prompts):
    served = serve(folders["dmc"], "dmc", blocks=3, ratio=100)
    found, reasons = served.generate([prompts[0][:20], prompts[1][:200], prompts[2][:20]], [4, 400, 4])
    assert reasons == ["length", "error", "length"]
    short = [prompts[0][:20], prompts[2][:20]]
    assert [found[0], found[2]] == alone(example("dmc"), "dmc", short, 4)
    assert served.engine.requests.pages_in_use() == 0


def test_the_least_memory_that_vllm_starts_with_holds_the_longest_request(serve, folders, prompts):
    """512 tokens, in blocks of 32 of which one is never given out."""
    with pytest.raises(ValueError, match="KV cache"):
        serve(folders["plain"], "dense", blocks=16)
    prompt = (prompts[0] * 8)[:508]
    found, reasons = serve(folders["plain"], "dense", blocks=17).generate([prompt], 4)
    assert reasons == ["length"] and found == alone(example("dense"), "dense", [prompt], 4)


def test_memory_that_is_not_one_allocation_is_refused():
    whole = torch.zeros(64, dtype=torch.int8)
    assert len(_bytes_of([whole[:32], whole[32:].view(torch.float32)])) == 64
    with pytest.raises(RuntimeError, match=r"must be one allocation for all layers, .* got 2"):
        _bytes_of([whole, torch.zeros(64, dtype=torch.int8)])


def test_a_prompt_that_is_read_whole_and_finds_too_few_pages_ends_alone(serve, folders, prompts):
    served = serve(folders["plain"], "pruned,pruner=snapkv,keep=200")
    requests, pages = served.engine.requests, served.engine.requests.part_pages
    # vLLM refuses at its start a length that fits nowhere: as if what this prompt keeps were more than was thought
    requests.part_pages = lambda part: requests.pages + 1 if part.prompt > 100 else pages(part)
    found, reasons = served.generate([prompts[0][:20], prompts[1][:150], prompts[2][:20]], 4)
    assert reasons == ["length", "error", "length"]
    assert served.engine.requests.pages_in_use() == 0


def test_a_request_whose_only_pass_failed_is_no_success(serve, folders, prompts, monkeypatch):
    served, attend, seen = serve(folders["dmc"], "dmc"), ServedPass.attend_to, {}

    def failing(self, layer, *rest):
        names = [part.request for part, _ in self.parts]
        seen.update(dict.fromkeys(names))
        self.failed |= {name: "made for this test" for name in list(seen)[1:2] if name in names}
        return attend(self, layer, *rest)

    monkeypatch.setattr(ServedPass, "attend_to", failing)
    short = [prompt[:20] for prompt in prompts[:3]]
    found, reasons = served.generate(short, 1)
    assert reasons == ["length", "error", "length"] and found[1] == []
    assert [found[0], found[2]] == alone(example("dmc"), "dmc", [short[0], short[2]], 1)
    assert served.engine.requests.pages_in_use() == 0


def test_an_aborted_request_gives_its_pages_back(serve, folders, prompts):
    served = serve(folders["plain"], "dense")
    engine = served.llm.llm_engine
    from vllm import SamplingParams

    for i in range(2):
        params = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompts[i][:60]}, params)
    for _ in range(4):
        engine.step()
    assert len(served.engine.decoding) == 2
    engine.abort_request(["0"])
    results = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            results[output.request_id] = list(output.outputs[0].token_ids)
    assert results["1"] == alone(example("dense"), "dense", [prompts[1][:60]], 20)[0]
    assert served.engine.requests.pages_in_use() == 0


def test_pages_of_a_request_that_vllm_turns_away_stay_free(serve, folders, prompts):
    served = serve(folders["plain"], "dense", blocks=20)
    engine, manager = served.llm.llm_engine, served.scheduler.kv_cache_manager
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False, ignore_eos=True)
    engine.add_request("0", {"prompt_token_ids": prompts[0][:60]}, params)
    engine.step()
    manager.watermark_blocks = 10**6  # nobody is let in beside others
    engine.add_request("1", {"prompt_token_ids": prompts[1][:150]}, params)
    engine.step()
    (request,) = served.scheduler.waiting
    assert all(served.engine.has_room(request.request_id, 0, 127) for _ in range(9))  # more than all pages at once
    manager.watermark_blocks, results = 0, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            results[output.request_id] = list(output.outputs[0].token_ids)
    short = [prompts[0][:60], prompts[1][:150]]
    assert [results["0"], results["1"]] == alone(example("dense"), "dense", short, 9)
    assert served.engine.preempted == 0 and served.engine.requests.pages_in_use() == 0


SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
FAMILIES = {
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "mistral/window": (MistralForCausalLM, MistralConfig, {"sliding_window": 40, "head_dim": 32}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "head_dim": 32, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen2_moe": (
        Qwen2MoeForCausalLM, Qwen2MoeConfig,
        {"num_attention_heads": 2, "num_key_value_heads": 1, "shared_expert_intermediate_size": 32, **MOE},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"head_dim": 32, **MOE}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families_give_the_tokens_of_transformers(serve, tmp_path, name):
    made, config, settings = FAMILIES[name]
    torch.manual_seed(1)
    model = made(config(**{**SMALL, **settings})).eval()
    for parameter in model.parameters():  # tokens far from a tie
        parameter.data *= 3 if parameter.ndim > 1 else 1
    model.save_pretrained(tmp_path)
    served = serve(tmp_path, PRUNED)
    assert served.generate(PROMPTS, 12)[0] == alone(model, PRUNED, PROMPTS, 12)


DENSE_CACHE, SHORT = "dense", "streaming,window_size=40,num_sink_tokens=4"
# what a layer may be: 3 seconds each, most of them vLLM's, which makes an engine
KINDS = {
    "gemma3_text/sliding": SHORT,  # two rotations, windows
    "gemma4_text/shared": PRUNED,  # layers that read others' keys, heads of two sizes
    "gemma4_text/k_eq_v": PRUNED,  # layers with other numbers of KV heads
    "gpt_oss/sliding": PRUNED,  # sinks
    "cohere2/sliding": SHORT,  # neighbours rotate, some layers not at all
    "llama4_text/chunked": PRUNED,  # chunks, neighbours in transformers and halves in vLLM
    "phi3/quarter": SHORT,  # a part of a head rotates
    "opt": PRUNED,  # learned positions
    "bloom": SHORT,  # ALiBi
    "glm": PRUNED,  # transformers' own code in vLLM, as the next ones
    "hunyuan_v1_dense": DENSE_CACHE,  # norms behind the rotation
    "smollm3/no_rope": SHORT,
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_layers_give_the_tokens_of_transformers(serve, tmp_path, monkeypatch, name):
    for field, value in {"hidden_size": 128, "head_dim": 32}.items():  # that vLLM has attention for
        monkeypatch.setitem(BASE, field, value)
    more = {"num_experts": None} if name.startswith("gemma4") else {"num_experts_per_tok": 1}
    more |= {"num_global_key_value_heads": 1, "global_head_dim": 32} if name.endswith("k_eq_v") else {}
    more |= {"floor_scale": 10**6}  # vLLM tunes no temperature where max_model_len is at most 32,768
    configuration = CONFIGURATIONS[name]
    model = replace(configuration, settings=configuration.settings | more).model(seed=1)
    model.save_pretrained(tmp_path)
    wanted = alone(model, KINDS[name], PROMPTS, 12)  # first: vLLM changes classes of transformers that it runs itself
    served = serve(tmp_path, KINDS[name])
    assert served.generate(PROMPTS, 12)[0] == wanted
    assert served.engine.requests.pages_in_use() == 0


def test_softcaps_are_vllms(serve, tmp_path, monkeypatch):
    """The tokens of vLLM's own attention: with transformers before 5.23 attach refuses the model."""
    monkeypatch.setitem(BASE, "head_dim", 32)
    CONFIGURATIONS["gemma2/softcap"].model(seed=1).save_pretrained(tmp_path)
    wanted = serve(tmp_path, None).generate(PROMPTS, 12)[0]
    assert serve(tmp_path, DENSE_CACHE).generate(PROMPTS, 12)[0] == wanted


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepseek_v3", r"DeepseekV3ForCausalLM must attend by .* in layers \[0, 1\], got \[\]"),
        ("ministral3/yarn", "llama_4_scaling_beta must be unset in the model's config"),
        ("doge", "its layers use the mask of their attention themselves"),
    ],
)
def test_models_that_do_not_fit_are_refused_before_the_server_starts(serve, tmp_path, name, message):
    CONFIGURATIONS[name].model().save_pretrained(tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=message):
        serve(tmp_path, DENSE_CACHE)


@pytest.mark.parametrize("what", ["scale", "window", "frequencies"])
def test_layers_that_are_others_in_vllm_than_in_transformers_are_refused(serve, folders, monkeypatch, what):
    made = Attention.__init__

    def other(self, *args, **given):
        made(self, *args, **given)
        self.impl.scale *= 2 if what == "scale" else 1
        self.sliding_window = 7 if what == "window" else self.sliding_window

    monkeypatch.setattr(Attention, "__init__", other)
    if what == "frequencies":
        monkeypatch.setattr(RotaryEmbeddingBase, "_compute_inv_freq", lambda self, _: torch.ones(self.rotary_dim // 2))
        _ROPE_DICT.clear()
    message = {"scale": "has scale", "window": "has window 7", "frequencies": "rotates otherwise"}[what]
    with pytest.raises(ValueError, match=f"layer 0 {message} .*in vLLM"):
        serve(folders["plain"], DENSE_CACHE)
    _ROPE_DICT.clear()


def test_without_a_compressed_cache_vllm_is_as_it_was(serve, folders, prompts):
    served = serve(folders["plain"], None, block_size=None)
    worker = served.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    model, config = worker.model_runner.model, served.config
    assert type(model) is TheirLlama and type(served.scheduler) is Scheduler and served.engine is None
    attention = [x for x in model.modules() if isinstance(x, Attention)]
    assert {type(x) for x in attention} == {Attention} and attention[0].attn_backend.get_name() == "CPU_ATTN"
    assert {type(x) for x in worker.get_kv_cache_spec().values()} == {FullAttentionSpec}
    managers = served.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert [type(x) for x in managers] == [FullAttentionManager]
    assert config.cache_config.enable_prefix_caching and config.cache_config.block_size == 128
    assert config.scheduler_config.scheduler_cls is None and config.additional_config == {}


@pytest.mark.parametrize(
    ("cache", "given", "message"),
    [
        (WHOLE, {"enable_chunked_prefill": True}, "enable_chunked_prefill must be False with .*reads prompts whole"),
        (PRUNED, {"long_prefill_token_threshold": 64}, "long_prefill_token_threshold must be 0 with .*all of a prompt"),
        ("dense", {"ratio": 2}, "ratio must not be given for 'dense', got 2"),
        ("dense", {"tensor_parallel_size": 2}, "tensor_parallel_size must be 1 with a compressed cache"),
        ("dense", {"scheduling_policy": "priority"}, "scheduling_policy must be 'fcfs'"),
        ("dense", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be 'float32'"),
        ("dense", {"block_size": 48}, "page_size must be a power of two"),
        ("quest", {}, "cache must be one of dense, dmc, gated, pruned, quantized, streaming to be served, got 'quest'"),
        ("dmc", {}, "not converted"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_setting(serve, folders, cache, given, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        serve(folders["plain"], cache, **given)


@pytest.mark.parametrize("cache", ["dense", PRUNED])
def test_seeded_requests_whose_prompts_are_read_in_parts_are_sampled_as_vllm_does(serve, folders, prompts, cache):
    """A CPU's generator cannot be wound back behind a part of a prompt: the engine died of it."""
    sampled = SamplingParams(temperature=1, seed=7, max_tokens=4, detokenize=False, ignore_eos=True)
    given = [prompts[0][:140] + prompts[i][: 9 + i] for i in (1, 2, 3, 4)]  # the third begins as the first two did

    def answers(served):
        found = [served.llm.generate([{"prompt_token_ids": x}], sampled, use_tqdm=False)[0] for x in given]
        return [list(x.outputs[0].token_ids) for x in found]

    served = serve(folders["plain"], cache)
    found = answers(served)
    assert [len(x) for x in found] == [4] * 4 and served.engine.requests.prompts.hits > 0
    if cache == "dense":
        assert found == answers(serve(folders["plain"], None, max_num_batched_tokens=512))


def test_a_prompt_that_comes_in_parts_of_the_clients_own_fails_alone(serve, folders, prompts):
    served = serve(folders["plain"], "dense")
    engine, core = served.llm.llm_engine, served.llm.llm_engine.engine_core.engine_core
    for name, resumable in (("session", True), ("other", False)):
        params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
        made = engine.input_processor.process_inputs(
            name, {"prompt_token_ids": prompts[0][:100]}, params, supported_tasks=engine.get_supported_tasks(),
            resumable=resumable,
        )  # fmt: skip
        core.add_request(*core.preprocess_add_request(made))
    tokens, ended = {"session": [], "other": []}, {}
    while len(ended) < 2:
        for output in [x for some in core.step()[0].values() for x in some.outputs]:
            tokens[output.request_id] += output.new_token_ids
            if output.finished:
                ended[output.request_id] = str(output.finish_reason)
    assert ended["session"] == "error" and tokens["session"] == []
    assert [tokens["other"]] == alone(example("dense"), "dense", [prompts[0][:100]], 12)
    served.engine.settle()
    assert not served.engine.requests.held()


def test_a_converted_model_asks_for_its_own_cache(serve, folders, prompts):
    served = serve(folders["dmc"], None)
    assert served.engine is not None and served.engine.settings.cache == "dmc"
    assert served.generate(prompts[:2], 5)[0] == alone(example("dmc"), "dmc", prompts[:2], 5)


def test_the_benchmark_writes_rows_of_what_was_run(tmp_path):
    program, path = "benchmarks/serving/serving_vllm.py", tmp_path / "rows.json"
    done = subprocess.run([sys.executable, program, "--tiny", "--json", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    shares = [row["share"] for name, row in rows.items() if name.startswith("equal/vllm/")]
    assert len(rows) == 25 and shares == [1.0] * 5


def test_the_benchmark_of_workloads_writes_rows_of_what_was_run(tmp_path):
    program, path = "benchmarks/serving/workloads.py", tmp_path / "rows.json"
    asked = ["--model", EXAMPLE, "--workloads", "bursts", "chat", "--caches", "streaming=streaming,window_size=60"]
    run = [sys.executable, program, "--tiny", *asked, "--memory", str(1 << 26), "--json", path]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    names = [f"{workload}/{name}" for workload in ("bursts", "chat") for name in ("vLLM", "streaming", "vLLM")]
    assert [row["name"] for row in rows] == names
    assert all(row["ratio"] > 0 and row["first"][0] > 0 and row["at_once"] > 0 for row in rows)


@pytest.mark.parametrize("settings", [{"mode": "dms", "dms_window": 5}, {"window": 4}], ids=["dms", "dmc"])
def test_converted_models_of_every_mode(serve, tmp_path, settings):
    model = deciding_model(dmc=settings, head_dim=32, eos_token_id=None)
    model.save_pretrained(tmp_path)
    prompts = [[(7 * i * i + 3 * i * n) % 97 for i in range(1, n)] for n in (90, 33, 150)]
    served = serve(tmp_path, "dmc", max_num_batched_tokens=48)  # prompts in parts
    assert served.generate(prompts, 12)[0] == alone(model, "dmc", prompts, 12)


def test_gated_caches(serve, tmp_path):
    model, cache = tiny_model(), f"gated,gates={tiny_gates_folder()},threshold=0,window=6,num_sink_tokens=2"
    model.save_pretrained(tmp_path)
    prompts = [[(7 * i * i + 3 * i * n) % 97 for i in range(1, n)] for n in (90, 33, 150)]
    served = serve(tmp_path, cache)
    assert served.generate(prompts, 12)[0] == alone(model, cache, prompts, 12)
    assert served.engine.requests.pages_in_use() == 0


def test_a_step_must_have_room_for_what_a_pruner_sees_together(serve, folders):
    given = {"enable_chunked_prefill": True, "max_num_batched_tokens": 128}
    with pytest.raises(ValueError, match=r"max_num_batched_tokens must be at least 131 with .* got 128: a prompt's"):
        serve(folders["plain"], "pruned,pruner=snapkv,window=100,keep=128", **given)
