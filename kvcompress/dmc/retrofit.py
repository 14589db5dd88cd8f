"""Retrofitting a model with DMC from start to end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..hf.attach import attach, base_model
from ..hf.convert import check_kept
from ..hf.method import saved_method
from ..retrofit.run import RunSettings, load, train
from .config import DMCConfig
from .convert import convert, state
from .recipe import DMCRecipe


def retrofit(
    recipe: DMCRecipe,
    settings: RunSettings,
    *,
    defaults: dict[str, Any] | None = None,
    resume: bool = False,
    **config: Any,
) -> dict[str, Any]:
    """Loads, converts, trains and saves a model; see DMCRecipe, RunSettings and retrofit.run.train.

    config: fields of DMCConfig; defaults: others, for a model that is not converted yet. One that is (an earlier run's)
    keeps its own and is not annealed again; ValueError for a field in config that differs.
    """
    model, tokenizer = load(settings)
    if saved_method(base_model(model)) is None:
        for name in ("dms_window", "dms_decides"):
            if name in config and config.get("mode") != "dms":
                raise ValueError(f"{name} needs mode 'dms', got {name} = {config[name]} without it")
        convert(model, DMCConfig(**((defaults or {}) | config)), anneal=recipe.anneal_steps > 0)
    else:
        attach(model)
        check_kept(state(model).config, config)
        if state(model).config.neuron_scale == 0:
            recipe = replace(recipe, anneal_steps=0)
    return train(model, tokenizer, recipe, settings, resume=resume)
