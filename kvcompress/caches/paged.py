"""A layer that keeps every token it is given, rotated at its position, in pages: what follows a compressed prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from .base import CompressedLayer, Step
from .pool import PagePool
from .store import keys_and_values


class PagedLayer(CompressedLayer):
    """Appends tokens at contiguous positions and attends to all that is held."""

    is_croppable = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.pool: PagePool | None = None
        self.rope_lengths: list[int] = []  # keys in sight when a sequence's frequencies were settled

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        rotary, counts = self.cache.rotary, self.cache.step.counts
        assert rotary is not None
        B, Hkv, S, D = keys.shape
        if self.pool is None:
            self.open_pool(B * Hkv, D, keys, [max(count, 1) for count in counts])
        pool = self.pool
        assert pool is not None
        bound = max(pool.bounds[b * Hkv] + counts[b] for b in range(B))
        # token s of a sequence with n new ones has position held + s - (S - n); padding gets any valid one
        first = pool.lengths.view(B, Hkv)[:, :1]
        if min(counts) < S:
            first = first - (S - torch.tensor(counts, dtype=torch.int32).to(first.device)[:, None])
        positions = (first + torch.arange(S, dtype=torch.int32, device=first.device)).clamp_(min=0)
        bound = max(bound, S)
        q = rotary.rotate(queries, positions, bound, self.rope_lengths)
        k = rotary.rotate(keys, positions, bound, self.rope_lengths)
        pool.append((k, values), self._per_row(counts))
        out, _ = ops.decode(
            q, pool.k_pages, pool.v_pages, pool.lengths, block_table=pool.block_table, scale=scaling, causal=True
        )
        return out

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        slots = keys_and_values(head_dim, like.dtype)
        self.pool = PagePool(rows, slots, like.device, self.cache.pool_settings)
        self.rope_lengths = rope_lengths

    def _per_row(self, counts: Sequence[int]) -> list[int]:
        assert self.pool is not None
        return [count for count in counts for _ in range(len(self.pool.bounds) // len(counts))]

    def check_step(self, step: Step) -> None:
        """Takes the pages that the step needs before any layer has changed, so that a full pool loses nothing."""
        super().check_step(step)
        if self.pool is not None and step.iteration is None and self.cache.pool_settings.max_pages is not None:
            self.pool.reserve(self._per_row(step.counts))

    def keys_in_sight(self, step: Step) -> int:
        held = [row[0] for row in self.stored_lengths() if row] or [0] * len(step.counts)
        return max(have + count for have, count in zip(held, step.counts, strict=True))

    def drop_last(self, tokens: int) -> None:
        if self.pool is not None:
            self.pool.drop_last(tokens)

    def nbytes(self) -> int:
        return self.pool.nbytes() if self.pool is not None else 0

    def reserved_nbytes(self) -> int:
        return self.pool.reserved_nbytes() if self.pool is not None else 0

    def trim(self) -> None:
        if self.pool is not None:
            self.pool.trim()

    def stored_lengths(self) -> list[list[int]]:
        batch = len(self.rope_lengths)
        if self.pool is None:
            return [[] for _ in range(batch)]
        heads = len(self.pool.bounds) // batch
        return [self.pool.counts[b * heads : (b + 1) * heads] for b in range(batch)]

    def select_batch(self, indices: list[int]) -> None:
        if self.pool is None:
            return
        heads = len(self.pool.bounds) // len(self.rope_lengths)
        self.pool.select_rows([b * heads + h for b in indices for h in range(heads)])
        self.rope_lengths = [self.rope_lengths[b] for b in indices]
