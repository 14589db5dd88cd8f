"""SnapKV: keep what the latest queries attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import ops
from ..support.presets import preset_of
from .base import Candidates, Pruner

_PRESETS: dict[str, dict[str, Any]] = {
    "official": {"window": 32, "kernel_size": 5, "pooling": "avg", "reduce": "sum"},
    "kvpress": {"window": 64, "kernel_size": 5, "pooling": "avg", "reduce": "mean"},
    "kvcache-factory": {"window": 8, "kernel_size": 7, "pooling": "max", "reduce": "sum"},
    "adakv": {"window": 32, "kernel_size": 7, "pooling": "max", "reduce": "mean"},
}


@dataclass(frozen=True)
class SnapKV(Pruner):
    """Keeps the keys that a window of queries attends to most, per KV head.

    The last `window` tokens are always kept. Unguided they vote (`reduce` over them and over the query heads of a KV
    head), and votes are pooled over `kernel_size` neighbours (`pooling`). Guided, the guide's tokens vote instead
    (`guide_reduce` over them and the heads), and votes are max-pooled over `guide_kernel_size` neighbours, so that what
    follows a hit is kept with it; the guide itself is never kept.
    num_sink_tokens: first tokens of the prompt that are always kept, counted inside the budget.
    Sum and mean choose the same tokens; they differ in the size of the scores alone.

    preset(name) gives the settings of a known implementation. They differ in these settings, and in what the query
    heads of a KV head do: "official" and "kvcache-factory" keep a set per query head (KV heads repeated in memory),
    "kvpress" and "adakv" take the mean over the query heads of a KV head, as here.
      official         window 32, average pooling over 5, sum: the defaults of init_snapkv in the authors' code (its
                       class says 64, which init_snapkv never passes)
      kvpress          window 64, average pooling over 5, mean
      kvcache-factory  window 8, maximum pooling over 7, sum: what its LongBench script sets
      adakv            window 32, maximum pooling over 7, mean
    Source: SnapKV, section 4.
    """

    window: int = 32
    kernel_size: int = 5
    num_sink_tokens: int = 0
    guide_kernel_size: int = 15
    guide_reduce: str = "max"
    pooling: str = "avg"
    reduce: str = "mean"
    uses_guide = True
    by_head = True

    def __post_init__(self) -> None:
        self._check(window=1, kernel_size=1, guide_kernel_size=1)
        for name in ("kernel_size", "guide_kernel_size"):
            if getattr(self, name) % 2 == 0:
                raise ValueError(f"{name} must be odd, got {getattr(self, name)}")
        for name, choices in (("guide_reduce", ops.REDUCTIONS), ("reduce", ops.REDUCTIONS), ("pooling", ops.POOLINGS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @staticmethod
    def preset(name: str, **changes: Any) -> SnapKV:
        """SnapKV as an implementation sets it: official, kvpress, kvcache-factory, adakv. changes: other fields."""
        return preset_of(SnapKV, _PRESETS, name, changes)

    @property
    def observation_window(self) -> int | None:
        return self.window

    @property
    def at_once(self) -> int:  # type: ignore[override]
        """Those that look at the others."""
        return self.window

    def recent(self, keep: int, chunk_length: int) -> int:
        return min(self.window, chunk_length, keep - min(self.num_sink_tokens, keep))

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        if candidates.guide_length:
            return candidates.attention(
                candidates.guide_length, reduce=self.guide_reduce, pooling="max", kernel_size=self.guide_kernel_size
            )
        recent = self.recent(keep, candidates.chunk_length)
        return candidates.attention(
            recent, reduce=self.reduce, pooling=self.pooling, kernel_size=self.kernel_size, skip_last=recent
        )
