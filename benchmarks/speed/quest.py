"""QuestCache's decode step of one layer against dense decoding: ours, and PyTorch's SDPA.

    python benchmarks/speed/quest.py [--quick] [--json FILE]

Shape of one layer of Llama-3-8B: Hq 32, Hkv 8, D 128, one query token over T tokens, pages of 16. A step rotates and
appends the token, notes the newest page's range, scores every page, takes the highest and reads them:
2*Hkv*(T/16 + budget)*D elements instead of 2*Hkv*T*D; the ceiling is the read bandwidth, as in decode.py. dense: what
the same layer does with a budget of the whole context. The peer is SDPA over contiguous keys, without rotating and
appending; the note compares with dense. Layers take turns through at least 1 GiB, so that no cache answers twice.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import COLD_NBYTES, Row, alternate, options, report
from benchmarks.speed.parts.layers import HKV, D, adopt, attend, draw_queries, draw_rows, fill, layers_of
from kvcompress import QuestCache

P = 16
BUDGETS = (1024, 2048, 4096)
FULL = [(dtype, B, 32768) for dtype in (torch.float32, torch.bfloat16, torch.float16) for B in (1, 4)]
QUICK = [(dtype, 1, 32768) for dtype in (torch.float32, torch.bfloat16)]
SIZES = {  # repetitions, budgets in tokens, and what is decoded
    "full": (25, BUDGETS, FULL),
    "quick": (7, BUDGETS, QUICK),
    "tiny": (1, (64, 128), [(torch.bfloat16, 1, 512)]),
}


def measure(
    dtype: torch.dtype, B: int, T: int, budgets: tuple[int, ...], repeats: int, cold_nbytes: int
) -> tuple[list[Row], float]:
    R = B * HKV
    nbytes = 2 * R * T * D * dtype.itemsize
    model, count = layers_of(1, 2 * T), max(1, -(-cold_nbytes // nbytes))
    caches = [QuestCache(model.config, page_size=P, dense_layers=0) for _ in range(count)]
    contiguous = [draw_rows(B, T, dtype) for _ in caches]
    for cache, rows in zip(caches, contiguous, strict=True):
        adopt(cache, model)
        fill(cache, B, T, lambda begin, S, rows=rows: [x[:, :, begin : begin + S] for x in rows])
    large = torch.ones(max(cold_nbytes, nbytes) // 4).view(-1, nbytes // 4)
    token = draw_queries(B, 1, dtype), *draw_rows(B, 1, dtype)
    turn = itertools.cycle(range(count))

    def step(budget):
        def work():
            cache = caches[next(turn)]
            cache.layers[0].pages_read = budget // P
            attend(cache, B, 1, [token])

        return work

    def sdpa():
        k, v = contiguous[next(turn)]
        return torch.nn.functional.scaled_dot_product_attention(token[0], k, v, enable_gqa=True)

    def reading():
        return large[next(turn) % len(large)].sum()

    works = {f"budget{budget}": step(budget) for budget in budgets} | {"dense": step(2 * T)}
    *times, peer, seconds = alternate(repeats, *works.values(), sdpa, reading)
    bandwidth = nbytes / seconds
    rows = []
    for what, seconds in zip(works, times, strict=True):
        moved = nbytes
        note = "pages of 16, all of them"
        if what != "dense":
            moved = nbytes // P + 2 * R * int(what.removeprefix("budget")) * D * dtype.itemsize
            note = f"{times[-1] / seconds:.2f}x our dense step, which reads {nbytes / moved:.1f} times as much"
        name = f"quest/{what}/{str(dtype).removeprefix('torch.')}/T{T}/B{B}"
        rows.append(Row(name, seconds, peer, "SDPA, enable_gqa", moved / seconds / bandwidth, moved, note))
    return rows, bandwidth


def main() -> None:
    choice = options(__doc__)
    repeats, budgets, measured = SIZES[choice.size]
    rows, bandwidths = [], []
    for dtype, B, T in measured:
        more, bandwidth = measure(dtype, B, T, budgets, repeats, COLD_NBYTES[choice.size])
        rows += more
        bandwidths.append(bandwidth)
    report(rows, choice.json, read_bytes=statistics.median(bandwidths))


if __name__ == "__main__":
    main()
