"""How a model is retrofitted with DMC or DMS: anneal the neurons, raise the ratio, solidify."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..retrofit.recipe import Recipe, cosine_decay, need_end_rate
from .convert import resume_decisions, set_neuron_scale, state
from .losses import CompressionLoss, MergedTokens, last_decisions


@dataclass(frozen=True)
class DMCRecipe(Recipe):
    """Three stages in one run. anneal_steps: the neurons fade out of attention, linearly. ramp_steps: the target ratio
    goes linearly from start_ratio to target_ratio (0: the target from the first step). solidify_steps: it stays, and
    the learning rate falls by a cosine to end_rate of it. warmup_steps: of the learning rate, at the start.
    neuron_scale goes from 1 to 0 in anneal_fraction of its steps. To go on to a higher ratio, start from the model of
    an earlier run that was not solidified: anneal_steps=0 and start_ratio its target.
    objective: what is added to the loss. seed: of the noise of decisions. Defaults are the paper's for 4x, in its steps
    of 4.2 M tokens.

    The loss on the ratio is of a whole step, over all ranks and passes, exactly: where the target is reached
    is what the step before merged as a whole (stored in checkpoints), and elsewhere the loss is linear in decisions.
    Asking the running step would take a forward pass more of all that it accumulates.
    Raises ValueError for a field out of range. Source: DMC, section 3.2; dmc_ramp of the released code.
    """

    target_ratio: float = 4.0
    start_ratio: float = 1.0
    anneal_steps: int = 250
    ramp_steps: int = 18000
    solidify_steps: int = 2000
    warmup_steps: int = 0
    anneal_fraction: float = 1.0
    end_rate: float = 0.1
    objective: CompressionLoss = field(default_factory=CompressionLoss)
    seed: int = 0
    schedules: ClassVar[tuple[str, ...]] = ("target_ratio", "neuron_scale", "layers")

    def __post_init__(self) -> None:
        if not 1 <= self.start_ratio <= self.target_ratio < math.inf:
            raise ValueError(
                f"target_ratio must be at least start_ratio, and that at least 1, got target_ratio {self.target_ratio} "
                f"and start_ratio {self.start_ratio}"
            )
        for name in ("anneal_steps", "ramp_steps", "solidify_steps", "warmup_steps", "seed"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {getattr(self, name)!r}")
        if self.steps < 1:
            raise ValueError("anneal_steps + ramp_steps + solidify_steps must be at least 1, got 0")
        if not 0 < self.anneal_fraction <= 1:
            raise ValueError(f"anneal_fraction must be above 0 and at most 1, got {self.anneal_fraction}")
        need_end_rate(self.end_rate)

    @property
    def steps(self) -> int:
        return self.anneal_steps + self.ramp_steps + self.solidify_steps

    def learning_rate(self, step: int) -> float:
        rate = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return rate * cosine_decay(step - self.anneal_steps - self.ramp_steps, self.solidify_steps, self.end_rate)

    def neuron_scale(self, step: int) -> float:
        """What is left of the neurons in attention in a step, 1 to 0."""
        if step >= self.anneal_steps:
            return 0.0
        return max(0.0, 1 - step / (self.anneal_fraction * self.anneal_steps))

    def target(self, step: int) -> float:
        """The ratio aimed at in a step; 1 while the neurons are annealed."""
        if step < self.anneal_steps:
            return 1.0
        share = min(1.0, (step - self.anneal_steps) / self.ramp_steps) if self.ramp_steps else 1.0
        return self.start_ratio + (self.target_ratio - self.start_ratio) * share

    def begin_step(self, model: nn.Module, step: int, passes: int) -> None:
        if step < 0 or passes < 1:
            raise ValueError(f"step must be at least 0 and passes at least 1, got {step} and {passes}")
        found = state(model)
        scale = self.neuron_scale(step)
        if scale > 0 and found.config.neuron_scale == 0:
            raise ValueError(
                f"anneal_steps must be 0 for a model that decides already, got {self.anneal_steps}: annealing would "
                "put its neurons back into attention and lose what they learned"
            )
        found.seed = self.seed
        found.begin_step(step)
        if step < self.anneal_steps and scale == 0:
            scale = 1e-6  # faded before its steps are over (anneal_fraction): decisions begin with the next stage
        if scale == found.config.neuron_scale:
            return
        if scale == 0 and step > self.anneal_steps:  # a resumed run, whose neurons carry decisions already
            resume_decisions(model)
        else:
            set_neuron_scale(model, scale)

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor | None, dict[str, Any]]:
        target = self.target(step)
        figures: dict[str, Any] = {"target_ratio": target, "neuron_scale": self.neuron_scale(step)}
        if step < self.anneal_steps:
            return None, figures | {"compression_loss": 0.0}
        if state(model).config.neuron_scale > 0:
            raise RuntimeError(
                f"the model must decide from step {self.anneal_steps} on, but its neuron_scale is "
                f"{state(model).config.neuron_scale}: call begin_step before each step"
            )
        if state(model).config.stride is not None:
            return None, figures | {"target_ratio": float(state(model).config.stride or 1)}
        decisions, merged = last_decisions(model), state(model).merged
        # before the first step is over nothing counts as reached
        reached = torch.zeros(decisions.alpha.shape[0]) if merged.reached is None else merged.reached
        loss = self.objective(decisions, target, reached)
        merged.note(*self.objective.merged(decisions))
        return loss, figures | {
            **MergedTokens.of(decisions)._asdict(),
            "layers": list(state(model).layers),
            "compression_loss": loss.detach(),
        }

    def measured(self, model: nn.Module) -> dict[str, Any]:
        """What would merge; nothing while the neurons are annealed, or tokens are pooled by a fixed stride."""
        config = state(model).config
        if config.neuron_scale > 0 or config.stride is not None:
            return {}
        return MergedTokens.of(last_decisions(model))._asdict()

    def summary(self, figures: dict[str, Any]) -> dict[str, Any]:
        """With ratio_soft, ratio_hard and ratio_layers [L][Hkv], tokens per entry, for what they are made of."""
        rest = {name: value for name, value in figures.items() if name not in MergedTokens._fields}
        if len(rest) == len(figures):
            return rest
        ratios = MergedTokens(*(torch.as_tensor(figures[name]) for name in MergedTokens._fields)).ratios()
        return rest | {f"ratio_{name}": value for name, value in ratios.items()}

    def progress(self, model: nn.Module) -> dict[str, Any]:
        merged = state(model).merged
        merged.close()
        return {"merged": merged.to_list()}

    def resume(self, model: nn.Module, progress: dict[str, Any]) -> None:
        state(model).merged.restore(progress["merged"])
