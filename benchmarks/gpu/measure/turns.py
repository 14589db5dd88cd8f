"""Times on a GPU: works that take turns, the ceilings of the card, and which kernels a work runs.

Without a GPU the same functions take the time of the CPU, so that a rehearsal runs every line of what measures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import common
from kvcompress.caches import graphs

Work = Callable[[], object]


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if on_gpu() else "cpu"


def alternate(repeats: int, *works: Work) -> list[float]:
    """Median seconds of each work on the GPU; they take turns.

    A large product goes first in every round: while it runs the host enqueues all of the round, so that no work,
    however short, waits for the host.
    """
    if not on_gpu():
        return common.alternate(repeats, *works)
    for work in works:
        for _ in range(2):
            work()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize()
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
    for _ in range(repeats):
        a @ b
        for number, work in enumerate(works):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            marks[number].append((begin, end))
        torch.cuda.synchronize()
    return [statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3 for pairs in marks]


def seconds(work: Work) -> float:
    """On the clock of the wall, from an idle device to an idle device."""
    if on_gpu():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes read and written per second by a large copy."""
    x = torch.empty(nbytes, dtype=torch.uint8, device=device()).fill_(1)
    y = torch.empty_like(x)
    return 2 * x.nbytes / alternate(20, lambda: y.copy_(x))[0]


def product_rate(n: int = 8192) -> float:
    """Operations per second of a large bfloat16 product."""
    a, b = (torch.randn(n, n, device=device(), dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / alternate(10, lambda: a @ b)[0]


def kernels_of(work: Work, passes: int) -> dict[str, tuple[float, float]]:
    """What a work runs on the GPU: of each kernel, how often in a pass and for how many seconds of it, by the profiler.
    Without a GPU: the work itself, once."""
    if not on_gpu():
        return {"the work": (1.0, statistics.median(seconds(work) for _ in range(passes)))}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(passes):
            work()
        torch.cuda.synchronize()
    rows: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        row = rows.setdefault(event.name, [0.0, 0.0])
        row[0] += 1
        row[1] += event.time_range.elapsed_us() / 1e6
    return {name: (count / passes, took / passes) for name, (count, took) in rows.items()}


def recorded(work: Work) -> Work:
    """What does the work again as a CUDA graph; without a GPU, the work itself. It has run before."""
    if not on_gpu():
        return work
    replay, results = graphs.record(work, torch.device("cuda", torch.cuda.current_device()))

    def again() -> object:  # a graph does not keep the tensors that it works on: the work has them
        replay()
        return work, results

    return again
