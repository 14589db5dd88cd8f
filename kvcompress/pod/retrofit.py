"""Retrofitting a model with PoD from start to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..hf.attach import attach, base_model
from ..retrofit.method import saved_method
from ..retrofit.run import RunSettings, load, train
from .config import PoDConfig
from .convert import convert, state
from .recipe import PoDRecipe


def load_plan(path: Path, **changes: Any) -> PoDConfig:
    """The config that a plan asks for: a JSON file with lead, sinks and recent. changes: further fields of PoDConfig.

    Raises FileNotFoundError if there is no such file, ValueError if it is no plan.
    """
    try:
        plan = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"plan must be a JSON file, got {path}: {error}") from None
    missing = {"lead", "sinks", "recent"} - set(plan if isinstance(plan, dict) else ())
    if missing:
        raise ValueError(f"plan must have the fields lead, sinks and recent, got {path} without {sorted(missing)}")
    return PoDConfig(**{name: plan[name] for name in ("lead", "sinks", "recent")} | changes)


def retrofit(
    recipe: PoDRecipe, settings: RunSettings, config: PoDConfig | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """Loads, converts, trains and saves a model; see PoDConfig, PoDRecipe, RunSettings and retrofit.run.train.

    config: for a model that is not converted yet. One that is (an earlier run's) keeps its own: None, or the same.
    Raises ValueError where a config is missing or another one than the model's.
    """
    model, tokenizer = load(settings)
    if saved_method(base_model(model)) is None:
        if config is None:
            raise ValueError("plan must be given for a model that is not converted yet, got none")
        convert(model, config)
    else:
        attach(model)
        if config not in (None, state(model).config):
            raise ValueError("plan must be that of the converted model, or not given, got another one")
    return train(model, tokenizer, recipe, settings, resume=resume)
