"""The latest queries of a layer, kept so that a pruner can score while decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..pruners import Pruner

VOTING = 16  # queries of decoded tokens that vote together


class RecentQueries:
    """A ring of the last queries, before rotation: a pruner rotates them for the positions that their keys then have.

    queries: [B, Hq, capacity, D] or None before the first. valid[b]: how many of the last ones are sequence b's own
    tokens, without padding between them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queries: Tensor | None = None
        self.valid: list[int] = []
        self._next = 0  # where the next query goes, modulo capacity

    @staticmethod
    def of(pruner: Pruner, every: int) -> RecentQueries | None:
        """What a pruner needs in a cache that compresses every so many tokens; None if nothing."""
        if pruner.accumulates:  # they wait for a common vote; few, as they count beside a small budget
            return RecentQueries(min(every or VOTING, VOTING))
        return RecentQueries(pruner.window or 1) if every else None

    @property
    def held(self) -> int:
        return max(self.valid, default=0)

    @property
    def full(self) -> bool:
        return self.held >= self.capacity

    def add(self, queries: Tensor, counts: Sequence[int]) -> None:
        """queries: [B, Hq, S, D], the last counts[b] of them tokens."""
        B, Hq, S, D = queries.shape
        if self.queries is None:
            self.queries = queries.new_zeros(B, Hq, self.capacity, D)
            self.valid = [0] * B
        if min(counts) < S:
            self._add_padded(queries, counts)
            return
        last = queries[:, :, -self.capacity :]
        places = (torch.arange(last.shape[2], device=queries.device) + self._next) % self.capacity
        self.queries[:, :, places] = last
        self._next = (self._next + last.shape[2]) % self.capacity
        self.valid = [min(held + count, self.capacity) for held, count in zip(self.valid, counts, strict=True)]

    def _add_padded(self, queries: Tensor, counts: Sequence[int]) -> None:
        """The same where some sequences have fewer tokens: theirs must not have padding between them."""
        assert self.queries is not None
        S = queries.shape[2]
        held, room = self.get()[0], self.queries.new_zeros(self.queries.shape)
        for b, count in enumerate(counts):
            old = held[b, :, held.shape[2] - self.valid[b] :]
            every = torch.cat([old, queries[b, :, S - count :]], 1)[:, -self.capacity :]
            room[b, :, self.capacity - every.shape[1] :] = every
        self.queries, self._next = room, 0
        self.valid = [min(held + count, self.capacity) for held, count in zip(self.valid, counts, strict=True)]

    def get(self) -> tuple[Tensor, list[int]]:
        """(the last queries in order [B, Hq, n, D], how many of them are each sequence's own)."""
        assert self.queries is not None
        places = (torch.arange(-self.held, 0, device=self.queries.device) + self._next) % self.capacity
        return self.queries[:, :, places], list(self.valid)

    def forget(self, b: int, but: int) -> None:
        """Forgets all but the last queries of sequence b."""
        if self.valid:
            self.valid[b] = min(self.valid[b], but)

    def clear(self) -> None:
        """Forgets them: they have voted."""
        self.valid = [0] * len(self.valid)

    def select_batch(self, indices: list[int]) -> None:
        if self.queries is not None:
            self.queries = self.queries[torch.tensor(indices).to(self.queries.device)]
            self.valid = [self.valid[b] for b in indices]
