"""PoD's cache: bytes, sequences that fit, and the time of a decoded token, beside the dense cache with the same kernel.

    python benchmarks/speed/pod.py [--quick] [--json FILE]

One block of 5 layers as Llama 3 8B has them (32 query heads, 8 KV heads of 128): one leads and four follow, so that
phi = 0.8 as in the paper, with 16 + 4,080 near tokens; random keys and values.

bytes    nbytes() of filled caches, tables included, at T tokens. ceiling: what was saved, of what the formula
         0.5 * phi * (T - W) / T says (PoDPlan.saved)
batch    sequences that a PoD cache holds in the memory of 4 dense ones (held at once); ratio over 4
decode   one token through the block's 5 layers: rotation, append, attention. reuse: followers take the probabilities
         that their lead has computed; recompute: from the lead's queries and keys; skipped: tau = 0, so that every
         follower's head skips, which is the most that tau can save. Peer: 5 layers that keep everything, same kernel.
         ceiling: bytes that must be read (keys, values, and probabilities written and read) per second, of a sum
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import Row, alternate, options, read_bandwidth, report

from kvcompress import PoDCache
from kvcompress.caches.paged import PagedLayer
from kvcompress.caches.passes import CachePass
from kvcompress.hf.facts import Facts, LayerFacts
from kvcompress.pod import PoDConfig, PoDPlan
from kvcompress.positions import RotaryTables
from kvcompress.softmax import Softmax

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS, SINKS, RECENT = 5, 16, 4080
LEAD = ((0,) * KV_HEADS,) * LAYERS
PLAN = PoDPlan(LEAD, SINKS, RECENT, query_heads=HEADS, head_dim=HEAD_DIM)
CHUNK = 4096  # tokens that are stored at once


def tokens(B: int, S: int, dtype: torch.dtype, heads: int) -> Tensor:
    return torch.randn(B, heads, S, HEAD_DIM).to(dtype)


def pod_cache(B: int, T: int, dtype: torch.dtype, **settings: Any) -> PoDCache:
    """With T tokens stored; nothing is attended to meanwhile."""
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=2 * T,
    )  # fmt: skip
    config.kvcompress = PoDConfig.of(PLAN).to_dict()
    cache = PoDCache(config, **settings)
    rotary = RotaryTables(LlamaRotaryEmbedding(config))
    cache.facts = Facts(
        {index: LayerFacts(index, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, rotary, rotary) for index in range(LAYERS)}
    )
    for begin in range(0, T, CHUNK):
        S = min(CHUNK, T - begin)
        opened = CachePass(cache.facts, cache.layers, [S] * B, S)
        for layer in cache.layers:
            k, v = tokens(B, S, dtype, KV_HEADS), tokens(B, S, dtype, KV_HEADS)
            if layer.keys is None:
                layer._open(opened, k.repeat_interleave(HEADS // KV_HEADS, 1), k)
            layer.keys.append(k, (S,) * B)  # type: ignore[union-attr]
            layer.values.append(v, (S,) * B)  # type: ignore[union-attr]
            layer.next = [begin + S] * B
            layer.places = torch.full((B, 1), begin + S, dtype=torch.int32)
    return cache


def dense_layers(cache: PoDCache, B: int, T: int, dtype: torch.dtype) -> list[PagedLayer]:
    """As many layers that keep everything."""
    layers = [PagedLayer(index, index, cache.pool_settings) for index in range(LAYERS)]
    for layer in layers:
        layer.open_pool(B * KV_HEADS, HEAD_DIM, torch.empty(0, dtype=dtype), [T] * B)
        for begin in range(0, T, CHUNK):
            S = min(CHUNK, T - begin)
            layer.pool.append([tokens(B, S, dtype, KV_HEADS) for _ in range(2)], [S] * (B * KV_HEADS))  # type: ignore[union-attr]
            layer.next = [begin + S] * B
    return layers


def held(layers: list[PagedLayer]) -> int:
    return sum(layer.nbytes() for layer in layers)


def step(cache: PoDCache, layers: list[Any], drawn: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    assert cache.facts is not None
    one = CachePass(cache.facts, layers, (1,) * drawn[0][0].shape[0], 1)
    for layer, given in zip(layers, drawn, strict=True):
        layer.attend(one, *given, Softmax(HEAD_DIM**-0.5))


def bytes_rows(T: int, dtype: torch.dtype) -> list[Row]:
    cache = pod_cache(1, T, dtype)
    ours, dense = cache.nbytes(), held(dense_layers(cache, 1, T, dtype))
    saved, predicted = 1 - ours / dense, PLAN.saved(T)
    note = f"saved {saved:.4f} of {dense / 2**20:,.0f} MiB, formula {predicted:.4f}"
    ceiling = saved / predicted if predicted else None
    return [Row(f"bytes/{name_of(dtype)}/T{T}", ours, dense, "dense, bytes", ceiling, ours, note)]


def batch_rows(T: int, dtype: torch.dtype) -> list[Row]:
    cache = pod_cache(1, T, dtype)
    memory = 4 * held(dense_layers(cache, 1, T, dtype))
    fits = memory // cache.nbytes()
    del cache
    several = pod_cache(int(fits), T, dtype).nbytes()
    note = f"{fits} sequences for 4 ({fits / 4 - 1:+.0%}), held {several / memory:.3f} of the memory"
    return [Row(f"batch/{name_of(dtype)}/T{T}", 1 / fits, 1 / 4, "dense", bytes=several, note=note)]


@torch.no_grad()  # as a cache runs
def decode_rows(T: int, B: int, dtype: torch.dtype, repeats: int, bandwidth: float) -> list[Row]:
    caches = {
        "reuse": pod_cache(B, T, dtype, reuse=True),
        "recompute": pod_cache(B, T, dtype, reuse=False),
        "skipped": pod_cache(B, T, dtype, tau=0.0),
    }
    dense = dense_layers(caches["reuse"], B, T, dtype)
    drawn = [tuple(tokens(B, 1, dtype, n) for n in (HEADS, KV_HEADS, KV_HEADS)) for _ in range(LAYERS)]
    works = [lambda cache=cache: step(cache, cache.layers, drawn) for cache in caches.values()]  # type: ignore[misc]
    seconds = alternate(repeats, *works, lambda: step(caches["reuse"], dense, drawn))  # type: ignore[arg-type]
    one, far = B * KV_HEADS * HEAD_DIM * dtype.itemsize, T - PLAN.window
    follower = 2 * PLAN.window * one
    weights = B * HEADS * far * 4
    read = {
        "reuse": 2 * T * one + weights + (LAYERS - 1) * (follower + far * one + weights),
        "recompute": 2 * T * one + (LAYERS - 1) * (follower + 2 * far * one),
        "skipped": 2 * T * one + weights + (LAYERS - 1) * follower,
    }
    name = f"decode/{name_of(dtype)}/T{T}/B{B}"
    return [
        Row(f"{name}/{kind}", took, seconds[-1], "dense, same kernel", read[kind] / took / bandwidth, read[kind],
            f"{took / seconds[-1]:.2f}x; bytes {read[kind] / (2 * LAYERS * T * one):.2f}x")
        for kind, took in zip(caches, seconds, strict=False)
    ]  # fmt: skip


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    choice = options(__doc__)
    torch.manual_seed(0)
    bandwidth, rows = read_bandwidth(), []
    for T in (8192,) if choice.quick else (8192, 32768, 131072):
        rows += bytes_rows(T, torch.bfloat16)
    rows += batch_rows(8192 if choice.quick else 32768, torch.bfloat16)
    repeats = 10 if choice.quick else 30
    for T, B in ((16384, 1),) if choice.quick else ((8192, 1), (32768, 1), (32768, 4)):
        for dtype in (torch.bfloat16,) if choice.quick or T * B > 65536 else (torch.bfloat16, torch.float32):
            rows += decode_rows(T, B, dtype, repeats, bandwidth)
    report(rows, choice.json, read_gigabytes_per_second=bandwidth / 1e9)


if __name__ == "__main__":
    main()
