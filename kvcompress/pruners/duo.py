"""DuoAttention: heads that retrieve keep all, the others the first and the latest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..budgets import Budget, CacheShape
from ..heads import HeadProfile
from ..support.checks import MOST_INT32, need, need_integer, need_number
from ..support.units import Keep
from .base import Candidates, Pruner


@dataclass(frozen=True)
class DuoAttention(Pruner):
    """Some KV heads keep every token, the others (streaming heads) the first `sinks` and the last
    `recent_tokens` alone.

    heads: how much each one retrieves, measured before (HeadProfile.load of a file; `kvcompress analyze heads`).
    sparsity: share of all heads that stream, those that retrieve least. sinks, recent_tokens: None = as the profile
    says.
    It brings its own budget (PrunedCache's keep and budget must be None): bytes grow with what is read in the heads
    that retrieve alone. For decoding give the cache `every`: streaming heads then hold at most sinks + recent + every
    tokens, else they grow until the next call. Tokens stay where they were. A prompt in one call is read with full
    attention in all heads; with a chunk_size streaming heads see their tokens and the chunk, as in the authors' chunked
    pre-filling.
    Source: DuoAttention (Xiao et al. 2024, arXiv:2410.10819), sections 2.2 and 2.3.
    """

    heads: HeadProfile
    sparsity: float = 0.5
    sinks: int | None = None
    recent_tokens: int | None = None
    by_head = True
    at_once = 0
    one_frame = True

    def __post_init__(self) -> None:
        kind = type(self.heads).__name__
        need(isinstance(self.heads, HeadProfile), f"heads must be a HeadProfile, got {kind}: HeadProfile.load reads it")
        need_number("sparsity", self.sparsity, 0.0, 1.0)
        for name, value, least in (("sinks", self.sinks, 0), ("recent_tokens", self.recent_tokens, 1)):
            if value is not None:
                need_integer(name, value, least, MOST_INT32)
        object.__setattr__(self, "num_sink_tokens", self.heads.sinks if self.sinks is None else self.sinks)

    @property
    def latest(self) -> int:
        """Last tokens that a streaming head keeps."""
        return self.heads.recent if self.recent_tokens is None else self.recent_tokens

    @property
    def own_budget(self) -> Budget:
        return StreamingHeads(self.heads, self.sparsity, self.num_sink_tokens + self.latest)

    def recent(self, keep: int, chunk_length: int) -> int:
        return min(self.latest, keep - min(self.num_sink_tokens, keep))

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        places = torch.arange(candidates.count, dtype=torch.float32, device=candidates.keys.device)
        return places.expand(candidates.heads, -1)


@dataclass(frozen=True)
class StreamingHeads(Budget):
    """Rows of heads that retrieve keep all that they have, the others the best `window` tokens."""

    heads: HeadProfile
    sparsity: float
    window: int

    def _whole(self, layer: int) -> tuple[bool, ...]:
        return self.heads.retrieves(self.sparsity)[layer]

    def mean_tokens(self, keep: Keep, length: int, shape: CacheShape) -> int:
        """Whatever is to be kept: it follows from the length."""
        layers = range(shape.layers)
        return sum(self.layer_tokens(length, length, j, shape.layers) for j in layers) // max(shape.layers, 1)

    def layer_tokens(self, mean: int, length: int, layer: int, layers: int) -> int:
        """Whatever the mean: rounded down."""
        whole = self._whole(layer)
        return sum(length if all_of_it else min(length, self.window) for all_of_it in whole) // len(whole)

    def over(self, layer: int, held: Sequence[int], keep: int, slack: int) -> bool:
        whole = self._whole(layer)
        return any(n >= self.window + slack and not whole[row % len(whole)] for row, n in enumerate(held))

    def check_rows(self, heads: Sequence[int]) -> None:
        self.heads.check_rows(heads)

    def divide(self, layer: int, ranks: Tensor, keep: int, allowed: int) -> tuple[Tensor, Tensor | None]:
        T, whole = ranks.shape[-1], torch.tensor(self._whole(layer), device="cpu")
        counts = (ranks > float("-inf")).sum(-1).to("cpu", torch.int32)
        kept = torch.where(whole, counts, counts.clamp(max=self.window))
        indices = torch.arange(T, dtype=torch.int32, device=ranks.device).repeat(*ranks.shape[:-1], 1)
        some = (~whole).nonzero()[:, 0].to(ranks.device)
        if len(some) and T > self.window:
            best = ranks.index_select(-2, some)
            best = ops.select_topk(best.flatten(0, -2), self.window).view(*best.shape[:-1], -1)
            own = indices.index_select(-2, some)
            own[..., : self.window] = best
            indices = indices.index_copy(-2, some, own)
        return indices[..., : max(int(kept.max()), 1)].contiguous(), kept
