"""`kvcompress retrofit pod`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .retrofit import Common, command

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"steps": 1500, "learning_rate": 3e-4, "length": 2048, "rows": 2, "accumulation": 1},
    "paper": {"steps": 1250, "learning_rate": 1e-5, "length": 32768, "rows": 1, "accumulation": 128},
}


@command
def pod(
    common: Common,
    plan: Annotated[Path | None, typer.Option(help="what kvcompress analyze pod wrote")] = None,
    mode: Annotated[
        str | None, typer.Option(help="pod (the default), or a baseline: window (near tokens alone) or cla")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="of the run", min=1)] = None,
) -> dict[str, Any]:
    """Retrofit a model with PoD: layers that attend alike share the keys of distant tokens.

    A model that is converted already (an earlier run's folder) goes on as it is and needs no plan.
    """
    from ..pod.plan import PoDPlan
    from ..pod.recipe import PoDRecipe
    from ..pod.retrofit import retrofit

    chosen = common.chosen(PRESETS, steps=steps)
    found = None if plan is None else PoDPlan.load(plan)
    given = {} if mode is None else {"mode": mode}
    return retrofit(PoDRecipe(steps=chosen["steps"]), common.settings(chosen), found, resume=common.resume, **given)
