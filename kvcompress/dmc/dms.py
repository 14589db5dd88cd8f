"""The layer of DMS: recent tokens in a ring, and of older ones those that were not marked for dropping."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .. import ops
from ..caches.formats import keys_and_values, slot_nbytes
from ..caches.passes import CachePass
from ..caches.ring import EVER, Ring
from ..caches.store import PoolSettings
from ..hf.facts import LayerFacts
from ..ops.softmax import Softmax
from .config import DMCConfig
from .layer import DecidingLayer


class DMSLayer(DecidingLayer):
    """The newest W + 1 tokens, W = dms_window, lie in a ring: keys, values, and each token's own decision, bool.

    A token that leaves the ring goes into pages, unless the decision of its successor (dms_decides="own": its own) is
    1. Keys are rotated once.
    """

    def __init__(self, index: int, number: int, pool_settings: PoolSettings, config: DMCConfig, track: bool) -> None:
        super().__init__(index, number, pool_settings, config, track)
        self.size, self.own = config.dms_window + 1, config.dms_decides == "own"
        self.ring: Ring | None = None

    # ---- attention ----

    def attend_token(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        pool, places, config, most = self.opened, self.places, self.config, max(self.next)
        cos, sin, offsets = step.facts[self.index].key_rotary.joint_tables(most + 1, self.rope_lengths, keys.device)
        alpha = self._decide(step, queries, keys) if self.decides_apart else None
        ring = self._ring(keys, values)
        ring.make_room(most + 1)
        k_ring, v_ring, marks = ring.arrays

        def write(table: ops.PageTable | None) -> Tensor:
            k_pages, v_pages = (None, None) if table is None else (pool.k_pages, pool.v_pages)
            return ops.ring_step_(
                queries, keys, values, k_ring, v_ring, places, window=self.size, own=self.own, marks=marks, alpha=alpha,
                k_pages=k_pages, v_pages=v_pages, table=table, **({} if table is None else pool.scales),
                base=None if offsets is None else -offsets, neuron=self.neuron, factor=config.dms_scale,
                shift=config.shift, margin=config.decision_margin, cos=cos, sin=sin, **softmax.options,
            )[0]  # fmt: skip

        # until a sequence's ring is full nothing leaves, and there are no pages
        out = write(None) if most < self.size else pool.step(write, known=False)
        if alpha is not None:
            self.note(alpha, step)
        return out

    def _ring(self, keys: Tensor, values: Tensor) -> Ring:
        if self.ring is None:
            self.ring = Ring(self.size, (keys, values, keys.new_zeros(keys.shape[:3], dtype=torch.bool)))
        return self.ring

    def _with_pages(self, q: Tensor, near: tuple[Tensor, Tensor], softmax: Softmax) -> Tensor:
        """Joins attention over the tokens in pages to that over others."""
        if max(self.opened.bounds) == 0:
            return near[0]
        return ops.merge_states(near, self._decode(q, self.opened.lengths, None, softmax.rest, causal=False))[0]

    def attend_many(
        self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attention over the ring and the chunk, near and far tokens apart, and over what was in pages before."""
        places = self.places
        positions, counts = self.positions(step), step.on(keys.device)
        q = self.queries_at(step, queries, positions)
        tokens = self.keys_at(step, keys, positions), values, alpha > 0.5
        ring, most = self._ring(*tokens[:2]), min(max(self.next), self.size)
        (k, v, decided), totals = tokens, counts
        if most or step.padded:
            (k, v, decided), totals = ring.joined(tokens, places, counts, most)
        lengths = totals.flatten()
        near = ops.attention(q, k, v, window=self.size, lengths=lengths, **softmax.options)
        if k.shape[2] > self.size:
            far = ops.attention(
                q, k, v, window=self.size, complement=True, key_bias=self._hiding(decided), lengths=lengths,
                **softmax.rest.options,
            )  # fmt: skip
            near = ops.merge_states(near, far)
        out = self._with_pages(q, near, softmax)
        self._page(k, v, decided, lengths)
        most = max(n + count for n, count in zip(self.next, step.counts, strict=True))
        ring.keep((k, v, decided), totals, places + counts, most)
        return out

    def _page(self, k: Tensor, v: Tensor, decided: Tensor, lengths: Tensor) -> None:
        """Puts into pages what leaves the ring unmarked, of tokens of which the newest stay there."""
        leaving = k.shape[2] - self.size
        if leaving > 0:
            t = torch.arange(leaving, device=k.device)
            stays = (t < lengths[:, None, None] - self.size) & ~self._dropped(decided)[..., :leaving]
            kept = stays.sum(-1, dtype=torch.int32).flatten().tolist()
            # those that stay last, in their order, and no more than the row with most of them has
            last = stays.to(torch.int8).argsort(stable=True, dim=-1)[..., leaving - max(kept) :]
            batch, heads = (torch.arange(n, device=k.device) for n in last.shape[:2])
            rows = batch[:, None, None], heads[:, None], last
            self.opened.append([x[rows] for x in (k, v)], kept)

    def _dropped(self, decided: Tensor) -> Tensor:
        """bool [..., T]: the tokens that decisions drop once they leave the ring."""
        return decided if self.own else functional.pad(decided, (0, 1))[..., 1:]

    def _hiding(self, decided: Tensor) -> Tensor:
        """The key_bias float32 [B, Hkv, T] of decisions bool [B, Hkv, T]: -inf where a token is dropped."""
        return torch.zeros(decided.shape, device=decided.device).masked_fill(self._dropped(decided), -torch.inf)

    # ---- steps that repeat ----

    @property
    def repeats(self) -> bool:
        return not self.track

    @property
    def _pages_follow(self) -> bool:
        """Whether a step's token pushes another out of some sequence's ring."""
        return max(self.next) >= self.size

    def prepare_steps(self) -> None:
        if self.ring is not None:
            self.ring.make_room(max(self.next) + 1)
            if self._pages_follow:
                super().prepare_steps()

    def steps_ahead(self, facts: LayerFacts) -> int:
        if self.ring is None or min(self.next) < self.sinks:  # the host spares first tokens
            return 0
        place = max(self.next)
        tables = facts.key_rotary.step_tables(place + 1, self.rope_lengths, self.places.device)
        if tables is None:
            return 0
        rows = EVER if tables[0] is None else tables[0].shape[0] - place
        room = self.opened.room if self._pages_follow else self.size - place  # then the step is another one
        return min(self.ring.steps_ahead(place), rows, room)

    def count_step(self) -> None:
        if self._pages_follow:
            self.opened.count_step()
        self.next = [place + 1 for place in self.next]

    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        assert self.ring is not None
        tables = facts.key_rotary.step_tables(max(self.next), self.rope_lengths, self.places.device) or ()
        pages = self.opened.held_tensors() if self._pages_follow else ()
        return tuple(x for x in (*pages, *self.ring.arrays, self.places, *tables) if x is not None)

    @property
    def placeable(self) -> bool:
        return False  # rings of all that may come would be there all the time

    # ---- state ----

    def most_slots(self, counts: tuple[int, ...]) -> list[int]:
        every = zip(counts, self.next or [0] * len(counts), strict=True)
        return [min(count, max(seen + count - self.size, 0)) for count, seen in every]

    def stored_lengths(self) -> list[list[int]]:
        recent = [min(count, self.size) for count in self.next]
        return [[near + far for far in row] for near, row in zip(recent, super().stored_lengths(), strict=True)]

    def kept_of(self, alpha: Tensor) -> Tensor:
        stays = ~self._dropped(alpha)
        stays[max(len(stays) - self.size, 0) :] = True
        return stays

    def most_beside(self, facts: LayerFacts, dtype: torch.dtype) -> int:
        return facts.kv_heads * self.size * (slot_nbytes(keys_and_values(facts.size, dtype)) + 1)

    def state(self) -> tuple[Tensor, ...]:
        return () if self.ring is None else self.ring.arrays
