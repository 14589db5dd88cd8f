"""Decode over contiguous and paged rows against PyTorch's SDPA.

    python benchmarks/speed/decode.py [--quick] [--json FILE]

Shape of one layer of Llama-3-8B: Hq 32, Hkv 8, D 128, one query token. Bytes that must be read: 2*Hkv*T*D elements per
sequence; the ceiling is the read bandwidth: summing as many bytes as the cache has, in turns with the rows that it is
for (it is what varies most). Buffers rotate through at least 1 GiB, so that no cache answers twice.
paged: pages of 16 and 64 tokens in the order in which the pool hands them out for a prompt. shuffled: the same pages in
random order, as after long decoding of many rows. ragged4: rows of mean length T/4, some whole, some T/16, as a learned
method gives them; its peer is SDPA over the dense cache. int8, k8v4: contiguous rows of codes; their peer is our own
bfloat16 in the same run.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import COLD_NBYTES, Row, alternate, options, report
from kvcompress import ops

HQ, HKV, D = 32, 8, 128
CODES = {"int8": ("int8", "int8"), "k8v4": ("int8", "int4")}  # of keys and values
PAGES = (16, 64)
FULL = [(dtype, B, T) for dtype in (torch.float32, torch.bfloat16) for B, T in ((1, 4096), (1, 32768), (8, 4096))] + [
    (torch.bfloat16, 1, 8192),
    (torch.bfloat16, 8, 32768),
    (torch.bfloat16, 32, 4096),
    (torch.float16, 1, 32768),
]
QUICK = [(dtype, 1, T) for dtype in (torch.float32, torch.bfloat16) for T in (4096, 32768)]
SIZES = {"full": (25, 9, FULL), "quick": (7, 9, QUICK), "tiny": (1, 1, [(torch.bfloat16, 1, 512)])}
LONG = 1 << 28  # bytes from which the second number of repetitions is taken


def measure(dtype: torch.dtype, B: int, T: int, repeats: tuple[int, int], cold_nbytes: int) -> tuple[list[Row], float]:
    R = B * HKV
    nbytes = 2 * R * T * D * dtype.itemsize
    large = torch.ones(max(cold_nbytes, nbytes) // 4).view(-1, nbytes // 4)
    kv = [
        (torch.randn(R, T, D, dtype=dtype), torch.randn(R, T, D, dtype=dtype))
        for _ in range(max(1, -(-cold_nbytes // nbytes)))
    ]
    queries = torch.randn(B, HQ, 1, D).to(dtype)
    full = torch.full((R,), T, dtype=torch.int32)
    shares = torch.tensor([1.0, 1 / 2, 1 / 8, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 8])  # mean 1/4
    ragged = (T * shares).to(torch.int32).repeat(B)
    turn = itertools.cycle(range(len(kv)))

    def contiguous():
        return ops.decode(queries, *kv[next(turn)], full)

    def reading():
        return large[next(turn) % len(large)].sum()

    def sdpa():
        k, v = (x.unflatten(0, (B, HKV)) for x in kv[next(turn)])
        return torch.nn.functional.scaled_dot_product_attention(queries, k, v, enable_gqa=True)

    def through(page, order, end):
        table = order.to(torch.int32).reshape(R, T // page)

        def work():
            k, v = (x.view(-1, page, D) for x in kv[next(turn)])
            return ops.decode(queries, k, v, end, block_table=table)

        return work

    works = {"": contiguous}
    for page in PAGES:
        count = R * T // page
        works[f"paged{page}/"] = through(page, torch.arange(count), full)
        works[f"shuffled{page}/"] = through(page, torch.randperm(count), full)
    works["ragged4/"] = through(PAGES[0], torch.arange(R * T // PAGES[0]), ragged)
    coded = {}
    for name, formats in CODES.items() if dtype == torch.bfloat16 and B == 1 else ():
        coded[name] = over_codes(queries, kv, full, formats, cold_nbytes)
    codes_nbytes, codes_works = [x[0] for x in coded.values()], [x[1] for x in coded.values()]
    *times, peer, seconds = alternate(repeats[nbytes >= LONG], *works.values(), *codes_works, sdpa, reading)
    bandwidth, dense = nbytes / seconds, times[0]
    rows = []
    times, of_codes = times[: len(works)], times[len(works) :]
    for what, seconds in zip(works, times, strict=True):
        moved = int(nbytes * ragged.sum() / full.sum()) if what == "ragged4/" else nbytes
        note = f"{seconds / dense - 1:+.1%} over contiguous rows" if what else "contiguous rows"
        if what == "ragged4/":
            note = f"{dense / seconds:.2f}x our dense time at compression {full.sum() / ragged.sum():.1f}"
        name = f"decode/{what}{str(dtype).removeprefix('torch.')}/T{T}/B{B}"
        ceiling = moved / seconds / bandwidth
        rows.append(Row(name, seconds, peer, "SDPA, enable_gqa", ceiling, moved, note))
    for name, moved, seconds in zip(coded, codes_nbytes, of_codes, strict=True):
        ceiling, note = moved / seconds / bandwidth, f"{moved / nbytes:.2f} of bfloat16's bytes"
        rows.append(Row(f"decode/{name}/T{T}/B{B}", seconds, dense, "our bfloat16", ceiling, moved, note))
    return rows, bandwidth


def over_codes(
    queries: torch.Tensor, kv: list[tuple[torch.Tensor, torch.Tensor]], end: torch.Tensor, formats: tuple[str, str],
    cold_nbytes: int,
) -> tuple[int, Callable[[], object]]:  # fmt: skip
    """Bytes of a cache of codes, and decode over such caches in turn, which do not fit a cache level either."""
    first = [ops.quantize(x, format) for x, format in zip(kv[0], formats, strict=True)]
    nbytes = sum(part.nbytes for pair in first for part in pair)
    held = [
        [ops.quantize(x, format) for x, format in zip(kv[i % len(kv)], formats, strict=True)]
        for i in range(max(1, -(-cold_nbytes // nbytes)))
    ]
    turn = itertools.cycle(held)

    def work():
        (k, key_scales), (v, value_scales) = next(turn)
        return ops.decode(queries, k, v, end, key_scales=key_scales, value_scales=value_scales)

    return nbytes, work


def main() -> None:
    choice = options(__doc__)
    *repeats, measured = SIZES[choice.size]
    rows, bandwidths = [], []
    for dtype, B, T in measured:
        more, bandwidth = measure(dtype, B, T, repeats, COLD_NBYTES[choice.size])
        rows += more
        bandwidths.append(bandwidth)
    report(rows, choice.json, read_bytes=statistics.median(bandwidths))


if __name__ == "__main__":
    main()
