"""H2O: keep what has received the most attention of all queries so far."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor

from ..support.presets import preset_of
from .base import Candidates, Pruner
from .observed import ObservedAttention


@dataclass(frozen=True)
class H2O(Pruner):
    """Keeps heavy hitters and recent tokens.

    A key's score is the sum of the attention that all queries ever paid to it, over the query heads of its KV head; the
    sum goes on over chunks and decoded tokens and follows its key through compaction. recent_ratio: share of the budget
    that the most recent tokens take, 0..1 (paper: half).
    Old keys have had more queries to collect from; that is the paper's definition, and why recent tokens are protected.
    preset("kvpress") is ObservedAttention, which is what kvpress has of it.
    Source: H2O, section 4; a running sum per KV head.
    """

    recent_ratio: float = 0.5
    num_sink_tokens: int = 0
    accumulates = True
    window = 1
    at_once = 0
    by_head = True

    def __post_init__(self) -> None:
        self._check()
        if not isinstance(self.recent_ratio, (int, float)) or not 0.0 <= self.recent_ratio <= 1.0:
            raise ValueError(f"recent_ratio must be between 0 and 1, got {self.recent_ratio}")

    @staticmethod
    def preset(name: str, **changes: Any) -> Pruner:
        """What an implementation has in H2O's place: kvpress. changes: other fields of that."""
        return preset_of(ObservedAttention, {"kvpress": {}}, name, changes)

    def recent(self, keep: int, chunk_length: int) -> int:
        return min(int(Fraction(repr(float(self.recent_ratio))) * keep), keep - min(self.num_sink_tokens, keep))

    def votes(self, candidates: Candidates) -> Tensor:
        return candidates.attention(candidates.queries.shape[2])

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        return self.votes(candidates) if candidates.received is None else candidates.received
