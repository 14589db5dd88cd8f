"""Values that are fitted to what went, so that attention to the tokens that stay gives what all of them gave.

Attention matching (Zweiger et al. 2026, arXiv:2602.16284), its second half: keys stay as they are, of tokens that a
pruner chose; values become those whose attention comes nearest to the whole text's, for reference queries: the text's
own, as they would ask from where its last token stands. Its ridge regressions are solved
through the inner products of the references, whose number does not grow with the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..softmax import Softmax
from .choose import Offers

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # of the mean of the diagonal
ENOUGH = 0.8  # of what the best ridge wins: the strongest that wins as much is taken
SEGMENTS = 16  # of the text, by turns held out
QUERIES = 1024  # references of a KV head, of all its query heads
LOGITS = 1 << 23  # at a time


@dataclass
class References:
    """Of one sequence in one layer. queries: float32 [Hkv, N, D], places of the text on its way: bool [N], whether they
    are held out. outputs: float32 [Hkv, N, D] over the whole text; sums: [Hkv, N], the logarithms of its mass. tokens:
    of the text."""

    queries: Tensor
    outputs: Tensor
    sums: Tensor
    held_out: Tensor
    tokens: int
    softmax: Softmax

    @staticmethod
    def of(offers: Offers, b: int) -> References | None:
        """Of what sequence b offers: a text that is held whole. None where it has no tokens."""
        assert offers.values is not None
        tokens = offers.valid[b] - offers.guides[b]
        if tokens <= 0:
            return None
        _, Hq, S, _ = offers.unrotated.shape
        heads = offers.heads
        count = min(tokens, max(QUERIES * heads // Hq, 2 * SEGMENTS))
        device = offers.keys.device
        each = torch.arange(count, device=device)
        places = S - offers.valid[b] + each * tokens // count
        last = offers.positions[b] - 1
        stand = torch.full((1, count), last, dtype=torch.int32, device=device)
        asked = offers.rotary.rotate(offers.unrotated[b : b + 1, :, places], stand, last + 1, [offers.in_sight[b]])
        queries = asked[0].unflatten(0, (heads, -1)).flatten(1, 2).float()
        held_out = (each * SEGMENTS // count % 2).bool().repeat(Hq // heads)
        outputs, sums = torch.empty_like(queries), queries.new_empty(queries.shape[:2])
        for head, row in enumerate(range(offers.rows(b).start, offers.rows(b).stop)):
            keys, values = (x[row, :tokens].float() for x in (offers.keys, offers.values))
            for part in torch.arange(queries.shape[1], device=device).split(max(LOGITS // tokens, 1)):
                logits = products(queries[head, part], keys, offers.softmax)
                sums[head, part] = total = logits.logsumexp(-1)
                outputs[head, part] = (logits - total[:, None]).exp() @ values
        return References(queries, outputs, sums, held_out, tokens, offers.softmax)

    def fitted(self, head: int, keys: Tensor, values: Tensor) -> Tensor:
        """Values float32 [n, D] of a KV head of which keys and values [n, D] are left. Waits for the device."""
        values = values.float()
        mass = (products(self.queries[head], keys.float(), self.softmax) - self.sums[head, :, None]).exp()
        weights = mass / (mass.sum(1, keepdim=True) + 1)
        missing = self.outputs[head] / 2 - weights @ values
        return values + _ridge(weights.double(), missing.double(), self.held_out).float()


def products(queries: Tensor, keys: Tensor, softmax: Softmax) -> Tensor:
    """Logits [N, n]; a sink belongs to what stands beside the text."""
    return softmax.capped(queries @ keys.T * softmax.scale)


def _ridge(weights: Tensor, missing: Tensor, held_out: Tensor) -> Tensor:
    """Zeros where no ridge helps references not seen. By way of [N, N]: X = A^T (A A^T + pull)^-1 missing."""
    inner, n = weights @ weights.T, weights.shape[1]
    strengths = torch.tensor(RIDGES, dtype=inner.dtype, device=inner.device)

    def solved(some: Tensor, strengths: Tensor) -> Tensor:
        """[ridges, those some, D]"""
        own = inner[some][:, some]
        pulls = strengths * (own.diagonal().sum() / n).clamp(min=1e-30)
        factors = torch.linalg.cholesky(own + pulls[:, None, None] * torch.eye(len(own)).to(own))
        return torch.cholesky_solve(missing[some].expand(len(strengths), -1, -1), factors)

    won = inner.new_zeros(len(RIDGES))
    for side in (held_out, ~held_out):
        found = inner[side][:, ~side] @ solved(~side, strengths)
        won += missing[side].square().sum() - (found - missing[side]).square().sum((1, 2))
    best = won.max()
    if not best > 0:
        return torch.zeros_like(weights.T @ missing)
    chosen = strengths[won >= ENOUGH * best].max()
    return weights.T @ solved(torch.ones_like(held_out), chosen[None])[0]
