"""PoD's cache: bytes, sequences that fit, and the time of a decoded token, beside the dense cache with the same kernel.

    python benchmarks/speed/pod.py [--quick] [--json FILE]

One block of 5 layers as Llama 3 8B has them (32 query heads, 8 KV heads of 128): one leads and four follow, so that
phi = 0.8 as in the paper, with 16 + 4,080 near tokens; random keys and values.

bytes    nbytes() of filled caches, tables included, at T tokens. ceiling: what was saved, of what the formula
         0.5 * phi * (T - W) / T says (PoDPlan.saved)
batch    sequences that a PoD cache holds in the memory of 4 dense ones (held at once); ratio over 4
decode   one token through the block's 5 layers: rotation, append, attention. reuse: followers take the probabilities
         that their lead has computed; recompute: from the lead's queries and keys; skipped: tau = 0, so that every
         follower's head skips, which is the most that tau can save. Peer: 5 layers that keep everything, same kernel.
         ceiling: bytes that must be read (keys, values, and probabilities written and read) per second, of a sum
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import Row, alternate, options, read_bandwidth, report
from benchmarks.speed.parts.caches import pod_cache, pod_reads
from benchmarks.speed.parts.layers import HKV, HQ, D, attend, dense_cache, draw_queries, draw_rows
from kvcompress import CompressedCache, QuestCache
from kvcompress.pod import PoDPlan

LAYERS = 5
LEAD = ((0,) * HKV,) * LAYERS


@dataclass(frozen=True)
class Sizes:
    """bytes, batch: tokens T of their rows. decode: T, B and dtypes."""

    repeats: int
    bytes: tuple[int, ...]
    batch: int
    decode: tuple[tuple[int, int, tuple[torch.dtype, ...]], ...]
    sinks: int = 16
    recent: int = 4080

    @property
    def plan(self) -> PoDPlan:
        return PoDPlan(LEAD, self.sinks, self.recent, query_heads=HQ, head_dim=D)


BOTH = (torch.bfloat16, torch.float32)
SIZES = {
    "full": Sizes(30, (8192, 32768, 131072), 32768, ((8192, 1, BOTH), (32768, 1, BOTH), (32768, 4, BOTH[:1]))),
    "quick": Sizes(10, (8192,), 8192, ((16384, 1, BOTH[:1]),)),
    "tiny": Sizes(1, (512,), 512, ((512, 1, BOTH[:1]),), 4, 60),
}


def dense(B: int, T: int, dtype: torch.dtype) -> QuestCache:
    return dense_cache(LAYERS, B, T, lambda _, S: draw_rows(B, S, dtype))


def bytes_rows(T: int, dtype: torch.dtype, plan: PoDPlan) -> list[Row]:
    ours, peer = pod_cache(1, T, dtype, plan).nbytes(), dense(1, T, dtype).nbytes()
    saved, predicted = 1 - ours / peer, plan.saved(T)
    note = f"saved {saved:.4f} of {peer / 2**20:,.0f} MiB, formula {predicted:.4f}"
    ceiling = saved / predicted if predicted else None
    return [Row(f"bytes/{name_of(dtype)}/T{T}", ours, peer, "dense, bytes", ceiling, ours, note)]


def batch_rows(T: int, dtype: torch.dtype, plan: PoDPlan) -> list[Row]:
    memory = 4 * dense(1, T, dtype).nbytes()
    fits = memory // pod_cache(1, T, dtype, plan).nbytes()
    several = pod_cache(int(fits), T, dtype, plan).nbytes()
    note = f"{fits} sequences for 4 ({fits / 4 - 1:+.0%}), held {several / memory:.3f} of the memory"
    return [Row(f"batch/{name_of(dtype)}/T{T}", 1 / fits, 1 / 4, "dense", bytes=several, note=note)]


def decode_rows(T: int, B: int, dtype: torch.dtype, plan: PoDPlan, repeats: int, bandwidth: float) -> list[Row]:
    caches: dict[str, CompressedCache] = {
        "reuse": pod_cache(B, T, dtype, plan, reuse=True),
        "recompute": pod_cache(B, T, dtype, plan, reuse=False),
        "skipped": pod_cache(B, T, dtype, plan, tau=0.0),
        "dense": dense(B, T, dtype),
    }
    drawn = [(draw_queries(B, 1, dtype), *draw_rows(B, 1, dtype)) for _ in range(LAYERS)]
    works = [lambda cache=cache: attend(cache, B, 1, drawn) for cache in caches.values()]  # type: ignore[misc]
    *seconds, peer = alternate(repeats, *works)
    one = B * HKV * D * dtype.itemsize
    read = pod_reads(LAYERS, T, plan.window, one, B * HQ * 4)
    name = f"decode/{name_of(dtype)}/T{T}/B{B}"
    return [
        Row(f"{name}/{kind}", took, peer, "dense, same kernel", read[kind] / took / bandwidth, read[kind],
            f"{took / peer:.2f}x; bytes {read[kind] / (2 * LAYERS * T * one):.2f}x")
        for kind, took in zip(read, seconds, strict=True)
    ]  # fmt: skip


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    choice = options(__doc__)
    torch.manual_seed(0)
    sizes, bandwidth, rows = SIZES[choice.size], read_bandwidth(choice.size), []
    for T in sizes.bytes:
        rows += bytes_rows(T, torch.bfloat16, sizes.plan)
    rows += batch_rows(sizes.batch, torch.bfloat16, sizes.plan)
    for T, B, dtypes in sizes.decode:
        for dtype in dtypes:
            rows += decode_rows(T, B, dtype, sizes.plan, sizes.repeats, bandwidth)
    report(rows, choice.json, read_bytes=bandwidth)


if __name__ == "__main__":
    main()
