"""TOVA: keep what the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..support.presets import preset_of
from .base import Candidates, Pruner


@dataclass(frozen=True)
class TOVA(Pruner):
    """Keeps the keys that the last query attends to most, summed over all heads of a layer, which keep the same tokens.

    The last token competes like any other, but for the `last` ones, which always stay. With a guide, its last token is
    the one that asks.
    preset("kvpress") is kvpress's TOVAPress: the last token always stays.
    Source: TOVA, section 4.
    """

    last: int = 0
    num_sink_tokens: int = 0
    window = 1
    at_once = 1
    uses_guide = True

    def __post_init__(self) -> None:
        self._check(last=0)

    @staticmethod
    def preset(name: str, **changes: Any) -> TOVA:
        """TOVA as an implementation sets it: kvpress. changes: other fields."""
        return preset_of(TOVA, {"kvpress": {"last": 1}}, name, changes)

    def recent(self, keep: int, chunk_length: int) -> int:
        return min(self.last, keep - min(self.num_sink_tokens, keep))

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        return candidates.attention(1).sum(0, keepdim=True).expand(candidates.heads, -1)
