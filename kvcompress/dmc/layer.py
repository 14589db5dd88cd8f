"""What the layers of DMC and DMS have in common: each token comes with a decision, usually a neuron's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..caches.choose import Choice
from ..caches.paged import PagedLayer, step_positions
from ..caches.passes import CachePass
from ..caches.store import PoolSettings
from ..hf.facts import LayerFacts
from ..ops.softmax import Softmax
from .config import DMCConfig
from .gates import decisions_of


class DecidingLayer(PagedLayer):
    """A layer each of whose tokens comes with a decision of every KV head; subclasses say what it does.

    places: int32 [B, 1], tokens seen of each sequence, the device's copy of `next`. track: decisions are remembered.
    """

    is_croppable = False
    steps_known = False
    sinks = 1  # first tokens that no decision is asked of
    places: Tensor  # once the pool is open

    def __init__(self, index: int, number: int, pool_settings: PoolSettings, config: DMCConfig, track: bool) -> None:
        super().__init__(index, number, pool_settings)
        self.config, self.track = config, track
        self.neuron: int | None = 0  # the coordinate that carries decisions; None = none does
        self.noted: list[tuple[Tensor, tuple[int, ...]]] = []  # with track: decisions [B, Hkv, S] and counts of calls

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        super().open_pool(rows, head_dim, like, rope_lengths)
        self.neuron = self.config.place(head_dim)
        self.places = torch.zeros(len(rope_lengths), 1, dtype=torch.int32, device=like.device)

    def attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        B, Hkv, _, D = keys.shape
        if self.pool is None:
            self.open_pool(B * Hkv, D, keys, step.whole)
        if step.one:
            out = self.attend_token(step, queries, keys, values, softmax)
        else:
            alpha = self._decide(step, queries, keys)
            out = self.attend_many(step, queries, keys, values, alpha, softmax)
            self.places += step.on(keys.device)
            self.note(alpha, step)
        self.next = [place + count for place, count in zip(self.next, step.counts, strict=True)]
        return out

    def note(self, alpha: Tensor, step: CachePass) -> None:
        """Remembers what a step's tokens decided, if anyone will ask."""
        if self.track:
            self.noted.append((alpha > 0.5, step.counts))

    @abstractmethod
    def attend_token(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """One token of every sequence; adds 1 to places."""

    @abstractmethod
    def attend_many(
        self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, softmax: Softmax
    ) -> Tensor:
        """Some tokens of each sequence, in parallel; gives what attend_token would one by one. alpha: float32
        [B, Hkv, S] of 0 and 1."""

    # ---- decisions ----

    @property
    def decides_apart(self) -> bool:
        """Whether decisions are made before a step's op, which else makes them of each head's own neuron."""
        return self.track or not self.config.decides_alone

    def _decide(self, step: CachePass, queries: Tensor, keys: Tensor) -> Tensor:
        """float32 [B, Hkv, S] of 0 and 1; 0 for the first token of a sequence."""
        S, places = keys.shape[2], self.places
        if self.config.stride is not None:
            # columns before a sequence's first token are padding: their places are negative, their decisions unused
            places = places + step.on(keys.device) - S + torch.arange(S, device=keys.device)
        return self._sparing(decisions_of(self.config, keys[..., self.neuron], places).alpha, step)

    def _sparing(self, alpha: Tensor, step: CachePass) -> Tensor:
        """The same, 0 for a sequence's first tokens."""
        for b, (seen, count) in enumerate(zip(self.next, step.counts, strict=True)):
            if seen < self.sinks:
                first = alpha.shape[2] - count
                alpha[b, :, first : first + self.sinks - seen] = 0
        return alpha

    def decisions(self) -> Tensor:
        """bool [B, Hkv, T], right-aligned, False before a shorter sequence's first token."""
        batch = len(self.next)
        if self.pool is None:
            return torch.zeros(batch, 0, 0, dtype=torch.bool, device="cpu")
        out = torch.zeros(batch, self.heads, max(self.next), dtype=torch.bool, device=self.pool.lengths.device)
        ends = list(self.next)
        for alpha, counts in reversed(self.noted):
            for b, count in enumerate(counts):
                if count:
                    last = out.shape[2] - (self.next[b] - ends[b])
                    out[b, :, last - count : last] = alpha[b, :, -count:]
                    ends[b] -= count
        return out

    def kept_positions(self) -> list[list[Tensor]]:
        if not self.track:
            raise ValueError(
                "kept_positions needs a cache made with track=True: which tokens a row's entries are of follows from "
                "its decisions"
            )
        if self.pool is None:
            return []
        every, kept = self.decisions().cpu(), []
        for b, n in enumerate(self.next):
            alpha = every[b, :, every.shape[2] - n :]
            kept.append([self.kept_of(row).nonzero().flatten() for row in alpha])
        return kept

    @abstractmethod
    def kept_of(self, alpha: Tensor) -> Tensor:
        """bool [T]: the tokens of a row that have entries of their own. alpha: bool [T], its decisions."""

    def keep(self, choice: Choice, anew: Sequence[Tensor] | None = None) -> None:
        raise NotImplementedError(
            f"slots of {type(self).__name__} cannot be chosen: what a row holds follows from its decisions"
        )

    # ---- positions ----

    def positions(self, step: CachePass) -> Tensor:
        """int32 [B, S], of a step's tokens."""
        return step_positions(self.places, step.counts, step.columns)

    def bound(self, step: CachePass) -> int:
        """No position of this step reaches it, those of padding after the last token included."""
        return max(self.next) + step.columns

    def queries_at(self, step: CachePass, queries: Tensor, positions: Tensor) -> Tensor:
        """Rotated, the neuron 0 before and after."""
        rotary = step.facts[self.index].query_rotary
        return rotary.rotate(queries, positions, self.bound(step), self.rope_lengths, without=self.neuron)

    def keys_at(self, step: CachePass, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotated, the neuron 0 before and after."""
        rotary = step.facts[self.index].key_rotary
        return rotary.rotate(keys, positions, self.bound(step), self.rope_lengths, without=self.neuron)

    # ---- state ----

    def check_step(self, step: CachePass, facts: LayerFacts) -> None:
        """Takes the pages that a step of one token may need; what more tokens need, their decisions say."""
        pool = self.pool
        if pool is None or step.columns > 1 or self.pool_settings.max_pages is None:
            return
        step.claim(pool, self._per_row(self.most_slots(step.counts)))

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return not self.track  # decisions that are remembered are of one batch

    def select(self, indices: list[int], batch: int) -> None:
        noted, self.noted = self.decisions()[indices] if self.noted else None, []  # those are by calls
        super().select(indices, batch)
        self.noted = [] if noted is None else [(noted, tuple(self.next))]

    @abstractmethod
    def state(self) -> tuple[Tensor, ...]:
        """What is kept beside the pages."""

    def beside_nbytes(self) -> int:
        return super().beside_nbytes() + sum(x.nbytes for x in self.state())


def left_aligned(step: CachePass, *tensors: Tensor) -> list[Tensor]:
    """[B, H, S, ...] each, the tokens of a sequence first and its padding after them."""
    if not step.padded:
        return list(tensors)
    out = []
    for x in tensors:
        moved = torch.empty_like(x, memory_format=torch.contiguous_format)
        for b, count in enumerate(step.counts):
            moved[b] = x[b].roll(count - step.columns, 1)
        out.append(moved)
    return out


def hiding(alpha: Tensor) -> Tensor:
    """The key_bias float32 [B, Hkv, T] of hard decisions [B, Hkv, T]: -inf where the next token's is 1, else 0."""
    return ops.dmc_mask(torch.where(alpha > 0.5, torch.inf, -torch.inf))
