"""Decode over codes of 8 and 4 bits, against the same rows in bfloat16 and float32.

    python benchmarks/speed/codes.py [--quick] [--json FILE]

Shape of one layer of Llama-3-8B: Hq 32, Hkv 8, D 128, one query token, pages of 16 in a prompt's order. Bytes that must
be read, of a key or value: 256 of bfloat16, 130 of int8, 66 of the values of k8v4; the ceiling is the read bandwidth,
measured in turns with each format over as many bytes. Buffers rotate through at least 1 GiB. The peer of a row is ours
in bfloat16; all formats of one length alternate.
quantize: a prompt's keys and values as codes; the ceiling counts what is read and written.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import COLD_NBYTES, Row, alternate, options, report
from kvcompress import ops

HQ, HKV, D, PAGE = 32, 8, 128, 16
SIZES = {
    "full": (25, [(1, 1024), (1, 8192), (1, 32768), (8, 4096), (8, 32768)]),
    "quick": (7, [(1, 8192), (1, 32768)]),
    "tiny": (1, [(1, 512)]),
}
CODES = {"int8": ("int8", "int8"), "k8v4": ("int8", "int4")}
NBYTES = {"float32": 1024, "bfloat16": 512, "int8": 260, "k8v4": 196}  # of a key and a value


def pages(kind: str, R: int, T: int) -> tuple:
    """(k_pages, v_pages, their scales) of random numbers."""
    k, v = (torch.randn(R * T // PAGE, PAGE, D) for _ in range(2))
    if kind in CODES:
        (k, k_scales), (v, v_scales) = (ops.quantize(x, code) for x, code in zip((k, v), CODES[kind], strict=True))
        return k, v, {"key_scales": k_scales, "value_scales": v_scales}
    dtype = getattr(torch, kind)
    return k.to(dtype), v.to(dtype), {}


def measure(B: int, T: int, repeats: int, cold_nbytes: int) -> tuple[list[Row], float]:
    R = B * HKV
    queries = torch.randn(B, HQ, 1, D, dtype=torch.bfloat16)
    table = torch.arange(R * T // PAGE, dtype=torch.int32).reshape(R, -1)
    end = torch.full((R,), T, dtype=torch.int32)
    large = torch.ones(max(cold_nbytes, R * T * 1024) // 4)
    works = {}
    for kind, nbytes in NBYTES.items():
        held = [pages(kind, R, T) for _ in range(max(1, -(-cold_nbytes // (R * T * nbytes))))]
        turn, part = itertools.cycle(held), R * T * nbytes // 4
        read = itertools.cycle(range(max(len(large) // part, 1)))

        def work(turn=turn):
            k, v, scales = next(turn)
            return ops.decode(queries, k, v, end, block_table=table, **scales)

        def reading(read=read, part=part):
            i = next(read)
            return large[i * part : (i + 1) * part].sum()

        works[kind], works[f"{kind} read"] = work, reading
    times = dict(zip(works, alternate(repeats, *works.values()), strict=True))
    rows, bandwidths = [], []
    for kind, nbytes in NBYTES.items():
        bandwidths.append(R * T * nbytes / times[f"{kind} read"])
        rows.append(Row(
            f"codes/{kind}/T{T}/B{B}", times[kind], times["bfloat16"], "ours in bfloat16",
            times[f"{kind} read"] / times[kind], R * T * nbytes, f"{times['float32'] / times[kind]:.2f}x float32",
        ))  # fmt: skip
    return rows, statistics.median(bandwidths)


def rounding(T: int, repeats: int) -> list[Row]:
    x = torch.randn(1, HKV, T, D, dtype=torch.bfloat16)
    rows = []
    for code, written in (("int8", 130), ("int4", 66)):
        ours, copy = alternate(repeats, lambda code=code: ops.quantize(x, code), x.clone)
        nbytes = HKV * T * (256 + written)
        moved = nbytes / (HKV * T * 512)
        rows.append(Row(f"quantize/{code}/T{T}", ours, copy, "a copy", copy * moved / ours, nbytes, "of bfloat16"))
    return rows


def main() -> None:
    choice = options(__doc__)
    repeats, measured = SIZES[choice.size]
    rows, bandwidths = [], []
    for B, T in measured:
        more, bandwidth = measure(B, T, repeats, COLD_NBYTES[choice.size])
        rows += more
        bandwidths.append(bandwidth)
    rows += rounding(measured[-1][1] if choice.size == "tiny" else 8192, repeats)
    report(rows, choice.json, read_bytes=statistics.median(bandwidths))


if __name__ == "__main__":
    main()
