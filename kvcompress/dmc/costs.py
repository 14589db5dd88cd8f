"""Which coordinate of queries and keys a model can best do without: the one that decisions should take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.attach import attach, base_model, detach, facts_of, is_attached
from ..hf.method import saved_method, set_method
from ..hf.projections import projections_of
from ..hf.seam import evaluating
from ..pruners.kvzip import KVzip
from ..support.checks import need, need_choice
from .config import CHOICES, DMCConfig
from .method import DMCMethod
from .neurons import NeuronRows, neurons_of

_GONE = 1e-30  # of what a neuron counts while it is annealed: a number above 0, which leaves nothing


@torch.no_grad()
def neuron_costs(model: nn.Module, input_ids: Tensor, *, mode: str = "dmc") -> Tensor:
    """What a plain model loses without each coordinate of the keys (and with mode "dmc" of the queries) of the layers
    that DMC or DMS converts: float32 [D], nats a token over the whole model's, D the smallest head dim. The smallest
    makes the best DMCConfig(neuron=...): annealing has the least to heal.

    Which it is depends on the model: the last one, which the authors of DMC take, may be among the dearest.
    input_ids: int64 [B, T]; a row of plain text and one that needs what is far away (said_again), a thousand tokens
    each, make the better choice: of SmolLM2-135M some coordinates cost 0.001 nats a token of plain text and 0.6 where a
    text is said again, others the reverse. Costs D + 1 forward passes over them; weights are changed meanwhile, and
    given back.
    Raises ValueError for a model that is converted, or cannot be (see convert), and one without logits of next tokens.
    """
    need_choice("mode", mode, CHOICES["mode"])
    decoder: Any = base_model(model)
    if saved_method(decoder) is not None:
        raise ValueError(f"model must not be converted yet, got one with config.kvcompress = {saved_method(decoder)}")
    need(decoder is not model, f"model must be one with a head (AutoModelForCausalLM), got {type(model).__name__}")
    plain = not is_attached(model)
    if plain:
        attach(model)
    try:
        facts = facts_of(decoder)
        method = DMCMethod(DMCConfig(mode=mode))
        method.check_facts(decoder, facts)
        method.rows(decoder, facts)
        made = {layer: own for layer, own in projections_of(decoder, facts).items() if layer in method.layers}
        size = min(facts[layer].head_dim for layer in method.layers)
        with evaluating(model):
            whole, found = _loss(model, input_ids), []
            for neuron in range(size):
                rows: NeuronRows = {}
                for own in made.values():
                    for part in (own.keys,) if mode == "dms" else (own.queries, own.keys):
                        for name, some in part.rows_of(neuron).items():
                            rows[name] = torch.cat([rows[name], some]) if name in rows else some
                method = DMCMethod(DMCConfig(mode=mode, neuron=neuron, neuron_scale=_GONE))
                method.check_facts(decoder, facts)
                set_method(decoder, method)
                with _without(decoder, rows):
                    found.append(_loss(model, input_ids) - whole)
    finally:
        set_method(decoder, None)
        if plain:
            detach(model)
    return torch.tensor(found)


def said_again(pruner: KVzip, ids: Tensor, length: int) -> Tensor:
    """int64 [at most length]: a text's beginning, the words with which KVzip (with_tokenizer) asks for it again, and it
    again."""
    asked = ids.new_tensor([*pruner.prompt, *pruner.suffix])
    half = ids[: max((length - len(asked)) // 2, 0)]
    return torch.cat([half, asked, half])


@contextmanager
def _without(decoder: nn.Module, rows: NeuronRows) -> Iterator[None]:
    """Zero in weights and biases, as conversion leaves them: a norm behind them has the rest to divide by."""
    places = [(tensor, dim, own.to(tensor.device)) for _, tensor, dim, own in neurons_of(decoder, rows)]
    kept = [tensor.index_select(dim, own) for tensor, dim, own in places]
    try:
        for tensor, dim, own in places:
            tensor.index_fill_(dim, own, 0.0)
        yield
    finally:
        for (tensor, dim, own), before in zip(places, kept, strict=True):
            tensor.index_copy_(dim, own, before)


def _loss(model: Any, input_ids: Tensor) -> float:
    return float(model(input_ids=input_ids, labels=input_ids, use_cache=False).loss)
