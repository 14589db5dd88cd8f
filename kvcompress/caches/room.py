"""Steps that a pool takes with nothing done on the host: pages are set aside for several of them at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import ops
from .store import PageStore, Rows, locked

Result = TypeVar("Result")


class Room:
    """Of a pool. bounds: most slots that each row has."""

    store: PageStore
    exact: bool  # whether the host knows as much as the device
    _rows: Rows
    _stock: int
    _bounds: list[int]
    _taken: int  # steps since bounds were as they are written down
    _room: int  # further steps whose pages are set aside, as long as nobody counts the free ones anew
    _room_stock: int
    _room_known: bool
    _shares: bool
    _last_shared: list[bool]
    _claim: int  # pages that no other pool may take before this one has
    _claim_beside: int  # those of them that are not for tokens
    _claims_room: bool  # whether a step's pages are claimed of those set aside: as soon as the free ones are counted

    @abstractmethod
    def reserve(self, counts: Sequence[int], rewrites: Sequence[bool] | None = None, beside: int = 0) -> int: ...

    @abstractmethod
    def _most_pages(self, counts: Sequence[int], rewrites: Sequence[bool] | None = None) -> int: ...

    @abstractmethod
    def _widen(self, slots: int) -> None: ...

    @abstractmethod
    def _lose_sight(self) -> None: ...

    @abstractmethod
    def _shares_last(self) -> Tensor: ...

    def copies(self, known: bool) -> np.ndarray:
        """bool [R]: rows whose next slot copies their last page, which another row has too. known: whether it surely is
        a new slot, and not the newest one written anew."""
        full = np.array(self.bounds, dtype=np.int64) % self.page_size == 0
        return np.array(self._last_shared, dtype=bool) & ~(full & known)

    @property
    def lock(self) -> Any:
        return self.store.lock

    @property
    def page_size(self) -> int:
        return self.store.settings.page_size

    @property
    def block_table(self) -> Tensor:
        return self._rows.block_table

    @property
    def lengths(self) -> Tensor:
        return self._rows.lengths

    def _table(self) -> ops.PageTable:
        return self.store.table(self._rows)

    @property
    def bounds(self) -> list[int]:
        """Most slots that each row has."""
        if self._taken:
            self._bounds, self._taken = [bound + self._taken for bound in self._bounds], 0
        return self._bounds

    @bounds.setter
    def bounds(self, bounds: list[int]) -> None:
        self._bounds, self._taken, self._room = bounds, 0, 0

    @locked
    def step(self, write: Callable[[ops.PageTable], Result], *, known: bool = True) -> Result:
        """What write(table) gives, an op that adds a slot to every row.

        Pages are set aside for as many steps as a page has slots, where there are as many: the steps between do nothing
        on the host. known: False = the op adds a slot or writes the newest one anew, and the device alone knows.
        Raises RuntimeError as reserve does; write is not called then.
        """
        first = not self.has_room or known != self._room_known
        if first:
            self._make_room(known)
        elif self._claim or self._claims_room:
            _, beside = self.unclaim()
            self._hold(beside, beside)
        out = write(self._table())
        self._room -= 1
        self._taken += 1
        if first and known and self._shares:
            self._last_shared = [False] * len(self._bounds)
        return out

    @locked
    def prepare(self, known: bool) -> None:
        """Sets pages aside for steps to come, as the first of them would, where none are. Not where rows that surely
        grow share pages: there the first step leaves a note on the host. known: as step takes it. Raises RuntimeError
        as reserve does."""
        if not (self.has_room or (known and self._shares)):
            self._make_room(known)

    @property
    def has_room(self) -> bool:
        """Whether pages are set aside for another step."""
        return self._room > 0 and self._room_stock == self.store.stock

    @property
    def room(self) -> int:
        """Steps that find their pages with nothing done on the host."""
        return self._room if self.has_room else 0

    @locked
    def count_step(self) -> None:
        """Counts one of them, which the device has done alone."""
        self._room -= 1
        self._taken += 1

    @locked
    def held_tensors(self) -> tuple[Tensor, ...]:
        """What a step reads and writes."""
        return *self.store.arrays.values(), *self._table()

    @locked
    def place(self, block_table: Tensor, lengths: Tensor) -> None:
        """The rows' lines lie in these tensors from now on, which hold what they held."""
        self._rows.block_table, self._rows.lengths = block_table, lengths

    @locked
    def borrow(self, block_table: Tensor, lengths: Tensor, bound: int, known: bool) -> None:
        """The rows are lines of another pool over the same store, which counts their pages: this one, whose own are
        empty, takes steps in its place. bound: most slots of one. known: as step takes it."""
        self._rows = Rows(block_table, lengths)  # of which the store knows nothing
        self.bounds, self._shares, self.exact = [bound] * len(lengths), False, False
        self._room, self._room_stock, self._room_known = 1 << 30, self.store.stock, known

    def _make_room(self, known: bool) -> None:
        store, R, steps = self.store, len(self._bounds), self.page_size
        _, beside = self.unclaim()
        needed = self.reserve([1] * R)
        self._hold(beside, beside)
        columns = self.block_table.shape[1] * self.page_size
        most = max(self.bounds, default=0)
        while steps > 1:
            more = self._most_pages([steps] * R, None if known else [True] * R)
            if more <= store.free_at_least and most + steps <= columns:
                needed = more
                break
            steps //= 2
        store.free_at_least -= needed
        if not known:
            self._lose_sight()
        self._room, self._room_stock, self._room_known = steps, store.stock, known

    # ---- pages for a pass, which pools of other threads leave alone ----

    @locked
    def claim(self, counts: Sequence[int], beside: int = 0) -> None:
        """Makes sure that counts[r] tokens for each row r, and `beside` pages, will find their place until they are
        there, or until unclaim, whatever other pools do. Raises RuntimeError as reserve does; nothing is changed then.
        """
        self.unclaim()
        alone = len(self.store.tables) == 1
        if self.has_room and not beside and max(counts, default=0) <= 1:
            if not alone:
                self._claims_room = True
                self.store.claimants.add(self)
            return
        needed = self.reserve(counts, beside=beside)
        if not alone:
            self._hold(needed, beside)

    @locked
    def unclaim(self) -> tuple[int, int]:
        """Claims nothing more. Returns what was: pages, and those of them that are not for tokens."""
        pages, beside = self._claim, self._claim_beside
        self.store.free_at_least += pages
        self._claim, self._claim_beside, self._claims_room = 0, 0, False
        self.store.claimants.discard(self)
        return pages, beside

    def claimed(self) -> int:
        """Free pages that the store must leave to this pool; asked where the free ones are counted."""
        if self._claims_room:
            R = len(self._bounds)
            self._claim += self._most_pages([1] * R, None if self._room_known else [True] * R)
            self._claims_room = False
        return self._claim

    def _hold(self, pages: int, beside: int) -> None:
        """Claims pages that are free; nothing must be claimed."""
        if pages > 0:
            self._claim, self._claim_beside = pages, max(beside, 0)
            self.store.free_at_least -= pages
            self.store.claimants.add(self)

    # ---- of many pools over one store ----

    @staticmethod
    def learn(store: PageStore, pools: Sequence[Room], held: Tensor | None = None) -> tuple[int, int]:
        """Learns what the device alone knows of these pools over one store; waits for it once. held: int32 [pages], how
        often others name a page, None = none do. Returns free pages, and how many those others alone name."""
        with store.lock:
            store._release_dropped()
            sharing = [pool for pool in pools if any(pool._last_shared)]
            asked = [pool.lengths for pool in pools] + [pool._shares_last() for pool in sharing]
            if held is not None:
                asked.append(((store.refs == held) & (held > 0)).sum(dtype=torch.int32)[None])
            found = store.count_free_and(asked)
            for pool, own in zip(pools, found[: len(pools)], strict=True):
                pool.bounds, pool.exact, pool._stock = own, True, store.stock
            for pool, shared in zip(sharing, found[len(pools) :], strict=held is None):
                pool._last_shared = [bool(x) for x in shared]
            return store.free_at_least, 0 if held is None else found[-1][0]

    @staticmethod
    def set_aside(store: PageStore, pools: Sequence[tuple[Room, bool]], spare: int, most: int) -> int:
        """Sets pages aside for `most` steps of all these pools, or for fewer where `spare` free pages must be left;
        returns for how many, 0 where one step finds too few. learn has just been called.

        pools: with each whether a step surely adds a slot to every row.
        """
        with store.lock:
            P, steps = store.settings.page_size, most
            held = np.array([bound for pool, _ in pools for bound in pool.bounds], dtype=np.int64)
            copied = np.array([row for pool, known in pools for row in pool.copies(known)], dtype=bool)

            def pages() -> int:
                copies = copied & ((held % P > 0) | (steps > 1))  # one step copies a full page or begins another
                return int((-(-(held + steps) // P) - -(-held // P) + copies).sum())

            while steps and (needed := pages()) > store.free_at_least - spare:
                steps //= 2
            if steps == 0:
                return 0
            store.free_at_least -= needed
            for pool, known in pools:
                pool._widen(max(pool.bounds, default=0) + steps)
                if not known:
                    pool._lose_sight()
                pool._room, pool._room_stock, pool._room_known = steps, store.stock, known
            return steps
