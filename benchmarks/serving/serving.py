"""Requests through transformers' continuous batching with compressed caches, against its own.

    python benchmarks/serving/serving.py [--quick] [--json FILE]

Arrivals and lengths are drawn once from a seed. Every cache has the same memory: pages and, of each request that may
run at once, what it keeps beside them. Rows: equal/transformers/CACHE (share of requests whose greedy tokens are those
of model.generate alone), concurrency/CACHE (ratio of requests at once, to dense), throughput/CACHE (ratio of tokens/s
to transformers' own continuous batching of the plain model), pages/CACHE (used: the largest share of all pages that
were in use at once; all are free at the end, or the benchmark fails).
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import options, print_table, write_json
from kvcompress import CacheSpec
from kvcompress.models.text import held_out_text
from kvcompress.serve import batching

CACHES = {
    "dense": "dense",
    "dmc": "dmc",
    "pruned": "pruned,pruner=snapkv,window={window},budget={budget}",
    "streaming": "streaming,window_size={budget},num_sink_tokens=4",
}


@dataclass(frozen=True)
class Size:
    """requests, their prompts' tokens at least and at most, tokens that each writes. at_once: dense requests that the
    memory holds. gap: mean seconds between arrivals. batch_tokens: of a pass. budget: tokens per KV head of the caches
    that have one; window: of queries that choose them."""

    requests: int
    shortest: int
    longest: int
    new: int
    at_once: int
    gap: float
    batch_tokens: int
    budget: int = 192
    window: int = 64
    page_size: int = 32


SIZES = {
    "full": Size(200, 950, 1150, 48, 4, 0.02, 2048),
    "quick": Size(20, 450, 550, 24, 4, 0.005, 1024),
    "tiny": Size(4, 40, 60, 3, 2, 0.0, 128, 16, 4, 8),
}


def drawn(size: Size) -> tuple[list[list[int]], list[float]]:
    """(prompts, seconds at which they arrive)."""
    draw, text, at = random.Random(0), held_out_text(), 0.0
    prompts, arrivals = [], []
    for _ in range(size.requests):
        start, length = draw.randrange(len(text) - size.longest), draw.randint(size.shortest, size.longest)
        prompts.append(list(text[start : start + length]))
        at += draw.expovariate(1 / size.gap) if size.gap else 0.0
        arrivals.append(at)
    return prompts, arrivals


def model_for(spec: str) -> Any:
    return kvcompress.load_example_model(retrofit="dmc" if spec.startswith("dmc") else None)[0]


def greedy(new: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)


def timed(model: Any, config: ContinuousBatchingConfig, prompts: Any, arrivals: Any, new: int) -> tuple[Any, float]:
    """(tokens of every request, seconds)."""
    manager = model.init_continuous_batching(generation_config=greedy(new), continuous_batching_config=config)
    manager.start()
    names, found = [f"request {i}" for i in range(len(prompts))], {}
    begun = time.perf_counter()

    def feed() -> None:
        for name, prompt, at in zip(names, prompts, arrivals, strict=True):
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


def alone(model: Any, spec: str, prompt: list[int], new: int) -> tuple[list[int], int]:
    """(tokens, bytes that the cache keeps beside pages)."""
    cache, ids = CacheSpec.parse(spec).make(model.config), torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
    beside = 0
    for layer in getattr(cache, "own", ()):
        pool = getattr(layer, "pool", None)
        beside += layer.nbytes() - (0 if pool is None else pool.nbytes())
    return out[0, len(prompt) :].tolist(), beside


def main() -> None:
    choice = options(__doc__)
    size = SIZES[choice.size]
    prompts, arrivals = drawn(size)
    plain = model_for("dense")
    config = plain.config
    rows = config.num_hidden_layers * config.num_key_value_heads
    page_nbytes = 2 * size.page_size * config.head_dim * plain.dtype.itemsize
    dense_pages = size.at_once * rows * math.ceil((size.longest + size.new) / size.page_size)
    memory, written = dense_pages * page_nbytes, size.requests * size.new

    own = ContinuousBatchingConfig(
        num_blocks=dense_pages // rows, page_size=size.page_size, max_batch_tokens=size.batch_tokens,
        max_requests_per_batch=64,
    )  # fmt: skip
    _, own_seconds = timed(plain, own, prompts, arrivals, size.new)
    del plain
    results: list[dict[str, Any]] = []
    at_once: dict[str, float] = {}
    lines = []
    for name, pattern in CACHES.items():
        spec = pattern.format(budget=size.budget, window=size.window)
        model = model_for(spec)
        with kvcompress.attach(model):
            wanted = [alone(model, spec, prompt, size.new) for prompt in prompts]
        beside = max(each for _, each in wanted)
        requests = min(64, size.requests)
        if name == "streaming":  # all of it lies beside pages
            requests = min(requests, memory // beside)
        pages = max((memory - requests * beside) // page_nbytes, 1)
        with batching(
            model, spec, pages=pages, page_size=size.page_size, requests=requests, batch_tokens=size.batch_tokens
        ) as serving:
            found, seconds = timed(model, ContinuousBatchingConfig(), prompts, arrivals, size.new)
            metrics, left = serving.metrics(), serving.served.pages_in_use()
        if left:
            raise RuntimeError(f"{left} pages are still in use after the last request with {spec}")
        same = sum(a == b for a, (b, _) in zip(found, wanted, strict=True)) / size.requests
        at_once[name] = metrics["peak_running"]
        ratio, used = at_once[name] / at_once["dense"], metrics["peak_pages"] / pages
        more = {"cache": spec, "memory_nbytes": memory, "requests": size.requests}
        results += [
            {"name": f"equal/transformers/{name}", "share": same, **more},
            {"name": f"concurrency/{name}", "ratio": ratio, "at_once": at_once[name], **more},
            {
                "name": f"throughput/{name}", "ratio": own_seconds / seconds, "tokens_per_second": written / seconds,
                "own_tokens_per_second": written / own_seconds, **more,
            },
            {"name": f"pages/{name}", "used": used, "pages": pages, "preempted": metrics["preempted"], **more},
        ]  # fmt: skip
        lines.append(
            (
                name, f"{same:.3f}", f"{at_once[name]:.0f}", f"{ratio:.2f}", f"{written / seconds:.1f}",
                f"{own_seconds / seconds:.2f}", f"{used:.2f}", f"{metrics['preempted']:.0f}",
            )
        )  # fmt: skip
    columns = ("cache", "equal", "at once", "to dense", "tokens/s", "to transformers' own", "pages used", "preempted")
    title = f"{size.requests} requests, {memory / 2**20:.0f} MiB; own {written / own_seconds:.1f} tokens/s"
    print_table(title, columns, lines, left=("cache",))
    if choice.json is not None:
        write_json(choice.json, results)


if __name__ == "__main__":
    main()
