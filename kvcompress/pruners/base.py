"""What a pruner is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """What one sequence of one layer offers after an iteration: memory first, then the chunk, then the guide if any.

    queries: [1, Hq, S, D] rotated: the chunk's tokens and then the guide's. keys: [1, Hkv, count + guide_length, D]
    rotated. count: candidates (memory and chunk). chunk_length: how many of them are new. scaling: of the logits.
    """

    queries: Tensor
    keys: Tensor
    count: int
    chunk_length: int
    guide_length: int
    scaling: float


class Pruner(ABC):
    """Chooses which candidates stay. Subclasses are frozen dataclasses."""

    num_sink_tokens: int
    uses_guide = False

    @abstractmethod
    def select(self, candidates: Candidates, keep: int) -> Tensor:
        """Places of the `keep` candidates that stay: int32 [Hkv, keep], rising, below candidates.count.

        keep: 1..candidates.count - 1.
        """

    def _check_sinks(self) -> None:
        if self.num_sink_tokens < 0:
            raise ValueError(f"num_sink_tokens must be at least 0, got {self.num_sink_tokens}")


def ranges(heads: int, *spans: tuple[int, int], device: torch.device) -> Tensor:
    """int32 [heads, n]: the numbers of the half-open spans one after another, the same for every head."""
    parts = [torch.arange(start, stop, dtype=torch.int32, device=device) for start, stop in spans]
    return torch.cat(parts).expand(heads, -1)
