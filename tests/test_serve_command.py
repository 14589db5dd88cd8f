"""kvcompress serve: vLLM's command line as it is assembled, what it says, and what is refused before vLLM starts."""

import importlib.util
import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec

import pytest
import torch
from helpers import deciding_model, tiny_gates_folder, tiny_model
from published_gates import hidden_gates_folder
from transformers import Lfm2Config, Qwen2Config
from typer.testing import CliRunner

from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress.caches import graphs, huge
from kvcompress.cli import app
from kvcompress.models import EXAMPLE
from kvcompress.serve.vllm import launch
from kvcompress.serve.vllm.launch import command_of, environment_of
from kvcompress.serve.vllm.passed import Passed

PRUNED = "pruned,pruner=snapkv,window=16,keep=64"
WHOLE = "pruned,pruner=observedattention,keep=64"
SETTINGS = {
    "cache": None,
    "memory": 64 << 20,
    "ratio": None,
    "swap": None,
    "cuda_graphs": False,
    "dtype": "auto",
    "host": "127.0.0.1",
    "port": 8000,
}


def made(model, *passed, **given):
    """(what vLLM loads, its options by name, the lines that are said)"""
    command = command_of(str(model), **{**SETTINGS, **given}, passed=Passed(passed))
    program, options = command.arguments[:4], command.arguments[4:]
    assert program[:3] == [sys.executable, "-m", "kvcompress.serve.vllm.program"]
    names = [i for i, word in enumerate(options) if word.startswith("--")]
    ends = [*names[1:], len(options)]
    assert len({options[i] for i in names}) == len(names)
    return program[3], {options[i]: options[i + 1 : end] for i, end in zip(names, ends, strict=True)}, command.lines


def run(*arguments, **environment):
    """What a command that fails says, in one line."""
    done = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "300", "TERM": "dumb", **environment})
    assert done.exit_code == 2, done.output
    return " ".join(done.output.replace("│", " ").replace("'", "").split())


@pytest.fixture
def with_vllm(monkeypatch):
    """As if vLLM were installed, and a list of what would have been started."""
    find, started = importlib.util.find_spec, []
    monkeypatch.setattr(
        "kvcompress.support.extras.find_spec", lambda name: ModuleSpec(name, None) if name == "vllm" else find(name)
    )
    monkeypatch.setattr(launch, "need_plugin", lambda: None)
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    return started


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    return str(tmp_path)


def test_vllm_is_told_the_cache_the_memory_and_the_length_and_the_rest_is_passed_on():
    folder, options, lines = made("example", "--api-key", "secret", "--max_num_seqs=7", "-O0", cache="dense", port=81)
    assert folder == str(EXAMPLE)
    asked = json.loads(options.pop("--additional-config")[0])
    assert asked == {"kvcompress": {"cache": "dense"}}
    assert options == {
        "--api-key": ["secret"], "--max_num_seqs=7": ["-O0"], "--dtype": ["float32"], "--host": ["127.0.0.1"],
        "--port": ["81"], "--max-model-len": ["2048"], "--kv-cache-memory-bytes": [str(64 << 20)],
        "--served-model-name": ["example"],
    }  # fmt: skip
    assert lines[:2] == [
        "model    example: float32, at most 2,048 tokens of a prompt and its answer",
        "cache    dense: 64.0 MiB, in blocks of 64 tokens",
    ]
    assert lines[3] == "server   vLLM's, at http://127.0.0.1:81"


def test_requests_that_fit_are_counted_as_the_plugin_counts_them(folder):
    block = 2 * 64 * 16 * 4 * 6  # keys and values, slots, head dim, float32, KV heads of all layers
    _, _, lines = made(folder, cache="dense", memory=17 * block)  # one block is never given out
    assert lines[2] == "requests prompts that fit at once: 2 of 512 tokens"
    _, _, lines = made(
        folder, "--block-size", "8", cache="pruned,pruner=snapkv,window=4,keep=8", memory=11 * block // 2
    )
    assert lines[2] == "requests prompts that fit at once: 43 of 512 tokens"
    with pytest.raises(ValueError, match=r"memory must be at least .* \(442368B\) for a request of 512 tokens, got"):
        made(folder, cache="dense", memory=8 * block)


@pytest.mark.parametrize("memory", [8 << 20, None])
def test_a_model_that_takes_images_too_is_served_for_text_alone(tmp_path, memory):
    CONFIGURATIONS["gemma3/multimodal"].config().save_pretrained(tmp_path)
    _, options, lines = made(tmp_path, memory=memory)
    assert options["--language-model-only"] == [] and lines[0].startswith(f"model    {tmp_path}, text alone: bfloat16")
    assert "--language-model-only" not in made(tmp_path, "--language-model-only=true", memory=memory)[1]


@pytest.mark.parametrize(("system", "vllm"), [("linux", 8 << 20), ("darwin", 4 << 20)])
def test_what_a_streaming_cache_keeps_beside_blocks_has_its_half_where_unused_memory_is_not_given_back(
    folder, monkeypatch, system, vllm
):
    monkeypatch.setattr(huge.sys, "platform", system)
    _, options, lines = made(folder, cache="streaming,window_size=71,num_sink_tokens=4", memory=8 << 20)
    assert options["--kv-cache-memory-bytes"] == [str(vllm)] and "8.0 MiB" in lines[1]
    block = 2 * 64 * 16 * 4 * 6
    pages = -(-75 * 6 // 64)  # of 75 slots of all KV heads
    assert lines[2].endswith(f"at once: {(vllm // block - 1) * 6 // pages} of 512 tokens")


def test_models_that_vllm_attends_to_in_chunks_are_refused_by_name(tmp_path):
    config = Qwen2Config(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, intermediate_size=32,
        vocab_size=64, dual_chunk_attention_config={"chunk_size": 64, "local_size": 8},
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dual_chunk_attention_config must be unset in the model's config"):
        made(tmp_path)


def test_prompts_that_are_read_whole_fit_into_a_step(folder):
    _, options, _ = made(folder, cache=PRUNED)
    assert "--no-enable-chunked-prefill" not in options and "--max-num-batched-tokens" not in options
    _, options, _ = made(folder, cache=WHOLE)
    assert options["--no-enable-chunked-prefill"] == [] and options["--max-num-batched-tokens"] == ["512"]
    _, options, _ = made(
        folder, "--max-model-len", "300", "--max-num-batched-tokens=1K",
        "--no-enable-chunked-prefill", cache=WHOLE,
    )  # fmt: skip
    assert options["--max-model-len"] == ["300"] and "--max-num-batched-tokens" not in options


def test_a_pruner_that_asks_behind_prompts_has_its_positions(folder):
    assert made(folder, cache="pruned,keep=64")[1]["--max-model-len"] == ["256"]  # of 512
    assert made(folder, "--max-model-len=100", cache="pruned,keep=64")[1]["--max-model-len=100"] == []
    with pytest.raises(ValueError, match=r"--max-model-len must be at most 256 with .* got 300: the model"):
        made(folder, "--max-model-len=300", cache="pruned,keep=64")


def test_a_long_model_gets_a_length_that_a_step_can_read_whole(tmp_path):
    tiny_model(max_position_embeddings=1 << 17).save_pretrained(tmp_path)
    assert made(tmp_path, cache=WHOLE)[1]["--max-model-len"] == ["32768"]
    assert made(tmp_path, cache=PRUNED)[1]["--max-model-len"] == [str(1 << 17)]
    memory, lengths = 1 << 30, [1024, 8192, 32768]
    _, options, lines = made(tmp_path, memory=memory)
    assert options["--max-model-len"] == [str(1 << 17)]
    fits = ", ".join(f"{(memory // 49152 - 1) // (tokens // 64):,} of {tokens:,} tokens" for tokens in lengths)
    assert lines[2] == f"requests prompts that fit at once: {fits}"


def test_a_converted_model_has_its_own_cache(tmp_path):
    deciding_model().save_pretrained(tmp_path)
    _, options, lines = made(tmp_path, ratio=4.0, swap="0")
    asked = json.loads(options["--additional-config"][0])
    assert asked == {"kvcompress": {"cache": "dmc", "ratio": 4.0, "swap": "0"}}
    with pytest.raises(ValueError, match=r"swap must be bytes, such as 1GiB, or 0 .*, got the text 'much'"):
        made(tmp_path, swap="much")
    assert lines[2].startswith("requests prompts that fit at once where 4 tokens share a slot: ")


def test_gates_are_expected_to_keep_what_they_are_asked_to():
    gates = f"gated,gates={tiny_gates_folder()}"
    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
        for cache, ratio, tokens in (
            (f"{gates},keep=1/4", None, "4"),
            (f"{gates},keep=1/4", 2.0, "2"),
            (f"{gates},threshold=-3", None, None),
        ):
            _, options, lines = made(folder, cache=cache, ratio=ratio)
            where = "" if tokens is None else f" where {tokens} tokens share a slot"
            assert lines[2].startswith(f"requests prompts that fit at once{where}: ")


def test_who_listens_to_others_without_a_key_is_told(folder, monkeypatch):
    told = "warning  without --api-key whoever reaches this address is answered"
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert made(folder, host="0.0.0.0")[2][-1] == told
    assert made(folder)[2][-1] != told and made(folder, "--api-key", "secret", host="0.0.0.0")[2][-1] != told
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert made(folder, host="0.0.0.0")[2][-1] != told


def test_memory_that_is_not_given_is_a_share_of_what_is_free_beside_the_weights(folder, monkeypatch):
    weights = sum(x.numel() for x in tiny_model().parameters()) * 4
    monkeypatch.setattr(launch, "free_node_nbytes", lambda: weights + (20 << 20))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert made(folder, memory=None)[1]["--kv-cache-memory-bytes"] == [str(10 << 20)]


def test_additional_config_of_others_stays(folder):
    _, options, _ = made(folder, "--additional-config", '{"other": 1}', "--seed", "3")
    assert json.loads(options["--additional-config"][0]).keys() == {"other", "kvcompress"}
    assert options["--seed"] == ["3"]


def test_the_environment_lets_vllm_find_the_plugin():
    assert environment_of({"A": "b"}) == {"A": "b"}
    assert environment_of({"VLLM_PLUGINS": "a,b"})["VLLM_PLUGINS"] == "a,b,kvcompress"
    assert environment_of({"VLLM_PLUGINS": ""})["VLLM_PLUGINS"] == "kvcompress"
    assert environment_of({"VLLM_PLUGINS": "kvcompress"})["VLLM_PLUGINS"] == "kvcompress"


def test_the_command_becomes_vllms(with_vllm, folder):
    given = ["--model", folder, "--memory", "8MiB", "--max-num-seqs", "4", "--served-model-name", "mine"]
    done = CliRunner().invoke(app, ["serve", *given], env={"VLLM_PLUGINS": ""})
    assert done.exit_code == 0, done.output
    ((program, arguments, environment),) = with_vllm
    assert program == sys.executable and environment["VLLM_PLUGINS"] == "kvcompress"
    assert arguments[3:8] == [folder, "--max-num-seqs", "4", "--served-model-name", "mine"]
    assert arguments.count("--served-model-name") == 1 and "requests prompts that fit at once" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "8GB?"), "--memory: memory must be bytes, such as 8GiB (units: B, KB, MB, GB, TB, KiB, MiB, "
         "GiB, TiB)"),
        (("--memory", "0B"), "--memory: memory must be at least 1, got 0"),
        (("--cache", "prund"), "--cache: cache must be one of dense"),
        (("--dtype", "half"), "--dtype: dtype must be one of float32, bfloat16, float16, auto, got half"),
        (("--ratio", "0.5"), "--ratio"),
        (("--port", "65536"), "--port"),
        (("--cache=dense", "--cache", "dmc"), "--cache: must be given once, got dense and dmc"),
        (("smollm2",), "--model: model must be given as --model, got smollm2 by itself"),
        (("--kv_cache_memory_bytes", "9"), "--kv-cache-memory-bytes must not be given to kvcompress serve: give --m"),
        (("--num-gpu-blocks-override=9",), "--num-gpu-blocks-override must not be given to kvcompress serve: give"),
        (("--config", "x.yaml"), "--config must not be given to kvcompress serve: give its options on the"),
        (("--additional-config.a", "1"), "--additional-config.a must be a part of --additional-config, which is"),
    ],
)  # fmt: skip
def test_options_that_are_wrong_are_refused_whether_vllm_is_there_or_not(arguments, message):
    assert message in run(*arguments)


def test_memory_that_the_environment_says_is_refused():
    assert "VLLM_CPU_KVCACHE_SPACE must not be set beside --memory, got 4" in run(VLLM_CPU_KVCACHE_SPACE="4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cache", "quest"), "--cache: cache must be one of dense, dmc, gated, pruned, quantized, streaming to be"),
        (("--cache", "dmc"), "not converted"),
        (("--cache", "pruned,pruner=kvzip,keep=0.5"), "pruner must not read prompts twice"),
        (("--cache", "pruned,pruner=criticalkv:tova,keep=8"), "pruner must not ask for the output projections under"),
        (("--cache", f"gated,gates={hidden_gates_folder()},threshold=0"), "gates must look at queries under vLLM"),
        (("--cache", PRUNED + ",page_size=8"), "page_size must not be given for a cache that is served"),
        (("--memory", "1KiB"), "--memory: memory must be at least 432.0 KiB (442368B) for a request of 512 tokens"),
        (("--memory", "900TiB"), "--memory: memory must be at most"),
        (("--cache", "dense", "--ratio", "4"), "--ratio: ratio must not be given for dense, got 4: how much stays is"),
        (("--cache", "quantized,dtype=int5"), "--cache: dtype must be int8, k8v4 or None"),
        (("--cache", WHOLE, "--enable-chunked-prefill"), "--enable-chunked-prefill must not be given with pruned"),
        (("--cache", WHOLE, "--max-num-batched-tokens", "99"), "--max-num-batched-tokens must be at least --max-"),
        (("--max-model-len", "auto"), "--max-model-len must be a number of tokens, such as 8192 or 8K, got auto"),
        (("--max-model-len", "9", "--max_model_len=8"), "--max-model-len must be given once, got 9 and 8"),
        (("--max-model-len", "--seed", "3"), "--max-model-len must have a value, got none"),
        (("--block-size", "48"), "page_size must be a power of two"),
        (("--additional-config", "[1]"), "--additional-config must be a JSON object, got [1]"),
        (("--additional-config", '{"kvcompress": {}}'), "--additional-config must not have kvcompress, which"),
    ],
)  # fmt: skip
def test_what_the_plugin_would_refuse_is_refused_before_vllm_starts(with_vllm, folder, arguments, message):
    assert message in run("--model", folder, *arguments) and not with_vllm


def test_models_that_cannot_be_are_named(with_vllm, tmp_path):
    Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]).save_pretrained(tmp_path)
    message = "--swap: swap must be 0 or None for a model with recurrent layers, whose states vLLM does not keep"
    assert message in run("--model", str(tmp_path), "--swap", "1MiB")
    assert "--model: model must be a folder or a name on the Hub, got ./no/where" in run("--model", "./no/where")
    assert not with_vllm


def test_without_vllm_or_the_plugin_the_line_that_installs_it_is_said(monkeypatch, folder):
    monkeypatch.setattr("kvcompress.support.extras.find_spec", lambda name: None)
    needed = "kvcompress serve needs vllm, of the extra vllm: pip install kvcompress[vllm]"
    assert needed in run("--model", folder, "--memory", "1GiB")
    monkeypatch.setattr("kvcompress.support.extras.find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(launch, "entry_points", lambda **given: ())
    assert "kvcompress serve needs kvcompress to be installed, not only found: pip install kvcompress" in run()


def test_recorded_steps_need_a_gpu(monkeypatch):
    with pytest.raises(ValueError, match="model must be on a CUDA device, got cpu"):
        made(EXAMPLE, cuda_graphs=True)
    monkeypatch.setattr(graphs, "record", lambda *_: None)
    asked = json.loads(made(EXAMPLE, cuda_graphs=True)[1]["--additional-config"][0])
    assert asked == {"kvcompress": {"cache": "dense", "cuda_graphs": True}}
