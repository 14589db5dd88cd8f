"""`kvcompress retrofit`: one command per trained method."""

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

# steps, what they are made of and the learning rate; "quick" is for the shipped model on two CPU cores
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "anneal_steps": 100, "ramp_steps": 6000, "solidify_steps": 4400, "warmup_steps": 20, "learning_rate": 6e-4,
        "shift": 2.0, "weight": 2.0, "length": 2048, "rows": 2, "accumulation": 1,
    },
    "paper": {
        "anneal_steps": 250, "ramp_steps": 18000, "solidify_steps": 2000, "warmup_steps": 0, "learning_rate": 3e-5,
        "shift": 5.0, "weight": 1.0, "length": 4096, "rows": 4, "accumulation": 256,
    },
}  # fmt: skip


def _chosen(preset: str, own: dict[str, Any], presets: dict[str, dict[str, Any]] = PRESETS) -> dict[str, Any]:
    """What a preset says, and what was given instead (None = not given)."""
    if preset not in presets:
        raise typer.BadParameter(f"must be one of {', '.join(presets)}, got {preset!r}", param_hint="--preset")
    return presets[preset] | {name: value for name, value in own.items() if value is not None}


def _settings(
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
def dmc(
    out: Out,
    target_cr: Annotated[float, typer.Option(help="tokens per cache entry to reach", min=1.0)] = 4.0,
    preset: Preset = "quick",
    model: Model = "example",
    text: Text = None,
    mode: Annotated[str | None, typer.Option(help="dmc (merge, the default) or dms (drop)")] = None,
    dms_window: Annotated[int | None, typer.Option(help="tokens that dms never drops (512)", min=0)] = None,
    start_cr: Annotated[float, typer.Option(help="where the ramp begins", min=1.0)] = 1.0,
    anneal_steps: Annotated[int | None, typer.Option(help="steps that fade the neurons out", min=0)] = None,
    ramp_steps: Annotated[int | None, typer.Option(help="steps from start to target", min=0)] = None,
    solidify_steps: Annotated[
        int | None, typer.Option(help="steps at the target, learning rate falling", min=0)
    ] = None,
    learning_rate: Rate = None,
    weight: Annotated[float | None, typer.Option(help="of the compression loss", min=0.0)] = None,
    shift: Annotated[float | None, typer.Option(help="c: how unlikely a merge is at first")] = None,
    hinge: Annotated[str, typer.Option(help="over what the ratio is meant: global, sequence or layer")] = "global",
    stride: Annotated[int | None, typer.Option(help="fixed pooling of so many tokens, the baseline", min=1)] = None,
    equal_weight: Annotated[float, typer.Option(help="DMC-C: weight of equal ratios within a layer", min=0.0)] = 0.0,
    distillation: Distillation = 0.0,
    teacher: Teacher = None,
    length: Length = None,
    rows: Rows = None,
    accumulation: Accumulation = None,
    save_steps: SaveSteps = 500,
    keep_all: KeepAll = False,
    seed: Annotated[int, typer.Option(help="of data and noise", min=0)] = 0,
    device: Device = "cpu",
    float32: Float32 = False,
    checkpointing: Checkpointing = False,
    resume: Resume = False,
) -> None:
    """Retrofit a model with Dynamic Memory Compression: each KV head learns which tokens to merge.

    A model that is converted already (an earlier run's folder) goes on without annealing.
    """
    from ..dmc.losses import CompressionLoss
    from ..dmc.recipe import DMCRecipe
    from ..dmc.retrofit import retrofit

    own = {
        "anneal_steps": anneal_steps, "ramp_steps": ramp_steps, "solidify_steps": solidify_steps, "weight": weight,
        "learning_rate": learning_rate, "shift": shift, "length": length, "rows": rows, "accumulation": accumulation,
    }  # fmt: skip
    chosen = _chosen(preset, own)
    try:
        recipe = DMCRecipe(
            target_ratio=target_cr, start_ratio=start_cr, seed=seed,
            objective=CompressionLoss(weight=chosen["weight"], hinge=hinge, equal_weight=equal_weight),
            **{name: chosen[name] for name in ("anneal_steps", "ramp_steps", "solidify_steps", "warmup_steps")},
        )  # fmt: skip
        settings = _settings(
            chosen, out=out, model=model, text=text, distillation=distillation, teacher=teacher, seed=seed,
            save_steps=save_steps, keep_all=keep_all, device=device, float32=float32, checkpointing=checkpointing,
        )  # fmt: skip
        given = {"mode": mode, "dms_window": dms_window, "shift": shift, "stride": stride}
        if stride is not None:
            given["omega"] = "uniform"
        retrofit(
            recipe,
            settings,
            defaults={"shift": chosen["shift"]},
            resume=resume,
            **{name: value for name, value in given.items() if value is not None},
        )
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def gqa(
    out: Out,
    kv_heads: Annotated[int, typer.Option(help="KV heads of a layer, a divisor of the model's", min=1)],
    preset: Preset = "quick",
    model: Model = "example",
    text: Text = None,
    steps: Annotated[int | None, typer.Option(help="in all; not given: as many as dmc's", min=1)] = None,
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

    own = {"learning_rate": learning_rate, "length": length, "rows": rows, "accumulation": accumulation}
    chosen = _chosen(preset, own)
    if steps is None:
        steps = chosen["anneal_steps"] + chosen["ramp_steps"] + chosen["solidify_steps"]
    if decay_steps is None:
        decay_steps = min(chosen["solidify_steps"], steps)
    try:
        recipe = PlainRecipe(steps=steps, warmup_steps=chosen["warmup_steps"], decay_steps=decay_steps)
        settings = _settings(
            chosen, out=out, model=model, text=text, distillation=distillation, teacher=teacher, seed=seed,
            save_steps=save_steps, keep_all=keep_all, device=device, float32=float32, checkpointing=checkpointing,
        )  # fmt: skip
        retrofit_gqa(recipe, settings, kv_heads, resume=resume)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None


POD_PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"steps": 1500, "learning_rate": 3e-4, "length": 2048, "rows": 2, "accumulation": 1},
    "paper": {"steps": 1250, "learning_rate": 1e-5, "length": 32768, "rows": 1, "accumulation": 128},
}


@app.command()
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
    from ..pod.plan import PoDPlan
    from ..pod.recipe import PoDRecipe
    from ..pod.retrofit import retrofit

    own = {
        "steps": steps, "learning_rate": learning_rate, "length": length, "rows": rows, "accumulation": accumulation,
    }  # fmt: skip
    chosen = _chosen(preset, own, POD_PRESETS)
    try:
        settings = _settings(
            chosen, out=out, model=model, text=text, distillation=distillation, teacher=teacher, seed=seed,
            save_steps=save_steps, keep_all=keep_all, device=device, float32=float32, checkpointing=checkpointing,
        )  # fmt: skip
        found = None if plan is None else PoDPlan.load(plan)
        given = {} if mode is None else {"mode": mode}
        retrofit(PoDRecipe(steps=chosen["steps"]), settings, found, resume=resume, **given)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
