"""`kvcompress retrofit dmc`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .options import token_count
from .retrofit import Common, command

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


@command
def dmc(
    common: Common,
    target_ratio: Annotated[float, typer.Option(help="tokens per cache entry to reach", min=1.0)] = 4.0,
    mode: Annotated[str | None, typer.Option(help="dmc (merge, the default) or dms (drop)")] = None,
    dms_window: Annotated[int | None, token_count("tokens that dms never drops (512)", 0)] = None,
    dms_decides: Annotated[
        str | None, typer.Option(help="whose decision drops a token: its successor's (the default) or its own")
    ] = None,
    neuron: Annotated[
        int | None, typer.Option(help="coordinate of queries and keys that decides (-1; see dmc.neuron_costs)")
    ] = None,
    start_ratio: Annotated[float, typer.Option(help="where the ramp begins", min=1.0)] = 1.0,
    anneal_steps: Annotated[int | None, typer.Option(help="steps that fade the neurons out", min=0)] = None,
    ramp_steps: Annotated[int | None, typer.Option(help="steps from start to target", min=0)] = None,
    solidify_steps: Annotated[
        int | None, typer.Option(help="steps at the target, learning rate falling", min=0)
    ] = None,
    weight: Annotated[float | None, typer.Option(help="of the compression loss", min=0.0)] = None,
    shift: Annotated[float | None, typer.Option(help="c: how unlikely a merge is at first")] = None,
    hinge: Annotated[str, typer.Option(help="over what the ratio is meant: global, sequence or layer")] = "global",
    stride: Annotated[int | None, token_count("fixed pooling of so many tokens, the baseline")] = None,
    equal_weight: Annotated[float, typer.Option(help="DMC-C: weight of equal ratios within a layer", min=0.0)] = 0.0,
) -> dict[str, Any]:
    """Retrofit a model with Dynamic Memory Compression: each KV head learns which tokens to merge.

    A model that is converted already (an earlier run's folder) goes on without annealing.
    """
    from ..dmc.losses import CompressionLoss
    from ..dmc.recipe import DMCRecipe
    from ..dmc.retrofit import retrofit

    chosen = common.chosen(
        PRESETS, anneal_steps=anneal_steps, ramp_steps=ramp_steps, solidify_steps=solidify_steps, weight=weight,
        shift=shift,
    )  # fmt: skip
    recipe = DMCRecipe(
        target_ratio=target_ratio, start_ratio=start_ratio, seed=common.seed,
        objective=CompressionLoss(weight=chosen["weight"], hinge=hinge, equal_weight=equal_weight),
        **{name: chosen[name] for name in ("anneal_steps", "ramp_steps", "solidify_steps", "warmup_steps")},
    )  # fmt: skip
    given = {
        "mode": mode, "dms_window": dms_window, "dms_decides": dms_decides, "neuron": neuron, "shift": shift,
        "stride": stride,
    }  # fmt: skip
    if stride is not None:
        given["omega"] = "uniform"
    config = {name: value for name, value in given.items() if value is not None}
    return retrofit(
        recipe, common.settings(chosen), defaults={"shift": chosen["shift"]}, resume=common.resume, **config
    )
