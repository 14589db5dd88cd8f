"""The latest queries of a layer, kept so that a pruner can score while decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..pruners import Pruner
from .rows import BatchState, joined_rows

VOTING = 16  # queries of decoded tokens that vote together


class RecentQueries(BatchState):
    """A ring of the last queries, before rotation: a pruner rotates them for the positions that their keys then have.
    For one that looks at what entered attention (uses_entering) that, as queries of one head.

    queries: [B, Hq, n, D] or None before the first; n is capacity, or less where few are held after a vote. valid[b]:
    how many of the last ones are sequence b's own tokens, without padding between them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queries: Tensor | None = None
        self.valid: list[int] = []
        self._next = 0  # where the next query goes, modulo n
        # what it was when a tensor on the device, int64 [1], was the same; in a tuple, as that is of no sequence
        self._cursor: tuple[int, Tensor] | None = None

    @staticmethod
    def of(pruner: Pruner, every: int | None) -> RecentQueries | None:
        """What a pruner needs in a cache that compresses every so many tokens, None = in none; None if nothing."""
        if pruner.rereads:  # queries of prompts alone
            return None
        if pruner.accumulates:  # they wait for a common vote; few, as they count beside a small budget
            return RecentQueries(min(every or VOTING, VOTING) + pruner.overlap)
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
            self.queries, self.valid = queries.new_zeros(B, Hq, self.capacity, D), [0] * B
        self._widen()
        if S == 1 == min(counts):
            self.queries.index_copy_(2, self._on_device(), queries)
            self._on_device().add_(1).remainder_(self.capacity)
            self.count_step()
            return
        last = queries[:, :, -self.capacity :]
        if min(counts) < S:  # a sequence's own must have no padding between them
            self.queries, self._next = self._joined(last, [min(count, last.shape[2]) for count in counts]), 0
        else:
            places = (torch.arange(last.shape[2], device=queries.device) + self._next) % self.capacity
            self.queries[:, :, places] = last
            self._next = (self._next + last.shape[2]) % self.capacity
        self.valid = [min(held + count, self.capacity) for held, count in zip(self.valid, counts, strict=True)]

    def _widen(self) -> None:
        assert self.queries is not None
        if (n := self.queries.shape[2]) < self.capacity:
            with torch.inference_mode(False):
                rolled = self.queries.roll(-self._next, 2)
                self.queries = torch.nn.functional.pad(rolled, (0, 0, self.capacity - n, 0))
            self._next = 0

    def _joined(self, new: Tensor, counts: list[int]) -> Tensor:
        """The held ones in order, then the last counts[b] of new ones: [B, Hq, capacity, D], right-aligned."""
        assert self.queries is not None
        both = torch.cat([self.queries.roll(-self._next, 2), new], 2)
        age = torch.arange(self.capacity - 1, -1, -1, device=new.device)  # of each place; 0 is the newest
        own = torch.tensor(counts, device=new.device)[:, None]
        index = both.shape[2] - 1 - torch.where(age < own, age, age - own + new.shape[2])
        index = index.clamp_(min=0)[:, None, :, None]
        return both.gather(2, index.expand(-1, both.shape[1], -1, both.shape[3]))

    def get(self) -> tuple[Tensor, list[int]]:
        """(the last queries in order [B, Hq, n, D], how many of them are each sequence's own)."""
        assert self.queries is not None
        places = (torch.arange(-self.held, 0, device=self.queries.device) + self._next) % self.queries.shape[2]
        return self.queries[:, :, places], list(self.valid)

    def forget(self, b: int, but: int) -> None:
        """Forgets all but the last queries of sequence b."""
        if self.valid:
            self.valid[b] = min(self.valid[b], but)

    def vote(self, voted: list[bool], stay: int) -> None:
        """These sequences' queries have voted: forgets all but the last `stay` of each, and gives back the memory where
        no more are held of any."""
        if self.queries is None:
            return
        self.valid = [min(held, stay) if done else held for held, done in zip(self.valid, voted, strict=True)]
        if self.held <= stay:
            self.queries, self._next = self.get()[0], 0

    def join(self, other: BatchState, batch: int, more: int) -> None:
        assert isinstance(other, RecentQueries)
        parts = [x.queries if x.queries is None else x.queries.roll(-x._next, 2) for x in (self, other)]
        width = max((part.shape[2] for part in parts if part is not None), default=0)
        # the newest query is the last one
        left = [
            part if part is None else torch.nn.functional.pad(part, (0, 0, width - part.shape[2], 0)) for part in parts
        ]
        self.queries, self._next = joined_rows(left[0], left[1], batch, more), 0
        self.valid = (self.valid or [0] * batch) + (other.valid or [0] * more)

    # ---- steps of a token each, which the device can do alone ----

    def _on_device(self) -> Tensor:
        assert self.queries is not None
        if self._cursor is None or self._cursor[0] != self._next:
            with torch.inference_mode(False):
                self._cursor = self._next, torch.tensor([self._next], device=self.queries.device)
        return self._cursor[1]

    def prepare_step(self) -> None:
        """Does what add would do before it stores a token of each sequence."""
        if self.queries is not None:
            self._widen()
            self._on_device()

    @property
    def steps_ahead(self) -> int:
        """How many tokens add stores on the device alone before the ring is full."""
        if self.queries is None or self.queries.shape[2] < self.capacity:
            return 0
        return max(self.capacity - 1 - self.held, 0)

    def count_step(self) -> None:
        """Counts a token of each sequence that the device has stored."""
        cursor, self._next = self._on_device(), (self._next + 1) % self.capacity
        self._cursor = self._next, cursor
        self.valid = [min(held + 1, self.capacity) for held in self.valid]

    def held_tensors(self) -> tuple[Tensor, ...]:
        assert self.queries is not None
        return self.queries, self._on_device()
