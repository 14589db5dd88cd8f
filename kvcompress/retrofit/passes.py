"""What forward passes without a cache have in common, whichever the method."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..documents import Documents, rotated
from ..hf.facts import Facts, LayerFacts
from ..hf.method import Call, Pass
from ..softmax import Softmax

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

    def split(self, *tensors: Tensor) -> list[Tensor]:
        """[B, H, T, ...] as documents [N, H, longest, ...], where there are any."""
        return list(tensors) if self.documents is None else [self.documents.split(x) for x in tensors]

    def join(self, out: Tensor) -> Tensor:
        """What split did, undone."""
        return out if self.documents is None else self.documents.join(out)

    def queries(self, layer: int, x: Tensor) -> Tensor:
        """Rotated."""
        return rotated(x, self.facts[layer].query_rotary, self.documents)

    def keys(self, layer: int, x: Tensor) -> Tensor:
        """Rotated."""
        return rotated(x, self.facts[layer].key_rotary, self.documents)

    def attend_locally(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """As the model does in a layer that sees a window or a chunk, within each document."""
        q, k, v = self.split(queries, keys, values)
        return self.join(local_attention(self.facts[layer], self.queries(layer, q), self.keys(layer, k), v, softmax))


def local_attention(facts: LayerFacts, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attention to a layer's window or chunk, to all where it has none. q, k: rotated."""
    size = facts.chunk or q.shape[2]
    parts = []
    for first in range(0, q.shape[2], size):
        part = [x[:, :, first : first + size] for x in (q, k, v)]
        parts.append(ops.attention(*part, window=facts.window, **softmax.options)[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def documents_of(call: Call) -> Documents | None:
    """The documents of a call; None where every row is one, without padding."""
    batch, columns = call.tokens.shape[:2]
    return Documents.of(call.attention_mask, call.position_ids, batch, columns)


def learns(call: Call) -> bool:
    """Whether anything is to be learned from a call."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in call.decoder.parameters())


def check_layers(decoder: nn.Module, facts: Facts) -> None:
    """Raises ValueError for a model whose layers a pass without a cache cannot tell apart."""
    known = {getattr(module, "layer_idx", None) for module in decoder.modules()}
    unknown = [layer for layer in sorted(facts) if layer not in known]
    if unknown:
        raise ValueError(
            f"{type(decoder).__name__} cannot be converted: one attention module serves layer {unknown[0]} and others, "
            "which a forward pass without a cache does not tell apart"
        )


def whole_layers(facts: Facts) -> list[int]:
    """Layers that see all tokens: those that a method may convert. Those that see a window or a chunk, and those that
    recur, stay as they are."""
    return [layer for layer in sorted(facts) if not facts[layer].is_local]
