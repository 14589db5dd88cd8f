"""Retrofitting a model with PoD from start to end."""

from __future__ import annotations

from typing import Any

import torch

from ..hf.attach import attach, base_model
from ..hf.convert import check_kept
from ..hf.method import saved_method
from ..hf.seam import evaluating
from ..retrofit.run import RunSettings, load, train
from .config import PoDConfig
from .convert import convert, state
from .plan import PoDPlan
from .recipe import PoDRecipe


def freeze_unused(decoder: Any, config: PoDConfig) -> None:
    """With CLA a layer whose heads all follow has no use for keys and values of its own: a distributed run would wait
    for their gradients. decoder: converted; what makes them is what a small pass gives no gradient."""
    if config.mode != "cla":
        return
    following = {layer for layer, row in enumerate(config.lead) if layer not in row}
    known = [module for module in decoder.modules() if getattr(module, "layer_idx", None) in following]
    attentions = [
        module for module in known if not any(inner in known for inner in module.modules() if inner is not module)
    ]
    parameters = [p for module in attentions for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    ids = torch.arange(4, device=decoder.get_input_embeddings().weight.device)[None]
    with torch.enable_grad(), evaluating(decoder):
        out = decoder(input_ids=ids, use_cache=False).last_hidden_state
        grads = torch.autograd.grad(out.float().square().sum(), parameters, allow_unused=True)
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is None:
            parameter.requires_grad_(False)


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
        check_kept(state(model).config, config)
        if wanted not in (None, state(model).config):
            raise ValueError("plan must be that of the converted model, or not given, got another one")
    freeze_unused(decoder, state(model).config)
    return train(model, tokenizer, recipe, settings, resume=resume)
