"""QuestCache's decode step of one layer against dense decoding: ours, and PyTorch's SDPA.

    python benchmarks/speed/quest.py [--quick] [--json FILE]

Shape of one layer of Llama-3-8B: Hq 32, Hkv 8, D 128, one query token over T tokens, pages of 16. A step notes the
newest page's range, scores every page, takes the highest and reads them: 2*Hkv*(T/16 + budget)*D elements instead of
2*Hkv*T*D; the ceiling is the read bandwidth, as in decode.py. Projections, rotation and appending are the same for all
rows and not in the figures. dense: what the same layer does with a budget of the whole context. The peer is SDPA over
contiguous keys; the note compares with dense. Layers take turns through at least 1 GiB, so that no cache answers twice.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import Row, alternate, options, report

from kvcompress import QuestCache, ops
from kvcompress.caches.base import Step
from kvcompress.caches.quest import QuestLayer

HQ, HKV, D, P = 32, 8, 128, 16
BUDGETS = (1024, 2048, 4096)
FULL = [(dtype, B, 32768) for dtype in (torch.float32, torch.bfloat16, torch.float16) for B in (1, 4)]
QUICK = [(dtype, 1, 32768) for dtype in (torch.float32, torch.bfloat16)]


def filled_layer(cache: QuestCache, B: int, T: int, dtype: torch.dtype) -> QuestLayer:
    """A layer that holds T random tokens per sequence."""
    layer = QuestLayer(cache, 0, None)
    keys, values = (torch.randn(B, HKV, T, D, dtype=dtype) for _ in range(2))
    layer.open_pool(B * HKV, D, keys, [T] * B)
    assert layer.pool is not None
    layer.pool.append((keys, values))
    layer._note_keys([T] * (B * HKV))
    return layer


def measure(dtype: torch.dtype, B: int, T: int, repeats: int) -> tuple[list[Row], float]:
    R = B * HKV
    nbytes = 2 * R * T * D * dtype.itemsize
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=HQ, num_key_value_heads=HKV, head_dim=D)
    cache = QuestCache(config, page_size=P, dense_layers=0)
    cache.step = Step((1,) * B, 1)
    layers = [filled_layer(cache, B, T, dtype) for _ in range(max(1, -(-(1 << 30) // nbytes)))]
    contiguous = [tuple(x.unflatten(0, (B, HKV)) for x in layer.pool.gather(T)) for layer in layers]
    large = torch.ones(max(1 << 30, nbytes) // 4).view(-1, nbytes // 4)
    queries = torch.randn(B, HQ, 1, D).to(dtype)
    turn = itertools.cycle(range(len(layers)))

    def quest(budget):
        def work():
            layer, cache.pages_read = layers[next(turn)], budget // P
            layer._note_keys([1] * R)
            return layer._read_chosen(queries, D**-0.5)

        return work

    def dense():
        pool = layers[next(turn)].pool
        return ops.decode(queries, pool.k_pages, pool.v_pages, pool.lengths, block_table=pool.block_table)

    def sdpa():
        k, v = contiguous[next(turn)]
        return torch.nn.functional.scaled_dot_product_attention(queries, k, v, enable_gqa=True)

    def reading():
        return large[next(turn) % len(large)].sum()

    works = {f"budget{budget}": quest(budget) for budget in BUDGETS} | {"dense": dense}
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
    rows, bandwidths = [], []
    for dtype, B, T in QUICK if choice.quick else FULL:
        more, bandwidth = measure(dtype, B, T, 7 if choice.quick else 25)
        rows += more
        bandwidths.append(bandwidth)
    report(rows, choice.json, read_bytes=statistics.median(bandwidths))


if __name__ == "__main__":
    main()
