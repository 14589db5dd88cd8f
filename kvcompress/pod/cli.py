"""`kvcompress retrofit pod`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..retrofit.cli import (
    Accumulation,
    Checkpointing,
    Device,
    Distillation,
    Float32,
    KeepAll,
    Length,
    Model,
    Out,
    Preset,
    Rate,
    Resume,
    Rows,
    SaveSteps,
    Teacher,
    Text,
    chosen_of,
    settings_of,
)

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"steps": 1500, "learning_rate": 3e-4, "length": 2048, "rows": 2, "accumulation": 1},
    "paper": {"steps": 1250, "learning_rate": 1e-5, "length": 32768, "rows": 1, "accumulation": 128},
}


def pod(
    out: Out,
    plan: Annotated[Path | None, typer.Option(help="what kvcompress analyze pod wrote")] = None,
    mode: Annotated[
        str | None, typer.Option(help="pod (the default), or a baseline: window (near tokens alone) or cla")
    ] = None,
    preset: Preset = "quick",
    model: Model = "example",
    text: Text = None,
    steps: Annotated[int | None, typer.Option(help="of the run", min=1)] = None,
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
    """Retrofit a model with PoD: layers that attend alike share the keys of distant tokens.

    A model that is converted already (an earlier run's folder) goes on as it is and needs no plan.
    """
    from .plan import PoDPlan
    from .recipe import PoDRecipe
    from .retrofit import retrofit

    own = {
        "steps": steps, "learning_rate": learning_rate, "length": length, "rows": rows, "accumulation": accumulation,
    }  # fmt: skip
    chosen = chosen_of(preset, own, PRESETS)
    try:
        settings = settings_of(
            chosen, out=out, model=model, text=text, distillation=distillation, teacher=teacher, seed=seed,
            save_steps=save_steps, keep_all=keep_all, device=device, float32=float32, checkpointing=checkpointing,
        )  # fmt: skip
        found = None if plan is None else PoDPlan.load(plan)
        given = {} if mode is None else {"mode": mode}
        retrofit(PoDRecipe(steps=chosen["steps"]), settings, found, resume=resume, **given)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
