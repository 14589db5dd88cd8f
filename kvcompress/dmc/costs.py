"""Which coordinate of queries and keys a model can best do without: the one that decisions should take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..hf.attach import attach, base_model, detach, facts_of, is_attached
from ..hf.method import saved_method, set_method
from ..hf.seam import evaluating
from .config import DMCConfig
from .method import DMCMethod

_GONE = 1e-30  # of what a neuron counts while it is annealed: a number above 0, which leaves nothing


@torch.no_grad()
def neuron_costs(model: nn.Module, input_ids: Tensor) -> Tensor:
    """What a plain model loses without each coordinate of the queries and keys of the layers that DMC converts:
    float32 [D], nats a token over the whole model's, D the smallest head dim. The smallest makes the best
    DMCConfig(neuron=...): annealing has the least to heal. Which it is depends on the model: of SmolLM2-135M the last
    one, which the authors take, costs 0.5 nats, and others a hundredth of that.

    input_ids: int64 [B, T] of text, a thousand tokens in all do. Costs D + 1 forward passes over them.
    Raises ValueError for a model that is converted, or cannot be (see convert).
    """
    decoder: Any = base_model(model)
    if saved_method(decoder) is not None:
        raise ValueError(f"model must not be converted yet, got one with config.kvcompress = {saved_method(decoder)}")
    plain = not is_attached(model)
    if plain:
        attach(model)
    try:
        facts = facts_of(decoder)
        method = DMCMethod(DMCConfig())
        method.check_facts(decoder, facts)
        size = min(facts[layer].head_dim for layer in method.layers)
        with evaluating(model):
            whole, found = _loss(model, input_ids), []
            for neuron in range(size):
                method = DMCMethod(DMCConfig(neuron=neuron, neuron_scale=_GONE))
                method.check_facts(decoder, facts)
                set_method(decoder, method)
                found.append(_loss(model, input_ids) - whole)
    finally:
        set_method(decoder, None)
        if plain:
            detach(model)
    return torch.tensor(found)


def _loss(model: Any, input_ids: Tensor) -> float:
    return float(model(input_ids=input_ids, labels=input_ids, use_cache=False).loss)
