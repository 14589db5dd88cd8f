"""Rows that keep the first tokens and a window of recent ones, or all: one array of a layer, keys or values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import ops
from ..caches.formats import Format
from ..caches.pool import PagePool
from ..caches.rows import BatchState
from ..caches.store import PoolSettings

Result = TypeVar("Result")


class WindowRows(BatchState):
    """R rows of vectors in pages, of which some keep all tokens ("all"), some the first `sinks` and what the next query
    sees of the last `recent` ones ("near"), and some nothing ("none").

    What a "near" row drops it drops in whole pages, behind those of the sinks, so that token t lies in slot t of its
    row before, and in slot t - dropped*P afterwards, where dropped are its pages that are gone. Nothing is copied. An
    "all" row may lose tokens behind the sinks once (keep), dropped*P of them too; those that came later than what was
    chosen among are found as in "near" rows.
    keeps: of each KV head. tokens: of each sequence, seen so far.
    """

    def __init__(
        self, name: str, batch: int, keeps: Sequence[str], sinks: int, recent: int, like: Tensor, settings: PoolSettings
    ) -> None:
        self.name, self.keeps, self.sinks, self.recent = name, list(keeps) * batch, sinks, recent
        self.heads = len(keeps)
        assert not isinstance(settings.dtype, tuple)  # PoDCache refuses those
        form = Format.of(settings.dtype, like.dtype, (name,))
        slots = {name: ((like.shape[-1],), like.dtype)} if form is None else form.slots(like.shape[-1])
        self.pool = PagePool(batch * self.heads, slots, like.device, settings, form=form)
        self.first = settings.blocks(sinks)  # pages of sinks
        self.dropped = [0] * (batch * self.heads)
        self._gone: tuple[list[int], Tensor] | None = None  # dropped, and the same on the device
        self._as: tuple[tuple[list[int], list[int], int, int], Tensor] | None = None  # what table_as used last
        self._moved: tuple[list[int], list[int], Tensor] | None = None  # what moved_as used last
        self.tokens = [0] * batch

    @property
    def pages(self) -> Tensor:
        """[pages, P, D], of a format its codes."""
        return self.pool.store.arrays[self.name]

    @property
    def scales(self) -> dict[str, Any]:
        """key_scales or value_scales of a format, as ops take them."""
        return self.pool.scales

    def table(self, rows: Tensor | None = None) -> Tensor:
        """int32 [rows, blocks], of the slots that are held."""
        return self.pool.block_table if rows is None else self.pool.block_table[rows]

    def gone(self) -> Tensor | None:
        """int64 [R, 1], dropped pages of each row; None where no row has dropped any."""
        if not any(self.dropped):
            return None
        if self._gone is None or self._gone[0] != self.dropped:
            self._gone = (list(self.dropped), torch.tensor(self.dropped, device=self.pages.device)[:, None])
        return self._gone[1]

    def table_as(self, other: WindowRows, rows: Tensor | None = None) -> Tensor:
        """The table of these rows, which hold at least the first and recent tokens that `other` holds, so that slots
        of `other` can be looked up in it."""
        table, theirs = self.pool.block_table, other.pool.block_table
        if any(self.dropped) or any(other.dropped) or theirs.shape[1] > table.shape[1]:
            sizes = self.dropped, other.dropped, table.shape[1], theirs.shape[1]
            if self._as is None or self._as[0] != sizes:
                self._as = (list(self.dropped), list(other.dropped), *sizes[2:]), self._places_as(other)
            table = table.gather(1, self._as[1])
        return table if rows is None else table[rows]

    def _places_as(self, other: WindowRows) -> Tensor:
        """int64 [R, blocks of `other`], for each of its pages the number of ours that holds the same tokens."""
        ours, theirs = (x.pool.block_table.shape[1] for x in (self, other))
        device = self.pages.device
        dropped = [theirs - ours for ours, theirs in zip(self.dropped, other.dropped, strict=True)]
        place = torch.arange(theirs, device=device)
        place = place + torch.where(place < self.first, 0, torch.tensor(dropped, device=device)[:, None])
        return place.clamp_(min=0, max=max(ours - 1, 0))

    # ---- writing ----

    def most_slots(self, counts: Sequence[int]) -> list[int]:
        """Slots that an append of counts[b] <= 1 tokens to each sequence takes, per row."""
        return [0 if keep == "none" else counts[row // self.heads] for row, keep in enumerate(self.keeps)]

    def append(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Takes in the last counts[b] of new tokens [B, H, S, D] of each sequence.

        Where each sequence has one token, it drops what that token's query does not see. Of more tokens a "near" row
        takes what queries to come see, no more: whoever attends to them does so before.
        """
        P, S, rows = self.pool.page_size, tokens.shape[2], range(len(self.keeps))
        one = S == 1 and min(counts) == 1
        starts, stops = [], []  # per row: tokens to be taken are those below `stop` and those from `start` on
        for row in rows:
            total = self.tokens[row // self.heads] + (0 if one else counts[row // self.heads])
            keep = self.keeps[row]
            begin = 0 if keep == "all" else total if keep == "none" else (total - self.recent + 1) // P * P
            stop = 0 if keep == "none" else self.first * P
            starts.append(max(begin, stop))
            stops.append(stop)
        self._drop(starts)
        if one:
            self.pool.append([tokens], self.most_slots(counts) if "none" in self.keeps else None)
            self.tokens = [n + 1 for n in self.tokens]
            return
        chosen = []
        for row in rows:
            seen, count = self.tokens[row // self.heads], counts[row // self.heads]
            columns = range(S - count, S)
            token = seen - (S - count)  # of column 0
            # the slots of what is held and of what is taken must follow each other
            chosen.append([c for c in columns if c + token < stops[row] or c + token >= starts[row]])
        taken = [len(columns) for columns in chosen]
        if min(taken) == S:
            self.pool.append([tokens])
        elif max(taken) > 0:
            most = max(taken)
            index = torch.tensor([[0] * (most - len(columns)) + columns for columns in chosen], device=tokens.device)
            index = index.view(len(self.tokens), self.heads, most, 1).expand(-1, -1, -1, tokens.shape[3])
            self.pool.append([tokens.gather(2, index)], taken)
        behind = [0] * len(rows)  # of the slots that are held there
        for row in rows:
            if self.keeps[row] == "near" and starts[row] > self.first * P:
                self.dropped[row] = starts[row] // P - self.first
                behind[row] = self.dropped[row] * P
        self.pool.origins.pass_over(self.first * P, behind)
        self.tokens = [n + count for n, count in zip(self.tokens, counts, strict=True)]

    def step(self, write: Callable[[ops.PageTable], Result]) -> Result:
        """What write(table) gives, an op that adds one token to every row; no row keeps nothing."""
        P = self.pool.page_size
        if any(
            (n - self.recent + 1) % P == 0 for n in self.tokens
        ):  # a page of a "near" row may have gone out of sight
            least = self.first * P
            self._drop([max((self.tokens[row // self.heads] - self.recent + 1) // P * P, least)
                        for row in range(len(self.keeps))])  # fmt: skip
        found = self.pool.step(write)
        self.tokens = [n + 1 for n in self.tokens]
        return found

    def moved_as(self, other: WindowRows) -> Tensor | None:
        """int32 [R]: how many pages further behind those of the sinks a token lies in these rows than in `other`;
        None = none."""
        if self.dropped == other.dropped:
            return None
        if self._moved is None or self._moved[:2] != (self.dropped, other.dropped):
            moved = [theirs - ours for ours, theirs in zip(self.dropped, other.dropped, strict=True)]
            on_device = torch.tensor(moved, dtype=torch.int32, device=self.pages.device)
            self._moved = (list(self.dropped), list(other.dropped), on_device)
        return self._moved[2]

    def _drop(self, starts: Sequence[int]) -> None:
        """Gives back pages of near rows that hold only tokens before starts[row], those of sinks excepted."""
        blocks, P = self.pool.store.settings.blocks, self.pool.page_size
        pages = [0] * len(self.keeps)
        for row, keep in enumerate(self.keeps):
            if keep == "near":
                held = max(blocks(self.pool.counts[row]) - self.first, 0)
                pages[row] = min(max(starts[row] // P - self.first - self.dropped[row], 0), held)
        if any(pages):
            self.pool.drop_pages(self.first, pages)
            self.dropped = [gone + more for gone, more in zip(self.dropped, pages, strict=True)]

    def keep(self, indices: Tensor, kept: Sequence[int], pages: Sequence[int]) -> None:
        """Leaves the slots indices[r, :kept[r]] of rows that hold all, that many pages fewer; kept -1 = all of them.

        Sinks and recent tokens must be among them.
        """
        self.pool.keep(indices, kept)
        self.dropped = [gone + more for gone, more in zip(self.dropped, pages, strict=True)]

    # ---- reading ----

    def kept_positions(self) -> list[list[Tensor]]:
        """Which tokens are held, by sequence and KV head: int64, on the CPU."""
        return self.pool.origins.rows(self.pool.counts, len(self.tokens))

    def first_slots(self, rows: Sequence[int], count: int) -> Tensor:
        """[rows, count, D], the first slots of some rows."""
        P, t = self.pool.page_size, torch.arange(count, device=self.pages.device)
        pages = self.table(torch.tensor(rows, device=self.pages.device))[:, t // P].long()
        return self._read(pages * P + t % P)

    def _read(self, slots: Tensor) -> Tensor:
        """[..., D], what slots int64 [...] of all pages hold; anything where there are no pages."""
        arrays = [
            x.flatten(0, 1)[slots] if x.shape[0] else x.new_zeros(*slots.shape, *x.shape[2:])
            for x in self.pool.store.arrays.values()
        ]
        form = self.pool.store.form
        return arrays[0] if form is None else form.decode(self.name, *arrays)

    def gather(self, tokens: Tensor) -> Tensor:
        """[B, H, N, D], what is held of the tokens int64 [B, N] of each sequence; anything where a row dropped one."""
        P, table = self.pool.page_size, self.table()
        B, N = tokens.shape
        slots = tokens[:, None].expand(B, self.heads, N).reshape(B * self.heads, N)
        gone = self.gone()
        if gone is not None:
            slots = torch.where(slots < self.first * P, slots, slots - gone * P)
        blocks = (slots // P).clamp_(min=0, max=max(table.shape[1] - 1, 0))
        found = table.gather(1, blocks) if table.shape[1] else blocks
        pages = found.long().clamp_(min=0, max=max(self.pages.shape[0] - 1, 0))
        return self._read(pages * P + slots % P).unflatten(0, (B, self.heads))

    # ---- state ----

    def removable(self) -> int:
        """Tokens that can be taken back from the end of every sequence."""
        P, most = self.pool.page_size, []
        for row, keep in enumerate(self.keeps):
            seen, gone = self.tokens[row // self.heads], self.dropped[row]
            # the query at n - tokens sees the keys from n - tokens - recent + 1 on, all of which must be here
            most.append(seen if not gone or keep != "near" else seen - self.recent + 1 - (self.first + gone) * P)
        return max(min(most, default=0), 0)

    def drop_last(self, tokens: int) -> None:
        self.pool.drop_last([0 if keep == "none" else tokens for keep in self.keeps])
        self.tokens = [n - tokens for n in self.tokens]


@dataclass
class Chunk:
    """Some tokens of each sequence with the near ones before them: sinks, then those that the first of them sees.

    held: int64 [B, N], the near tokens that are held. index: int64 [B, T] into N held and S new ones, None = as they
    are. lengths: int32 [B], how many there are, the new ones last; None = T. before: int32 [B], tokens seen before.
    """

    held: Tensor
    index: Tensor | None
    lengths: Tensor | None
    before: Tensor
    far: bool  # whether a token before the chunk is distant to all of it

    @classmethod
    def of(
        cls, seen: list[int], counts: tuple[int, ...], columns: int, sinks: int, recent: int, device: torch.device
    ) -> Chunk:
        """Of counts[b] new tokens of each sequence in so many columns, after seen[b] others."""
        at_start = [min(n, sinks) for n in seen]
        firsts = [max(s, n - recent + 1) for n, s in zip(seen, at_start, strict=True)]
        helds = [s + n - first for n, s, first in zip(seen, at_start, firsts, strict=True)]
        N, totals = max(helds), [held + count for held, count in zip(helds, counts, strict=True)]

        def column(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device=device)[:, None]

        t = torch.arange(N, device=device)
        held = torch.where(t < column(at_start), t, column(firsts) - column(at_start) + t).clamp(min=0)
        before = column(seen)[:, 0].int()
        far = any(first > sinks for first in firsts)
        if min(helds) == N and min(counts) == columns:
            return cls(held, None, None, before, far)
        t = torch.arange(max(*totals, columns), device=device)
        moved = N + columns - column(list(counts)) + t - column(helds)
        index = torch.where(t < column(helds), t, moved).clamp(min=0, max=N + columns - 1)
        return cls(held, index, torch.tensor(totals, dtype=torch.int32, device=device), before, far)

    def sequence(self, rows: WindowRows, new: Tensor) -> Tensor:
        """[B, Hkv, T, D] of what rows hold and new ones [B, Hkv, S, D]."""
        both = torch.cat([rows.gather(self.held), new], 2) if self.held.shape[1] else new
        if self.index is None:
            return both
        return both.gather(2, self.index[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3]))
