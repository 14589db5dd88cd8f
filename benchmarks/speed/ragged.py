"""What it costs a decoded token that the rows of a layer have different lengths, at equal bytes.

    python benchmarks/speed/ragged.py [--quick] [--json FILE]

Budgets that heads share (AdaKV, GlobalTopK) leave rows of different lengths; on the example model the longest row of a
cache has up to 6 times the mean. Layers as Llama 3 8B has them (32 query heads, 8 KV heads of 128), random keys and
values, a pass over layers without their model, as in step.py; 1/8 of T tokens a row, mean over the rows of a layer.

ragged/<max over mean>/<dtype>/T<T>/B<B>
    One KV head of each sequence holds so many times the mean, the others share the rest evenly; 1 = all alike. ratio:
    time with rows all alike over ours, in turns. ceiling: bytes of keys and values over the time, of the read bandwidth
    measured in the same run.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import COLD_NBYTES, Row, alternate, options, read_bandwidth, report
from benchmarks.speed.parts.caches import pruned_cache
from benchmarks.speed.parts.layers import HKV, D, attend, draw_queries, draw_rows
from benchmarks.speed.step import PASS_NBYTES, TOKENS, turns
from kvcompress import PrunedCache

PART = 8  # a row holds 1/PART of the tokens, mean
RAGGED = (1, 1.5, 3, 6)  # the longest row over the mean


@dataclass(frozen=True)
class Sizes:
    """measured: dtype, T and B. passes: bytes of a pass's keys and values."""

    repeats: int
    measured: tuple[tuple[torch.dtype, int, int], ...]
    passes: int = PASS_NBYTES


SIZES = {
    "full": Sizes(25, tuple((torch.bfloat16, T, B) for T, B in ((8192, 1), (32768, 1), (32768, 8)))),
    "quick": Sizes(9, ((torch.bfloat16, 32768, 1),)),
    "tiny": Sizes(1, ((torch.float32, 512, 2),), 1),
}


def shares(longest: float) -> tuple[float, ...]:
    """Of the tokens that each KV head holds."""
    others = (HKV - longest) / (HKV - 1)
    return tuple(times / PART for times in (longest, *(others,) * (HKV - 1)))


def rows(dtype: torch.dtype, T: int, B: int, sizes: Sizes, cold: int, bandwidth: float) -> list[Row]:
    nbytes = 2 * B * HKV * (T // PART) * D * dtype.itemsize
    layers = max(sizes.passes // nbytes, 1)
    drawn = [[(draw_queries(B, 1, dtype), *draw_rows(B, 1, dtype)) for _ in range(layers)] for _ in range(TOKENS)]
    tokens = itertools.cycle(drawn)

    def step(cache: PrunedCache) -> None:
        attend(cache, B, 1, next(tokens))

    count = max(min(sizes.repeats + 1, -(-cold // (layers * nbytes * len(RAGGED)))), 1)
    works = [turns(lambda x=x: pruned_cache(layers, B, T, dtype, shares(x)), count, step) for x in RAGGED]  # type: ignore[misc]
    alike, *_ = times = alternate(sizes.repeats, *works)
    name = f"{str(dtype).removeprefix('torch.')}/T{T}/B{B}"
    return [
        Row(f"ragged/{longest:g}/{name}", took, alike, "rows all alike", layers * nbytes / took / bandwidth,
            layers * nbytes, f"{layers} layers; longest row {int(shares(longest)[0] * T)} of {T // PART} mean")
        for longest, took in zip(RAGGED, times, strict=True)
    ]  # fmt: skip


def main() -> None:
    choice = options(__doc__)
    torch.manual_seed(0)
    sizes, bandwidth = SIZES[choice.size], read_bandwidth(choice.size)
    measured = [row for each in sizes.measured for row in rows(*each, sizes, COLD_NBYTES[choice.size], bandwidth)]
    report(measured, choice.json, read_bytes=bandwidth)


if __name__ == "__main__":
    main()
