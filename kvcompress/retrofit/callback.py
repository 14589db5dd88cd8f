"""What a retrofit needs of any Trainer of transformers (trl's too): a callback, and a loss that is added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .checkpoints import read_json, write_whole
from .figures import Figures, rounded
from .recipe import Recipe

PROGRESS = "retrofit.json"  # in a checkpoint: what the recipe goes on from


class RetrofitCallback(TrainerCallback):
    """Lets a recipe set the model up before each step, keeps what it goes on from in checkpoints, and logs its figures.

    The Trainer's compute_loss must return add_loss of the loss that it has, and its max_steps be the recipe's steps;
    the learning rate is the Trainer's own (RetrofitTrainer's follows the recipe).
    Raises ValueError where training begins with other max_steps, or is resumed from a checkpoint that the callback had
    no part in, naming the file.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.folder: Path | None = None  # the checkpoint that is resumed from; None = that of its step in output_dir
        self._figures = Figures(recipe.schedules)  # since the last line of the log
        self._step = 0

    def add_loss(
        self,
        model: Any,
        loss: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        passes: int | None = None,
        **more: Tensor,
    ) -> Tensor:
        """The loss of a forward pass in training, with what the recipe adds.

        model: as compute_loss is given it. num_items_in_batch: as compute_loss is given it; where it is a number, loss
        is this pass's part of the step's, and so is what is added. passes: the Trainer's
        current_gradient_accumulation_steps, forward passes of this step (the last one of an epoch may have fewer than
        others); needed where num_items_in_batch is a number. more: other parts of the loss, scaled as it is, to be
        logged beside it.
        Raises ValueError where it is needed and not given.
        """
        if num_items_in_batch is not None and (passes is None or passes < 1):
            raise ValueError(
                "passes must be the Trainer's current_gradient_accumulation_steps, at least 1, where "
                f"num_items_in_batch is a number, got {passes}"
            )
        added, figures = self.recipe.loss(model, self._step)
        parts = 1 if num_items_in_batch is None or passes is None else passes
        # a step has the sum of its passes' parts; the mean over passes is to be the step's
        own = {name: parts * value.detach() for name, value in ({"lm_loss": loss} | more).items()}
        self._figures.note(own | figures)
        return loss if added is None else loss + added / parts

    def save(self, folder: Path, model: Any, *, writes: bool) -> None:
        """Writes what the recipe goes on from; called on every rank, of which those that save write."""
        progress = self.recipe.progress(model)
        if writes:
            write_whole(folder / PROGRESS, json.dumps(progress).encode())

    def take_figures(self, args: TrainingArguments) -> dict[str, Any]:
        """Means over passes and ranks since the last time; called on every rank."""
        found = self.recipe.summary(self._figures.take(args.device))
        return {name: rounded(value) for name, value in found.items()}

    # ---- what the Trainer calls ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.max_steps != self.recipe.steps:
            raise ValueError(f"max_steps must be the recipe's {self.recipe.steps} steps, got {state.max_steps}")
        if state.global_step > 0:
            folder = self.folder or _folder(args, state)
            self.recipe.resume(kwargs["model"], read_json(folder / PROGRESS))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step = state.global_step
        self.recipe.begin_step(kwargs["model"], self._step, args.gradient_accumulation_steps)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = _folder(args, state)
        if not (folder / PROGRESS).is_file():  # RetrofitTrainer has written it before the checkpoint had its name
            self.save(folder, kwargs["model"], writes=state.is_world_process_zero)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if "loss" in logs and self._figures.noted:  # RetrofitTrainer has taken them
            found = self.take_figures(args)
            logs.update({name: value for name, value in found.items() if not isinstance(value, list)})
            if state.log_history:
                state.log_history[-1].update(found)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".", f"checkpoint-{state.global_step}")
