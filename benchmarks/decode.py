"""Decode over contiguous and paged rows against PyTorch's SDPA.

    python benchmarks/decode.py [--quick] [--json FILE]

Shape of one layer of Llama-3-8B: Hq 32, Hkv 8, D 128, one query token. Bytes that must be read: 2*Hkv*T*D elements per
sequence; the ceiling is the read bandwidth measured in the same run. Buffers rotate through at least 1 GiB, so that no
cache answers twice. "ragged": rows of mean length T/4, some whole, some at T/16, as a learned method gives them.
"""

from __future__ import annotations

import itertools

import torch
from common import Row, alternate, options, read_bandwidth, report

from kvcompress import ops

HQ, HKV, D, PAGE = 32, 8, 128, 64


def as_pages(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, T, D] as pages in random order and their table."""
    R, T, _ = x.shape
    order = torch.randperm(R * T // PAGE)
    pages = torch.empty(R * T // PAGE, PAGE, D, dtype=x.dtype)
    pages[order] = x.reshape(-1, PAGE, D)
    return pages, order.to(torch.int32).reshape(R, T // PAGE)


def main() -> None:
    choice = options(__doc__)
    bandwidth = read_bandwidth()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for B, T in ((1, 4096), (1, 32768)) if choice.quick else ((1, 4096), (1, 32768), (8, 4096), (8, 32768)):
            R, size = B * HKV, dtype.itemsize
            nbytes = 2 * R * T * D * size
            copies = max(1, -(-(1 << 30) // nbytes))
            kv = [(torch.randn(R, T, D).to(dtype), torch.randn(R, T, D).to(dtype)) for _ in range(copies)]
            pages = []
            for k, v in kv:
                k_pages, table = as_pages(k)
                v_pages = torch.empty_like(k_pages)
                v_pages[table.flatten().long()] = v.reshape(-1, PAGE, D)
                pages.append((k_pages, v_pages, table))
            queries = torch.randn(B, HQ, 1, D).to(dtype)
            full = torch.full((R,), T, dtype=torch.int32)
            shares = torch.tensor([1.0, 1 / 2, 1 / 8, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 8])  # mean 1/4
            ragged = (T * shares).to(torch.int32).repeat(B)
            turn = itertools.cycle(range(copies))

            def contiguous(kv=kv, queries=queries, full=full, turn=turn):
                return ops.decode(queries, *kv[next(turn)], full)

            def paged(pages=pages, queries=queries, end=full, turn=turn):
                k_pages, v_pages, table = pages[next(turn)]
                return ops.decode(queries, k_pages, v_pages, end, block_table=table)

            def compressed(paged=paged, ragged=ragged):
                return paged(end=ragged)

            def sdpa(kv=kv, queries=queries, turn=turn, B=B):
                k, v = (x.unflatten(0, (B, HKV)) for x in kv[next(turn)])
                return torch.nn.functional.scaled_dot_product_attention(queries, k, v, enable_gqa=True)

            times = alternate(3 if choice.quick else 9, contiguous, paged, compressed, sdpa)
            peer = times[3]
            name = f"{str(dtype).removeprefix('torch.')}/T{T}/B{B}"
            ceiling = nbytes / times[0] / bandwidth
            rows.append(Row(f"decode/{name}", times[0], peer, "SDPA, enable_gqa", ceiling, nbytes, "contiguous rows"))
            note = f"ratio 1 through pages: {times[1] / times[0] - 1:+.1%} over contiguous"
            ceiling = nbytes / times[1] / bandwidth
            rows.append(Row(f"decode/paged{PAGE}/{name}", times[1], peer, "SDPA, enable_gqa", ceiling, nbytes, note))
            part = int(nbytes * ragged.sum() / full.sum())
            note = f"{times[1] / times[2]:.2f}x our own dense time at compression {full.sum() / ragged.sum():.1f}"
            ceiling = part / times[2] / bandwidth
            rows.append(Row(f"decode/ragged4/{name}", times[2], peer, "SDPA, enable_gqa, dense", ceiling, part, note))
    report(rows, choice.json, read_bytes=bandwidth)


if __name__ == "__main__":
    main()
