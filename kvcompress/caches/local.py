"""A layer whose queries see a window or a chunk: all of that is kept, in a ring, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..hf.facts import LayerFacts
from ..ops.softmax import Softmax
from .formats import Format, coded, decoded, keys_and_values, named_scales
from .paged import StepTables, step_positions
from .passes import CachePass
from .repeating import RepeatingLayer
from .ring import Ring


class LocalLayer(RepeatingLayer):
    """Keys stand at the tokens' own places. window: keys that a query sees, itself included; or chunk: it sees those of
    its own chunk of so many positions. The guide of a prompt attends and is not kept. dtype: of FORMATS: what is held,
    and attended to, are codes.

    places: int32 [B, 1], tokens of each sequence so far; next: the same on the host.
    """

    is_sliding = True
    joins = True
    places: Tensor  # once there is a ring
    dtype: str | None = None  # here for files from before there were codes
    form: Format | None = None

    def __init__(self, index: int, window: int | None, chunk: int | None, dtype: str | None = None) -> None:
        super().__init__(index, -1)
        self.window, self.chunk, self.dtype = window, chunk, dtype
        self.ring: Ring | None = None
        self.next: list[int] = []
        self.rope_lengths: list[int] = []

    @property
    def size(self) -> int:
        size = self.chunk if self.window is None else self.window
        assert size is not None
        return size

    def attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        facts, S = step.facts[self.index], keys.shape[2]
        if self.ring is None:
            B, Hkv, _, D = keys.shape
            self.form = Format.of(self.dtype, keys.dtype)
            slots = keys_and_values(D, keys.dtype, self.form).values()
            self.ring = Ring(self.size, [keys.new_empty(B, Hkv, 0, *shape, dtype=kind) for shape, kind in slots])
            self.places = torch.zeros(B, 1, dtype=torch.int32, device=keys.device)
            self.next, self.rope_lengths = [0] * B, step.whole
        if (out := self._step(step, queries, keys, values, softmax)) is not None:
            return out
        ring, places = self.ring, self.places
        positions, bound = step_positions(places, step.counts, S), max(self.next) + S
        new = coded(self.form, (facts.key_rotary.rotate(keys, positions, bound, self.rope_lengths), values))
        lengths = self.rope_lengths

        def rotated(x: Tensor) -> Tensor:
            return facts.query_rotary.rotate(x, positions, bound, lengths)

        after = [n + count for n, count in zip(self.next, step.kept, strict=True)]
        if step.one:
            ring.make_room(max(after))
            ring.put(new, *ring.slots(places))
            # a chunk begins in slot 0
            end = (places + 1).clamp(max=self.size) if self.chunk is None else places % self.size + 1
            end = end.expand(-1, ring.heads).reshape(-1).contiguous()
            (held_k, held_v), scales = ring.arrays[:2], named_scales(ring.arrays)

            def view(x: Tensor, softmax: Softmax) -> Tensor:
                return ops.decode(rotated(x), held_k, held_v, end, **scales, **softmax.options)[0]

        else:
            # of a chunk those that are in the next token's
            held = places.clamp(max=self.size) if self.chunk is None else places % self.size
            befores = [min(n, self.size) if self.chunk is None else n % self.size for n in self.next]
            most, counts = max(befores), step.on(keys.device)
            stored, totals = ring.joined(new, places, counts, most, held)
            all_k, all_v = decoded(self.form, stored)  # as later tokens find them, so that parts change nothing

            def view(x: Tensor, softmax: Softmax) -> Tensor:
                q = rotated(x)
                if self.chunk is None:
                    whole = not step.padded and min(befores) == most
                    ends = None if whole else totals.flatten()
                    return ops.attention(q, all_k, all_v, window=self.window, lengths=ends, **softmax.options)[0]
                return self._in_chunks(q, all_k, all_v, befores, step.counts, softmax)

            kept = torch.tensor(step.kept, dtype=torch.int32, device=keys.device)[:, None]
            ring.keep(stored, held + kept, places + kept, max(after))
        self.next, self.places = after, places + (1 if step.one else kept)
        return step.answer(self.index, view, queries, softmax)

    def _step(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor | None:
        """One token of every sequence in a single op; None, and nothing is stored, where that cannot be."""
        ring, places, most = self.ring, self.places, max(self.next) + 1
        if not step.one or (tables := self._tables(step.facts[self.index], most)) is None:
            return None
        assert ring is not None
        ring.make_room(most)
        k_ring, v_ring, *scales = ring.arrays
        named: dict[str, Any] = dict(zip(("k_ring_scales", "v_ring_scales"), scales, strict=False))
        out = ops.ring_step_(
            queries, keys, values, k_ring, v_ring, places, window=self.size, chunked=self.chunk is not None,
            cos=tables[0], sin=tables[1], **named, **softmax.options,
        )[0]  # fmt: skip
        self.next = [n + 1 for n in self.next]
        return out

    def _tables(self, facts: LayerFacts, rows: int) -> StepTables | None:
        """By which an op rotates tokens at positions below rows; None where it cannot do all of a step."""
        if facts.readers or facts.query_rotary is not facts.key_rotary:
            return None
        return facts.query_rotary.step_tables(rows, self.rope_lengths, self.places.device)

    # ---- steps that repeat ----

    @property
    def repeats(self) -> bool:
        return True

    def prepare_steps(self) -> None:
        if self.ring is not None:
            self.ring.make_room(max(self.next) + 1)

    def steps_ahead(self, facts: LayerFacts) -> int:
        if self.ring is None:
            return 0
        place = max(self.next)
        if (tables := self._tables(facts, place + 1)) is None:
            return 0
        room = self.ring.steps_ahead(place)
        return room if tables[0] is None else min(room, tables[0].shape[0] - place)

    def count_step(self) -> None:
        self.next = [place + 1 for place in self.next]

    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        assert self.ring is not None
        tables = self._tables(facts, max(self.next)) or ()
        return tuple(x for x in (*self.ring.arrays, self.places, *tables) if x is not None)

    @property
    def placeable(self) -> bool:
        return True

    def step_rows(self) -> dict[str, Tensor]:
        assert self.ring is not None
        self.ring.make_room(self.size)
        return {f"ring {i}": x for i, x in enumerate(self.ring.arrays)} | {"places": self.places}

    def place_rows(self, rows: dict[str, Tensor], *, borrowed: int | None = None) -> None:
        assert self.ring is not None
        self.ring.arrays = tuple(rows[f"ring {i}"] for i in range(len(self.ring.arrays)))
        self.places = rows["places"]
        if borrowed is not None:
            self.next = [borrowed] * len(self.next)

    def _in_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, befores: list[int], counts: tuple[int, ...], softmax: Softmax
    ) -> Tensor:
        """Queries [B, Hq, S, D] over keys [B, Hkv, T, D], left-aligned; befores[b] of them come before those of the
        queries, all in one chunk."""
        out, S, size = torch.zeros_like(q), q.shape[2], self.size
        for b, (before, count) in enumerate(zip(befores, counts, strict=True)):
            start = 0  # of the chunk, among the keys
            while start < before + count:
                stop = min(start + size, before + count)
                first = max(start, before)  # query of the chunk
                if stop > first:
                    columns = slice(S - count + first - before, S - count + stop - before)
                    part = slice(b, b + 1)
                    out[part, :, columns] = ops.attention(
                        q[part, :, columns], k[part, :, start:stop], v[part, :, start:stop], **softmax.options
                    )[0]
                start = stop
        return out

    # ---- state ----

    def nbytes(self) -> int:
        return 0 if self.ring is None else self.ring.nbytes()

    def stored_lengths(self) -> list[list[int]]:
        if self.ring is None:
            return []
        return [[n] * self.ring.heads for n in self._held()]

    def _held(self) -> list[int]:
        """Tokens of each sequence that the next one may see; of a chunk that has just ended all."""
        return [min(n, self.size) if self.chunk is None else n % self.size or min(n, self.size) for n in self.next]

    def kept_positions(self) -> list[list[Tensor]]:
        if self.ring is None:
            return []
        last = zip(self.next, self._held(), strict=True)
        return [[torch.arange(n - held, n, device="cpu")] * self.ring.heads for n, held in last]
