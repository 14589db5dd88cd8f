"""Ridge regression from sums: memory does not grow with what is fitted to."""

from __future__ import annotations

import torch
from torch import Tensor

_STILL = 1e-6  # a variance that is none


class RidgeSums:
    """What a regression of `features` numbers to `outputs` needs of all its rows."""

    def __init__(self, features: int, outputs: int) -> None:
        self.square = torch.zeros(features, features, dtype=torch.float64, device="cpu")
        self.product = torch.zeros(features, outputs, dtype=torch.float64, device="cpu")

    def add(self, x: Tensor, y: Tensor) -> None:
        """x: float32 [n, features]. y: float32 [n, outputs]."""
        self.square += (x.T @ x).cpu().double()
        self.product += (x.T @ y).cpu().double()

    def solved(self, ridge: float) -> Tensor:
        """float32 [features, outputs]. ridge: on the diagonal, times its mean."""
        damping = ridge * self.square.diagonal().mean() * torch.eye(len(self.square), dtype=torch.float64, device="cpu")
        return torch.linalg.solve(self.square + damping, self.product).float()


def levels_of(said: list[Tensor], count: int) -> Tensor:
    """float32 [count], rising: a share of i / (count - 1) of all numbers lies under the i-th.

    Levels but the first and the last lie between two numbers: at one of them it would be rounding that decides about
    the token that said it, and a text read in one pass and in chunks would keep different ones.
    """
    every = torch.cat([part.flatten() for part in said]).sort().values
    between = torch.cat([every[:1], (every[:-2] + every[1:-1]) / 2, every[-1:]]) if len(every) > 1 else every
    places = torch.linspace(0, len(every) - 1, count, dtype=torch.float64, device=every.device)
    return between[places.round().long()]


def explained(found: Tensor, wanted: Tensor) -> list[float]:
    """R2 of each output: [n, outputs] both; 0 of one that does not vary, as there is nothing to explain."""
    varies = (wanted - wanted.mean(0)).square().sum(0)
    r2 = 1 - (found - wanted).square().sum(0) / varies
    return torch.where(varies > _STILL * len(wanted), r2, 0.0).tolist()
