"""What a user of a small model could take instead, on a CPU: whole-model times of engines, side by side.

    python benchmarks/speed/engines.py [--quick] [--json FILE] [--vllm-python FILE] [--openvino-python FILE]
                                       [--llamacpp-python FILE]

SmolLM2-135M-Instruct reads a prompt of 256, 2,000 and 7,000 tokens of an English book and writes 32 tokens behind it,
greedily, one sequence at a time. Each engine is a process of its own with the model loaded, and waits while others run;
they take turns in an order of their own each round.

prompt/<engine>/T<T>  seconds to the first token, median of rounds
token/<engine>/T<T>   a token behind it: median over the tokens of all rounds
growth/<engine>       of a token's time per 1,000 tokens of context, from the shortest to the longest prompt

transformers   with DynamicCache and SDPA
ours           attached; all kept (a PrunedCache that keeps everything), in int8 and k8v4 (QuantizedCache), a quarter
               (SnapKV), streaming (4 and 1,020)
vllm           its CPU build, its own cache and the plugin's quarter, compiled where that works
openvino       OpenVINO GenAI on the GGUF as it is: 4-bit weights, 8-bit cache
llamacpp       llama.cpp on the same GGUF, flash attention, a cache in float16; in its q8_0 and q4_0

The first two hold weights in bfloat16, as vLLM does. The other engines are measured where a Python is named that has
them: pip install openvino-genai, or llama-cpp-python, or `make .venv-vllm/installed`.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.books import books_of
from kvcompress import CacheSpec
from kvcompress.evaluate.texts import Library
from kvcompress.models import EXAMPLE
from kvcompress.support.smollm2 import gguf_file, smollm2_folder

PROGRAM = Path(__file__).with_name("parts") / "engine_program.py"
KEPT = "pruned,pruner=streamingllm,keep=1000000"
QUARTER = "pruned,pruner=snapkv,keep=0.25"
TORCH: dict[str, str | None] = {
    "transformers": None, "ours, all kept": KEPT, "ours, int8": "quantized,dtype=int8",
    "ours, k8v4": "quantized,dtype=k8v4", "ours, a quarter": QUARTER, "ours, streaming": "streaming,window_size=1020",
}  # fmt: skip
VLLM: dict[str, str | None] = {"vllm": None, "vllm, a quarter": QUARTER}
LLAMACPP: dict[str, str | None] = {"llamacpp": None, "llamacpp, q8_0": "q8_0", "llamacpp, q4_0": "q4_0"}


@dataclass(frozen=True)
class Size:
    lengths: tuple[int, ...] = (256, 2000, 7000)
    new: int = 32
    rounds: int = 3


TINY = ("transformers", "ours, a quarter")  # each is a process

SIZES = {"full": Size(), "quick": Size((256, 1000), 8, 2), "tiny": Size((96, 200), 2, 1)}


class Engine:
    """A process that has one loaded."""

    def __init__(self, name: str, python: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process
        self.version = self._answer()["version"]

    def ask(self, ids: list[int], new: int) -> tuple[float, list[float]]:
        assert self._process.stdin is not None
        print(json.dumps({"ids": ids, "new": new}), file=self._process.stdin, flush=True)
        found = self._answer()
        return found["prompt_seconds"], found["token_seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}; its own words are above")
        return dict(json.loads(line))


@contextmanager
def running(name: str, python: str, given: dict[str, Any]) -> Iterator[Engine]:
    with subprocess.Popen([python, str(PROGRAM), json.dumps(given)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:  # fmt: skip
        try:
            yield Engine(name, python, process)
        finally:
            process.kill()


def engines(choice: Any, threads: int, longest: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, Python and what its program is given, of each."""
    tiny = choice.size == "tiny"
    folder = str(EXAMPLE if tiny else smollm2_folder("model"))
    shared = {"threads": threads, "longest": longest, "dtype": "float32" if tiny else "bfloat16"}
    for cache in (*TORCH.values(), *VLLM.values()):
        if cache is not None:
            CacheSpec.parse(cache)
    found = [(name, sys.executable, {"engine": "torch", "model": folder, "cache": cache, **shared})
             for name, cache in TORCH.items() if not tiny or name in TINY]  # fmt: skip
    if choice.vllm_python is not None:
        found += [(name, str(choice.vllm_python), {"engine": "vllm", "model": folder, "cache": cache, **shared})
                  for name, cache in VLLM.items()]  # fmt: skip
    gguf = None if tiny else str(gguf_file("model"))
    if choice.openvino_python is not None:
        found.append(("openvino", str(choice.openvino_python), {"engine": "openvino", "model": gguf, **shared}))
    if choice.llamacpp_python is not None:
        found += [(name, str(choice.llamacpp_python), {"engine": "llamacpp", "model": gguf, "cache": cache, **shared})
                  for name, cache in LLAMACPP.items()]  # fmt: skip
    return found


def text_of(size: str) -> list[int]:
    """Tokens of a book; --tiny reads the standard library's source."""
    _, tokenizer = load("example" if size == "tiny" else "smollm2", "cpu")
    text = Library().text if size == "tiny" else next(iter(books_of("report")))[1]
    return list(tokenizer(text[: 1 << 17], add_special_tokens=False).input_ids)


def main() -> None:
    parse = parser(__doc__)
    for name in ("vllm", "openvino", "llamacpp"):
        parse.add_argument(f"--{name}-python", type=Path, help="a Python that has it (default: it is left out)")
    choice = parse_arguments(parse)
    size, order = SIZES[choice.size], random.Random(0)
    ids, longest = text_of(choice.size), -(-(max(size.lengths) + size.new + 8) // 64) * 64
    prompts: dict[tuple[str, int], list[float]] = {}
    tokens: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        started = [stack.enter_context(running(*given)) for given in engines(choice, torch.get_num_threads(), longest)]
        for engine in started:
            engine.ask(ids[: min(size.lengths)], 2)
        for length in size.lengths:
            for round in range(size.rounds):
                for engine in order.sample(started, len(started)):
                    print(f"{length:,} tokens, round {round + 1}: {engine.name}", file=sys.stderr)
                    prompt, written = engine.ask(ids[:length], size.new)
                    prompts.setdefault((engine.name, length), []).append(prompt)
                    tokens.setdefault((engine.name, length), []).extend(written)
        versions = {engine.name: engine.version for engine in started}
    rows, lines = [], []
    first, last = min(size.lengths), max(size.lengths)
    for name in versions:
        prompt = {length: statistics.median(prompts[name, length]) for length in size.lengths}
        token = {length: statistics.median(tokens[name, length]) for length in size.lengths}
        growth = 1000 * (token[last] - token[first]) / (last - first)
        for length in size.lengths:
            rows.append({"name": f"prompt/{name}/T{length}", "seconds": prompt[length]})
            rows.append({"name": f"token/{name}/T{length}", "seconds": token[length]})
        rows.append({"name": f"growth/{name}", "seconds_per_1000_tokens": growth})
        lines.append((name, *(f"{x:.2f}" for x in prompt.values()), *(f"{1e3 * x:.1f}" for x in token.values()),
                      f"{1e3 * growth:.2f}"))  # fmt: skip
    heads = [f"prompt {length:,}, s" for length in size.lengths] + [f"token {length:,}, ms" for length in size.lengths]
    print_table("engines", ("engine", *heads, "ms per 1,000"), lines, left=("engine",))
    if choice.json is not None:
        write_json(choice.json, rows, versions=versions, size=asdict(size))


if __name__ == "__main__":
    main()
