"""Requests through vLLM with compressed caches, against vLLM's own. Needs the environment of make test-vllm.

    .venv-vllm/bin/python benchmarks/serving/serving_vllm.py [--quick] [--caches NAME ...] [--json FILE]

Prompts and lengths are drawn once from a seed; all requests come at once. Every cache has the same number of vLLM's
blocks; what streaming keeps beside them is counted as blocks too. Rows: equal/vllm/CACHE (share of requests whose
greedy tokens are those of model.generate alone), concurrency/CACHE (ratio of requests at once, to vLLM's dense),
throughput/CACHE (ratio of tokens/s at saturation to vLLM's dense), decoding/CACHE (16 requests at once in memory for
all: ratio of decoded tokens/s to vLLM's dense, medians of alternating runs), pages/CACHE (used: the largest share of
all pages that were in use at once; all are free at the end, or the benchmark fails).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import parse_arguments, parser, print_table, write_json
from benchmarks.serving.serving import CACHES, SIZES, Size, alone, drawn, model_for, text_of
from kvcompress.serve.vllm import register
from kvcompress.serve.vllm.engine import ENGINES

RUNS, AT_ONCE = 3, 16


class Engine:
    """A vLLM engine. cache: None = vLLM's own."""

    def __init__(self, folder: str, cache: str | None, blocks: int, size: Size) -> None:
        longest = -(-(size.longest + size.new) // size.page_size) * size.page_size
        whole = cache is not None and cache.startswith("pruned")
        self.llm = LLM(
            folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=longest,
            max_num_seqs=64, block_size=size.page_size, num_gpu_blocks_override=blocks, kv_cache_memory_bytes=1 << 30,
            max_num_batched_tokens=max(size.batch_tokens, longest), enable_chunked_prefill=not whole,
            enable_prefix_caching=False, disable_log_stats=True,
            additional_config={} if cache is None else {"kvcompress": {"cache": cache}},
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.served = ENGINES.get(self.engine.vllm_config.instance_id)

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, int, float]:
        """(tokens, seconds, most at once, seconds of the steps in which all decode)."""
        params = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        found: dict[int, list[int]] = {}
        most, decoding, begun = 0, 0.0, time.perf_counter()
        while self.engine.has_unfinished_requests():
            running = self.scheduler.running
            all_decode = len(running) == len(prompts) and all(x.num_output_tokens for x in running)
            start = time.perf_counter()
            for output in self.engine.step():
                if output.finished:
                    found[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
            decoding += (time.perf_counter() - start) * all_decode
            most = max(most, len(self.scheduler.running))
        return [found[i] for i in range(len(prompts))], time.perf_counter() - begun, most, decoding

    def close(self) -> None:
        self.engine.engine_core.shutdown()


@contextlib.contextmanager
def saved(spec: str):  # type: ignore[no-untyped-def]
    """(folder, model) of what a cache is for."""
    model = model_for(spec)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield folder, model


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES), help="all by default")
    choice = parse_arguments(parse)
    size = SIZES[choice.size]
    # vLLM's CPU attention takes pages of multiples of 32; 16 requests decode together once all prompts are read
    size = replace(size, page_size=32, new=max(size.new, 24))
    register()
    prompts, _ = drawn(size)
    blocks = size.at_once * -(-(size.longest + size.new) // size.page_size) + 1  # one that vLLM never gives out
    many = AT_ONCE * (blocks - 1) // size.at_once + 1
    together = [prompts[i % len(prompts)] for i in range(AT_ONCE)]
    written = size.requests * size.new
    results: list[dict[str, Any]] = []
    lines = []
    with saved("dense") as (folder, _):
        own = Engine(folder, None, blocks, size)
        own.run(prompts[:1], size.new)  # what is made once
        _, own_seconds, own_most, _ = own.run(prompts, size.new)
        own.close()
        own_many = Engine(folder, None, many, size)
        for name in choice.caches:
            spec = text_of(name, size)
            with saved(spec) as (own_folder, model):
                with kvcompress.attach(model):
                    wanted = [alone(model, spec, prompt, size.new) for prompt in prompts]
                del model
                ours = Engine(own_folder, spec, blocks, size)
                ours.run(prompts[:1], size.new)
                found, seconds, most, _ = ours.run(prompts, size.new)
                served = ours.served
                assert served is not None
                if left := served.requests.pages_in_use():
                    raise RuntimeError(f"{left} pages are still in use after the last request with {spec}")
                ours.close()
                ours_many, times = Engine(own_folder, spec, many, size), []
                for _ in range(RUNS):
                    times.append((own_many.run(together, size.new)[3], ours_many.run(together, size.new)[3]))
                ours_many.close()
            same = sum(a == b for a, b in zip(found, wanted, strict=True)) / size.requests
            decoding = statistics.median(theirs for theirs, _ in times) / statistics.median(mine for _, mine in times)
            used = served.peak_pages / served.requests.pages
            more = {"cache": spec, "blocks": blocks, "requests": size.requests}
            results += [
                {"name": f"equal/vllm/{name}", "share": same, **more},
                {"name": f"concurrency/{name}", "ratio": most / own_most, "at_once": most, **more},
                {
                    "name": f"throughput/{name}", "ratio": own_seconds / seconds,
                    "tokens_per_second": written / seconds, "own_tokens_per_second": written / own_seconds, **more,
                },
                {"name": f"decoding/{name}", "ratio": decoding, "at_once": AT_ONCE, **more},
                {"name": f"pages/{name}", "used": used, "preempted": served.preempted, **more},
            ]  # fmt: skip
            row = (
                f"{most}",
                f"{most / own_most:.2f}",
                f"{own_seconds / seconds:.2f}",
                f"{decoding:.2f}",
                f"{used:.2f}",
            )
            lines.append((name, f"{same:.3f}", *row, f"{served.preempted}"))
            if choice.json is not None:  # what is known so far
                write_json(choice.json, results)
        own_many.close()
    columns = ("cache", "equal", "at once", "to dense", "tokens/s to dense", "decoding 16", "pages used", "preempted")
    title = f"{size.requests} requests, {blocks} blocks; own {written / own_seconds:.1f} tokens/s"
    print_table(title, columns, lines, left=("cache",))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
