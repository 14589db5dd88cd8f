"""LagKV: keep what stands out against the part of the text that comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..support.presets import preset_of
from .base import Candidates, Pruner


@dataclass(frozen=True)
class LagKV(Pruner):
    """Keeps, of each part of a row, the tokens whose keys and values vary most when the next part sets the scale.

    After the sinks a row is cut into parts of `lag` tokens. A part's keys are scaled, channel by channel, to the range
    that the next part's have; a token's score is the standard deviation over its channels, softmax over the part; the
    same of the values; their sum. Tokens are ranked within their part, so that every part keeps the same share. The
    last whole part has no next one: it and what follows stay, the newest first where the budget is less. No query is
    looked at. A row shorter than sinks and two parts keeps its newest tokens.
    compare: True compares scores over parts, as they are, in place of ranks (kvpress's cross_scoring; for AdaKV).
    While decoding, and in further calls, what is held is cut into parts anew.
    preset("kvpress") is kvpress's LagKVPress: parts of 128, 4 sinks.
    Source: LagKV (Liang et al. 2025, arXiv:2504.04704), section 3; lag and sinks as in the authors' code.
    """

    lag: int = 1024
    num_sink_tokens: int = 16
    compare: bool = False
    uses_values = True
    by_head = True
    at_once = 0

    def __post_init__(self) -> None:
        self._check(lag=2)

    @staticmethod
    def preset(name: str, **changes: Any) -> LagKV:
        """LagKV as an implementation sets it: kvpress. changes: other fields."""
        return preset_of(LagKV, {"kvpress": {"lag": 128, "num_sink_tokens": 4}}, name, changes)

    def always(self, keep: int, length: int) -> int:
        first, last = self._ranked(length)
        return min(keep, length - (last - first))

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        if candidates.values is None:
            raise ValueError("candidates must have values for LagKV, got None")
        keys, values = (x[0, :, : candidates.count].float() for x in (candidates.own_keys, candidates.own_values))
        if candidates.lengths is None:
            return self._of_rows(keys, values)
        scores = torch.zeros(keys.shape[:2], device=keys.device)
        for head, length in enumerate((candidates.lengths - candidates.guide_length).tolist()):
            scores[head, :length] = self._of_rows(keys[head : head + 1, :length], values[head : head + 1, :length])[0]
        return scores

    def _of_rows(self, keys: Tensor, values: Tensor) -> Tensor:
        T, (first, last) = keys.shape[1], self._ranked(keys.shape[1])
        newest = torch.arange(T, device=keys.device) / max(T, 1)
        if first == last:
            return newest.expand(len(keys), -1)
        end = last + self.lag
        parts = sum(_deviation(x[:, first:end].unflatten(1, (-1, self.lag))) for x in (keys, values))
        assert isinstance(parts, Tensor)
        if not self.compare:
            parts = parts.argsort(-1).argsort(-1) / self.lag
        scores = 2 + newest.repeat(len(keys), 1)  # above any sum of two softmaxes
        scores[:, first:last] = parts.flatten(1)
        return scores

    def _ranked(self, length: int) -> tuple[int, int]:
        """Where the tokens of a row stand that a next part ranks: whole parts but the last; none of a short row."""
        first = min(self.num_sink_tokens, length)
        return first, first + max((length - first) // self.lag - 1, 0) * self.lag


def _deviation(parts: Tensor) -> Tensor:
    """float32 [Hkv, n - 1, lag] of parts [Hkv, n, lag, D]."""
    least, most = parts[:, 1:].amin(2, keepdim=True), parts[:, 1:].amax(2, keepdim=True)
    return ((parts[:, :-1] - least) / (most - least).clamp_min(1e-12)).std(-1).softmax(-1)
