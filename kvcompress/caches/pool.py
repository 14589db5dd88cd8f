"""Storage of what attention reads: rows of any length in pages, shared between rows until written."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import ops
from .formats import Format, Slots, coded, scales_of
from .keeping import Keeping
from .origins import Origins
from .rows import BatchState
from .store import PageStore, PoolSettings, Rows, Snapshot, locked

Result = TypeVar("Result")


class PagePool(BatchState, Keeping):
    """R rows of slots, each of its own length, in pages of P slots (row r = b*H + h).

    slots: what a slot holds, by name: sizes and dtype; keys_and_values(D, dtype) is usual, and positions, scores or
    anything else can go along. All of them are appended, dropped, shared and chosen together; what needs a table of
    its own is a pool of its own. block_table: int32 [R, blocks], the pages of each row in order. lengths: int32 [R].
    origins: which tokens the slots hold. What goes, and what stays, is in keeping.py.
    Both are on the device and nothing waits for it there; the host keeps `bounds`, which lengths never exceed (and
    equal while `exact`). Forks and selected rows share pages until one of them writes.
    Each thread may have a pool of its own over the same pages, and several may fork one. A thread whose pool has forks
    elsewhere reads by snapshot(): between two looks at k_pages and block_table another may trim.
    """

    def __init__(
        self, rows: int, slots: Slots, device: torch.device, settings: PoolSettings | None = None, *,
        store: PageStore | None = None, form: Format | None = None,
    ) -> None:  # fmt: skip
        """store: where pages come from, which must be of these slots; None = one of its own, of these settings. form:
        that the slots are of, None = they hold tokens as they come."""
        if store is None:
            store = PageStore(slots, device, settings or PoolSettings(), form=form)
        else:
            store.check_slots(slots, device)
        lines = torch.zeros(rows, 0, dtype=torch.int32, device=device)
        self._open(store, Rows(lines, torch.zeros(rows, dtype=torch.int32, device=device)), [0] * rows, Origins(rows))

    def _open(self, store: PageStore, rows: Rows, bounds: list[int], origins: Origins) -> None:
        self.store, self._rows, self.origins = store, rows, origins
        self.bounds = bounds  # and no step ahead
        self._room_stock, self._room_known = -1, True
        self.exact = True
        self._stock = store.stock
        self._last_shared = [False] * len(bounds)  # whether a row's last page may be named by others too
        self._shares = False  # whether any page may
        self._claim, self._claim_beside, self._claims_room = 0, 0, False
        self._register()

    @locked
    def _register(self) -> None:
        self.store.tables.add(self._rows)
        weakref.finalize(self, self.store.dropped.append, self._rows).atexit = False

    # ---- what there is ----

    @property
    def k_pages(self) -> Tensor:
        return self.store.arrays["keys"]

    @property
    def v_pages(self) -> Tensor:
        return self.store.arrays["values"]

    @property
    def scales(self) -> dict[str, Any]:
        """key_scales and value_scales, where keys and values are in a format."""
        return self.store.scales

    def zeros(self, *sizes: int) -> Tensor:
        """As the tokens that go in and come out."""
        return torch.zeros(sizes, dtype=self.dtype, device=self.lengths.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tokens that go in and come out."""
        return self.k_pages.dtype if self.store.form is None else self.store.form.dtype

    @locked
    def snapshot(self) -> Snapshot:
        """What attention reads, all of one moment: for a pool whose forks other threads change."""
        return Snapshot(self.store.arrays, self._rows.block_table, self._rows.lengths, self.store.scales)

    @property
    def counts(self) -> list[int]:
        """Slots per row. Waits for the device if only the device knows."""
        if not self.exact:
            self.bounds, self.exact = self.lengths.tolist(), True
        return self.bounds

    @locked
    def pages_in_use(self) -> int:
        """Pages that these rows name, each once. Waits for the device."""
        if self.store.pages == 0:
            return 0
        return int(torch.unique(self.block_table[self._named()]).numel())

    def nbytes(self) -> int:
        """Bytes of the pages that these rows name, each once, and of their table. Pages shared with a fork count in
        both; free pages in neither (reserved_nbytes counts all)."""
        tables = sum(x.numel() * x.element_size() for x in (self.block_table, self.lengths))
        return self.pages_in_use() * self.store.page_nbytes() + tables

    def reserved_nbytes(self) -> int:
        """Bytes of all tensors: every page of the store, free or in use by forks, the free list, and this table."""
        return self.store.nbytes() + sum(x.numel() * x.element_size() for x in (self.block_table, self.lengths))

    def gather(
        self, capacity: int, names: Sequence[str] | None = None, rows: Sequence[int] | None = None, *,
        exact: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """For each name in slots (or of these) [R, capacity, ...], zeros past each row's length. capacity: at least the
        longest. Of slots in a format keys and values, as numbers again; exact: in float32, whose codes and scales are
        those that they have. rows: of these alone, zeros of others."""
        form = self.store.form
        if form is None:
            found = self._gather(capacity, names, rows)
        else:
            wanted = [name for name in form.names if names is None or name in names]
            parts = [name for name in self.store.arrays if any(name in (x, scales_of(x)) for x in wanted)]
            codes = dict(zip(parts, self._gather(capacity, parts, rows), strict=True))
            form = form.exact if exact else form
            found = [form.decode(name, codes[name], codes[scales_of(name)]) for name in wanted]
        if rows is None:
            return found
        index = torch.tensor(rows, device=self.lengths.device)
        return [x.new_zeros(len(self.counts), *x.shape[1:]).index_copy_(0, index, x) for x in found]

    def _gather(self, capacity: int, names: Sequence[str] | None, of: Sequence[int] | None) -> list[Tensor]:
        counts, P = self.counts, self.page_size
        every, table, lengths, _ = self.snapshot()
        if of is not None:
            index = torch.tensor(of, device=lengths.device)
            counts, table, lengths = [counts[row] for row in of], table[index], lengths[index]
        arrays = [array for name, array in every.items() if names is None or name in names]
        longest = max(counts, default=0)
        out = [x.new_zeros(len(counts), capacity, *x.shape[2:]) for x in arrays]
        if longest:
            places = torch.arange(longest, dtype=torch.int32, device=lengths.device)
            held = places < lengths[:, None]
            pages = torch.where(held, table.gather(1, (places // P).long().expand(len(counts), -1)), 0)
            slots = pages.long() * P + places % P
            for x, array in zip(out, arrays, strict=True):
                rows = array.flatten(0, 1)[slots]
                x[:, :longest] = rows.masked_fill_(~held.view(*held.shape, *[1] * (rows.ndim - 2)), 0)
        return out

    # ---- what changes it ----

    @locked
    def reserve(self, counts: Sequence[int], rewrites: Sequence[bool] | None = None, beside: int = 0) -> int:
        """Makes sure that an append of counts[r] tokens to each row r finds its pages; returns the most it can take.

        rewrites: rows whose newest slot may be written anew besides; None = no row. beside: further pages. Raises
        RuntimeError if the pool may not grow as far (it names max_pages), and changes nothing then. Asks the device
        only where what the host knows does not suffice.
        """
        store = self.store
        store.tidy()
        if not self.exact and self._stock != store.stock:
            self._refresh()
        needed = beside + self._most_pages(counts, rewrites)
        if needed > store.free_at_least:
            store.count_free()
            self._refresh()
            needed = beside + self._most_pages(counts, rewrites)
            store.provide(needed)
        self._widen(max((b + n for b, n in zip(self.bounds, counts, strict=True)), default=0))
        return needed

    def _widen(self, slots: int) -> None:
        """Makes the table wide enough for rows of so many slots."""
        blocks, held = self.store.settings.blocks(slots), self.block_table.shape[1]
        if blocks > held:
            with torch.inference_mode(False):
                wider = torch.nn.functional.pad(self.block_table, (0, max(blocks, 2 * held) - held))
                self._rows.block_table = wider

    def append(self, tokens: Sequence[Tensor], counts: Sequence[int] | Tensor | None = None) -> None:
        """Appends to every row its last counts[r] of S new tokens, in one call for all rows and arrays.

        tokens: one [B, H, S, ...] for each name in slots, B*H = R; of a format keys and values. counts: 0..S; None = S;
        an int32 tensor [R] on the device is not read by the host, which then knows only that at most S were added.
        Raises ValueError for counts out of range, RuntimeError as reserve does; nothing is changed then.
        """
        S, R = tokens[0].shape[2], len(self.bounds)
        known = not isinstance(counts, Tensor)
        most = [S] * R if counts is None or isinstance(counts, Tensor) else list(counts)
        if len(most) != R:
            raise ValueError(f"counts must hold one number for each of {R} rows, got {len(most)}")
        if min(most, default=0) < 0 or max(most, default=0) > S:
            row, count = next((row, count) for row, count in enumerate(most) if not 0 <= count <= S)
            raise ValueError(f"counts must be between 0 and the S = {S} new tokens, got {count} for row {row}")
        on_device, tokens = counts if isinstance(counts, Tensor) else None, coded(self.store.form, tokens)
        if known and min(most, default=S) < S:
            on_device = torch.tensor(most, dtype=torch.int32, device=self.lengths.device)

        def write(table: ops.PageTable) -> None:
            ops.append_tokens_(list(self.store.arrays.values()), tokens, table, counts=on_device)

        self.extend(write, most, known=known)

    @locked
    def extend(
        self,
        write: Callable[[ops.PageTable], None],
        counts: Sequence[int],
        *,
        rewrites: Sequence[bool] | None = None,
        known: bool = True,
    ) -> None:
        """Lets an op that appends to pages do so: write(table) adds counts[r] slots to each row r.

        rewrites: rows whose newest slot it may write anew besides; None = no row. known: False = it adds at most as
        many, and the device alone knows. Raises RuntimeError as reserve does; write is not called then.
        """
        _, beside = self.unclaim()
        needed = self.reserve(counts, rewrites)
        self.store.free_at_least -= needed  # before: forks would count on pages that a write took and did not tell of
        write(self._table())
        self._hold(beside, beside)
        self.bounds = [bound + count for bound, count in zip(self.bounds, counts, strict=True)]
        if not known:
            self._lose_sight()
        elif self._shares:
            again = rewrites or [False] * len(counts)
            rows = zip(self._last_shared, counts, again, strict=True)
            self._last_shared = [here and not (count or rewritten) for here, count, rewritten in rows]

    @locked
    def read(self, look: Callable[[ops.PageTable], Result]) -> Result:
        """What look(table) gives, an op that leaves the rows as they are."""
        return look(self._table())

    def trim(self) -> None:
        """Gives free pages back, those of dropped forks included; pools over the same pages go on as before.

        reserved_nbytes then counts the pages in use alone. The next append takes new pages as a pool does that has run
        out: trim when a pool will rest, not between tokens. A pool with grow="error" keeps its pages. Waits for the
        device, and needs memory for a copy of the pages in use; RuntimeError, and nothing changed, if there is none.
        On a GPU the memory goes back to PyTorch's allocator: torch.cuda.empty_cache() gives it to others.
        """
        self.store.trim()

    @locked
    def fork(self) -> PagePool:
        """An independent pool of the same rows over the same pages, which are copied when one of the two writes.

        copy.copy and copy.deepcopy do the same.
        """
        pool, origins = object.__new__(type(self)), copy.deepcopy(self.origins)
        self._room = 0
        # memory may run out above, or in it: pages that it has shared nobody else would give up
        pool._open(self.store, self._share(None), list(self.bounds), origins)
        pool.exact, pool._stock = self.exact, -1
        for one in (self, pool):
            one._shares, one._last_shared = True, [True] * len(self.bounds)
        return pool

    def select(self, indices: list[int], batch: int) -> None:
        """Of rows that are those of so many sequences: see select_rows."""
        heads = len(self.bounds) // batch
        self.select_rows([b * heads + h for b in indices for h in range(heads)])

    @locked
    def select_rows(self, rows: Sequence[int]) -> None:
        """Makes row i what rows[i] was. Rows that are named twice share their pages; those not named give theirs up.

        Raises ValueError for a number that is not one of a row, 0..R-1.
        """
        for row in rows:
            if not 0 <= row < len(self.bounds):
                raise ValueError(f"rows must be between 0 and {len(self.bounds) - 1}, got {row}")
        if list(rows) == list(range(len(self.bounds))):
            return
        index = torch.tensor(rows, dtype=torch.long, device=self.lengths.device)
        old, new = self._rows, self._share(index)
        try:
            self.store.release(old)
        except BaseException:  # the old ones stay
            self.store.dropped.append(new)
            raise
        old.block_table, old.lengths = new.block_table, new.lengths
        times = Counter(rows)
        self.origins.select(list(rows), len(self.bounds))
        self.bounds = [self.bounds[row] for row in rows]
        self._stock = -1
        self._last_shared = [self._last_shared[row] or times[row] > 1 for row in rows]
        self._shares = self._shares or max(times.values(), default=0) > 1

    def join(self, other: BatchState, batch: int, more: int) -> None:
        """See join_rows."""
        assert isinstance(other, PagePool)
        self.join_rows(other)

    @locked
    def join_rows(self, other: PagePool) -> None:
        """Takes over the rows of another pool over the same store, behind its own; the other has none then.

        Raises ValueError for a pool over other pages.
        """
        if other.store is not self.store:
            raise ValueError("a pool must be over the same store to join another")
        stock, mine, new = self.store.stock, self._rows, other._rows
        known = all(pool.exact or pool._stock == stock for pool in (self, other))
        tables = [rows.block_table for rows in (mine, new)]
        width = max(table.shape[1] for table in tables)
        with torch.inference_mode(False):
            joint = torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
            mine.lengths, mine.block_table = torch.cat([mine.lengths, new.lengths]), joint
            new.block_table, new.lengths = new.block_table[:0], new.lengths[:0]
        self.origins.join(other.origins, len(self.bounds), len(other.bounds))
        other.origins = Origins(0)
        self.bounds, other.bounds = self.bounds + other.bounds, []
        self.exact, self._stock = self.exact and other.exact, stock if known else -1
        self._last_shared, other._last_shared = self._last_shared + other._last_shared, []
        self._shares = self._shares or other._shares

    def __copy__(self) -> PagePool:
        return self.fork()  # a second object over the same table would give its pages up twice

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        return self.fork()

    @locked
    def __getstate__(self) -> dict[str, Any]:
        """A pool is saved alone: not with the pages of its forks, nor with free ones."""
        store, rows = self.store.copy_of([self._rows])
        return vars(self) | {"store": store, "_rows": rows[0], "_stock": -1, "_room": 0, "_claim": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    # ---- within ----

    def _shares_last(self) -> Tensor:
        """int32 [R], on the device: 1 where a row's last page is another's too."""
        table, lengths = self.block_table, self.lengths
        if not table.shape[1]:
            return torch.zeros_like(lengths)
        last = (lengths - 1).clamp_(min=0) // self.page_size
        refs = self.store.refs[table.gather(1, last.long()[:, None])[:, 0]]
        return ((refs > 1) & (lengths > 0)).to(torch.int32)

    def _named(self) -> Tensor:
        return self.store.named(self._rows)

    @torch.inference_mode(False)
    def _share(self, index: Tensor | None) -> Rows:
        """Further lines that name the pages of the given rows (None: all)."""
        self.store.tidy()
        table, named = self.block_table, self._named()
        rows = Rows(table.clone(), self.lengths.clone()) if index is None else Rows(table[index], self.lengths[index])
        named = named if index is None else named[index]
        if self.store.pages:
            pages = torch.where(named, rows.block_table, 0).flatten()
            self.store.refs.index_add_(0, pages, named.flatten().to(torch.int32))
        return rows

    def _most_pages(self, counts: Sequence[int], rewrites: Sequence[bool] | None = None) -> int:
        """Pages that an append of counts[r] tokens takes at most, as far as the host knows."""
        blocks, P, exact = self.store.settings.blocks, self.page_size, self.exact
        taken = sum(blocks(bound + n) - blocks(bound) for bound, n in zip(self.bounds, counts, strict=True))
        if not self._shares:
            return taken
        again = rewrites or [False] * len(counts)
        rows = zip(self.bounds, counts, self._last_shared, again, strict=True)
        return taken + sum(
            shared and (rewritten or (n > 0 and (bound % P > 0 or not exact))) for bound, n, shared, rewritten in rows
        )

    def _refresh(self) -> None:
        """Learns from the device what the host has lost sight of."""
        counts = self.counts
        self._stock = self.store.stock
        if not self._shares:
            return
        table, named = self.block_table, self._named()
        shared = named & (self.store.refs[torch.where(named, table, 0)] > 1)
        last = named.sum(1, keepdim=True).clamp_(min=1) - 1
        flags = torch.stack([shared.gather(1, last)[:, 0], shared.any(1)]).tolist() if table.shape[1] else [[], []]
        self._last_shared, self._shares = flags[0] or [False] * len(counts), any(flags[1])

    def _lose_sight(self) -> None:
        """The device alone knows the lengths now."""
        if self.exact:
            self._stock = self.store.stock
        self.exact = False
