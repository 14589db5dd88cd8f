"""Requests through vLLM with compressed caches, against vLLM's own. Needs the environment of make test-vllm.

    .venv-vllm/bin/python benchmarks/serving/serving_vllm.py [--quick] [--shared] [--caches NAME ...] [--json FILE]

Prompts and lengths are drawn once from a seed; all requests come at once. Every cache has the same number of vLLM's
blocks; what streaming keeps beside them is counted as blocks too. Rows: equal/vllm/CACHE (share of requests whose
greedy tokens are those of model.generate alone), concurrency/CACHE (ratio of requests at once, to vLLM's dense),
throughput/CACHE (ratio of tokens/s at saturation to vLLM's dense), decoding/CACHE (16 requests at once in memory for
all: ratio of decoded tokens/s to vLLM's dense, medians of alternating runs), pages/CACHE (used: the largest share of
all pages that were in use at once; all are free at the end, or the benchmark fails). --shared: four fifths of every
prompt are the same text, and prefixes are shared on both sides; rows shared/..., none of decoding.
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
        longest = -(-(size.longest + size.longest_answer) // size.page_size) * size.page_size
        self.llm = LLM(
            folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=longest,
            max_num_seqs=64, block_size=size.page_size, num_gpu_blocks_override=blocks, kv_cache_memory_bytes=1 << 30,
            max_num_batched_tokens=max(size.batch_tokens, longest), enable_prefix_caching=size.shared > 0,
            disable_log_stats=True,
            additional_config={} if cache is None else {"kvcompress": {"cache": cache}},
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.served = ENGINES.get(self.engine.vllm_config.instance_id)

    def run(self, prompts: list[list[int]], news: list[int]) -> tuple[list[list[int]], float, int, float]:
        """(tokens, seconds, most at once, seconds of the steps in which all decode)."""
        for i, (prompt, new) in enumerate(zip(prompts, news, strict=True)):
            params = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
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
    parse.add_argument("--shared", action="store_true", help="prompts that begin alike")
    choice = parse_arguments(parse)
    size = SIZES[choice.size]
    # vLLM's CPU attention takes pages of multiples of 32; 16 requests decode together once all prompts are read
    size = replace(size, page_size=32, new=max(size.new, 24))
    size = size.sharing() if choice.shared else size
    register()
    prompts, _, news = drawn(size)
    blocks = (
        size.at_once * -(-(size.longest + size.longest_answer) // size.page_size) + 1
    )  # one that vLLM never gives out
    many = AT_ONCE * (blocks - 1) // size.at_once + 1
    together = [prompts[i % len(prompts)] for i in range(AT_ONCE)]
    written, same_new = sum(news), [size.new] * AT_ONCE
    results: list[dict[str, Any]] = []
    lines = []
    with saved("dense") as (folder, _):
        own = Engine(folder, None, blocks, size)
        own.run(prompts[:1], news[:1])  # what is made once
        own.llm.reset_prefix_cache()
        _, own_seconds, own_most, _ = own.run(prompts, news)
        own.close()
        own_many = Engine(folder, None, many, size)
        for name in choice.caches:
            spec = text_of(name, size)
            with saved(spec) as (own_folder, model):
                with kvcompress.attach(model):
                    wanted = [alone(model, spec, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
                del model
                ours = Engine(own_folder, spec, blocks, size)
                ours.run(prompts[:1], news[:1])
                ours.llm.reset_prefix_cache()
                found, seconds, most, _ = ours.run(prompts, news)
                served = ours.served
                assert served is not None
                if left := served.requests.pages_in_use():
                    raise RuntimeError(f"{left} pages are still in use after the last request with {spec}")
                ours.close()
                ours_many, times = Engine(own_folder, spec, many, size), []
                for _ in range(RUNS if not size.shared else 0):
                    times.append((own_many.run(together, same_new)[3], ours_many.run(together, same_new)[3]))
                ours_many.close()
            same = sum(a == b for a, b in zip(found, wanted, strict=True)) / size.requests
            theirs, mine = (statistics.median(x) for x in zip(*times, strict=True)) if times else (0.0, 1.0)
            decoding = theirs / mine
            used = served.peak_pages / served.requests.pages
            more = {"cache": spec, "blocks": blocks, "requests": size.requests}
            rows = [
                {"name": f"equal/vllm/{name}", "share": same, **more},
                {"name": f"concurrency/{name}", "ratio": most / own_most, "at_once": most, **more},
                {
                    "name": f"throughput/{name}", "ratio": own_seconds / seconds,
                    "tokens_per_second": written / seconds, "own_tokens_per_second": written / own_seconds, **more,
                },
                {"name": f"decoding/{name}", "ratio": decoding, "at_once": AT_ONCE, **more},
                {"name": f"pages/{name}", "used": used, "preempted": served.preempted,
                 "not_read": served.requests.prompts.hits, **more},
            ]  # fmt: skip
            if size.shared:
                rows = [row | {"name": f"shared/{row['name']}"} for row in rows if "decoding" not in row["name"]]
            results += rows
            row = (
                f"{most}",
                f"{most / own_most:.2f}",
                f"{own_seconds / seconds:.2f}",
                f"{decoding:.2f}" if times else "",
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
