"""What the layers of DMC and DMS have in common: decisions by a neuron that takes no part in attention."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..dmc.gates import decisions_of
from .base import Step
from .paged import PagedLayer

if TYPE_CHECKING:
    from .dmc import DMCCache


class DecidingLayer(PagedLayer):
    """A layer each of whose tokens comes with a decision of every KV head; subclasses say what it does.

    places: int32 [B, 1], tokens seen of each sequence, the device's copy of `next`.
    """

    cache: DMCCache
    is_croppable = False

    def __init__(self, cache: DMCCache, index: int, sliding_window: int | None) -> None:
        super().__init__(cache, index, sliding_window)
        self.places: Tensor | None = None
        self.noted: list[tuple[Tensor, tuple[int, ...]]] = []  # with track: decisions [B, Hkv, S] and counts of calls

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        # frequencies that depend on length are settled for the whole prompt, not for its first chunk
        whole = self.cache.prompt_lengths or rope_lengths
        super().open_pool(rows, head_dim, like, [max(n, m) for n, m in zip(rope_lengths, whole, strict=True)])
        self.places = torch.zeros(len(rope_lengths), 1, dtype=torch.int32, device=like.device)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        counts = self.cache.step.counts
        B, Hkv, S, D = keys.shape
        if self.pool is None:
            self.open_pool(B * Hkv, D, keys, [max(count, 1) for count in counts])
        assert self.places is not None
        if S == 1 and min(counts) == 1:
            with torch.inference_mode():  # several small ops, that dispatch in half the time past autograd
                alpha = self._decide(keys)
            out = self.attend_one(queries, keys, values, alpha, scaling)
            self.places = self.places + 1
        else:
            alpha = self._decide(keys)
            out = self.attend_many(queries, keys, values, alpha, scaling)
            self.places = self.places + self._counts(keys.device)
        self.next = [place + count for place, count in zip(self.next, counts, strict=True)]
        if self.cache.track:
            self.noted.append((alpha > 0.5, counts))
        return out

    @abstractmethod
    def attend_one(self, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, scaling: float) -> Tensor:
        """One token of every sequence. alpha: float32 [B, Hkv, 1] of 0 and 1; the rest as for attend."""

    @abstractmethod
    def attend_many(self, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, scaling: float) -> Tensor:
        """Some tokens of each sequence, in parallel; gives what attend_one would one by one."""

    # ---- decisions ----

    def _decide(self, keys: Tensor) -> Tensor:
        """float32 [B, Hkv, S] of 0 and 1; 0 for the first token of a sequence."""
        counts, S = self.cache.step.counts, keys.shape[2]
        assert self.places is not None
        places = self.places
        if self.cache.dmc.stride is not None:
            # columns before a sequence's first token are padding: their places are negative, their decisions unused
            places = places + self._counts(keys.device) - S + torch.arange(S, device=keys.device)
        alpha = decisions_of(self.cache.dmc, keys[..., self.cache.neuron], places).alpha
        for b, (seen, count) in enumerate(zip(self.next, counts, strict=True)):
            if seen == 0 and count:
                alpha[b, :, -count] = 0
        return alpha

    def _counts(self, device: torch.device) -> Tensor:
        """int32 [B, 1], tokens of each sequence in this step."""
        return torch.tensor(self.cache.step.counts, dtype=torch.int32).to(device)[:, None]

    def decisions(self) -> Tensor:
        """bool [B, Hkv, T], right-aligned, False before a shorter sequence's first token."""
        batch = len(self.next)
        if self.pool is None:
            return torch.zeros(batch, 0, 0, dtype=torch.bool)
        out = torch.zeros(batch, self.heads, max(self.next), dtype=torch.bool, device=self.pool.lengths.device)
        ends = list(self.next)
        for alpha, counts in reversed(self.noted):
            for b, count in enumerate(counts):
                if count:
                    last = out.shape[2] - (self.next[b] - ends[b])
                    out[b, :, last - count : last] = alpha[b, :, -count:]
                    ends[b] -= count
        return out

    # ---- positions ----

    def _bound(self) -> int:
        """No position of this step reaches it, those of padding after the last token included."""
        return max(self.next) + self.cache.step.columns

    def _without_neuron(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys rotated, the neuron 0 before and after."""
        rotary = self.cache.rotary
        assert rotary is not None
        return rotary.rotate(x, positions, self._bound(), self.rope_lengths, without=self.cache.neuron)

    def _left_aligned(self, *tensors: Tensor) -> list[Tensor]:
        """[B, H, S, ...] each, the tokens of a sequence first and its padding after them."""
        counts, columns = self.cache.step.counts, self.cache.step.columns
        if min(counts) == columns:
            return list(tensors)
        out = []
        for x in tensors:
            moved = torch.empty_like(x, memory_format=torch.contiguous_format)
            for b, count in enumerate(counts):
                moved[b] = x[b].roll(count - columns, 1)
            out.append(moved)
        return out

    # ---- state ----

    def check_step(self, step: Step) -> None:
        """Takes the pages that a step of one token may need; what more tokens need, their decisions say."""
        super(PagedLayer, self).check_step(step)
        if self.pool is not None and step.columns == 1 and self.cache.pool_settings.max_pages is not None:
            self.pool.reserve(self._per_row(self.most_slots(step.counts)))

    def most_slots(self, counts: tuple[int, ...]) -> list[int]:
        """Slots of pages that a step of at most one token per sequence fills at most, per sequence."""
        return list(counts)

    @torch.inference_mode(False)
    def select_batch(self, indices: list[int]) -> None:
        if self.pool is None or self.places is None:
            return
        heads, device = self.heads, self.places.device
        index = torch.tensor(indices).to(device)
        noted = self.decisions()[index] if self.noted else None
        super().select_batch(indices)
        self.places = self.places[index]
        self.noted = [] if noted is None else [(noted, tuple(self.next))]
        rows = torch.tensor([b * heads + h for b in indices for h in range(heads)])
        self.select_state(rows.to(device))

    @abstractmethod
    def select_state(self, rows: Tensor) -> None:
        """Makes row i of what is kept beside the pages what rows[i] was."""

    @abstractmethod
    def state(self) -> tuple[Tensor, ...]:
        """What is kept beside the pages."""

    def nbytes(self) -> int:
        return super().nbytes() + sum(x.nbytes for x in self.state())

    def reserved_nbytes(self) -> int:
        return super().reserved_nbytes() + sum(x.nbytes for x in self.state())


def hiding(alpha: Tensor) -> Tensor:
    """The key_bias float32 [B, Hkv, T] of hard decisions [B, Hkv, T]: -inf where the next token's is 1, else 0."""
    return ops.dmc_mask(torch.where(alpha > 0.5, torch.inf, -torch.inf))
