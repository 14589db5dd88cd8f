"""DMC's speed: a training step against the vanilla model's, its averages, decoding and memory at a ratio of 4.

    python benchmarks/speed/dmc.py [--quick] [--json FILE]

step        forward and backward of a decoder of 4 layers (--width, T = 2,048, soft decisions with noise) against the
            same model as transformers runs it (SDPA), and against the same kernels without decisions (the model half
            annealed), which is the cost of the machinery alone
accumulate  ops.dmc_accumulate: bytes that it must move (keys, values, gates in, averages and z out; backward: two
            gradients, keys, values, gates and states in, gradients out) per second over those of a copy of 256 MiB in
            the same turns; states are the averages before every 64th token
decode      one layer's whole step (decisions, append or merge, attention) over rows that kept a quarter of T tokens, at
            heads of very different ratios, against the dense cache's step (append, attention) with the same kernel
batch       sequences that fit where 16 dense ones do, from the bytes of real caches, tables and float32 tails included
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import Row, alternate, options, report
from benchmarks.speed.parts.caches import deciding, dmc_cache
from benchmarks.speed.parts.layers import HKV, D, attend, dense_cache, draw_queries, draw_rows
from kvcompress import CompressedCache, QuestCache, dmc, ops
from kvcompress.dmc import CompressionLoss, DMCConfig

KEPT = (0.6, 0.4, 0.3, 0.25, 0.2, 0.12, 0.08, 0.05)  # share of tokens that open an entry, per KV head; mean 0.25
KINDS = {"ragged": KEPT, "even": (0.25,) * HKV, "ratio1": (1.0,) * HKV}


@dataclass(frozen=True)
class Sizes:
    """widths and step_tokens: of the decoder that is trained. accumulated: bytes of a head's keys over its head dim.
    copied: bytes of the array whose copy gives the bandwidth. decoded: tokens that a row has seen, of every dtype and
    batch. batch: those of the rows that are counted."""

    repeats: int = 9
    step_repeats: int = 5
    widths: tuple[int, ...] = (256, 1024)
    step_tokens: int = 2048
    accumulated: int = 8192
    copied: int = 256 << 20
    decoded: int = 32768
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    batches: tuple[int, ...] = (1, 8)
    batch: tuple[int, ...] = (4096, 32768)


SIZES = {
    "full": Sizes(),
    "quick": Sizes(3, 2, (256,), decoded=8192, dtypes=(torch.bfloat16,), batches=(1,), batch=(4096,)),
    "tiny": Sizes(1, 1, (128,), 64, 256, 1 << 20, 256, (torch.bfloat16,), (1,), (256,)),
}


# ---- training ----


def decoder(width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=4,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 128, 1), head_dim=64,
        max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def step_rows(width: int, T: int, autocast: bool, repeats: int) -> list[Row]:
    ids = torch.randint(0, 256, (2, T), generator=torch.Generator().manual_seed(1))
    plain, bare, full = (decoder(width) for _ in range(3))
    dmc.convert(bare)
    dmc.set_neuron_scale(bare, 0.5)
    dmc.convert(full, DMCConfig(shift=-1.0), anneal=False)  # three in four tokens merge
    objective = CompressionLoss()

    def step(model: LlamaForCausalLM, compressed: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids).loss
        if compressed:
            loss = loss + objective(dmc.last_decisions(model), 4.0)
        loss.backward()
        model.zero_grad(set_to_none=True)

    seconds = alternate(repeats, lambda: step(full, True), lambda: step(plain, False), lambda: step(bare, False))
    name = f"step/width{width}/{'bfloat16' if autocast else 'float32'}/T{T}/B2"
    return [
        Row(f"{name}/vanilla", seconds[0], seconds[1], "transformers, SDPA", note=f"{seconds[0] / seconds[1]:.2f}x"),
        Row(f"{name}/kernels", seconds[0], seconds[2], "no decisions", note=f"{seconds[0] / seconds[2]:.2f}x"),
    ]


# ---- partial averages ----


def accumulate_rows(dtype: torch.dtype, nbytes: int, copied: int, repeats: int) -> list[Row]:
    # outputs of 8 MiB, for which the allocator reuses memory: larger ones would be fresh pages in every call
    B, H, T = 1, HKV, nbytes // dtype.itemsize
    sets = []
    for _ in range(6):  # together more than the last-level cache holds
        keys, values = (torch.randn(B, H, T, D).to(dtype).requires_grad_() for _ in range(2))
        alpha = torch.rand(B, H, T).requires_grad_()
        omega = (torch.rand(B, H, T) + 0.01).requires_grad_()
        sets.append((keys, values, alpha, omega))
    turn = [0]

    def take() -> tuple[Tensor, ...]:
        turn[0] = (turn[0] + 1) % len(sets)
        return sets[turn[0]]

    def forward() -> None:
        with torch.no_grad():
            ops.dmc_accumulate(*take(), neuron=-1)

    outs = [ops.dmc_accumulate(*x, neuron=-1)[:2] for x in sets]
    grads = (torch.randn(B, H, T, D).to(dtype), torch.randn(B, H, T, D).to(dtype))

    def backward() -> None:
        inputs = take()
        torch.autograd.grad(outs[turn[0]], inputs, grads, retain_graph=True)

    size, gates = B * H * T * D * dtype.itemsize, B * H * T * 4
    states = 2 * gates // 64 * D  # float32 averages of keys and values before every 64th token
    moved = {"forward": 4 * size + 3 * gates + states, "backward": 6 * size + 5 * gates + states}
    # read + write bandwidth: arrays of which no cache holds a part worth speaking of
    source, target = (torch.ones(copied // 4) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    seconds = alternate(repeats, forward, backward, copy)
    rate = 2 * copied / seconds[2]
    name = f"accumulate/{str(dtype).removeprefix('torch.')}/T{T}"
    return [
        Row(
            f"{name}/{kind}",
            took,
            None,
            None,
            moved[kind] / took / rate,
            moved[kind],
            f"of {rate / 1e9:.0f} GB/s copied",
        )
        for kind, took in (("forward", seconds[0]), ("backward", seconds[1]))
    ]


# ---- decoding ----


def dense(B: int, T: int, dtype: torch.dtype) -> QuestCache:
    return dense_cache(1, B, T, lambda _, S: draw_rows(B, S, dtype))


def decode_rows(dtype: torch.dtype, B: int, T: int, kind: str, repeats: int) -> list[Row]:
    ours, peer = dmc_cache(1, B, T, dtype, KINDS[kind]), dense(B, T, dtype)
    drawn = [(draw_queries(B, 1, dtype), *deciding(B, 1, dtype, KINDS[kind])) for _ in range(61)]
    turn = [0, 0]

    def step(number: int, cache: CompressedCache) -> None:
        turn[number] += 1
        attend(cache, B, 1, [drawn[turn[number] % len(drawn)]])

    seconds = alternate(repeats, lambda: step(0, ours), lambda: step(1, peer))
    name = f"decode/{str(dtype).removeprefix('torch.')}/T{T}/B{B}/{kind}"
    entries = sum(sum(held) for held in ours.stored_lengths()[0])
    nbytes, note = 2 * entries * D * dtype.itemsize, f"ratio {ours.compression_ratio():.2f}"
    return [Row(name, seconds[0], seconds[1], "dense, same kernel", bytes=nbytes, note=note)]


def batch_rows(dtype: torch.dtype, T: int) -> list[Row]:
    ours, memory = dmc_cache(1, 1, T, dtype, KEPT), 16 * dense(1, T, dtype).nbytes()
    fits = memory // ours.nbytes()
    several = dmc_cache(1, int(fits), T, dtype, KEPT).nbytes() if T <= 4096 else None
    checked = "" if several is None else f", held {several / memory:.3f} of the memory"
    note = f"{fits} sequences, ratio {ours.compression_ratio():.2f}{checked}"
    name = f"batch/{str(dtype).removeprefix('torch.')}/T{T}"
    return [Row(name, 1 / fits, 1 / 16, "dense", bytes=ours.nbytes(), note=note)]


def main() -> None:
    choice = options(__doc__)
    sizes = SIZES[choice.size]
    rows: list[Row] = []
    for width in sizes.widths:
        for autocast in (False, True):
            rows += step_rows(width, sizes.step_tokens, autocast, sizes.step_repeats)
    for dtype in (torch.float32, torch.bfloat16):
        rows += accumulate_rows(dtype, sizes.accumulated, sizes.copied, 2 * sizes.repeats)
    for dtype in sizes.dtypes:
        for B in sizes.batches:
            for kind in KINDS:
                rows += decode_rows(dtype, B, sizes.decoded, kind, 5 * sizes.repeats)
    for length in sizes.batch:
        rows += batch_rows(torch.bfloat16, length)
    report(rows, choice.json)


if __name__ == "__main__":
    main()
