"""A layer that keeps what it is given in pages, rotated where it was written, and attends to all that is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..hf.facts import LayerFacts
from ..ops.softmax import Softmax
from .choose import Choice
from .formats import Format, keys_and_values
from .indexed import IndexKeys
from .passes import CachePass
from .pool import PagePool
from .repeating import RepeatingLayer
from .rows import by_sequence, spread
from .store import PageStore, PoolSettings

StepTables = tuple[Tensor, Tensor] | tuple[None, None]  # cos and sin of a step; None where nothing turns
Alone = tuple[Tensor, Tensor] | None  # keys and values [B, Hkv, S, D] of a pass, where these are all that is held


class StepTurn(NamedTuple):
    """How an op turns the token of a step: it stands at its slot + shift (int32 [R], None = 0) of tables with so many
    rows for a sequence, None = without end."""

    tables: StepTables
    shift: Tensor | None
    rows: int | None


def step_positions(first: Tensor, counts: Sequence[int], tokens: int) -> Tensor:
    """int32 [B, tokens]: first[b] is the place of sequence b's first real token, of which there are counts[b],
    right-aligned; padding before it gets any."""
    if min(counts) < tokens:
        first = first - (tokens - torch.tensor(counts, dtype=torch.int32, device=first.device)[:, None])
    return (first + torch.arange(tokens, dtype=torch.int32, device=first.device)).clamp_(min=0)


class PagedLayer(RepeatingLayer):
    """Appends tokens and attends to all that is held.

    Which slots stay is chosen by keep() alone. store: where its pages come from, None = a store of its own.
    steps_known: whether a decoded token surely adds a slot to every row.
    """

    is_croppable = True
    joins = True
    store: PageStore | None = None
    index_keys: IndexKeys | None = None  # where an indexer chooses what a query sees
    steps_known = True
    shifts = True  # whether its op of a step takes a shift

    def __init__(self, index: int, number: int, pool_settings: PoolSettings) -> None:
        super().__init__(index, number)
        self.pool_settings = pool_settings
        self.pool: PagePool | None = None
        self.rope_lengths: list[int] = []  # keys in sight when a sequence's frequencies were settled
        self.offsets: list[int] = []  # of each sequence: from a token's number to the position where it stands
        self.next: list[int] = []  # position of each sequence's next token
        self._shifted: tuple[list[int], Tensor | None] | None = None
        self._joined: tuple[tuple[Tensor | None, Tensor], Tensor] | None = None  # a shift and offsets, both together

    @property
    def opened(self) -> PagePool:
        """The pool, once there is one."""
        assert self.pool is not None
        return self.pool

    @property
    def heads(self) -> int:
        return len(self.opened.bounds) // len(self.rope_lengths)

    @property
    def shift(self) -> Tensor | None:
        """int32 [R]: a coming token of slot s stands at position s + shift; None = 0. shift + length is the same for
        all heads of a sequence. It follows from what has gone (origins), whoever let it go."""
        pool = self.pool
        if pool is None:
            return None
        later = pool.origins.later
        if self._shifted is None or self._shifted[0] is not later:
            numbers = [late + offset for late, offset in zip(later, spread(self.offsets, self.heads), strict=True)]
            shift = torch.tensor(numbers, dtype=torch.int32, device=pool.lengths.device) if any(numbers) else None
            self._shifted = later, shift
        return self._shifted[1]

    def attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        self.note_index(step)
        if (out := self.attend_one(step, queries, keys, values, softmax)) is not None:
            return out
        view = self.append(step, keys, values)
        return step.answer(self.index, view, queries, softmax)

    def note_index(self, step: CachePass) -> None:
        """Stores the index keys of the pass's tokens, and rotates those and its index queries."""
        if step.index is None:
            return
        batch, S, lengths = len(step.counts), step.columns, self.rope_lengths or step.whole
        places, offsets = self.next or [0] * batch, self.offsets or [0] * batch
        first = torch.tensor(places, dtype=torch.int32, device=step.index.keys.device)[:, None]
        positions = step_positions(first, step.counts, S)
        step.index = index = step.index.rotated(step.facts[self.index], positions, max(places) + S, lengths)
        if self.index_keys is None:
            self.index_keys = IndexKeys(batch)
        numbers = [place - offset for place, offset in zip(places, offsets, strict=True)]
        self.index_keys.append(index.keys[:, 0], numbers, step.counts)

    def choosing(self, step: CachePass, most: int) -> IndexKeys | None:
        """By which an indexer leaves out some of so many tokens of the longest row; None where it leaves out none."""
        return self.index_keys if step.index is not None and most > step.index.indexer.top else None

    def attend_one(
        self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor | None:
        """One token of every sequence in a single op; None where that cannot be."""
        state = self._step(step, queries, keys, values, softmax, None)
        return None if state is None else state[0]

    def _step(
        self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax, begin: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """(out, lse) over the slots from begin on, the new one included, once that is stored; None, and nothing is
        stored, where an op cannot do all of it."""
        pool, facts = self.pool, step.facts[self.index]
        if pool is None or not step.one or facts.readers or facts.query_rotary is not facts.key_rotary:
            return None
        turn = self._turn(facts, max(self.next) + 1)
        if turn is None or self.choosing(step, max(pool.bounds) + 1):
            return None
        state = pool.step(lambda table: self.write_step(table, queries, keys, values, softmax, turn, begin))
        self.next = [place + 1 for place in self.next]
        return state

    def _turn(self, facts: LayerFacts, rows: int) -> StepTurn | None:
        """For tokens at positions below rows; None where an op cannot turn all sequences."""
        rotary, device = facts.query_rotary, self.opened.lengths.device
        if (tables := rotary.step_tables(rows, self.rope_lengths, device)) is not None:
            return StepTurn(tables, self.shift, None if tables[0] is None else tables[0].shape[0])
        if not self.shifts or (joint := rotary.batch_tables(rows, self.rope_lengths, device)) is None:
            return None
        cos, sin, offsets = joint  # of each sequence its own rows of them
        joined, shift = self._joined, self.shift
        if joined is None or joined[0][0] is not shift or joined[0][1] is not offsets:
            with torch.inference_mode(False):
                each = offsets.expand(-1, self.heads).flatten()
                self._joined = joined = (shift, offsets), each if shift is None else each + shift
        return StepTurn((cos, sin), joined[1], cos.shape[0] // len(self.next))

    def write_step(
        self, table: ops.PageTable, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax,
        turn: StepTurn, begin: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The op of a step: adds the token to every row; (out, lse) from begin on."""
        pool = self.opened
        return ops.paged_step_(
            queries, keys, values, pool.k_pages, pool.v_pages, table, shift=turn.shift, begin=begin,
            cos=turn.tables[0], sin=turn.tables[1], scale=softmax.scale, softcap=softmax.softcap,
            sink_logits=softmax.sink_logits, **pool.scales,
        )  # fmt: skip

    def append(self, step: CachePass, keys: Tensor, values: Tensor) -> Callable[[Tensor, Softmax], Tensor]:
        """Stores new tokens; returns the attention of queries [B, Hq, S, D] at their places."""
        facts, counts = step.facts[self.index], step.counts
        B, Hkv, S, D = keys.shape
        if self.pool is None:
            self.open_pool(B * Hkv, D, keys, step.whole)
        pool = self.opened
        bound = max(max(place + count for place, count in zip(self.next, counts, strict=True)), S)
        place = pool.lengths if self.shift is None else pool.lengths + self.shift
        positions = step_positions(place.view(B, Hkv)[:, :1], counts, S)
        new = facts.key_rotary.rotate(keys, positions, bound, self.rope_lengths), values
        alone = new if not (max(pool.bounds) or step.padded or pool.store.form) else None
        pool.append(new, self._per_row(counts))
        self.next = [place + count for place, count in zip(self.next, counts, strict=True)]

        def view(queries: Tensor, softmax: Softmax) -> Tensor:
            rotated = facts.query_rotary.rotate(queries, positions, bound, self.rope_lengths)
            if (index := self.choosing(step, max(pool.bounds))) is not None:
                k, v = (x.unflatten(0, (B, Hkv)) for x in pool.gather(max(pool.counts)))
                return index.attend(step, rotated, k, v, pool.counts, softmax)
            return self.attend_held(step, queries, rotated, softmax, alone)

        return view

    def attend_held(self, step: CachePass, queries: Tensor, rotated: Tensor, softmax: Softmax, alone: Alone) -> Tensor:
        """Attention of the last S tokens, which are held already. queries: the same before rotation."""
        return self._decode(rotated, self.opened.lengths, None, softmax, causal=True)[0]

    def _decode(
        self, rotated: Tensor, end: Tensor, begin: Tensor | None, softmax: Softmax, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of queries over the slots begin..end-1 of every row."""
        held = self.opened.snapshot()
        return ops.decode(
            rotated, held.k_pages, held.v_pages, end, block_table=held.block_table, begin=begin, causal=causal,
            **held.scales, **softmax.options,
        )  # fmt: skip

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        form = Format.of(self.pool_settings.dtype_of(self.index), like.dtype)
        slots = keys_and_values(head_dim, like.dtype, form)
        self.pool = PagePool(rows, slots, like.device, self.pool_settings, store=self.store, form=form)
        self.rope_lengths, batch = rope_lengths, len(rope_lengths)
        self.offsets, self.next, self._shifted, self._joined = [0] * batch, [0] * batch, None, None

    def most_slots(self, counts: tuple[int, ...]) -> list[int]:
        """Slots of pages that a step of counts[b] tokens of each sequence fills at most, per sequence."""
        return list(counts)

    def _per_row(self, counts: Sequence[int]) -> list[int]:
        return spread(counts, self.heads)

    def check_step(self, step: CachePass, facts: LayerFacts) -> None:
        """Takes the pages that the step needs before any layer has changed, so that a full pool loses nothing."""
        pool = self.pool
        if pool is None or step.iteration is not None or self.pool_settings.max_pages is None:
            return
        step.claim(pool, self._per_row(step.counts))

    @property
    def repeats(self) -> bool:
        return self.index_keys is None  # they are appended, and chosen from, by the host

    def prepare_steps(self) -> None:
        if self.pool is not None:
            self.pool.prepare(self.steps_known)

    def steps_ahead(self, facts: LayerFacts) -> int:
        pool = self.pool
        if pool is None or not pool.has_room or facts.readers or facts.query_rotary is not facts.key_rotary:
            return 0
        place = max(self.next)
        turn = self._turn(facts, place + 1)
        if turn is None:
            return 0
        return pool.room if turn.rows is None else min(pool.room, turn.rows - place)

    def count_step(self) -> None:
        self.opened.count_step()
        self.next = [place + 1 for place in self.next]

    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        turn = self._turn(facts, max(self.next))
        held = (*self.opened.held_tensors(), *((self.shift,) if turn is None else (turn.shift, *turn.tables)))
        return tuple(x for x in held if x is not None)

    @property
    def placeable(self) -> bool:
        return self.repeats

    def step_rows(self) -> dict[str, Tensor]:
        pool, shift = self.opened, self.shift
        shift = torch.zeros_like(pool.lengths) if shift is None else shift
        return {"block_table": pool.block_table, "lengths": pool.lengths, "shift": shift}

    def place_rows(self, rows: dict[str, Tensor], *, borrowed: int | None = None) -> None:
        pool = self.opened
        if borrowed is None:
            pool.place(rows["block_table"], rows["lengths"])
        else:
            pool.borrow(rows["block_table"], rows["lengths"], borrowed, self.steps_known)
            self.next = [borrowed] * len(self.next)
        self._shifted, self._joined = (pool.origins.later, rows["shift"]), None

    # ---- what stays ----

    def keep(self, choice: Choice, anew: Sequence[Tensor] | None = None) -> None:
        """Keeps the chosen slots of every row, and with them all that belongs to a slot; tokens to come stand where
        they would have stood. anew: other keys and values for what stays. Raises as PagePool.keep does."""
        pool = self.opened
        pool.keep(choice.slots, choice.kept, anew)
        self.follow(choice)

    def follow(self, choice: Choice) -> None:
        """The chosen slots have moved to the front of their rows: what a layer notes of slots follows."""
        if self.index_keys is not None:
            self.index_keys.keep(self.kept_positions())

    # ---- state ----

    def drop_last(self, tokens: int) -> None:
        if self.pool is not None:
            self.pool.drop_last(tokens)
            self.next = [place - tokens for place in self.next]

    def nbytes(self) -> int:
        return self.beside_nbytes() + (0 if self.pool is None else self.pool.nbytes())

    def beside_nbytes(self) -> int:
        """Bytes of what is held beside pages."""
        joined = 0 if self._joined is None else self._joined[1].nbytes
        joined += 0 if self.index_keys is None else self.index_keys.nbytes()
        return joined + (0 if self.shift is None else self.shift.nbytes)

    def reserved_nbytes(self) -> int:
        return self.beside_nbytes() + (0 if self.pool is None else self.pool.reserved_nbytes())

    def trim(self) -> None:
        if self.pool is not None:
            self.pool.trim()

    def stored_lengths(self) -> list[list[int]]:
        return [] if self.pool is None else by_sequence(self.pool.counts, len(self.next))

    def kept_positions(self) -> list[list[Tensor]]:
        return [] if self.pool is None else self.pool.origins.rows(self.pool.counts, len(self.rope_lengths))
