"""Observed attention: keep what those that could look at it did look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Candidates, Pruner


@dataclass(frozen=True)
class ObservedAttention(Pruner):
    """Keeps the keys that got the most attention from the queries of the call, mean over those that see them.

    A key's score is the sum over a call's queries and the query heads of a KV head, divided by the number of the call's
    queries at or behind it. Nothing is carried on from call to call and no token is sure to stay, which tells it from
    H2O; the last tokens, which few see, score high. window: queries that a cache keeps for it while decoding.
    Source: kvpress's ObservedAttentionPress, which it relates to H2O; the mean over heads in place of a sum changes no
    choice.
    """

    window: int = 256
    num_sink_tokens: int = 0
    by_head = True

    def __post_init__(self) -> None:
        self._check(window=1)

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        S = candidates.queries.shape[2] - candidates.guide_length
        received = candidates.attention(candidates.queries.shape[2])
        places, held = candidates.places()
        behind = (held - places).clamp(min=1) if isinstance(held, Tensor) else held - places
        return received / torch.clamp(behind.expand_as(received), max=max(S, 1))
