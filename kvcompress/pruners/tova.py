"""TOVA: keep what the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Candidates, Pruner


@dataclass(frozen=True)
class TOVA(Pruner):
    """Keeps the keys that the last query attends to most, summed over all heads of a layer, which keep the same tokens.

    The last token competes like any other. With a guide, its last token is the one that asks.
    Source: TOVA, section 4.
    """

    num_sink_tokens: int = 0
    window = 1
    uses_guide = True

    def __post_init__(self) -> None:
        self._check()

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        return candidates.attention(1).sum(0, keepdim=True).expand(candidates.heads, -1)
