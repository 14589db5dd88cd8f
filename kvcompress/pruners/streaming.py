"""StreamingLLM: keep the first tokens and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Candidates, Pruner, ranges


@dataclass(frozen=True)
class StreamingLLM(Pruner):
    """Keeps num_sink_tokens first tokens and the most recent ones; looks at no attention, so a guide means nothing.

    Source: StreamingLLM, section 3.2; imdc.md, section 7.
    """

    num_sink_tokens: int = 4

    def __post_init__(self) -> None:
        self._check_sinks()

    def select(self, candidates: Candidates, keep: int) -> Tensor:
        sinks = min(self.num_sink_tokens, keep)
        recent = (candidates.count - (keep - sinks), candidates.count)
        return ranges(candidates.keys.shape[1], (0, sinks), recent, device=candidates.keys.device)
