"""Every pruner's scoring against the plain PyTorch formula, and as a share of one prefill layer.

    python benchmarks/score.py [--quick] [--json FILE]

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
import time
from unittest import mock

import torch
from common import Row, alternate, gemm_rate, options, report
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import kvcompress
from kvcompress import PrunedCache, RemoteGap, ops, prefill, pruners
from kvcompress.caches.choose import Offers
from kvcompress.caches.passes import CachePass
from kvcompress.caches.pruned_layer import PrunedLayer
from kvcompress.hf.facts import LayerFacts
from kvcompress.models.text import long_text
from kvcompress.positions import RotaryTables
from kvcompress.softmax import Softmax

HQ, HKV, D, HIDDEN, MLP, KEPT = 32, 8, 128, 4096, 14336, 2048
G = HQ // HKV


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


def works(dtype: torch.dtype, T: int, W: int):  # type: ignore[no-untyped-def]
    """name -> (ours, peer, queries of the score); none of them but H2O looks at more than W queries."""
    queries, keys = torch.randn(1, HQ, W, D).to(dtype), torch.randn(1, HKV, T, D).to(dtype)
    near = min(2048, T // 4)

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


def by_pruner(T: int) -> dict[str, object]:
    """Pruners without a score of attention, called as a cache calls them."""
    rotary = RotaryTables(LlamaRotaryEmbedding(llama()))
    queries, keys, values = (torch.randn(1, heads, T, D) for heads in (HQ, HKV, HKV))
    offer = pruners.Candidates(
        queries, keys, T, T, 0, Softmax(D**-0.5), values=values, unrotated=queries, position=T, rotary=rotary
    )
    every = (pruners.KeyNorm(), pruners.Random(), pruners.StreamingLLM(), pruners.ExpectedAttention())
    return {type(pruner).__name__: (lambda pruner=pruner: pruner.scores(offer, KEPT)) for pruner in every}


def llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=1, num_attention_heads=HQ, num_key_value_heads=HKV,
        head_dim=D, max_position_embeddings=8192,
    )  # fmt: skip


def compression(T: int):  # type: ignore[no-untyped-def]
    """What PrunedCache does with one layer after its attention over a prompt."""
    cache = PrunedCache(llama(), pruners.CenterOfGravity(), positions=RemoteGap())
    rotary = RotaryTables(LlamaRotaryEmbedding(llama()))
    facts = LayerFacts(0, HQ, HKV, D, D, rotary, rotary)
    queries, keys, values = (torch.randn(1, heads, T, D) for heads in (HQ, HKV, HKV))

    def work():  # type: ignore[no-untyped-def]
        layer, step = cache.layers[0], CachePass({0: facts}, cache.layers, [T], T)
        layer.chooser.whole = []
        layer.open_pool(HKV, D, keys, [T])
        layer.next, layer.tokens, layer.far.near = [T], [T], [T]
        offers = Offers(keys[0], values[0], [T] * HKV, queries, queries, [T], [0], [T], rotary, Softmax(D**-0.5))
        layer.settle(offers, step, facts, held=False)
        return layer.pool

    return work


@torch.no_grad()
def shipped(T: int, repeats: int) -> Row:
    """The same on the shipped model, whose layers are small: seconds of all layers in compression and in the prompt."""
    model, _ = kvcompress.load_example_model()
    ids = torch.tensor([list(long_text(T + 1))])
    pruner, total = pruners.CenterOfGravity(T // 4, T // 4), []
    settle = PrunedLayer.settle

    def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        settle(*args, **kwargs)
        spent.append(time.perf_counter() - begin)

    with kvcompress.attach(model), mock.patch.object(PrunedLayer, "settle", timed):
        for _ in range(repeats + 1):  # the first is not counted
            spent: list[float] = []
            begin = time.perf_counter()
            prefill(model, ids, PrunedCache(model.config, pruner, positions=RemoteGap()))
            total.append((sum(spent), time.perf_counter() - begin))
    seconds, whole = (statistics.median(x) for x in zip(*total[1:], strict=True))
    note = f"{seconds / whole:.1%} of reading the prompt in {whole * 1e3:.0f} ms, all layers"
    return Row(f"compress/CGE+RGL/example model/T{T}/kept{T // 2}", seconds, note=note)


def main() -> None:
    choice = options(__doc__)
    rate, W = gemm_rate(), 64
    few, many = (3, 3) if choice.quick else (9, 25)
    rows = []
    for dtype in (torch.float32,) if choice.quick else (torch.float32, torch.bfloat16):
        for T in (32768,) if choice.quick else (8192, 32768):
            name = f"{str(dtype).removeprefix('torch.')}/T{T}/Hq{HQ}/Hkv{HKV}/D{D}"
            for pruner, (ours, peer, count) in works(dtype, T, W).items():
                torch.testing.assert_close(ours(), peer().float(), atol=1e-2, rtol=0.1)
                seconds, plainly = alternate(few, ours, peer)
                flop = 2 * HQ * count * T * D
                note = f"{seconds * rate / layer_flop(T):.3%} of a prefill layer"
                rows.append(
                    Row(f"score/{pruner}/{name}/W{count}", seconds, plainly, "plain PyTorch", flop / seconds / rate,
                        HKV * T * D * dtype.itemsize, note)
                )  # fmt: skip
            scores = torch.rand(HKV, T)
            (seconds,) = alternate(many, lambda scores=scores: ops.select_topk(scores, KEPT))  # type: ignore[misc]
            note = f"{seconds * rate / layer_flop(T):.3%} of a prefill layer"
            rows.append(Row(f"select/{name}/k{KEPT}", seconds, note=note))
    T = 32768
    for pruner, work in by_pruner(T).items():
        (seconds,) = alternate(few, work)
        note = f"{seconds * rate / layer_flop(T):.3%} of a prefill layer"
        rows.append(Row(f"score/{pruner}/float32/T{T}/Hq{HQ}/Hkv{HKV}/D{D}", seconds, note=note))
    T = 2048 if choice.quick else 8192
    queries, keys = torch.randn(1, HQ, T, D), torch.randn(1, HKV, T, D)
    ours, peer = alternate(
        1 if choice.quick else 3,
        lambda: ops.window_scores(queries, keys, reduce="sum", kernel_size=1, skip_last=0),
        lambda: plain_h2o(queries, keys),
    )
    note = f"{ours * rate / layer_flop(T):.1%} of a prefill layer; all queries"
    rows.append(
        Row(f"score/H2O/float32/T{T}/Hq{HQ}/Hkv{HKV}/D{D}", ours, peer, "plain PyTorch, head by head",
            HQ * T * T * D / ours / rate, note=note)
    )  # fmt: skip
    T = 8192
    (seconds,) = alternate(few, compression(T))
    note = f"{seconds * rate / layer_flop(T):.3%} of a prefill layer (paper: 0.26%)"
    rows.append(Row(f"compress/CGE+RGL/float32/T{T}/kept4096/Hq{HQ}/Hkv{HKV}/D{D}", seconds, note=note))
    rows.append(shipped(2000, few))
    report(rows, choice.json, gemm_flop=rate)


if __name__ == "__main__":
    main()
