"""`kvcompress retrofit`: what its commands share, and the one that needs no method.

Those of the methods are registered by kvcompress.cli.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .run import RunSettings

app = typer.Typer(no_args_is_help=True, help="Train a model for a compressed cache.")

# options that every command has
Out = Annotated[Path, typer.Option(help="folder for checkpoints, metrics and the trained model")]
Preset = Annotated[str, typer.Option(help="quick (minutes to hours, a small model) or paper")]
Model = Annotated[str, typer.Option(help="folder or name of a transformers model, or example")]
Text = Annotated[list[Path] | None, typer.Option(help="training text: .txt, .jsonl, .csv or .parquet")]
Rate = Annotated[float | None, typer.Option(help="AdamW's")]
Distillation = Annotated[
    float, typer.Option(help="share of the loss that is the distance to the teacher", min=0.0, max=1.0)
]
Teacher = Annotated[str | None, typer.Option(help="folder or name; not given: the model as it was")]
Length = Annotated[int | None, typer.Option(help="tokens of a training row", min=2)]
Rows = Annotated[int | None, typer.Option(help="rows of a forward pass", min=1)]
Accumulation = Annotated[int | None, typer.Option(help="forward passes of a step", min=1)]
SaveSteps = Annotated[int, typer.Option(help="steps between checkpoints", min=1)]
KeepAll = Annotated[bool, typer.Option("--keep-all", help="keep every checkpoint, not the last two")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Float32 = Annotated[bool, typer.Option("--float32", help="no bfloat16 autocast")]
Checkpointing = Annotated[bool, typer.Option("--checkpointing", help="recompute activations")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in the folder")]

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


def chosen_of(preset: str, own: dict[str, Any], presets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a preset says, and what was given instead (None = not given)."""
    if preset not in presets:
        raise typer.BadParameter(f"must be one of {', '.join(presets)}, got {preset!r}", param_hint="--preset")
    return presets[preset] | {name: value for name, value in own.items() if value is not None}


def settings_of(
    chosen: dict[str, Any], *, out: Path, model: str, text: list[Path] | None, distillation: float,
    teacher: str | None, seed: int, save_steps: int, keep_all: bool, device: str, float32: bool, checkpointing: bool,
) -> RunSettings:  # fmt: skip
    """What all commands ask for, and of what was chosen the rows and the learning rate."""
    from .run import RunSettings

    return RunSettings(
        out=out, model=model, text=tuple(text or ()), distillation=distillation, teacher=teacher, seed=seed,
        save_steps=save_steps, keep_checkpoints=None if keep_all else 2,
        device=device, bfloat16=not float32, checkpointing=checkpointing,
        **{name: chosen[name] for name in ("length", "rows", "accumulation", "learning_rate")},
    )  # fmt: skip


@app.command()
def gqa(
    out: Out,
    kv_heads: Annotated[int, typer.Option(help="KV heads of a layer, a divisor of the model's", min=1)],
    preset: Preset = "quick",
    model: Model = "example",
    text: Text = None,
    steps: Annotated[
        int | None, typer.Option(help="in all; not given: the preset's, which are as many as those of dmc", min=1)
    ] = None,
    decay_steps: Annotated[int | None, typer.Option(help="the last ones, learning rate falling", min=0)] = None,
    learning_rate: Rate = None,
    distillation: Distillation = 0.0,
    teacher: Teacher = None,
    length: Length = None,
    rows: Rows = None,
    accumulation: Accumulation = None,
    save_steps: SaveSteps = 500,
    keep_all: KeepAll = False,
    seed: Annotated[int, typer.Option(help="of data", min=0)] = 0,
    device: Device = "cpu",
    float32: Float32 = False,
    checkpointing: Checkpointing = False,
    resume: Resume = False,
) -> None:
    """Average a model's KV heads to fewer ones and train it on: the baseline of the same cache size.

    What it saves is a plain transformers model.
    """
    from .gqa import PlainRecipe, retrofit_gqa

    own = {
        "steps": steps, "learning_rate": learning_rate, "length": length, "rows": rows, "accumulation": accumulation,
    }  # fmt: skip
    chosen = chosen_of(preset, own, PRESETS)
    if decay_steps is None:
        decay_steps = min(chosen["decay_steps"], chosen["steps"])
    try:
        recipe = PlainRecipe(steps=chosen["steps"], warmup_steps=chosen["warmup_steps"], decay_steps=decay_steps)
        settings = settings_of(
            chosen, out=out, model=model, text=text, distillation=distillation, teacher=teacher, seed=seed,
            save_steps=save_steps, keep_all=keep_all, device=device, float32=float32, checkpointing=checkpointing,
        )  # fmt: skip
        retrofit_gqa(recipe, settings, kv_heads, resume=resume)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
