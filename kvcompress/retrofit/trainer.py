"""Continued pre-training on transformers' Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from .recipe import Recipe

METRICS = "metrics.jsonl"


class RecipeCallback(TrainerCallback):
    """Lets the recipe set the model up before each step."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.recipe.begin_step(kwargs["model"], state.global_step, args.gradient_accumulation_steps)


class MetricsFile(TrainerCallback):
    """One JSON line in output_dir/metrics.jsonl each time figures are logged; a resumed run goes on where it stood.

    Raises ValueError where a run is resumed and a line of the file is none of these; the file stays as it is.
    """

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        path = Path(args.output_dir or ".", METRICS)
        if not state.is_world_process_zero:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().split(b"\n") if path.is_file() and state.global_step else []
        steps = [(_step_of(path, number, line), line) for number, line in enumerate(lines, 1) if line.strip()]
        fresh = path.with_suffix(".new")
        fresh.write_bytes(b"".join(line + b"\n" for step, line in steps if step <= state.global_step))
        fresh.replace(path)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            line = {"step": state.global_step} | kwargs.get("logs", {}) | self.latest
            with Path(args.output_dir or ".", METRICS).open("a") as file:
                file.write(json.dumps(line) + "\n")


def _step_of(path: Path, number: int, line: bytes) -> int:
    """The step that a line of metrics is of."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, IndexError):  # no JSON, or of something else
        step = None
    if isinstance(step, bool) or not isinstance(step, int):
        shown = line[:60].decode(errors="replace")
        raise ValueError(
            f"{path}, line {number}, must be a JSON object with a step, got {shown!r}: a run that was stopped may have "
            "left it half written. Remove or mend that line and resume again; nothing was changed"
        )
    return step


class TokenizerInCheckpoints(TrainerCallback):
    """A checkpoint is a model of its own: one that can be loaded as such, with its tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.tokenizer.save_pretrained(Path(args.output_dir or ".", f"checkpoint-{state.global_step}"))


class RetrofitTrainer(Trainer):
    """Trains a converted model by a recipe: its schedules as a callback, what it adds to the loss in compute_loss.

    recipe: what to do at each step; args.max_steps is set to its steps, the learning rate follows it. teacher: a model
    of the same vocabulary, usually the original one; None = no distillation. distillation: share of the loss that is
    the KL divergence to the teacher, per token, the rest being the language model's; 0 to 1.
    Everything else as transformers.Trainer. Figures of the recipe are logged, and written with lists to metrics.jsonl
    in the output folder.
    Raises ValueError for a teacher without distillation or the reverse, or a share out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        args: TrainingArguments,
        recipe: Recipe,
        *,
        teacher: PreTrainedModel | None = None,
        distillation: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if not 0 <= distillation <= 1:
            raise ValueError(f"distillation must be between 0 and 1, got {distillation}")
        if (teacher is None) != (distillation == 0):
            raise ValueError(f"teacher and distillation must be given together, got distillation {distillation}")
        args.max_steps = recipe.steps
        super().__init__(model, args, **kwargs)
        self.recipe, self.teacher, self.distillation = recipe, teacher, distillation
        if teacher is not None:
            teacher.requires_grad_(False).eval().to(args.device)
        self.metrics_file = MetricsFile()
        self.add_callback(RecipeCallback(recipe))
        self.add_callback(self.metrics_file)
        self.model_accepts_loss_kwargs = False  # every part of the loss is a mean over the batch
        self._figures: dict[str, list[Any]] = {}  # since the last line of the log

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        scheduler = getattr(self, "lr_scheduler", None)
        if scheduler is None:
            chosen = optimizer or self.optimizer
            assert chosen is not None
            self.lr_scheduler = scheduler = LambdaLR(chosen, self.recipe.learning_rate)
        return scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss
        if not model.training:
            return (loss, outputs) if return_outputs else loss
        figures: dict[str, Any] = {"lm_loss": float(loss.detach())}
        if self.teacher is not None:
            distance = self._distance(outputs.logits, inputs)
            figures["distillation_loss"] = float(distance.detach())
            loss = (1 - self.distillation) * loss + self.distillation * distance
        added, more = self.recipe.loss(self.accelerator.unwrap_model(model), self.state.global_step)
        loss = loss if added is None else loss + added
        self._note(figures | more)
        return (loss, outputs) if return_outputs else loss

    def _distance(self, logits: Tensor, inputs: dict[str, Any]) -> Tensor:
        """KL divergence from the teacher's next-token distributions, mean over the tokens that have a label."""
        assert self.teacher is not None
        with torch.no_grad():
            given = {name: x for name, x in inputs.items() if name != "labels"}
            wanted = self.teacher(**given, use_cache=False).logits
        kept = inputs["labels"][:, 1:] != -100
        student, teacher = (x[:, :-1][kept].float().log_softmax(-1) for x in (logits, wanted))
        return nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")

    def _note(self, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            newest = self.recipe.schedules
            means = {name: _mean(values[-1:] if name in newest else values) for name, values in self._figures.items()}
            self.metrics_file.latest = {name: mean for name, mean in means.items() if isinstance(mean, list)}
            logs = logs | {name: mean for name, mean in means.items() if not isinstance(mean, list)}
            self._figures = {}
        super().log(logs, start_time)


def _mean(values: list[Any]) -> Any:
    """Of numbers, or of lists of them element by element; None where one is missing."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], list):
        return [_mean(list(column)) for column in zip(*values, strict=True)]
    return round(float(np.mean(values)), 5)
