"""How much of a whole optimizer step was merged: what the hinge of the ratio looks at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..retrofit.ranks import summed


class MergedShare:
    """reached: float32 [L], the share of decisions that merged in the last step that is over, by layer, over all ranks
    and passes; None before the first."""

    def __init__(self) -> None:
        self.reached: Tensor | None = None
        self._totals: Tensor | None = None

    def note(self, totals: Tensor, tokens: Tensor) -> None:
        """A forward pass of the step. totals: [L], its tokens that merge, mean over heads. tokens: of how many."""
        noted = torch.cat([totals.detach(), tokens.detach()[None]]).float()
        self._totals = noted if self._totals is None else self._totals + noted

    def close(self) -> None:
        """The step is over; collective over the ranks, which have all noted passes or none."""
        if self._totals is not None:
            totals = summed(self._totals)
            self.reached, self._totals = totals[:-1] / totals[-1].clamp(min=1), None

    def to_list(self) -> list[float] | None:
        """What a resumed run needs, after close."""
        return None if self.reached is None else self.reached.tolist()

    def restore(self, reached: Sequence[float] | None) -> None:
        self.reached = None if reached is None else torch.tensor(reached)
        self._totals = None
