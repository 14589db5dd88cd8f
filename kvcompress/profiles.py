"""Budgets whose shares of layers and heads were measured before: a profile of a model, and what goes by it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import ops
from .budgets import Budget, flat_topk
from .support.checks import need
from .support.files import read_fields, write_text
from .support.names import file_of

__all__ = ["BudgetProfile", "Profiled"]

FORMAT = "kvcompress budget profile 1"
_UNIT = 1 << 20  # shares are counted in parts of this


@dataclass(frozen=True)
class BudgetProfile:
    """How a budget is divided over the layers and KV heads of a model, in shares of the mean of all rows.

    shares: [layers that compress][KV heads], at least 0; their mean is made 1. measured: what they come from, for
    people. kvcompress.analysis.measure_profile makes one.
    """

    shares: tuple[tuple[float, ...], ...]
    measured: str = ""

    def __post_init__(self) -> None:
        rows = self.shares
        good = isinstance(rows, (list, tuple)) and rows and all(isinstance(row, (list, tuple)) and row for row in rows)
        need(bool(good), f"shares must be a list of numbers for each layer, got {rows!r}")
        flat = [share for row in rows for share in row]
        for share in flat:
            number = isinstance(share, (int, float)) and not isinstance(share, bool)
            need(number and 0 <= share < float("inf"), f"shares must be at least 0 and finite, got {share!r}")
        need(sum(flat) > 0, "shares must not be 0 everywhere")
        need(isinstance(self.measured, str), f"measured must be a text, got {self.measured!r}")
        mean = sum(flat) / len(flat)
        mean = 1.0 if abs(mean - 1) < 1e-6 else mean  # what was saved is read as it was
        object.__setattr__(self, "shares", tuple(tuple(float(share / mean) for share in row) for row in rows))

    def check_rows(self, heads: Sequence[int]) -> None:
        """Raises ValueError if it is not for a model whose layers that compress have so many KV heads."""
        own = [len(row) for row in self.shares]
        need(
            own == list(heads),
            f"profile must be of this model: it has KV heads {own}, the model's layers that compress {list(heads)}"
            + (f"; measured: {self.measured}" if self.measured else ""),
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As JSON, whole or not at all: under a temporary name in the same folder, then renamed. Returns the path."""
        return write_text(path, json.dumps({"format": FORMAT} | asdict(self), allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> BudgetProfile:
        """What save wrote. path: or its name on the Hub, owner/name/file.json, of owner/name shares.json. Raises
        ValueError for anything else, FileNotFoundError for no file, ConnectionError where the Hub cannot be reached."""
        path = file_of("profile", os.fspath(path), "shares.json")
        return BudgetProfile(**read_fields(path, "profile", FORMAT, BudgetProfile))


@dataclass(frozen=True)
class Profiled(Budget):
    """Every row has its share of a profile, whatever its scores: known before anything is read.

    A layer keeps exactly what its rows' shares are of what stays (rounded so that the sum over all layers is exact, at
    least 1 token per row and at most all), and in it each row its own share: the best of its own scores. What always
    stays in a row stays even where its share is less, at the cost of others in its layer. Needs no scores that mean the
    same in other rows, and no layer waits for another: it serves iterative reading too.
    """

    profile: BudgetProfile

    def __post_init__(self) -> None:
        need(
            isinstance(self.profile, BudgetProfile),
            f"profile must be a BudgetProfile, got {type(self.profile).__name__}: BudgetProfile.load reads a file",
        )

    def check_rows(self, heads: Sequence[int]) -> None:
        self.profile.check_rows(heads)

    def layer_tokens(self, mean: int, length: int, layer: int, layers: int) -> int:
        need(
            layers == len(self.profile.shares),
            f"profile must be of this model: it has {len(self.profile.shares)} layers, the model {layers} that "
            "compress",
        )
        if mean == 0 or mean >= length:
            return min(mean, length)
        weights = tuple(sum(row) / len(row) for row in self.profile.shares)
        return _apportioned(layers * mean, weights, length)[layer]

    def divide(self, layer: int, ranks: Tensor, keep: int, allowed: int) -> tuple[Tensor, Tensor | None]:
        T, row = ranks.shape[-1], self.profile.shares[layer]
        counts = torch.tensor(_apportioned(len(row) * keep, row, max(T, keep)), device=ranks.device)[:, None]
        # the best `counts` of each row come before all others, then the next best of every row in turn
        order = ranks.argsort(stable=True, dim=-1, descending=True)
        behind = torch.empty_like(order).scatter_(-1, order, torch.arange(T, device=order.device).expand_as(order))
        places = torch.where(ranks.isinf(), ranks, (counts - behind).to(ranks.dtype))
        return flat_topk(places, keep, allowed, 1)


@functools.lru_cache(maxsize=1024)
def _apportioned(total: int, weights: tuple[float, ...], most: int) -> tuple[int, ...]:
    """total in parts as the weights are to each other, each 1..most."""
    kept, n = [round(weight / max(max(weights), 1e-30) * _UNIT) for weight in weights], len(weights)
    parts = ops.divide_memory(total, kept, [_UNIT] * n, lowest=[min(1, total // n)] * n, highest=[most] * n)
    return tuple(parts.tolist())
