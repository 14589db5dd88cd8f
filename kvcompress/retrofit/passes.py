"""What forward passes without a cache have in common, whichever the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..hf.config import cache_layers, ranks_of, recurs
from ..hf.documents import Documents, Group, rotated
from ..hf.facts import Facts, LayerFacts
from ..hf.method import KEYWORD, Call, Pass
from ..hf.seam import evaluating
from ..ops.softmax import Softmax

REENTRANT = "gradient checkpointing must be non-reentrant, gradient_checkpointing_kwargs={'use_reentrant': False}"


class TrainingPass(Pass):
    """A forward pass over rows that may be padded, or hold several documents each.

    with_gradient: whether anything is to be learned from it.
    """

    def __init__(self, facts: Facts, documents: Documents | None = None, *, with_gradient: bool = False) -> None:
        self.facts, self.documents, self.with_gradient = facts, documents, with_gradient

    @property
    def recomputes(self) -> bool:
        """Whether this layer will run again, by reentrant gradient checkpointing, before anything is learned."""
        return self.with_gradient and not torch.is_grad_enabled()

    def over_documents(self, attend: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of what attend(group, *parts) returns of documents that are about as long as each other, [N, H, longest, ...]
        each, the whole, [B, H, T, ...]. tensors: [B, H, T, ...]; group: None where each row is one document."""
        if self.documents is None:
            return attend(None, *tensors)
        found = [attend(group, *map(group.split, tensors)) for group in self.documents.groups]
        return tuple(self.documents.join(list(parts)) for parts in zip(*found, strict=True))

    def queries(self, layer: int, x: Tensor, group: Group | None = None) -> Tensor:
        """Rotated."""
        return rotated(x, self.facts[layer].query_rotary, group)

    def keys(self, layer: int, x: Tensor, group: Group | None = None) -> Tensor:
        """Rotated."""
        return rotated(x, self.facts[layer].key_rotary, group)

    def attend_locally(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """As the model does in a layer that sees a window or a chunk, within each document."""

        def attend(group: Group | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
            q, k = self.queries(layer, q, group), self.keys(layer, k, group)
            return (local_attention(self.facts[layer], q, k, v, softmax),)

        return self.over_documents(attend, queries, keys, values)[0]


def local_attention(facts: LayerFacts, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attention to a layer's window or chunk, to all where it has none. q, k: rotated."""
    size = facts.chunk or q.shape[2]
    parts = []
    for first in range(0, q.shape[2], size):
        part = [x[:, :, first : first + size] for x in (q, k, v)]
        parts.append(ops.attention(*part, window=facts.window, **softmax.options)[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def documents_of(call: Call) -> Documents | None:
    """The documents of a call; None where every row is one, without padding.

    Raises ValueError for rows of several documents where layers recur, whose state goes from one to the next.
    """
    batch, columns = call.tokens.shape[:2]
    found = Documents.of(call.attention_mask, call.position_ids, batch, columns)
    if found is None or call.position_ids is None or not recurs(cache_layers(call.decoder.config)):
        return found
    if len(found.lengths) > int(found.valid.any(1).sum()):
        raise ValueError(
            "position_ids must not begin anew within a row for a model with recurrent layers: their state would go "
            "from one document to the next; give each document a row"
        )
    return found


def learns(call: Call) -> bool:
    """Whether anything is to be learned from a call.

    Raises ValueError if it is by a model whose heads are cut over ranks.
    """
    found = torch.is_grad_enabled() and any(p.requires_grad for p in call.decoder.parameters())
    tp_size = ranks_of(call.decoder.config)
    if found and tp_size > 1:
        raise ValueError(
            f"tp_size must be 1 in training, got {tp_size}: noise, plans and the loss on the ratio are of all heads of "
            "a layer; cut weights over ranks by FSDP2 instead, and take torch.no_grad() for inference"
        )
    return found


class _Naming(Pass):
    """Attends to nothing."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        return torch.zeros_like(queries)


@torch.inference_mode(False)
@torch.no_grad()
def check_layers(decoder: Any, facts: Facts) -> None:
    """Raises ValueError for an attached model whose layers a pass without a cache cannot tell apart."""
    ids = torch.ones(1, 2, dtype=torch.long, device=decoder.get_input_embeddings().weight.device)
    with evaluating(decoder):
        decoder(input_ids=ids, use_cache=False, **{KEYWORD: _Naming(facts)})


def whole_layers(facts: Facts) -> list[int]:
    """Layers that see all tokens: those that a method may convert. Those that see a window or a chunk, and those that
    recur, stay as they are."""
    return [layer for layer in sorted(facts) if not facts[layer].is_local]
