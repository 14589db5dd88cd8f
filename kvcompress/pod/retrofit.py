"""Retrofitting a model with PoD from start to end."""

from __future__ import annotations

from typing import Any

from ..hf.attach import attach, base_model
from ..hf.method import saved_method
from ..retrofit.run import RunSettings, load, train
from .config import PoDConfig
from .convert import convert, state
from .plan import PoDPlan
from .recipe import PoDRecipe


def freeze_unused(decoder: Any, config: PoDConfig) -> None:
    """With CLA a layer whose heads all follow has no use for keys and values of its own: a distributed run would wait
    for their gradients."""
    for index, (layer, row) in enumerate(zip(decoder.layers, config.lead, strict=True)):
        if config.mode == "cla" and index not in row:
            for name in ("k_proj", "v_proj", "k_norm"):
                if (part := getattr(layer.self_attn, name, None)) is not None:
                    part.requires_grad_(False)


def retrofit(
    recipe: PoDRecipe, settings: RunSettings, plan: PoDPlan | None = None, *, resume: bool = False, **config: Any
) -> dict[str, Any]:
    """Loads, converts, trains and saves a model; see PoDPlan, PoDRecipe, RunSettings and retrofit.run.train.

    plan: for a model that is not converted yet. One that is (an earlier run's) keeps its own: None, or the same.
    config: further fields of PoDConfig.
    Raises ValueError where a plan is missing, for another model, or another one than the converted model's.
    """
    model, tokenizer = load(settings)
    decoder = base_model(model)
    wanted = None if plan is None else PoDConfig.of(plan, **config)
    if saved_method(decoder) is None:
        if plan is None or wanted is None:
            raise ValueError("plan must be given for a model that is not converted yet, got none")
        plan.check_model(decoder.config)
        if wanted.mode != "window" and wanted.followers == 0:
            raise ValueError("plan must have heads that follow, for anything to be shared, got one with none")
        convert(model, wanted)
    else:
        attach(model)
        for name, value in config.items():
            if (own := getattr(state(model).config, name)) != value:
                raise ValueError(f"{name} must be {own!r}, as the model was converted, or not given; got {value!r}")
        if wanted not in (None, state(model).config):
            raise ValueError("plan must be that of the converted model, or not given, got another one")
    freeze_unused(decoder, state(model).config)
    return train(model, tokenizer, recipe, settings, resume=resume)
