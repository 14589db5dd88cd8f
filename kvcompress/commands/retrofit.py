"""`kvcompress retrofit`: what its commands share, and the one that needs no method.

Those of the methods are beside it, registered by kvcompress.cli.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..support.extras import need_packages
from .options import Model, token_count

if TYPE_CHECKING:
    from ..retrofit.run import RunSettings

app = typer.Typer(no_args_is_help=True, help="Train a model for a compressed cache.")


@dataclass(frozen=True)
class Common:
    """The options that every command has; numbers that are None are the preset's."""

    out: Annotated[Path, typer.Option(help="folder for checkpoints, metrics and the trained model")]
    preset: Annotated[str, typer.Option(help="quick (minutes to hours, a small model) or paper")] = "quick"
    model: Model = "example"
    text: Annotated[list[Path] | None, typer.Option(help="training text: .txt, .jsonl, .csv or .parquet")] = None
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="a data set, folder or file: name,config=...,split=...,column=...,weight=...,validation=a split; "
            "once for each"
        ),
    ] = None
    streaming: Annotated[bool, typer.Option("--streaming", help="read data as it goes, without downloading it")] = False
    shuffle_buffer: Annotated[int, typer.Option(help="documents of a stream to draw the next one from", min=1)] = 1000
    no_borders: Annotated[bool, typer.Option("--no-borders", help="documents in a row see each other, as one text")] = (
        False
    )
    validation: Annotated[
        float, typer.Option(help="documents to hold out of each data set, below 1 a share of them; 0: none", min=0.0)
    ] = 0.0
    eval_steps: Annotated[
        int | None, typer.Option(help="steps between evaluations on what is held out; not given: --save-steps", min=1)
    ] = None
    report_to: Annotated[list[str] | None, typer.Option(help="tensorboard, wandb, ...: who else gets the log")] = None
    learning_rate: Annotated[float | None, typer.Option(help="AdamW's")] = None
    distillation: Annotated[
        float, typer.Option(help="share of the loss that is the distance to the teacher", min=0.0, max=1.0)
    ] = 0.0
    teacher: Annotated[str | None, typer.Option(help="folder or name; not given: the model as it was")] = None
    length: Annotated[int | None, token_count("tokens of a training row", 2)] = None
    rows: Annotated[int | None, typer.Option(help="rows of a forward pass", min=1)] = None
    accumulation: Annotated[int | None, typer.Option(help="forward passes of a step", min=1)] = None
    save_steps: Annotated[int, typer.Option(help="steps between checkpoints", min=1)] = 500
    keep_all: Annotated[bool, typer.Option("--keep-all", help="keep every checkpoint, not the last two")] = False
    seed: Annotated[int, typer.Option(help="of what is random", min=0)] = 0
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu"
    float32: Annotated[bool, typer.Option("--float32", help="no bfloat16 autocast")] = False
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="recompute activations")] = False
    shards: Annotated[
        int, typer.Option(help="ranks (torchrun) that weights are cut over, by FSDP2; the others hold copies", min=1)
    ] = 1
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in the folder")] = False
    as_json: Annotated[bool, typer.Option("--json", help="print JSON and nothing else: what training.json holds")] = (
        False
    )

    def chosen(self, presets: dict[str, dict[str, Any]], **own: Any) -> dict[str, Any]:
        """What the preset says, and what was given instead, among it a command's own options."""
        if self.preset not in presets:
            allowed = ", ".join(presets)
            raise typer.BadParameter(f"must be one of {allowed}, got {self.preset!r}", param_hint="--preset")
        given = {name: getattr(self, name) for name in FROM_PRESET} | own
        return presets[self.preset] | {name: value for name, value in given.items() if value is not None}

    def settings(self, chosen: dict[str, Any]) -> RunSettings:
        from ..retrofit.run import RunSettings

        return RunSettings(
            out=self.out, model=self.model, text=tuple(self.text or ()), data=tuple(self.data or ()),
            streaming=self.streaming, shuffle_buffer=self.shuffle_buffer, borders=not self.no_borders,
            validation=self.validation, eval_steps=self.eval_steps, report_to=tuple(self.report_to or ()),
            distillation=self.distillation,
            teacher=self.teacher, seed=self.seed, save_steps=self.save_steps,
            keep_checkpoints=None if self.keep_all else 2, device=self.device, bfloat16=not self.float32,
            checkpointing=self.checkpointing, shards=self.shards, **{name: chosen[name] for name in FROM_PRESET},
        )  # fmt: skip


FROM_PRESET = ("length", "rows", "accumulation", "learning_rate")


def command(function: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    """A command of `retrofit`: the function's own options, and those of Common, which it gets as its argument `common`.

    The function returns the figures of its run, which are printed. Its ValueError, FileNotFoundError and ImportError
    are shown as what they are, wrong options and packages that are missing.
    """
    own = [p for p in _parameters(function) if p.name != "common"]
    shared = _parameters(Common)
    names = {p.name for p in shared}

    @wraps(function)
    def run(**given: Any) -> None:
        common = Common(**{name: given.pop(name) for name in names})
        try:
            need_packages("retrofit", "accelerate", "datasets")
            figures = _run(function, common, given)
        except (ValueError, FileNotFoundError, ImportError) as error:
            raise typer.BadParameter(str(error)) from None
        if int(os.environ.get("RANK", 0)) == 0:
            from ..retrofit.report import summary

            typer.echo(json.dumps(figures, default=str) if common.as_json else summary(figures, common.out))

    every = [p.replace(kind=p.KEYWORD_ONLY) for p in (*shared, *own)]
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in every}
    app.command()(run)
    return run


def _run(function: Callable[..., dict[str, Any]], common: Common, given: dict[str, Any]) -> dict[str, Any]:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of weights that are loaded and written; the run has its own
    return function(common=common, **given)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [p.replace(annotation=hints[p.name]) for p in parameters]


# steps and the learning rate, as many as those of DMC; "quick" is for the shipped model on two CPU cores
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "steps": 10500, "decay_steps": 4400, "warmup_steps": 20, "learning_rate": 6e-4, "length": 2048, "rows": 2,
        "accumulation": 1,
    },
    "paper": {
        "steps": 20250, "decay_steps": 2000, "warmup_steps": 0, "learning_rate": 3e-5, "length": 4096, "rows": 4,
        "accumulation": 256,
    },
}  # fmt: skip


@command
def gqa(
    common: Common,
    kv_heads: Annotated[int, typer.Option(help="KV heads of a layer, a divisor of the model's", min=1)],
    steps: Annotated[
        int | None, typer.Option(help="in all; not given: the preset's, which are as many as those of dmc", min=1)
    ] = None,
    decay_steps: Annotated[int | None, typer.Option(help="the last ones, learning rate falling", min=0)] = None,
) -> dict[str, Any]:
    """Average a model's KV heads to fewer ones and train it on: the baseline of the same cache size.

    What it saves is a plain transformers model.
    """
    from ..retrofit.gqa import PlainRecipe, retrofit_gqa

    chosen = common.chosen(PRESETS, steps=steps)
    if decay_steps is None:
        decay_steps = min(chosen["decay_steps"], chosen["steps"])
    recipe = PlainRecipe(steps=chosen["steps"], warmup_steps=chosen["warmup_steps"], decay_steps=decay_steps)
    return retrofit_gqa(recipe, common.settings(chosen), kv_heads, resume=common.resume)
