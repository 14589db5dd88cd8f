"""Sparse indexers (DeepSeek-V3.2, GLM-5): each query attends to the `top` tokens whose index keys say most to it.

An index key is one small vector of each token, beside its keys and values. In a pass of ours the family's own code
makes it and hands it to the cache, which answers with an IndexTicket: what that code then does with it is noted, not
done, and the ticket comes to our attention function in the place of the tokens that would have been chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.softmax import Softmax

# what an indexer of this kind does with its keys: of T tokens the largest sum_h w_h max(0, q_h k)
_STEPS = ["transpose", "float", "unsqueeze", "matmul", "relu", "matmul", "squeeze", "add"]
_MOST = 1 << 25  # numbers of scores at a time


def _noted(step: str) -> Callable[..., IndexTicket]:
    def method(self: IndexTicket, *args: Any, **given: Any) -> IndexTicket:
        self._steps.append(step)
        return self

    return method


class IndexTicket:
    """Stands for the scores of an indexer. keys: [B, S, D], queries: [B, H, S, D], both before rotation; weights:
    [B, S, H]; top: tokens that a query chooses."""

    keys: Tensor
    queries: Tensor
    weights: Tensor
    top: int
    shape = (1 << 60,)  # there is more than it chooses

    def __init__(self, layer: int | None, keys: Tensor) -> None:
        self._layer, self.keys = layer, keys
        self._steps: list[str] = []

    @property
    def indices(self) -> IndexTicket:
        return self

    @property
    def odd(self) -> ValueError:
        return ValueError(f"layer {self._layer} chooses tokens by an indexer of another kind than DeepSeek-V3.2's")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(str(self.odd) if "_layer" in vars(self) else name)

    transpose, float, unsqueeze, squeeze, __add__ = map(_noted, ("transpose", "float", "unsqueeze", "squeeze", "add"))

    def __mul__(self, scale: Any) -> IndexTicket:
        return self  # the same for all tokens

    def topk(self, k: int, dim: int) -> IndexTicket:
        self.top = k
        if self._steps != _STEPS:
            raise self.odd
        return self

    def to(self, dtype: torch.dtype) -> IndexTicket:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self: IndexTicket = next(x for x in args if isinstance(x, IndexTicket))
        self._steps.append(function.__name__)
        if function.__name__ == "matmul" and "relu" in self._steps:
            self.weights = args[0].squeeze(2)
        elif function.__name__ == "matmul":
            self.queries = args[0].transpose(1, 2)
        return self


class Indexer(NamedTuple):
    """Of a layer. top: tokens that a query chooses. order: as LayerFacts has it, of index queries and keys; rotates:
    whether they turn, as the layer's own do."""

    top: int
    order: Tensor | None
    rotates: bool

    def framed(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(-1, self.order.to(x.device))


class Index(NamedTuple):
    """What a layer's indexer brings in a pass. queries: [B, H, S, D], keys: [B, 1, S, D], weights: [B, S, H]."""

    indexer: Indexer
    queries: Tensor
    keys: Tensor
    weights: Tensor

    def rotated(self, facts: Any, positions: Tensor | None, bound: int, lengths: list[int]) -> Index:
        """The same at positions, as RotaryTables.rotate takes them. facts: of the layer."""
        if not self.indexer.rotates:
            return self
        queries, keys = (x.rotate(y, positions, bound, lengths) for x, y in (
            (facts.query_rotary, self.queries), (facts.key_rotary, self.keys)))  # fmt: skip
        return self._replace(queries=queries, keys=keys)


def shown(mask: Tensor, indices: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """A mask of transformers [B, 1, S, T] which hides all but the tokens of indices [B, S, n], as these families make
    it where attention is transformers' own."""
    hidden = torch.ones(*indices.shape[:2], tokens, dtype=torch.bool, device=indices.device)
    hidden = hidden.scatter_(-1, indices.long(), False)[:, None]
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(dtype).min)


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], index: tuple[Tensor, Tensor, Tensor], top: int,
    softmax: Softmax, places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one sequence whose queries [Hq, S, D] are the last S of each row's lengths[h] keys [Hkv, T, D], each
    to the top tokens that it chooses of those that its row holds.

    index: queries [H, S, Di], weights [S, H], keys [U, Di] of the tokens. places: int64 [Hkv, T], which of them a row's
    slots hold; None = all rows hold just these. Returns [Hq, S, D].
    """
    (Hkv, T, _), S, device = k.shape, q.shape[1], q.device
    slots, ends = torch.arange(T, device=device), torch.tensor(lengths, device=device)[:, None, None]
    block, parts = max(_MOST // (T * max(len(q), len(index[0]))), 1), []
    for first in range(0, S, block):
        here = slice(first, first + block)
        products = (index[0][:, here].float() @ index[2].float().T).relu_()  # [H, s, U]
        scores = (index[1][here, None].float() @ products.transpose(0, 1)).transpose(0, 1)  # [1, s, U]
        if places is not None:
            scores = scores.expand(Hkv, -1, -1).gather(2, places[:, None].expand(-1, scores.shape[1], -1))
        seen = slots <= ends[: len(scores)] - S + torch.arange(S, device=device)[here, None]
        best = scores.masked_fill(~seen, -torch.inf).topk(min(top, T), -1).indices
        seen &= torch.zeros_like(seen).scatter_(-1, best, True)
        parts.append(_masked(q[:, here], k, v, seen, softmax))
    return torch.cat(parts, 1)


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softmax: Softmax) -> Tensor:
    """[Hq, S, D]. seen: bool [Hkv or 1, S, T]."""
    rows = q.unflatten(0, (k.shape[0], -1))  # [Hkv, G, S, D]
    logits = softmax.capped((rows @ k[:, None].transpose(2, 3)).float() * softmax.scale)
    logits = logits.masked_fill_(~seen[:, None], -torch.inf)
    if softmax.sink_logits is not None:
        sinks = softmax.sink_logits.view(*rows.shape[:2], 1, 1).expand(-1, -1, rows.shape[2], 1)
        logits = torch.cat([logits, sinks], 3)
    weights = logits.softmax(3)[..., : k.shape[1]].to(v.dtype)
    return (weights @ v[:, None]).flatten(0, 1)
