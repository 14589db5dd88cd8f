"""CurDKV: keep what weighs much in keys and in values, beside its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..support.checks import need, need_choice
from .base import Candidates, Pruner

PARTS = ("product", "mean", "key", "value")


@dataclass(frozen=True)
class CurDKV(Pruner):
    """Keeps tokens whose keys and values are long beside those of their neighbours: leverage, approximated.

    A key's share is its squared norm over the sum of those in its stretch of `local` tokens, counted from the start of
    what is held (None = over all); the same of values. combine: their "product", "mean", or one of them, "key",
    "value". No query is looked at.
    Source: CurDKV (Sengupta et al. 2025, arXiv:2509.15038), approximate leverage scores, in the form and with the
    defaults of kvpress's CURPress; without its random projection.
    """

    local: int | None = 16
    combine: str = "product"
    num_sink_tokens: int = 4
    uses_values = True
    by_head = True
    at_once = 0

    def __post_init__(self) -> None:
        self._check(**({} if self.local is None else {"local": 1}))
        need_choice("combine", self.combine, PARTS)

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        need(candidates.values is not None, "candidates must have values for CurDKV, got None")
        assert candidates.values is not None
        places, held = candidates.places()
        keys, values = (
            self._shares(x[0, :, : candidates.count].float().square().sum(-1).masked_fill(places >= held, 0))
            for x in (candidates.own_keys, candidates.own_values)
        )
        both = {"product": keys * values, "mean": (keys + values) / 2, "key": keys, "value": values}[self.combine]
        return both / both.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)

    def _shares(self, squares: Tensor) -> Tensor:
        """float32 [Hkv, T] of squared norms [Hkv, T]."""
        T = squares.shape[1]
        each = T if self.local is None else min(self.local, T)
        parts = torch.nn.functional.pad(squares, (0, -T % each)).unflatten(1, (-1, each))
        sums = parts.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return (parts / sums).flatten(1)[:, :T]
