"""The layer of DMS: recent tokens in a ring, and of older ones those that were not marked for dropping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from .. import ops
from .deciding import DecidingLayer, hiding

if TYPE_CHECKING:
    from .dmc import DMCCache


class DMSLayer(DecidingLayer):
    """Token t of a sequence lies in slot t % (W + 1) of a ring of the newest W + 1, W = dms_window.

    A token that leaves the ring goes into pages, unless the decision of its successor is 1. Keys are rotated once.
    keys, values: [R, W + 1, D]; alpha: bool [R, W + 1], each token's own decision.
    """

    def __init__(self, cache: DMCCache, index: int, sliding_window: int | None) -> None:
        super().__init__(cache, index, sliding_window)
        self.size = cache.dmc.dms_window + 1
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.alpha: Tensor | None = None

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        super().open_pool(rows, head_dim, like, rope_lengths)
        self.keys, self.values = (like.new_zeros(rows, self.size, head_dim) for _ in range(2))
        self.alpha = torch.zeros(rows, self.size, dtype=torch.bool, device=like.device)

    # ---- attention ----

    def attend_one(self, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, scaling: float) -> Tensor:
        pool, places = self.pool, self.places
        assert pool is not None and places is not None
        assert self.keys is not None and self.values is not None and self.alpha is not None
        R = self.keys.shape[0]
        per_row = places.expand(-1, keys.shape[1]).reshape(R, 1)
        slot, rows = (per_row % self.size)[:, 0].long(), torch.arange(R, device=keys.device)
        leaving = self.keys[rows, slot], self.values[rows, slot]
        k = self._without_neuron(keys, places)
        q = self._without_neuron(queries, places)
        decided = (alpha > 0.5).flatten()
        if max(self.next) >= self.size:  # else nothing leaves
            after = ((per_row + 1) % self.size)[:, 0].long()
            marked = decided if self.size == 1 else self.alpha[rows, after]
            stays = ((per_row[:, 0] >= self.size) & ~marked).to(torch.int32)
            pool.append([x.view(*keys.shape) for x in leaving], stays)
        self.keys[rows, slot], self.values[rows, slot] = k.view(R, -1), values.reshape(R, -1)
        self.alpha[rows, slot] = decided
        near = self._decode_ring(q, (per_row[:, 0] + 1).clamp(max=self.size), scaling)
        return self._with_pages(q, near, scaling)

    def _decode_ring(self, q: Tensor, end: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return ops.decode(q, self.keys, self.values, end, scale=scaling)

    def _with_pages(self, q: Tensor, near: tuple[Tensor, Tensor], scaling: float) -> Tensor:
        """Joins attention over the tokens in pages to that over others."""
        assert self.pool is not None
        if max(self.pool.bounds) == 0:
            return near[0]
        return ops.merge_states(near, self._decode(q, self.pool.lengths, None, scaling, causal=False))[0]

    def attend_many(self, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, scaling: float) -> Tensor:
        """Attention over the ring and the chunk, near and far tokens apart, and over what was in pages before."""
        pool, places, S = self.pool, self.places, keys.shape[2]
        assert pool is not None and places is not None
        positions = self._positions(places, S)
        q, k = self._without_neuron(queries, positions), self._without_neuron(keys, positions)
        k, v, decided, lengths = self._with_ring(k, values, alpha > 0.5)
        near = ops.attention(q, k, v, window=self.size, lengths=lengths, scale=scaling)
        if k.shape[2] > self.size:
            far = ops.attention(
                q, k, v, window=self.size, complement=True, key_bias=hiding(decided), lengths=lengths, scale=scaling
            )
            near = ops.merge_states(near, far)
        out = self._with_pages(q, near, scaling)
        self._store(k, v, decided, lengths)
        return out

    def _with_ring(self, k: Tensor, v: Tensor, decided: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The ring's tokens, oldest first, and this step's, left-aligned: keys, values [B, Hkv, T, D], decisions
        bool [B, Hkv, T], and how many there are, int32 [B]."""
        assert self.keys is not None and self.values is not None and self.alpha is not None and self.places is not None
        B, Hkv, S, D = k.shape
        T = min(max(self.next), self.size) + S
        counts, held = self._counts(k.device), self.places.clamp(max=self.size)
        t = torch.arange(T, device=k.device)
        ring = (self.places - held + t) % self.size
        index = torch.where(t < held, ring, self.size + (t - held + S - counts)).clamp_(max=self.size + S - 1).long()
        index = index[:, None].expand(B, Hkv, T)
        wide = index[..., None].expand(B, Hkv, T, D)
        both = [
            torch.cat([old.view(B, Hkv, *old.shape[1:]), new], 2)
            for old, new in ((self.keys, k), (self.values, v), (self.alpha, decided))
        ]
        lengths = (held + counts).flatten()
        return both[0].gather(2, wide), both[1].gather(2, wide), both[2].gather(2, index), lengths

    def _store(self, k: Tensor, v: Tensor, decided: Tensor, lengths: Tensor) -> None:
        """Makes the newest of these tokens the ring, and puts into pages what leaves it unmarked."""
        assert self.pool is not None and self.places is not None
        B, Hkv, T, D = k.shape
        leaving = T - self.size
        if leaving > 0:
            t = torch.arange(leaving, device=k.device)
            stays = (t < lengths[:, None, None] - self.size) & ~functional.pad(decided, (0, 1))[..., 1 : leaving + 1]
            # those that stay last, in their order
            order = stays.to(torch.int8).argsort(stable=True, dim=-1)[..., None].expand(-1, -1, -1, D)
            kept = stays.sum(-1, dtype=torch.int32).flatten().tolist()
            self.pool.append([x[:, :, :leaving].gather(2, order) for x in (k, v)], kept)
        total = self.places + self._counts(k.device)  # [B, 1]
        slots = torch.arange(self.size, device=k.device)
        newest = total - 1 - (total - 1 - slots) % self.size  # the token that slot s holds now; below 0: none
        index = (newest - total + lengths[:, None]).clamp_(min=0).long()[:, None].expand(B, Hkv, self.size)
        wide = index[..., None].expand(B, Hkv, self.size, D)
        self.keys, self.values = (x.gather(2, wide).flatten(0, 1) for x in (k, v))
        self.alpha = decided.gather(2, index).flatten(0, 1)

    # ---- state ----

    def most_slots(self, counts: tuple[int, ...]) -> list[int]:
        return [count if seen >= self.size else 0 for count, seen in zip(counts, self.next, strict=True)]

    def stored_lengths(self) -> list[list[int]]:
        recent = [min(count, self.size) for count in self.next]
        return [[near + far for far in row] for near, row in zip(recent, super().stored_lengths(), strict=True)]

    def select_state(self, rows: Tensor) -> None:
        assert self.keys is not None and self.values is not None and self.alpha is not None
        self.keys, self.values, self.alpha = self.keys[rows], self.values[rows], self.alpha[rows]

    def state(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.keys, self.values, self.alpha) if x is not None)
