"""A layer that keeps what it is given in pages, rotated where it was written, and attends to all that is held."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from .base import CompressedLayer, Step
from .pool import PagePool
from .store import keys_and_values


def step_positions(first: Tensor, counts: Sequence[int], tokens: int) -> Tensor:
    """int32 [B, tokens]: first[b] is the place of sequence b's first real token, of which there are counts[b],
    right-aligned; padding before it gets any."""
    if min(counts) < tokens:
        first = first - (tokens - torch.tensor(counts, dtype=torch.int32).to(first.device)[:, None])
    return (first + torch.arange(tokens, dtype=torch.int32, device=first.device)).clamp_(min=0)


class PagedLayer(CompressedLayer):
    """Appends tokens and attends to all that is held.

    The token in slot s of a row stands at position s + shift.
    """

    is_croppable = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.pool: PagePool | None = None
        self.rope_lengths: list[int] = []  # keys in sight when a sequence's frequencies were settled
        self.shift: Tensor | None = None  # int32 [R]; None = 0. shift + length is the same for all heads of a sequence
        self.next: list[int] = []  # position of each sequence's next token

    @property
    def heads(self) -> int:
        assert self.pool is not None
        return len(self.pool.bounds) // len(self.rope_lengths)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        rotary, counts = self.cache.rotary, self.cache.step.counts
        assert rotary is not None
        B, Hkv, S, D = keys.shape
        if self.pool is None:
            self.open_pool(B * Hkv, D, keys, [max(count, 1) for count in counts])
        pool = self.pool
        assert pool is not None
        bound = max(max(place + count for place, count in zip(self.next, counts, strict=True)), S)
        place = pool.lengths if self.shift is None else pool.lengths + self.shift
        positions = self._positions(place.view(B, Hkv)[:, :1], S)
        q = rotary.rotate(queries, positions, bound, self.rope_lengths)
        k = rotary.rotate(keys, positions, bound, self.rope_lengths)
        pool.append((k, values), self._per_row(counts))
        self.next = [place + count for place, count in zip(self.next, counts, strict=True)]
        return self.attend_held(queries, q, scaling)

    def attend_held(self, queries: Tensor, rotated: Tensor, scaling: float) -> Tensor:
        """Attention of the last S tokens, which are held already. queries: the same before rotation."""
        pool = self.pool
        assert pool is not None
        return self._decode(rotated, pool.lengths, None, scaling, causal=True)[0]

    def _decode(
        self, rotated: Tensor, end: Tensor, begin: Tensor | None, scaling: float, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of queries over the slots begin..end-1 of every row."""
        pool = self.pool
        assert pool is not None
        return ops.decode(
            rotated, pool.k_pages, pool.v_pages, end, block_table=pool.block_table, begin=begin, scale=scaling,
            causal=causal,
        )  # fmt: skip

    def _positions(self, first: Tensor, tokens: int) -> Tensor:
        return step_positions(first, self.cache.step.counts, tokens)

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        slots = keys_and_values(head_dim, like.dtype)
        self.pool = PagePool(rows, slots, like.device, self.cache.pool_settings)
        self.rope_lengths, self.next = rope_lengths, [0] * len(rope_lengths)
        self.shift = None

    def _per_row(self, counts: Sequence[int]) -> list[int]:
        assert self.pool is not None
        return [count for count in counts for _ in range(len(self.pool.bounds) // len(counts))]

    def check_step(self, step: Step) -> None:
        """Takes the pages that the step needs before any layer has changed, so that a full pool loses nothing."""
        super().check_step(step)
        if self.pool is not None and step.iteration is None and self.cache.pool_settings.max_pages is not None:
            self.pool.reserve(self._per_row(step.counts))

    def keys_in_sight(self, step: Step) -> int:
        held = self.next or [0] * len(step.counts)
        return max(have + count for have, count in zip(held, step.counts, strict=True))

    def drop_last(self, tokens: int) -> None:
        if self.pool is not None:
            self.pool.drop_last(tokens)
            self.next = [place - tokens for place in self.next]

    def nbytes(self) -> int:
        held = self.pool.nbytes() if self.pool is not None else 0
        return held + (0 if self.shift is None else self.shift.nbytes)

    def reserved_nbytes(self) -> int:
        held = self.pool.reserved_nbytes() if self.pool is not None else 0
        return held + (0 if self.shift is None else self.shift.nbytes)

    def trim(self) -> None:
        if self.pool is not None:
            self.pool.trim()

    def stored_lengths(self) -> list[list[int]]:
        batch = len(self.rope_lengths)
        if self.pool is None:
            return [[] for _ in range(batch)]
        counts, heads = self.pool.counts, self.heads
        return [counts[b * heads : (b + 1) * heads] for b in range(batch)]

    def select_batch(self, indices: list[int]) -> None:
        if self.pool is None:
            return
        heads = self.heads
        rows = [b * heads + h for b in indices for h in range(heads)]
        self.pool.select_rows(rows)
        index = torch.tensor(rows).to(self.pool.lengths.device)
        self.shift = None if self.shift is None else self.shift[index]
        self.rope_lengths, self.next = ([list_[b] for b in indices] for list_ in (self.rope_lengths, self.next))
