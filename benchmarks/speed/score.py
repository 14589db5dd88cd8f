"""Every pruner's scoring against the plain PyTorch formula, and as a share of one prefill layer.

    python benchmarks/speed/score.py [--quick] [--json FILE]

Shape of one layer of Llama-3-8B: Hq 32, Hkv 8, D 128, hidden 4096, MLP 14336. The peer is what a user would write:
matmul, mask, fp32 softmax, reduction (SnapKV: and avg_pool1d); it holds [Hq, W, T] floats (256 MiB at T = 32,768 with
64 queries; H2O's peer goes head by head: [T, T] floats at a time), ours 10 MiB. ceiling: the FLOPs of the scores'
products (2*Hq*W*T*D; causal half of it for H2O) at the GEMM rate measured in the same run, over our time; there are as
many exponentials as logits besides. share: of the time that one prefill layer's FLOPs take at that rate (projections,
MLP and causal attention).
compress: the whole of CGE with RGL after a prompt of 8,192 tokens, 2,048 + 2,048 kept: score, select, take the keys
and values that stay, rotate the compressed ones to their new positions, append to pages.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import Row, alternate, gemm_rate, options, report
from benchmarks.speed.parts.layers import HKV, HQ, D, adopt, attend, draw_queries, draw_rows, layers_of, unattended
from kvcompress import PrunedCache, RemoteGap, ops, prefill, pruners
from kvcompress.caches.pruned_layer import PrunedLayer
from kvcompress.models.text import long_text
from kvcompress.ops.softmax import Softmax
from kvcompress.positions import RotaryTables

HIDDEN, MLP = 4096, 14336
G = HQ // HKV


@dataclass(frozen=True)
class Sizes:
    """repeats: of what takes long, and of what does not. lengths: of prompts that are scored with W queries, in these
    dtypes; the last is that of by_pruner. kept: tokens that are selected. near: those of CGE. whole: length and
    repetitions where all queries are scored. compressed: length, near and far tokens that stay. shipped: the prompt of
    the shipped model."""

    repeats: tuple[int, int] = (9, 25)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    lengths: tuple[int, ...] = (8192, 32768)
    kept: int = 2048
    near: int = 2048
    whole: tuple[int, int] = (8192, 3)
    compressed: tuple[int, int] = (8192, 2048)
    shipped: int = 2000


SIZES = {
    "full": Sizes(),
    "quick": Sizes((3, 3), (torch.float32,), (32768,), whole=(2048, 1)),
    "tiny": Sizes((1, 1), (torch.float32,), (256,), 64, 64, (128, 1), (256, 64), 400),
}


def layer_flop(T: int) -> float:
    weights = 2 * HIDDEN * (HQ + HKV) * D + 3 * HIDDEN * MLP
    return 2.0 * T * weights + 2.0 * HQ * D * T * T


def plain(queries: torch.Tensor, keys: torch.Tensor, *, first: int = 0, last: int = 0) -> torch.Tensor:
    """Sums over the queries and the heads of a KV head; columns `first` at the start and `last` at the end masked."""
    W, T = queries.shape[2], keys.shape[2]
    grouped = queries.reshape(1, HKV, G * W, D)
    logits = (grouped @ keys.transpose(2, 3) * D**-0.5).view(1, HKV, G, W, T)
    hidden = torch.ones(W, T, dtype=torch.bool).triu(T - W + 1)
    hidden[:, :first] = True
    hidden[:, T - last :] = True
    return logits.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32).sum(dim=(2, 3))


def plain_snapkv(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    W = queries.shape[2]
    votes = plain(queries, keys)[..., :-W] / (G * W)
    return torch.nn.functional.avg_pool1d(votes, 5, 1, 2)


def plain_h2o(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    T = keys.shape[2]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    out = torch.zeros(1, HKV, T)
    for h in range(HQ):
        logits = (queries[0, h] @ keys[0, h // G].T * D**-0.5).masked_fill(hidden, float("-inf"))
        out[0, h // G] += logits.softmax(-1, dtype=torch.float32).sum(0)
    return out


def works(dtype: torch.dtype, T: int, W: int, near: int):  # type: ignore[no-untyped-def]
    """name -> (ours, peer, queries of the score); none of them but H2O looks at more than W queries."""
    queries, (keys, _) = draw_queries(1, W, dtype), draw_rows(1, T, dtype)

    def score(**settings):  # type: ignore[no-untyped-def]
        return ops.window_scores(queries, keys, reduce="sum", kernel_size=1, **settings)

    return {
        "SnapKV": (lambda: ops.window_scores(queries, keys), lambda: plain_snapkv(queries, keys), W),
        "CenterOfGravity/global": (
            lambda: score(skip_last=near, mask_last=near), lambda: plain(queries, keys, last=near)[..., :-near], W,
        ),
        "CenterOfGravity/local": (
            lambda: score(skip_last=near, mask_first=4), lambda: plain(queries, keys, first=4)[..., :-near], W,
        ),
        "TOVA": (
            lambda: ops.window_scores(queries[:, :, -1:], keys, reduce="sum", kernel_size=1, skip_last=0),
            lambda: plain(queries[:, :, -1:], keys), 1,
        ),
    }  # fmt: skip


def by_pruner(T: int, kept: int) -> dict[str, Callable[[], object]]:
    """Pruners without a score of attention, called as a cache calls them."""
    rotary = RotaryTables(layers_of(1, T).model.rotary_emb)
    queries, (keys, values) = draw_queries(1, T, torch.float32), draw_rows(1, T, torch.float32)
    offer = pruners.Candidates(
        queries, keys, T, T, 0, Softmax(D**-0.5), values=values, unrotated=queries, position=T, rotary=rotary
    )
    every = (pruners.KeyNorm(), pruners.Random(), pruners.StreamingLLM(), pruners.ExpectedAttention())
    return {type(pruner).__name__: (lambda pruner=pruner: pruner.scores(offer, kept)) for pruner in every}


@contextmanager
def compressing() -> Iterator[list[float]]:
    """Seconds that each layer of a PrunedCache takes to compress, one after the other."""
    seconds: list[float] = []
    settle = PrunedLayer.settle

    def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        settle(*args, **kwargs)
        seconds.append(time.perf_counter() - begin)

    with mock.patch.object(PrunedLayer, "settle", timed):
        yield seconds


def compression(T: int, near: int, repeats: int) -> float:
    """Seconds of what PrunedCache does with one layer after its attention over a prompt."""
    model, pruner = layers_of(1, T), pruners.CenterOfGravity(near, near)
    prompt = draw_queries(1, T, torch.float32), *draw_rows(1, T, torch.float32)
    with compressing() as seconds, unattended():
        for _ in range(repeats + 1):  # the first is not counted
            cache = PrunedCache(model.config, pruner, positions=RemoteGap())
            adopt(cache, model)
            attend(cache, 1, T, [prompt])
    return statistics.median(seconds[1:])


@torch.no_grad()
def shipped(T: int, repeats: int) -> Row:
    """The same on the shipped model, whose layers are small: seconds of all layers in compression and in the prompt."""
    model, _ = kvcompress.load_example_model()
    ids = torch.tensor([list(long_text(T + 1))])
    pruner, total = pruners.CenterOfGravity(T // 4, T // 4), []
    with kvcompress.attach(model):
        for _ in range(repeats + 1):  # the first is not counted
            begin = time.perf_counter()
            with compressing() as spent:
                prefill(model, ids, PrunedCache(model.config, pruner, positions=RemoteGap()))
            total.append((sum(spent), time.perf_counter() - begin))
    seconds, whole = (statistics.median(x) for x in zip(*total[1:], strict=True))
    note = f"{seconds / whole:.1%} of reading the prompt in {whole * 1e3:.0f} ms, all layers"
    return Row(f"compress/CGE+RGL/example model/T{T}/kept{T // 2}", seconds, note=note)


def main() -> None:
    choice = options(__doc__)
    sizes, rate, W = SIZES[choice.size], gemm_rate(choice.size), 64
    few, many = sizes.repeats
    kept, shape = sizes.kept, f"Hq{HQ}/Hkv{HKV}/D{D}"
    rows = []
    for dtype in sizes.dtypes:
        for T in sizes.lengths:
            name = f"{str(dtype).removeprefix('torch.')}/T{T}/{shape}"
            for pruner, (ours, peer, count) in works(dtype, T, W, sizes.near).items():
                torch.testing.assert_close(ours(), peer().float(), atol=1e-2, rtol=0.1)
                seconds, plainly = alternate(few, ours, peer)
                flop = 2 * HQ * count * T * D
                note = f"{seconds * rate / layer_flop(T):.3%} of a prefill layer"
                rows.append(
                    Row(f"score/{pruner}/{name}/W{count}", seconds, plainly, "plain PyTorch", flop / seconds / rate,
                        HKV * T * D * dtype.itemsize, note)
                )  # fmt: skip
            scores = torch.rand(HKV, T)
            (seconds,) = alternate(many, lambda scores=scores: ops.select_topk(scores, kept))  # type: ignore[misc]
            note = f"{seconds * rate / layer_flop(T):.3%} of a prefill layer"
            rows.append(Row(f"select/{name}/k{kept}", seconds, note=note))
    T = sizes.lengths[-1]
    for pruner, work in by_pruner(T, kept).items():
        (seconds,) = alternate(few, work)
        note = f"{seconds * rate / layer_flop(T):.3%} of a prefill layer"
        rows.append(Row(f"score/{pruner}/float32/T{T}/{shape}", seconds, note=note))
    T, repeats = sizes.whole
    queries, (keys, _) = draw_queries(1, T, torch.float32), draw_rows(1, T, torch.float32)
    ours, peer = alternate(
        repeats,
        lambda: ops.window_scores(queries, keys, reduce="sum", kernel_size=1, skip_last=0),
        lambda: plain_h2o(queries, keys),
    )
    note = f"{ours * rate / layer_flop(T):.1%} of a prefill layer; all queries"
    rows.append(
        Row(f"score/H2O/float32/T{T}/{shape}", ours, peer, "plain PyTorch, head by head",
            HQ * T * T * D / ours / rate, note=note)
    )  # fmt: skip
    T, near = sizes.compressed
    seconds = compression(T, near, few)
    note = f"{seconds * rate / layer_flop(T):.3%} of a prefill layer (paper: 0.26%)"
    rows.append(Row(f"compress/CGE+RGL/float32/T{T}/kept{2 * near}/{shape}", seconds, note=note))
    rows.append(shipped(sizes.shipped, few))
    report(rows, choice.json, gemm_flop=rate)


if __name__ == "__main__":
    main()
