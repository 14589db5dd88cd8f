"""Which linear layer takes what the heads of a layer have attended to: learned by running the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.softmax import Softmax
from .facts import Facts, LayerFacts, OutputLayer
from .method import KEYWORD, Pass
from .projections import TOKENS, attention_linears, out_dim
from .seam import evaluating


class _SeenPass(Pass):
    """Gives every layer numbers of its own as its attention's result."""

    chooses = True

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.given: dict[int, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        out = torch.rand(queries.shape, generator=torch.Generator().manual_seed(layer), device="cpu").to(queries)
        own = out[..., : self.facts[layer].value_dim]
        self.given[layer] = own.transpose(1, 2).flatten(2)
        return out


def output_layers(decoder: nn.Module, facts: Facts, layers: Iterable[int]) -> dict[int, OutputLayer]:
    """Those of the given layers, which attend, of an attached decoder.

    Raises ValueError, naming the layer, where no linear layer takes the result of attention as it is (a gate or a norm
    comes between).
    """
    found: dict[int, OutputLayer] = {}
    seen = _SeenPass(facts)

    def noticing(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            given = seen.given.get(layer)
            if given is not None and args and isinstance(args[0], Tensor) and torch.equal(args[0], given):
                found[layer] = _of(module, facts[layer])

        return hook

    hooks = [
        module.register_forward_pre_hook(noticing(layer))
        for layer, some in attention_linears(decoder).items()
        for _, module in some
    ]
    try:
        embeddings: Any = decoder.get_input_embeddings()  # type: ignore[operator]
        ids = torch.ones(1, TOKENS, dtype=torch.long, device=embeddings.weight.device)
        with evaluating(decoder):
            decoder(input_ids=ids, use_cache=False, **{KEYWORD: seen})
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        if layer not in found:
            raise ValueError(
                f"layer {layer} of {type(decoder).__name__}: no linear layer of its own takes the result of its "
                "attention as it is, so that values cannot be weighed by it"
            )
    return found


def _of(module: Any, facts: LayerFacts) -> OutputLayer:
    transposed = out_dim(getattr(module, "base_layer", module)) == 0
    return OutputLayer(module, facts.query_heads, facts.value_dim, transposed)
