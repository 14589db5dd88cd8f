"""How a model is retrofitted with PoD: continued pre-training with nothing added to the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..retrofit.recipe import Recipe, cosine_decay, need_end_rate
from .convert import mean_gates


@dataclass(frozen=True)
class PoDRecipe(Recipe):
    """steps: of the run (5 B tokens in steps of 4 M are the paper's 1250). warmup: share of them in which the learning
    rate rises; a cosine takes it to end_rate of its peak.

    Raises ValueError for a field out of range. Source: PoD, section 3.1; warmup, end_rate ours.
    """

    steps: int = 1250
    warmup: float = 0.01
    end_rate: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, got {self.steps!r}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be at least 0 and below 1, got {self.warmup}")
        need_end_rate(self.end_rate)

    def learning_rate(self, step: int) -> float:
        rising = math.ceil(self.warmup * self.steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        return cosine_decay(step - rising, self.steps - rising, self.end_rate)

    def begin_step(self, model: nn.Module, step: int, passes: int) -> None:
        pass

    def measured(self, model: nn.Module) -> dict[str, Any]:
        return self.loss(model, 0)[1]

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor | None, dict[str, Any]]:
        gates = mean_gates(model)
        known = [gate for gate in gates if gate is not None]
        return None, {"gate": sum(known) / len(known), "gate_layers": gates} if known else {}
