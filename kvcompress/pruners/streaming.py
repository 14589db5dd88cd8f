"""StreamingLLM and window attention: keep tokens by their place alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Candidates, Pruner


@dataclass(frozen=True)
class StreamingLLM(Pruner):
    """Keeps num_sink_tokens first tokens and the most recent ones; looks at no attention, so a guide means nothing.

    Source: StreamingLLM, section 3.2. StreamingCache does the same at every token, in a ring.
    """

    num_sink_tokens: int = 4
    by_head = True
    at_once = 0

    def __post_init__(self) -> None:
        self._check()

    def recent(self, keep: int, chunk_length: int) -> int:
        return keep - min(self.num_sink_tokens, keep)

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        places = torch.arange(candidates.count, dtype=torch.float32, device=candidates.keys.device)
        return places.expand(candidates.heads, -1)


@dataclass(frozen=True)
class WindowAttention(StreamingLLM):
    """Keeps the most recent tokens alone. A baseline: models break without their first tokens.

    Source: StreamingLLM, figure 1 (b).
    """

    num_sink_tokens: int = 0
