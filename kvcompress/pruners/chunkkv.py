"""ChunkKV: keep or drop neighbours together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..support.presets import preset_of
from .asking import AskingPruner
from .base import Candidates, Pruner
from .snapkv import SnapKV


@dataclass(frozen=True)
class ChunkKV(AskingPruner):
    """Another pruner's scores, of chunks of neighbours in place of tokens: each token gets its chunk's mean.

    pruner: whose scores, SnapKV's window by default. chunk: tokens of a chunk, counted from the start of what is held;
    the last one may be shorter. heads: "shared" sums over the KV heads of a layer, which then keep the same chunks;
    "per_kv_head" leaves each its own. A budget that ends inside a chunk takes the first tokens of it. What the inner
    pruner always keeps stays.
    preset("kvpress") is kvpress's ChunkKVPress: chunks of 20.
    Source: ChunkKV (Liu et al. 2025, arXiv:2502.00299), section 3; without its reuse of a layer's choice in others.
    """

    pruner: Pruner = field(default_factory=SnapKV)
    chunk: int = 10
    heads: str = "shared"

    def __post_init__(self) -> None:
        self._follow()
        if self.heads not in ("shared", "per_kv_head"):
            raise ValueError(f"heads must be one of shared, per_kv_head, got {self.heads!r}")
        self._check(chunk=1)

    @staticmethod
    def preset(name: str, **changes: Any) -> ChunkKV:
        """ChunkKV as an implementation sets it: kvpress. changes: other fields."""
        return preset_of(ChunkKV, {"kvpress": {"chunk": 20}}, name, changes)

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        return self.heads == "per_kv_head" and self.pruner.by_head

    @property
    def at_once(self) -> int | None:  # type: ignore[override]
        """As many as the pruner asks for."""
        return self.pruner.at_once

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        scores = self.pruner.scores(candidates, keep).float()
        places, held = candidates.places()
        scores = scores.masked_fill(places >= held, 0)
        counted = (places < held).expand_as(scores).float()
        if self.heads == "shared":
            scores, counted = (x.sum(0, keepdim=True).expand_as(x) for x in (scores, counted))
        spare = -candidates.count % self.chunk
        chunks, sizes = (
            torch.nn.functional.pad(x, (0, spare)).unflatten(1, (-1, self.chunk)).sum(-1) for x in (scores, counted)
        )
        return (chunks / sizes.clamp_min(1)).repeat_interleave(self.chunk, 1)[:, : candidates.count]
