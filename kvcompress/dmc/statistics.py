"""What decisions amount to: how much is left, by layer and head, by length, by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..support.checks import need, need_tensor


class RatioOverLength(NamedTuple):
    """Tokens per entry of texts of these lengths. lengths: int64 [N]. total: float64 [N], all tokens / all entries.
    mean: float64 [N], mean over layers and heads of tokens / entries: it keeps growing with the length, by heads that
    hardly ever open an entry, where total comes to rest."""

    lengths: Tensor
    total: Tensor
    mean: Tensor


def as_decisions(decisions: Tensor | Sequence[Tensor]) -> Tensor:
    """bool [L, B, Hkv, T] of zeros and ones, or of L tensors [B, Hkv, T] (cache.decisions(layer) of each layer).

    The first token's count as 0: it always opens an entry.
    Raises TypeError for what is no tensor, ValueError for other shapes, for NaN and for numbers between 0 and 1.
    """
    if not isinstance(decisions, Tensor):
        for layer, part in enumerate(decisions):
            need_tensor(f"decisions[{layer}]", part)
        shapes = sorted({tuple(part.shape) for part in decisions})
        need(len(shapes) == 1, f"decisions must be of one shape in every layer, got {shapes}")
        decisions = torch.stack(list(decisions))
    need(decisions.ndim == 4 and 0 not in decisions.shape,
         f"decisions must be [L, B, Hkv, T] and not empty, got shape {tuple(decisions.shape)}")  # fmt: skip
    merged = decisions.detach().cpu()
    if merged.dtype != torch.bool:
        need(bool(((merged == 0) | (merged == 1)).all()), "decisions must be 0 or 1: hard ones, without noise")
        merged = merged == 1
    merged = merged.clone()
    merged[..., 0] = False
    return merged


def ratio_over_length(decisions: Tensor | Sequence[Tensor], lengths: Sequence[int] | None = None) -> RatioOverLength:
    """Compression ratio of the first n tokens of texts, for each n.

    decisions: as for as_decisions, of texts of equal length. lengths: n, 1 to T each; None = 1 to T. A head's ratio is
    that of all texts together. Raises as as_decisions does, and ValueError for a length out of range.
    Source: DMC, figure 8, which does not say which of the two it shows.
    """
    merged = as_decisions(decisions)
    L, B, Hkv, T = merged.shape
    chosen = list(range(1, T + 1)) if lengths is None else list(lengths)
    for n in chosen:
        need(1 <= n <= T, f"lengths must be 1 to {T}, got {n}")
    at = torch.tensor(chosen, dtype=torch.int64)
    entries = (~merged).long().cumsum(-1)[..., at - 1].double().sum(1)  # [L, Hkv, N], of all texts
    tokens = at.double() * B
    return RatioOverLength(at, tokens * L * Hkv / entries.sum((0, 1)), (tokens / entries).mean((0, 1)))


def decision_over_position(decisions: Tensor | Sequence[Tensor]) -> Tensor:
    """float64 [T]: share of the layers, heads and texts that merge the token at each position."""
    return as_decisions(decisions).double().mean((0, 1, 2))
