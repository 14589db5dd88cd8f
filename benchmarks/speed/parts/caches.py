"""Caches of layers as Llama 3 8B has them that have seen T tokens of each sequence, a function for each method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.parts.layers import adopt, draw_rows, fill, layers_of
from kvcompress import DMCCache, PoDCache, PrunedCache, dmc, pod
from kvcompress.caches.base import CompressedCache
from kvcompress.caches.origins import Origins
from kvcompress.dmc import DMCConfig
from kvcompress.pod import PoDConfig, PoDPlan
from kvcompress.pruners import Pruner

Draw = Callable[[int, int], tuple[Tensor, Tensor]]  # keys and values of some tokens from a place on, as fill takes it
SHARES = (1, 1 / 2, 1 / 8, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 8)  # of the tokens, as AdaKV divides them; mean 1/4


def deciding(B: int, S: int, dtype: torch.dtype, opens: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Keys and values whose decisions open an entry with the probability of their head."""
    k, v = draw_rows(B, S, dtype)
    opened = torch.rand(B, len(opens), S) < torch.tensor(opens)[:, None]
    k[..., -1] = torch.where(opened, -5.0, 5.0).to(dtype)
    return k, v


def dmc_cache(
    layers: int, B: int, T: int, dtype: torch.dtype, opens: Sequence[float], config: DMCConfig | None = None
) -> DMCCache:
    """opens: share of tokens that open an entry (DMC) or stay (DMS), per KV head."""
    model = layers_of(layers, 2 * T)
    dmc.convert(model, config or DMCConfig(shift=0.0), anneal=False)
    cache = DMCCache(model.config)
    adopt(cache, model)
    fill(cache, B, T, lambda _, S: deciding(B, S, dtype, opens))
    return cache


def pod_cache(B: int, T: int, dtype: torch.dtype, plan: PoDPlan, **settings: Any) -> PoDCache:
    """As many layers as the plan has."""
    model = layers_of(len(plan.lead), 2 * T)
    pod.convert(model, PoDConfig.of(plan))
    cache = PoDCache(model.config, **settings)
    adopt(cache, model)
    fill(cache, B, T, lambda _, S: draw_rows(B, S, dtype))
    return cache


def pruned_cache(
    layers: int, B: int, T: int, dtype: torch.dtype, shares: Sequence[float] = SHARES, pruner: Pruner | None = None
) -> PrunedCache:
    """shares: of the T tokens that each KV head has kept."""
    model = layers_of(layers, 2 * T)
    cache = PrunedCache(model.config, pruner, keep=1.0)
    adopt(cache, model)
    keep(cache, B, T, [int(share * T) for share in shares], lambda _, S: draw_rows(B, S, dtype))
    return cache


def keep(cache: CompressedCache, B: int, T: int, kept: Sequence[int], draw: Draw) -> None:
    """Makes a PrunedCache hold kept[h] of T tokens of each sequence's KV head h, as after a prompt that was pruned."""
    for layer in cache.compressing:
        k, v = draw(0, max(kept))
        layer.open_pool(B * len(kept), k.shape[3], k, [T] * B)
        origins = Origins(B * len(kept))
        origins.later = [T - count for count in kept] * B
        layer.pool.fill((k, v), list(kept) * B, origins)
        layer.next = [T] * B
    cache._check_dtype()  # an empty cache takes note of its model's
    cache.seen, cache._lengths = T, [T] * B


def pod_reads(layers: int, T: int, window: int, token_nbytes: int, weight_nbytes: int) -> dict[str, int]:
    """Bytes that a decoded token moves in one block of PoD, by how followers attend to distant tokens: reuse (the
    probabilities of their lead), recompute (from its queries and keys), skipped (all of them skip).

    token_nbytes: of the keys of a token in all heads, and of its values; weight_nbytes: of its probabilities.
    """
    far, follower = T - window, 2 * window * token_nbytes
    weights = far * weight_nbytes
    whole, values = 2 * T * token_nbytes, far * token_nbytes
    return {
        "reuse": whole + weights + (layers - 1) * (follower + values + weights),
        "recompute": whole + (layers - 1) * (follower + 2 * values),
        "skipped": whole + weights + (layers - 1) * follower,
    }
