"""What it costs to score a prompt, beside the work that the prompt takes anyway.

    python benchmarks/speed/scoring.py [--quick] [--json FILE]

scoring/<pruner>/<dtype>/T<T>
    Replay, Successor, KeyDiff: what the pruner does with one layer of a prompt of T tokens, shape of Llama 3 8B (Hq 32,
    Hkv 8, D 128), random numbers; the peer is that layer's causal attention, by our own kernel too (ops.attention), in
    turns. Successor is given the logarithms of that attention's sums, as a cache gives them.
    CriticalKV: its scores over SnapKV's alone, with the l1 norms of the paper and with l2; hidden 4,096. The peer is
    the time that the FLOPs of one layer's prefill (projections, MLP of 14,336, causal attention) take at the GEMM rate
    measured in the same run: a real prefill takes longer.
    KVzip: what prefill takes longer with it, over 3/4 of a prompt removed, than with a cache that keeps all; the peer
    is that prefill: a random model of 2 layers, Hq 16, Hkv 4, D 64, hidden 1,024, MLP of 3,584.
share: ours over the peer's time. bar: what it should be at most, None where nobody said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import Row, alternate, gemm_rate, options, report
from benchmarks.speed.parts.layers import HQ, D, draw_queries, draw_rows, layers_of
from benchmarks.speed.score import HIDDEN, layer_flop
from kvcompress import ops
from kvcompress.ops.softmax import Softmax
from kvcompress.positions import RotaryTables
from kvcompress.pruners import Candidates, CriticalKV, KeyDiff, KVzip, Pruner, Replay, SnapKV, Successor

BARS = {"Replay": 1.0, "Successor": 0.05, "KeyDiff": None, "CriticalKV/l1": 0.01, "CriticalKV/l2": 0.01, "KVzip": 2.2}


@dataclass(frozen=True)
class Sizes:
    """prompts: dtype, T and repetitions of the scores' rows. read: T and repetitions of whole prefills; width: hidden
    size of their model."""

    prompts: tuple[tuple[torch.dtype, int, int], ...]
    read: tuple[int, int]
    width: int = 1024


SIZES = {
    "full": Sizes(
        tuple((dtype, T, repeats) for dtype in (torch.float32, torch.bfloat16)
              for T, repeats in ((4096, 5), (8192, 3), (16384, 1))),
        (4096, 3),
    ),
    "quick": Sizes(((torch.float32, 4096, 3),), (2048, 1)),
    "tiny": Sizes(((torch.float32, 128, 1),), (64, 1), 64),
}  # fmt: skip


@dataclass
class ScoringRow(Row):
    share: float = 0.0
    bar: float | None = None


def row(pruner: str, sizes: str, ours: float, peer: float, peer_name: str) -> ScoringRow:
    share, bar = ours / peer, BARS[pruner]
    note = f"{share:.2%} of it" + ("" if bar is None else f", bar {bar:.0%}")
    return ScoringRow(f"scoring/{pruner}/{sizes}", ours, peer, peer_name, note=note, share=share, bar=bar)


def offer(dtype: torch.dtype, T: int) -> Candidates:
    """What a cache offers after a prompt of one sequence."""
    rotary = RotaryTables(layers_of(1, 2 * T).model.rotary_emb)
    queries, (keys, values) = draw_queries(1, T, dtype), draw_rows(1, T, dtype)
    sums = ops.attention(queries, keys, values)[1]
    output = torch.randn(HQ, D, HIDDEN).to(dtype) / HIDDEN**0.5
    return Candidates(queries, keys, T, T, 0, Softmax(D**-0.5), values=values, unrotated=queries, position=T,
                      rotary=rotary, in_sight=T, sums=sums, output=output)  # fmt: skip


def score_rows(dtype: torch.dtype, T: int, repeats: int, rate: float) -> list[Row]:
    asked, keep = offer(dtype, T), T // 4
    assert asked.values is not None
    queries, keys, values = asked.queries, asked.keys, asked.values

    def scores(pruner: Pruner) -> Callable[[], object]:
        return lambda: pruner.scores(asked, keep)

    by_attention = {"Replay": Replay(), "Successor": Successor(), "KeyDiff": KeyDiff()}
    by_layer = {f"CriticalKV/{norm}": CriticalKV(norm=norm) for norm in ("l1", "l2")}
    works = [scores(pruner) for pruner in (*by_attention.values(), SnapKV(), *by_layer.values())]
    attention, *times = alternate(repeats, lambda: ops.attention(queries, keys, values), *works)
    sizes = f"{str(dtype).removeprefix('torch.')}/T{T}"
    rows: list[Row] = [
        row(name, sizes, seconds, attention, "causal attention, our kernel")
        for name, seconds in zip(by_attention, times, strict=False)
    ]
    alone, layer = times[len(by_attention)], layer_flop(T) / rate
    for name, seconds in zip(by_layer, times[len(by_attention) + 1 :], strict=True):
        rows.append(row(name, sizes, max(seconds - alone, 1e-9), layer, "prefill of a layer, FLOPs at the GEMM rate"))
    return rows


def prefill_rows(T: int, repeats: int, width: int) -> list[Row]:
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=2, head_dim=64,
        num_attention_heads=max(width // 64, 4), num_key_value_heads=max(width // 256, 1),
        max_position_embeddings=3 * T,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(256, (1, T))

    def read(pruner: Pruner, keep: float) -> Callable[[], object]:
        return lambda: kvcompress.prefill(model, ids, kvcompress.PrunedCache(config, pruner, keep=keep))

    with kvcompress.attach(model):
        whole, again = alternate(repeats, read(SnapKV(), 1.0), read(KVzip(), 0.25))
    return [row("KVzip", f"float32/T{T}", max(again - whole, 1e-9), whole, "prefill that keeps all")]


def main() -> None:
    choice = options(__doc__)
    torch.manual_seed(0)
    sizes, rate = SIZES[choice.size], gemm_rate(choice.size)
    rows = [row for prompt in sizes.prompts for row in score_rows(*prompt, rate)]
    rows += prefill_rows(*sizes.read, sizes.width)
    report(rows, choice.json, gemm_flop=rate)


if __name__ == "__main__":
    main()
