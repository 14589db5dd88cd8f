"""Requests through transformers' continuous batching with compressed caches, against its own.

    python benchmarks/serving/serving.py [--quick] [--shared] [--rows PATTERN ...] [--json FILE]

Arrivals and lengths are drawn once from a seed. Every cache has the same memory: pages and, of each request that may
run at once, what it keeps beside them. Rows: equal/transformers/CACHE (share of requests whose greedy tokens are those
of model.generate alone), concurrency/CACHE (ratio of requests at once, to dense), throughput/CACHE (ratio of tokens/s
to transformers' own continuous batching of the plain model), pages/CACHE (used: the largest share of all pages that
were in use at once; all are free at the end, or the benchmark fails). --rows runs what these patterns need, such as
"*/dmc" or "equal/*"; --shared: four fifths of every prompt are the same text, and prefixes are shared on both sides
(rows shared/...); a cache's rows are printed, and the file is written, as soon as they are known. Gates are fitted
to the model first.
"""

from __future__ import annotations

import argparse
import atexit
import fnmatch
import functools
import math
import random
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import parse_arguments, parser, print_table, write_json
from kvcompress import CacheSpec
from kvcompress.gates import fit_gates
from kvcompress.models.text import held_out_text, training_text
from kvcompress.pruners import KVzip
from kvcompress.serve import batching

CACHES = {
    "dense": "dense",
    "dmc": "dmc",
    "gated": "gated,gates={gates},keep=1/8",
    "pruned": "pruned,pruner=snapkv,window={window},keep={keep}",
    "streaming": "streaming,window_size={keep},num_sink_tokens=4",
}
TEXTS, LEARNED = 24, 768  # that gates are fitted to, and tokens of each
ROWS = ("equal/transformers", "concurrency", "throughput", "pages")
COLUMNS = ("cache", "equal", "at once", "to dense", "tokens/s", "to transformers' own", "pages used", "preempted")


@dataclass(frozen=True)
class Size:
    """requests, their prompts' tokens at least and at most, tokens that each writes. at_once: dense requests that the
    memory holds. gap: mean seconds between arrivals. batch_tokens: of a pass. keep: tokens per KV head of the caches
    that have one; window: of queries that choose them. most_new: tokens that each writes at most, 0 = new.
    shared: first tokens of every prompt, which are the same."""

    requests: int
    shortest: int
    longest: int
    new: int
    at_once: int
    gap: float
    batch_tokens: int
    keep: int = 192
    window: int = 64
    page_size: int = 32
    most_new: int = 0
    shared: int = 0

    def sharing(self) -> Size:
        """The same with prompts that begin alike, and answers of any length."""
        long, part = self.longest * 25 // 23, self.longest // 46  # 1,250 of 1,150
        return replace(self, shortest=long - part, longest=long + part, most_new=self.new * 6, shared=long * 4 // 5)

    @property
    def longest_answer(self) -> int:
        return max(self.new, self.most_new)


SIZES = {
    "full": Size(200, 950, 1150, 32, 4, 0.02, 2048),
    "quick": Size(20, 450, 550, 24, 4, 0.005, 1024),
    "tiny": Size(4, 40, 60, 3, 2, 0.0, 128, 16, 4, 8),
}


def drawn(size: Size) -> tuple[list[list[int]], list[float], list[int]]:
    """(prompts, seconds at which they arrive, tokens that each writes)."""
    draw, text, at = random.Random(0), held_out_text(), 0.0
    prompts, arrivals, news = [], [], []
    for _ in range(size.requests):
        start, length = draw.randrange(len(text) - size.longest), draw.randint(size.shortest, size.longest)
        prompts.append(list(text[: size.shared]) + list(text[start : start + length - size.shared]))
        news.append(draw.randint(size.new, size.most_new) if size.most_new else size.new)
        at += draw.expovariate(1 / size.gap) if size.gap else 0.0
        arrivals.append(at)
    return prompts, arrivals, news


def model_for(spec: str) -> Any:
    return kvcompress.load_example_model(retrofit="dmc" if spec.startswith("dmc") else None)[0]


@functools.cache
def gates_folder() -> str:
    """Of gates for the shipped model, fitted once a run to texts that it was trained on."""
    model, tokenizer = kvcompress.load_example_model()
    text = training_text(np.random.default_rng(0))
    starts = range(0, len(text) - LEARNED, len(text) // TEXTS)
    texts = [torch.tensor(list(text[start : start + LEARNED])) for start in starts]
    folder = Path(tempfile.mkdtemp(), "gates")
    atexit.register(shutil.rmtree, folder.parent)
    return str(fit_gates(model, texts, KVzip(mass=True).with_tokenizer(tokenizer)).save(folder))


def text_of(name: str, size: Size) -> str:
    """A cache as text."""
    pattern = CACHES[name]
    gates = gates_folder() if "{gates}" in pattern else None
    return pattern.format(keep=size.keep, window=size.window, gates=gates)


def greedy(new: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)


def timed(model: Any, config: ContinuousBatchingConfig, prompts: Any, arrivals: Any, news: Any) -> tuple[Any, float]:
    """(tokens of every request, seconds)."""
    manager = model.init_continuous_batching(generation_config=greedy(max(news)), continuous_batching_config=config)
    manager.start()
    names, found = [f"request {i}" for i in range(len(prompts))], {}
    begun = time.perf_counter()

    def feed() -> None:
        for name, prompt, at, new in zip(names, prompts, arrivals, news, strict=True):
            time.sleep(max(begun + at - time.perf_counter(), 0))
            manager.add_request(prompt, request_id=name, max_new_tokens=new, eos_token_id=-1)

    feeder = threading.Thread(target=feed)
    feeder.start()
    while len(found) < len(names) and manager.is_running():
        result = manager.get_result(timeout=1)
        if result is not None:
            if result.error:
                raise RuntimeError(result.error)
            found[result.request_id] = result.generated_tokens
    seconds = time.perf_counter() - begun
    feeder.join()
    manager.stop()
    manager.destroy()
    return [found[name] for name in names], seconds


def alone(model: Any, spec: str, prompt: list[int], new: int) -> list[int]:
    """What model.generate writes."""
    cache, ids = CacheSpec.parse(spec).make(model.config), torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def beside_nbytes(model: Any, spec: str, prompt: list[int]) -> int:
    """What the cache of a request keeps beside pages once its prompt is read."""
    cache, ids = CacheSpec.parse(spec).make(model.config), torch.tensor([prompt])
    with torch.no_grad():
        model(ids, past_key_values=cache)
    beside = 0
    for layer in getattr(cache, "own", ()):
        pool = getattr(layer, "pool", None)
        beside += layer.nbytes() - (0 if pool is None else pool.nbytes())
    return beside


class Comparison:
    """All caches over the same requests and memory. wanted: whether a row of this name is asked for."""

    def __init__(self, size: Size, wanted: Any) -> None:
        self.size, self.wanted = size, wanted
        self.prompts, self.arrivals, self.news = drawn(size)
        plain = model_for("dense")
        rows = plain.config.num_hidden_layers * plain.config.num_key_value_heads
        self.page_nbytes = 2 * size.page_size * plain.config.head_dim * plain.dtype.itemsize
        dense_pages = size.at_once * rows * math.ceil((size.longest + size.longest_answer) / size.page_size)
        self.memory, self.written = dense_pages * self.page_nbytes, sum(self.news)
        self.at_once: dict[str, float] = {}
        self.own_seconds: float | None = None
        if any(wanted(f"throughput/{name}") for name in CACHES):
            own = ContinuousBatchingConfig(
                num_blocks=dense_pages // rows, page_size=size.page_size, max_batch_tokens=size.batch_tokens,
                max_requests_per_batch=64,
            )  # fmt: skip
            _, self.own_seconds = timed(plain, own, self.prompts, self.arrivals, self.news)
            said("transformers' own", self.own_seconds)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a cache that are asked for."""
        size, spec = self.size, text_of(name, self.size)
        model = model_for(spec)
        with kvcompress.attach(model):
            # what lies beside pages does not depend on a prompt that is longer than any window
            beside = beside_nbytes(model, spec, self.prompts[0])
        # all that streaming holds lies beside pages; what others hold there takes half of the memory at most
        most = self.memory // (beside if name == "streaming" else max(2 * beside, 1))
        prefixes = 0 if name == "pruned" or not size.shared else min(4, most // 3)
        requests = min(64, size.requests, most - prefixes)
        pages = max((self.memory - (requests + prefixes) * beside) // self.page_nbytes, 1)
        with batching(
            model, spec, pages=pages, page_size=size.page_size, requests=requests, batch_tokens=size.batch_tokens,
            prefixes=prefixes,
        ) as serving:  # fmt: skip
            found, seconds = timed(model, ContinuousBatchingConfig(), self.prompts, self.arrivals, self.news)
            metrics, left = serving.metrics(), serving.served.pages_in_use()
        said(f"{name}, served", seconds)
        if left:
            raise RuntimeError(f"{left} pages are still in use after the last request with {spec}")
        self.at_once[name] = metrics["peak_running"]
        results: list[dict[str, Any]] = [
            {"name": f"pages/{name}", "used": metrics["peak_pages"] / pages, "pages": pages,
             "preempted": metrics["preempted"], "not_read": metrics["prefix_tokens"]},
            {"name": f"concurrency/{name}", "ratio": self.at_once[name] / self.at_once.get("dense", math.nan),
             "at_once": self.at_once[name]},
        ]  # fmt: skip
        if self.own_seconds is not None:
            results.append(
                {"name": f"throughput/{name}", "ratio": self.own_seconds / seconds,
                 "tokens_per_second": self.written / seconds, "own_tokens_per_second": self.written / self.own_seconds}
            )  # fmt: skip
        if self.wanted(f"equal/transformers/{name}"):
            begun = time.perf_counter()
            with kvcompress.attach(model):
                each = [alone(model, spec, *asked) for asked in zip(self.prompts, self.news, strict=True)]
            said(f"{name}, each alone", time.perf_counter() - begun)
            same = sum(a == b for a, b in zip(found, each, strict=True))
            results.append({"name": f"equal/transformers/{name}", "share": same / size.requests})
        more = {"cache": spec, "memory_nbytes": self.memory, "requests": size.requests}
        return [row | more for row in results if self.wanted(row["name"])]

    def named(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As they are written."""
        return [row | {"name": f"shared/{row['name']}"} for row in rows] if self.size.shared else rows


def said(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s", flush=True)


def line_of(name: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    found = {row["name"].rpartition("/")[0]: row for row in rows}

    def number(row: str, field: str, form: str) -> str:
        return format(found[row][field], form) if row in found else ""

    return (
        name, number("equal/transformers", "share", ".3f"), number("concurrency", "at_once", ".0f"),
        number("concurrency", "ratio", ".2f"), number("throughput", "tokens_per_second", ".1f"),
        number("throughput", "ratio", ".2f"), number("pages", "used", ".2f"), number("pages", "preempted", ".0f"),
    )  # fmt: skip


def options() -> argparse.Namespace:
    given = parser(__doc__)
    given.add_argument("--shared", action="store_true", help="prompts that begin alike")
    given.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="names of rows, * for any letters")
    choice = parse_arguments(given)
    choice.wanted = lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in choice.rows)
    choice.caches = [name for name in CACHES if any(choice.wanted(f"{row}/{name}") for row in ROWS)]
    if not choice.caches:
        given.error(f"argument --rows: no row is called {' or '.join(choice.rows)}; they begin with {', '.join(ROWS)}")
    if any(choice.wanted(f"concurrency/{name}") for name in CACHES) and "dense" not in choice.caches:
        choice.caches.insert(0, "dense")  # which they are compared with
    return choice


def main() -> None:
    choice = options()
    size = SIZES[choice.size]
    comparison = Comparison(size.sharing() if choice.shared else size, choice.wanted)
    results: list[dict[str, Any]] = []
    lines = []
    for name in choice.caches:
        rows = comparison.rows(name)
        results += rows
        lines.append(line_of(name, rows))
        for column, value in zip(COLUMNS[1:], lines[-1][1:], strict=True):
            if value:
                print(f"  {name} {column}: {value}", flush=True)
        if choice.json is not None and results:
            write_json(choice.json, comparison.named(results))
    title = f"{comparison.size.requests} requests, {comparison.memory / 2**20:.0f} MiB"
    print_table(title, COLUMNS, [line for line in lines if any(line[1:])], left=("cache",))


if __name__ == "__main__":
    main()
