"""Which layers of a model can share keys."""

from __future__ import annotations

from typing import Any

import torch

from ..hf.facts import Facts, LayerFacts
from .lead import Kinds


def kinds_of(decoder: Any, facts: Facts) -> Kinds:
    """A number for each layer: the lowest layer of its kind, whose queries and keys are of the same sizes and rotate
    alike; None for layers that see a window or a chunk, or recur: nothing of theirs is distant.

    Raises ValueError where layers that see all tokens have different numbers of heads, or read each other's keys.
    """
    name, kinds = type(decoder).__name__, list[int | None]()
    for layer in range(max(decoder.config.num_hidden_layers, max(facts) + 1)):
        own = facts.get(layer)
        if own is None or own.is_local:
            kinds.append(None)
            continue
        if own.reads is not None or own.readers:
            raise ValueError(
                f"{name} is not supported by PoD: its layers read the keys of others already (layer {layer})"
            )
        if own.indexer is not None:
            raise ValueError(
                f"{name} is not supported by PoD: layer {layer} chooses the tokens that it attends to by an indexer"
            )
        lowest = next(facts[first] for first in [*[k for k in kinds if k is not None], layer])
        if (own.query_heads, own.kv_heads) != (lowest.query_heads, lowest.kv_heads):
            raise ValueError(
                f"{name} is not supported by PoD: layer {layer} has {own.query_heads} query and {own.kv_heads} KV "
                f"heads, layer {lowest.index} has {lowest.query_heads} and {lowest.kv_heads}"
            )
        kinds.append(next((k for k in dict.fromkeys(kinds) if k is not None and _alike(own, facts[k])), layer))
    if all(kind is None for kind in kinds):
        raise ValueError(f"{name} is not supported by PoD: none of its layers sees all tokens")
    return tuple(kinds)


def _alike(a: LayerFacts, b: LayerFacts) -> bool:
    if (a.head_dim, a.value_dim, a.rotates) != (b.head_dim, b.value_dim, b.rotates):
        return False
    for ours, theirs in ((a.query_rotary, b.query_rotary), (a.key_rotary, b.key_rotary)):
        tables = [x.tables(16, 16, torch.device("cpu")) for x in (ours, theirs)]
        for one, other in zip(*tables, strict=True):
            if one.shape[1] != other.shape[1] or not torch.equal(one[:16], other[:16]):
                return False
    return True
