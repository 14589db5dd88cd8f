"""One engine with one model behind a pipe, in a Python of its own: run by benchmarks/speed/engines.py.

    python engine_program.py '{"engine": "llamacpp", "model": "file.gguf", "longest": 8192, ...}'

Writes a line of JSON when the model is loaded ({"version": ...}) and one for each that it reads: {"ids": [...], "new":
n} is answered with {"prompt_seconds": ..., "token_seconds": [...]}. What it imports is of the standard library, and the
engine.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Found = tuple[float, list[float]]  # seconds to the first token, and of each behind it
Ask = Callable[[list[int], int], Found]


def _between(times: list[float]) -> Found:
    """times: the beginning, then when each token was there."""
    steps = [after - before for before, after in itertools.pairwise(times)]
    return steps[0], steps[1:]


def torch_engine(given: dict[str, Any]) -> tuple[str, Ask]:
    """transformers with DynamicCache (cache: None), or with one of ours, as text."""
    import torch
    import transformers

    import kvcompress

    torch.set_num_threads(given["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=getattr(torch, given["dtype"]))
    model.eval()
    spec = None if given["cache"] is None else kvcompress.CacheSpec.parse(given["cache"])
    if spec is not None:
        kvcompress.attach(model)

    @torch.no_grad()
    def ask(ids: list[int], new: int) -> Found:
        cache: Any = transformers.DynamicCache(config=model.config) if spec is None else spec.make(model.config)
        step, times = torch.tensor([ids]), [time.perf_counter()]
        if spec is not None:
            kvcompress.prefill(model, step, cache)
            step = step[:, -1:]
        for _ in range(new + 1):
            step = model(step, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter())
        return _between(times)

    return f"transformers {transformers.__version__}, torch {torch.__version__}", ask


def vllm_engine(given: dict[str, Any]) -> tuple[str, Ask]:
    """cache: None = vLLM's own."""
    bound = ",".join(map(str, range(given["threads"])))
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
                   "VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_USE_V2_MODEL_RUNNER": "0"}  # fmt: skip
    import vllm

    cache = given["cache"]
    llm = vllm.LLM(
        given["model"], skip_tokenizer_init=True, dtype=given["dtype"], max_model_len=given["longest"],
        max_num_batched_tokens=given["longest"], enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30,
        enable_chunked_prefill=False, disable_log_stats=True,
        additional_config={} if cache is None else {"kvcompress": {"cache": cache}},
    )  # fmt: skip
    engine, asked = llm.llm_engine, iter(range(1 << 30))

    def ask(ids: list[int], new: int) -> Found:
        params = vllm.SamplingParams(temperature=0, max_tokens=new + 1, detokenize=False, ignore_eos=True)
        times = [time.perf_counter()]
        engine.add_request(str(next(asked)), {"prompt_token_ids": ids}, params)
        written = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if len(output.outputs[0].token_ids) > written:
                    written = len(output.outputs[0].token_ids)
                    times.append(time.perf_counter())
        return _between(times)

    return f"vllm {vllm.__version__}", ask


def llamacpp_engine(given: dict[str, Any]) -> tuple[str, Ask]:
    """cache: None = float16, or a type of ggml's."""
    import llama_cpp

    kind = getattr(llama_cpp, f"GGML_TYPE_{(given['cache'] or 'f16').upper()}")
    llm = llama_cpp.Llama(given["model"], n_ctx=given["longest"], n_batch=512, n_threads=given["threads"],
                          n_threads_batch=given["threads"], flash_attn=True, type_k=kind, type_v=kind,
                          verbose=False)  # fmt: skip

    def ask(ids: list[int], new: int) -> Found:
        llm.reset()
        times = [time.perf_counter()]
        llm.eval(ids)
        for _ in range(new + 1):
            token = llm.sample(temp=0.0)
            times.append(time.perf_counter())
            llm.eval([token])
        return _between(times)

    return f"llama-cpp-python {llama_cpp.__version__}", ask


def openvino_engine(given: dict[str, Any]) -> tuple[str, Ask]:
    import numpy as np
    import openvino
    import openvino_genai

    schedule = openvino_genai.SchedulerConfig()
    schedule.enable_prefix_caching = False  # each round reads the same prompts
    schedule.max_num_batched_tokens, schedule.cache_size = given["longest"], 1
    pipe = openvino_genai.LLMPipeline(
        given["model"], "CPU", scheduler_config=schedule, INFERENCE_NUM_THREADS=given["threads"]
    )

    def ask(ids: list[int], new: int) -> Found:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new + 1, True, False
        config.apply_chat_template = False
        prompt = np.array([ids], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        times = [time.perf_counter()]

        class Clock(openvino_genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, token: Any) -> Any:
                for _ in token if isinstance(token, list) else [token]:
                    times.append(time.perf_counter())
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        pipe.generate(inputs, config, Clock())
        return _between(times)

    return f"openvino-genai {openvino_genai.__version__}", ask


ENGINES = {"torch": torch_engine, "vllm": vllm_engine, "llamacpp": llamacpp_engine, "openvino": openvino_engine}


def main() -> None:
    given = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is not an answer
    version, ask = ENGINES[given["engine"]](given)
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt, tokens = ask(asked["ids"], asked["new"])
        print(json.dumps({"prompt_seconds": prompt, "token_seconds": tokens}), file=out, flush=True)


if __name__ == "__main__":
    main()
