"""What followers may skip while decoding (tau), and how much that was."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..caches.passes import CachePass


@dataclass(frozen=True)
class SkipShares:
    """Shares of what decoding did since the cache was new or reset, 0..1: followers = skipped of the followers' distant
    (query head, token) pairs; distant = skipped of all distant pairs; work = multiply-adds of attention, of those with
    tau=None. NaN where there were none."""

    followers: float
    distant: float
    work: float


class Skips:
    """tau: None or 1 = nothing is skipped. window: near tokens at most. pairs: (query head, token), counted where
    anything may be skipped."""

    def __init__(self, tau: float | None, window: int) -> None:
        self.tau, self.window = tau, window
        self.pairs = {"near": 0, "lead": 0, "follower": 0}
        self.skipped: Tensor | None = None

    @property
    def any(self) -> bool:
        return self.tau is not None and self.tau != 1

    def in_step(self, step: CachePass) -> bool:
        """Whether a pass skips: one token of each sequence at most, which is not of a prompt."""
        return self.any and step.columns == 1 and step.iteration is None

    def count(self, step: CachePass, held: list[int], heads: int, skipped: Tensor | None) -> None:
        """Adds up what a step attends to in one layer: held tokens of each sequence by so many query heads; skipped:
        bool [B, heads, 1] in a follower, None in a lead."""
        if not self.in_step(step):
            return
        seen = [n * count for n, count in zip(held, step.counts, strict=True)]
        far = [max(n - self.window, 0) for n in seen]
        self.pairs["near"] += heads * (sum(seen) - sum(far))
        self.pairs["lead" if skipped is None else "follower"] += heads * sum(far)
        if skipped is not None:
            counts = torch.tensor(far, device=skipped.device)[:, None, None]
            more = (skipped * counts).sum()
            self.skipped = more if self.skipped is None else self.skipped + more

    def shares(self) -> SkipShares:
        if not self.any:
            return SkipShares(0.0, 0.0, 1.0)
        near, lead, follower = (self.pairs[name] for name in ("near", "lead", "follower"))
        skipped = 0 if self.skipped is None else int(self.skipped)
        # a key is multiplied once and a value once; followers multiply distant values alone
        work = 2 * near + 2 * lead + follower
        return SkipShares(
            skipped / follower if follower else math.nan,
            skipped / (lead + follower) if lead + follower else math.nan,
            (work - skipped) / work if work else math.nan,
        )

    def reset(self) -> None:
        self.pairs, self.skipped = dict.fromkeys(self.pairs, 0), None
