"""Values that answer for what went: the definition of PrunedCache's fit_values."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # of the mean of the diagonal
ENOUGH = 0.8  # of what the best ridge wins: the strongest that wins as much is taken
SEGMENTS = 16  # of the text, by turns held out


def missing_of(queries: Tensor, keys: Tensor, values: Tensor, kept: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What queries [N, D] miss when of keys and values [T, D] only those at places kept [n] are left.

    Beside the text a query finds something else, with as much mass as the whole text and no value. p: its softmax over
    the text, m: the sum of p over what is left; its weights on that are A = p[kept] / (m + 1), which were p / 2.
    Returns (A [N, n], p values / 2 - A values[kept] [N, D]).
    """
    p = (queries @ keys.T * scale).softmax(-1)
    weights = p[:, kept] / (p[:, kept].sum(1, keepdim=True) + 1)
    return weights, p @ values / 2 - weights @ values[kept]


def ridge(weights: Tensor, missing: Tensor, strength: float) -> Tensor:
    """X [n, D] with the least |weights X - missing|^2 + strength d |X|^2; d: mean diagonal of weights^T weights."""
    gram = weights.T @ weights
    pull = strength * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram + pull, weights.T @ missing)


def fitted(weights: Tensor, missing: Tensor, held_out: Tensor) -> Tensor:
    """What is added to the values that are left: X [n, D], zeros where no ridge helps references that it has not seen.
    held_out: bool [N], the half of them that is judged by the other half, and the other way round."""
    sides = (held_out, ~held_out)
    nothing = sum(missing[side].square().sum().item() for side in sides)
    won = {}
    for strength in RIDGES:
        errors = [
            (weights[side] @ ridge(weights[~side], missing[~side], strength) - missing[side]).square().sum().item()
            for side in sides
        ]
        won[strength] = nothing - sum(errors)
    best = max(won.values())
    if best <= 0:
        return torch.zeros(weights.shape[1], missing.shape[1], dtype=missing.dtype)
    return ridge(weights, missing, max(s for s, gain in won.items() if gain >= ENOUGH * best))
