"""Thousands of requests through kvcompress.serve.batching, and whether pages or memory leak.

    python benchmarks/serving/soak.py [--minutes 30] [--requests 2000] [--cache dmc] [--quick] [--json FILE]

Rounds of requests that all come at once, over the minutes: prompts of any length up to the model's, streamed or not, to
the end or cancelled, more than the pages hold, so that some give theirs up and are read again. Between rounds nothing
runs; then pages in use and resident memory (after malloc_trim) are noted. Rows: soak/pages (leaked: most
pages that were still in use between rounds; free: pages at each of them; used: the largest share in use at once),
soak/memory (ratio: median of the last quarter over that of the second; nbytes: at each round), soak/answers (share of
answers to the end that equal the first answer to the same prompt; failed: requests that got no answer). Exits with 1
where a page has leaked, a request failed, or memory grew by more than 2 % and 8 MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import parse_arguments, parser, print_table, write_json
from kvcompress import CacheSpec
from kvcompress.models.text import held_out_text
from kvcompress.serve import Batching, batching

MOST_GROWTH, MOST_NBYTES = 1.02, 8 << 20  # of memory, both of which it must pass to be a leak
WAIT = 300.0  # seconds for all answers of a round


@dataclass(frozen=True)
class Size:
    """minutes, requests: where they are not given. each: requests of a round. longest: tokens of a prompt. new: of an
    answer at most. pages: of all requests. distinct: prompts that are drawn from."""

    minutes: float
    requests: int
    each: int
    longest: int
    new: int
    pages: int
    distinct: int


SIZES = {
    "full": Size(30, 2000, 20, 1500, 160, 320, 100),
    "quick": Size(0.6, 160, 20, 800, 80, 160, 40),
    "tiny": Size(0.05, 24, 6, 60, 12, 24, 6),
}


@dataclass(frozen=True)
class Asked:
    """A request. leaves: it is cancelled after so many answers of a stream, or hundredths of a second; None = never."""

    prompt: tuple[int, ...]
    new: int
    stream: bool
    leaves: int | None


def drawn(size: Size, requests: int) -> list[list[Asked]]:
    """Rounds."""
    draw, text = random.Random(0), held_out_text()
    prompts = []
    for _ in range(size.distinct):
        length = round(size.longest ** draw.uniform(0.4, 1.0))  # as many short ones as long ones
        start = draw.randrange(len(text) - length)
        prompts.append((tuple(text[start : start + length]), draw.randint(2, size.new)))
    asked = []
    for _ in range(requests):
        prompt, new = draw.choice(prompts)
        leaves = draw.randrange(1, 30) if draw.random() < 0.25 else None
        asked.append(Asked(prompt, new, draw.random() < 0.5, leaves))
    return [asked[i : i + size.each] for i in range(0, requests, size.each)]


def resident_nbytes() -> int:
    """Of this process, once what is free has been given back."""
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        sys.exit("soak.py needs /proc/self/statm (Linux)")


class Soak:
    """What came of all requests. manager: transformers', which runs."""

    def __init__(self, serving: Batching, manager: Any) -> None:
        self.serving, self.manager = serving, manager
        self.first: dict[tuple[tuple[int, ...], int], list[int]] = {}  # answers
        self.answered = self.equal = self.left = 0
        self.failed: list[str] = []

    def round(self, requests: list[Asked]) -> None:
        """All of them; the pages of those that were cancelled are free at its end, or never."""
        begun = time.monotonic()
        waiting = {
            self.manager.add_request(
                list(asked.prompt), max_new_tokens=asked.new, streaming=asked.stream, eos_token_id=-1
            ): asked
            for asked in requests
        }
        pieces = dict.fromkeys(waiting, 0)
        while waiting and time.monotonic() < begun + WAIT:
            result = self.manager.get_result(timeout=0.01)
            if result is not None and result.request_id in waiting:
                pieces[result.request_id] += 1
                if result.error or result.is_finished():
                    self._note(waiting.pop(result.request_id), result)
            hundredths = 100 * (time.monotonic() - begun)
            for name, asked in list(waiting.items()):
                if asked.leaves is not None and (pieces[name] if asked.stream else hundredths) >= asked.leaves:
                    self.manager.cancel_request(name)
                    del waiting[name]
                    self.left += 1
        self.failed += ["no answer"] * len(waiting)
        while time.monotonic() < begun + WAIT:
            numbers = self.serving.metrics()
            if not numbers["running"] and not numbers["waiting"] and not numbers["pages_in_use"]:
                return
            time.sleep(0.02)

    def _note(self, asked: Asked, result: Any) -> None:
        if result.error:
            self.failed.append(str(result.error))
            return
        answer = list(result.generated_tokens)
        self.answered += 1
        self.equal += self.first.setdefault((asked.prompt, asked.new), answer) == answer


def rows_of(soak: Soak, samples: list[tuple[float, int, int]], spec: str) -> list[dict[str, Any]]:
    """samples: (seconds, free pages, bytes) after each round."""
    numbers, memory = soak.serving.metrics(), [nbytes for _, _, nbytes in samples]
    quarter = max(len(samples) // 4, 1)
    second, last = statistics.median(memory[quarter : 2 * quarter] or memory), statistics.median(memory[-quarter:])
    pages, free = int(numbers["pages"]), [free for _, free, _ in samples]
    more = {"cache": spec, "rounds": len(samples), "total_seconds": samples[-1][0]}
    return [
        {
            "name": "soak/pages", "leaked": pages - min(free), "pages": pages, "used": numbers["peak_pages"] / pages,
            "preempted": int(numbers["preempted"]), "peak_running": int(numbers["peak_running"]), "free": free,
            "at": [round(at, 1) for at, _, _ in samples], **more,
        },
        {"name": "soak/memory", "ratio": last / second, "grown_nbytes": last - second, "resident": memory, **more},
        {
            "name": "soak/answers", "share": soak.equal / max(soak.answered, 1), "answered": soak.answered,
            "left": soak.left, "failed": len(soak.failed), "reasons": sorted(set(soak.failed))[:10], **more,
        },
    ]  # fmt: skip


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """What must not be."""
    pages, memory, answers = rows
    found = []
    if pages["leaked"]:
        found.append(f"{pages['leaked']} pages were in use when nothing ran")
    if memory["ratio"] > MOST_GROWTH and memory["grown_nbytes"] > MOST_NBYTES:
        found.append(
            f"memory grew by {memory['grown_nbytes'] / 2**20:.1f} MiB, to {memory['ratio']:.3f} of what it was"
        )
    if answers["failed"]:
        found.append(f"{answers['failed']} requests failed: {answers['reasons']}")
    return found


def options() -> argparse.Namespace:
    given = parser(__doc__)
    given.add_argument("--minutes", type=float, help="over which the rounds begin; it ends with the last of them")
    given.add_argument("--requests", type=int, help="of all rounds together")
    given.add_argument("--cache", default="dmc", help="as CacheSpec has it")
    return parse_arguments(given)


def main() -> None:
    choice = options()
    size = SIZES[choice.size]
    minutes = size.minutes if choice.minutes is None else choice.minutes
    rounds = drawn(size, choice.requests or size.requests)
    logging.set_verbosity_error()
    retrofit = "dmc" if CacheSpec.parse(choice.cache).kind == "dmc" else None
    model, _ = kvcompress.load_example_model(retrofit=retrofit)
    samples: list[tuple[float, int, int]] = []
    rows: list[dict[str, Any]] = []
    settings = {"pages": size.pages, "page_size": 16, "requests": 16, "batch_tokens": 2048}
    config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1)
    with batching(model, choice.cache, **settings) as serving:
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        soak, begun = Soak(serving, manager), time.monotonic()
        for i, requests in enumerate(rounds):
            time.sleep(max(begun + i * 60 * minutes / len(rounds) - time.monotonic(), 0))
            soak.round(requests)
            free = serving.pages - serving.served.pages_in_use()
            samples.append((time.monotonic() - begun, free, resident_nbytes()))
            rows = rows_of(soak, samples, str(serving.spec))
            if choice.json is not None:
                write_json(choice.json, rows)  # so that what stops halfway is not lost
            if not i % max(len(rounds) // 20, 1):
                at, free, nbytes = samples[-1]
                said = f"{at:6.0f} s  {soak.answered:5} answered  {soak.left:4} left  {len(soak.failed):3} failed"
                print(f"{said}  {free:5} pages free  {nbytes / 2**20:7.1f} MiB", flush=True)
    pages, memory, answers = rows
    print_table(
        f"{sum(map(len, rounds))} requests in {pages['total_seconds'] / 60:.1f} minutes, {pages['cache']}",
        ("leaked pages", "used", "preempted", "memory, last to second quarter", "answered", "equal", "left", "failed"),
        [
            (
                f"{pages['leaked']}", f"{pages['used']:.2f}", f"{pages['preempted']}", f"{memory['ratio']:.4f}",
                f"{answers['answered']}", f"{answers['share']:.4f}", f"{answers['left']}", f"{answers['failed']}",
            )
        ],
    )  # fmt: skip
    if found := wrong(rows):
        sys.exit("; ".join(found))


if __name__ == "__main__":
    main()
