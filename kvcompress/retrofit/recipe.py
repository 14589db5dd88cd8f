"""What a training run of a method consists of, step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class Recipe(ABC):
    """A schedule and what is added to the loss. Steps count from 0; all that depends on time depends on the step alone,
    so that a run can be resumed anywhere."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of the whole run."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """Factor of the run's learning rate."""

    @abstractmethod
    def begin_step(self, model: nn.Module, step: int, passes: int) -> None:
        """Sets the model up for a step. passes: forward passes of each step (gradient accumulation)."""

    @abstractmethod
    def loss(self, model: nn.Module, step: int) -> tuple[Tensor | None, dict[str, Any]]:
        """What is added to the language model's loss after a forward pass (None = nothing), and figures to log: numbers
        for the log and the metrics file, lists for the file alone."""
