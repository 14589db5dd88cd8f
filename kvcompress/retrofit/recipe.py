"""What a training run of a method consists of, step by step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from ..support.checks import need


class Recipe(ABC):
    """A schedule and what is added to the loss. Steps count from 0; all that depends on time depends on the step alone,
    so that a run can be resumed anywhere.

    schedules: figures of loss that are logged as they are at that step; others are means since the last line.
    """

    schedules: ClassVar[tuple[str, ...]] = ()

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
        """What is added to the language model's loss after a forward pass (None = nothing; a step has the mean over its
        passes and ranks), and figures: numbers, tensors and lists of which means over passes and ranks are taken."""

    def summary(self, figures: dict[str, Any]) -> dict[str, Any]:
        """What is to be logged, from such means: numbers for the log and the metrics file, lists for the file alone."""
        return figures

    def measured(self, model: nn.Module) -> dict[str, Any]:
        """Figures of a forward pass in evaluation, for summary, as loss has them of one in training."""
        return {}

    def progress(self, model: nn.Module) -> dict[str, Any]:
        """What a checkpoint must hold for loss to go on as it would have, for json; called on every rank."""
        return {}

    def resume(self, model: nn.Module, progress: dict[str, Any]) -> None:
        """Goes on from what progress said. Raises KeyError for what it lacks."""
        del model, progress


def need_end_rate(end_rate: float) -> None:
    need(0 <= end_rate <= 1, f"end_rate must be between 0 and 1, got {end_rate}")


def cosine_decay(done: int, steps: int, end_rate: float) -> float:
    """Factor of a learning rate that falls by a cosine within `steps` steps, `done` of which are over: 1 up to its
    first step (done <= 0), end_rate after its last."""
    if done <= 0:
        return 1.0
    share = min(1.0, done / max(steps, 1))
    return end_rate + (1 - end_rate) * 0.5 * (1 + math.cos(math.pi * share))
