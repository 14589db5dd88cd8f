"""SnapKV: keep what the latest queries attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from .base import Candidates, Pruner, ranges


@dataclass(frozen=True)
class SnapKV(Pruner):
    """Keeps the keys that a window of queries attends to most, per KV head.

    The chunk's last `window` tokens are always kept. Unguided they vote (mean over them and over the query heads of a
    KV head), and votes are average-pooled over `kernel_size` neighbours. Guided, the guide's tokens vote instead
    (`guide_reduce` over them and the heads), and votes are max-pooled over `guide_kernel_size` neighbours, so that what
    follows a hit is kept with it; the guide itself is never kept.
    num_sink_tokens: first tokens of the prompt that are always kept, counted inside the budget.
    Source: SnapKV, section 4; imdc.md, section 7.
    """

    window: int = 32
    kernel_size: int = 5
    num_sink_tokens: int = 0
    guide_kernel_size: int = 15
    guide_reduce: str = "max"
    uses_guide = True

    def __post_init__(self) -> None:
        self._check_sinks()
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        for name in ("kernel_size", "guide_kernel_size"):
            size = getattr(self, name)
            if size < 1 or size % 2 == 0:
                raise ValueError(f"{name} must be odd and at least 1, got {size}")
        if self.guide_reduce not in ops.REDUCTIONS:
            raise ValueError(f"guide_reduce must be one of {', '.join(ops.REDUCTIONS)}, got {self.guide_reduce!r}")

    def select(self, candidates: Candidates, keep: int) -> Tensor:
        queries, keys, count = candidates.queries, candidates.keys, candidates.count
        heads = keys.shape[1]
        sinks = min(self.num_sink_tokens, keep)
        recent = min(self.window, candidates.chunk_length, keep - sinks)
        if recent == 0:
            return ranges(heads, (0, sinks), device=keys.device)
        guided = candidates.guide_length > 0
        scores = ops.window_scores(
            queries[:, :, -(candidates.guide_length if guided else recent) :],
            keys,
            scale=candidates.scaling,
            reduce=self.guide_reduce if guided else "mean",
            pooling="max" if guided else "avg",
            kernel_size=self.guide_kernel_size if guided else self.kernel_size,
        )[0, :, : count - recent]
        scores[:, :sinks] = float("inf")
        chosen = ops.select_topk(scores, keep - recent)
        return torch.cat([chosen, ranges(heads, (count - recent, count), device=keys.device)], dim=1)
