"""Where pages come from: the arrays, the free list and how they grow."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from .. import ops
from ..support.checks import MOST_INT32, need_integer
from .formats import FORMATS, Dtypes, Format, Slots, scales_of, slot_nbytes
from .huge import advise_huge

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MANY_TABLES = 32  # of dropped pools, after which their pages are given up though none runs short


def locked(method: Callable[Concatenate[Any, Arguments], Result]) -> Callable[Concatenate[Any, Arguments], Result]:
    """A method that holds self.lock, so that threads take turns."""

    @functools.wraps(method)
    def in_turn(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.lock:
            return method(self, *args, **kwargs)

    return in_turn


@dataclass(frozen=True)
class PoolSettings:
    """page_size: slots per page, a power of two. max_pages: most pages of one pool, None = no limit.

    grow: "double": a pool starts with the pages it needs and doubles when they run out, up to max_pages; "error": it
    takes max_pages at once and never more. A pool that may not grow raises RuntimeError and stays as it was.
    dtype: how keys and values are stored: None = as the model makes them, "int8", or "k8v4" (keys of 8 bits, values of
    4), with a float16 scale for each token and head besides. They are rounded once, when they are stored. A list or
    tuple has one of these for each of the model's layers.
    """

    page_size: int = 16
    max_pages: int | None = None
    grow: str = "double"
    dtype: Dtypes = None

    def __post_init__(self) -> None:
        size = self.page_size
        most = MOST_INT32 // 2 + 1
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or (size <= most and size & (size - 1)):
            raise ValueError(f"page_size must be a power of two, an integer such as 64, got {size!r}")
        need_integer("page_size", size, 1, most)
        if self.grow not in ("double", "error"):
            raise ValueError(f"grow must be 'double' or 'error', got {self.grow!r}")
        if isinstance(self.dtype, list):
            object.__setattr__(self, "dtype", tuple(self.dtype))
        for dtype in self.dtype if isinstance(self.dtype, tuple) else (self.dtype,):
            if dtype is not None and dtype not in FORMATS:
                raise ValueError(
                    f"dtype must be {', '.join(map(repr, FORMATS))} or None, or a list of these, one for each layer, "
                    f"got {dtype!r}"
                )
        if self.max_pages is None and self.grow == "error":
            raise ValueError("max_pages must be given with grow='error', got None")
        if self.max_pages is not None:
            need_integer("max_pages", self.max_pages, 1, MOST_INT32)

    def dtype_of(self, layer: int) -> str | None:
        """That of the model's layer of this number."""
        return self.dtype[layer] if isinstance(self.dtype, tuple) else self.dtype

    def blocks(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def check(self, pages: int) -> None:
        """Raises RuntimeError if a pool may not have so many pages."""
        if self.max_pages is not None and pages > self.max_pages:
            raise RuntimeError(
                f"max_pages = {self.max_pages} is too few: {pages} pages of {self.page_size} tokens are needed in one "
                "layer, those of all forks, beams and samples together; use max_pages of at least "
                f"{pages}, or None with grow='double'"
            )


@dataclass(eq=False)
class Rows:
    """The lines of one pool's table. An object of its own: it outlives the pool until its pages are given up."""

    block_table: Tensor
    lengths: Tensor


class Claimant(Protocol):
    """A pool, as the store sees it."""

    def claimed(self) -> int: ...


class Snapshot(NamedTuple):
    """What attention reads of one pool, all of the same moment. arrays: by name in slots [pages, P, ...].

    It stays readable until that pool itself is changed, whatever its forks do meanwhile in other threads: they write to
    pages that no other pool names, and where the store grows or is trimmed the arrays of before stay as they are.
    """

    arrays: Mapping[str, Tensor]
    block_table: Tensor
    lengths: Tensor
    scales: Mapping[str, Any]  # key_scales and value_scales, where keys and values are in a format

    @property
    def k_pages(self) -> Tensor:
        return self.arrays["keys"]

    @property
    def v_pages(self) -> Tensor:
        return self.arrays["values"]


class PageStore:
    """Pages that one pool and its forks take theirs from.

    arrays: for each name in slots [pages, P, ...]. refs: int32 [pages], rows that name a page. free_pages, free_count:
    the pages that nobody names (see ops.PageTable). All on the device, and replaced when the store grows. The host
    knows only that at least `free_at_least` pages are free, beside those that pools have claimed for a pass: enough to
    take pages without asking the device.
    lock: held by whatever changes pages, tables or any of these. A thread that has it may take it again. On CUDA the
    order of the threads is that of the stream: all of them must use the same one, as they do unless told otherwise.
    """

    def __init__(
        self, slots: Slots, device: torch.device, settings: PoolSettings, memory: Tensor | None = None,
        form: Format | None = None,
    ) -> None:  # fmt: skip
        """memory: uint8 [n] in which all pages lie, with grow="error" alone; None = memory of its own. form: that these
        slots are of, None = they hold tokens as they come."""
        P = settings.page_size
        self.settings, self.form = settings, form
        self._page_nbytes = P * slot_nbytes(slots)  # asked in every step
        self.arrays = {
            name: torch.empty(0, P, *shape, dtype=dtype, device=device) for name, (shape, dtype) in slots.items()
        }
        self.refs = torch.zeros(0, dtype=torch.int32, device=device)
        self.free_pages = torch.zeros(0, dtype=torch.int32, device=device)
        self.free_count = torch.zeros(2, dtype=torch.int32, device=device)
        self.free_at_least = 0
        self.stock = 0  # how often the free pages were counted: bounds from before that no longer add up
        self.tables = weakref.WeakSet[Rows]()  # of every pool over these pages
        self.claimants = weakref.WeakSet[Claimant]()  # pools that have claimed pages, which are not in free_at_least
        # of pools that are gone, to be given up by and by: a finalizer comes in any thread and at any time, also amid
        # what holds the lock, and does no more than append here
        self.dropped: deque[Rows] = deque()
        self.lock = threading.RLock()
        if settings.grow == "error":
            assert settings.max_pages is not None
            self._add_pages(settings.max_pages, memory)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("tables", "lock", "claimants")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()
        self.tables = weakref.WeakSet(self.dropped)  # the pools add theirs when they come back
        self.claimants = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> PageStore:
        return self  # forks of who takes pages here take theirs here too

    @property
    def pages(self) -> int:
        return self.refs.shape[0]

    @property
    def scales(self) -> dict[str, Any]:
        """key_scales and value_scales, where keys and values are in a format."""
        return {} if self.form is None else {scales_of(name): self.arrays[scales_of(name)] for name in self.form.names}

    def named(self, rows: Rows) -> Tensor:
        """Which entries of a table name a page: bool [R, blocks]."""
        starts = torch.arange(rows.block_table.shape[1], device=rows.lengths.device) * self.settings.page_size
        return starts < rows.lengths[:, None]

    def table(self, rows: Rows) -> ops.PageTable:
        return ops.PageTable(rows.block_table, rows.lengths, self.refs, self.free_pages, self.free_count)

    @locked
    def release(self, rows: Rows) -> None:
        """Empties the rows."""
        ops.truncate_rows_(self.table(rows), torch.zeros_like(rows.lengths), self.settings.page_size)

    @locked
    def tidy(self) -> None:
        """Gives up the pages of dropped pools where many tables have piled up. Waits for nothing."""
        if len(self.dropped) >= MANY_TABLES:
            self._release_dropped()  # more pages are then free than free_at_least says

    def _release_dropped(self) -> None:
        while self.dropped:
            rows = self.dropped.pop()
            try:
                self.release(rows)
            except BaseException:
                self.dropped.append(rows)
                raise

    @locked
    def count_free(self) -> int:
        """Free pages, those of dropped pools included and those that are claimed not. Waits for the device."""
        self.count_free_and([])
        return self.free_at_least

    @locked
    def count_free_and(self, others: Sequence[Tensor]) -> list[list[int]]:
        """The same, and what is in other int32 tensors on the device, in one copy."""
        self._release_dropped()
        numbers = torch.cat([self.free_count, *others]).tolist() if others else self.free_count.tolist()
        self.free_at_least, refused = numbers[0] - self.claimed(), numbers[1]
        self.stock += 1
        if refused:
            raise RuntimeError(
                "tokens were lost: pages ran out on the device, or a row names a page that does not exist; reserve() "
                "more before appending"
            )
        ends = list(itertools.accumulate((len(x) for x in others), initial=2))
        return [numbers[start:end] for start, end in itertools.pairwise(ends)]

    def claimed(self) -> int:
        """Free pages that pools have claimed."""
        return sum(pool.claimed() for pool in list(self.claimants))

    def check_slots(self, slots: Slots, device: torch.device) -> None:
        """Raises ValueError for what cannot lie in these pages."""
        here = {name: (tuple(array.shape[2:]), array.dtype) for name, array in self.arrays.items()}
        if dict(slots) != here or device != self.refs.device:
            raise ValueError(
                f"slots must be {here} on {self.refs.device} as the store's, got {dict(slots)} on {device}"
            )

    @locked
    def provide(self, pages: int) -> None:
        """Makes sure that this many pages are free; RuntimeError, and nothing changed, if the settings forbid it.

        To be called when free_at_least is exact.
        """
        missing = pages - self.free_at_least
        if missing <= 0:
            return
        limit = self.settings.max_pages
        self.settings.check(self.pages + missing)
        total = max(self.pages + missing, 2 * self.pages)
        self._add_pages((total if limit is None else min(total, limit)) - self.pages)

    @torch.inference_mode(False)
    def _add_pages(self, count: int, memory: Tensor | None = None) -> None:
        old, free, arrays = self.pages, self.free_at_least + self.claimed(), {}
        if memory is not None:
            advise_huge(memory, written=True)
            sizes = [count * math.prod(x.shape[1:]) * x.element_size() for x in self.arrays.values()]
            parts = memory[: sum(sizes)].split(sizes)
        for i, (name, array) in enumerate(self.arrays.items()):
            shape = (old + count, *array.shape[1:])
            if memory is None:
                arrays[name] = array.new_empty(shape)
                advise_huge(arrays[name])
            else:
                arrays[name] = parts[i].view(array.dtype).view(shape)
            arrays[name][:old] = array
        # pages are handed out from the end of the list: old ones first, then new ones from the lowest
        added = torch.arange(old + count - 1, old - 1, -1, dtype=torch.int32, device=self.refs.device)
        free_pages = torch.cat([added, self.free_pages[:free], self.free_pages.new_zeros(old - free)])
        refs = torch.cat([self.refs, self.refs.new_zeros(count)])
        free_count = self.free_count + torch.tensor([count, 0], dtype=torch.int32, device=self.refs.device)
        # all of them or none: memory may have run out above
        self.arrays, self.refs, self.free_pages, self.free_count = arrays, refs, free_pages, free_count
        self.free_at_least += count

    @locked
    @torch.inference_mode(False)
    def trim(self) -> None:
        """Gives back the memory of free pages: those in use move together, and every table over them follows.

        A store with grow="error" keeps its pages: it has them so as never to ask for memory again. Waits for the
        device. While it copies, the pages in use exist twice; without memory for that nothing is changed.
        """
        claimed = self.claimed()
        if self.count_free() + claimed == 0 or self.settings.grow == "error":
            return
        kept = self.refs.nonzero().flatten()
        place = torch.zeros_like(self.refs)
        place[kept] = torch.arange(len(kept), dtype=torch.int32, device=place.device)
        arrays = {name: array[kept] for name, array in self.arrays.items()}
        moved = []
        for rows in list(self.tables):
            named = self.named(rows)
            width = int(named.any(0).sum())  # no entry is left that might name a page that is gone
            table, named = rows.block_table[:, :width], named[:, :width]
            moved.append((rows, torch.where(named, place[torch.where(named, table, 0)], 0)))
        refs, free_pages, free_count = self.refs[kept], place.new_zeros(len(kept)), torch.zeros_like(self.free_count)
        for rows, lines in moved:
            rows.block_table = lines
        self.arrays, self.refs, self.free_pages, self.free_count = arrays, refs, free_pages, free_count
        self.free_at_least = -claimed  # whoever takes pages next makes as many again

    @locked
    @torch.inference_mode(False)
    def copy_of(self, every: Sequence[Rows]) -> tuple[PageStore, list[Rows]]:
        """A store of their own for these rows, which holds their pages alone. Waits for the device."""
        names = [self.named(rows) for rows in every]
        pages, place = torch.unique(
            torch.cat([rows.block_table[named] for rows, named in zip(every, names, strict=True)]), return_inverse=True
        )
        arrays = {name: array[pages] for name, array in self.arrays.items()}
        refs = torch.bincount(place, minlength=len(pages)).to(torch.int32)
        store = PageStore.of_pages(self.settings, arrays, refs, self.form)
        store.free_count[1] = self.free_count[1]
        copies = []
        places = place.to(torch.int32).split([int(named.sum()) for named in names])
        for rows, named, own in zip(every, names, places, strict=True):
            table = torch.zeros_like(rows.block_table)
            table[named] = own
            copies.append(Rows(table, rows.lengths.clone()))
        return store, copies

    @staticmethod
    @torch.inference_mode(False)
    def of_pages(
        settings: PoolSettings, arrays: dict[str, Tensor], refs: Tensor, form: Format | None = None
    ) -> PageStore:
        """A store whose first pages are these [pages, P, ...], page i named refs[i] times, at least once. More are
        there where settings say so."""
        slots = {name: (tuple(array.shape[2:]), array.dtype) for name, array in arrays.items()}
        store, count = PageStore(slots, refs.device, settings, form=form), len(refs)
        if store.pages:  # it has all that it may have
            for name, array in arrays.items():
                store.arrays[name][:count] = array
            store.refs[:count] = refs
            store.free_count[0] -= count  # a new store hands out its lowest pages first
            store.free_at_least -= count
        else:
            store.arrays, store.refs = dict(arrays), refs
            store.free_pages = torch.zeros(count, dtype=torch.int32, device=refs.device)
        return store

    def page_nbytes(self) -> int:
        """Bytes of one page, all arrays together."""
        return self._page_nbytes

    @locked
    def nbytes(self) -> int:
        """Bytes of all pages, free ones included, and of the free list."""
        tensors = (*self.arrays.values(), self.refs, self.free_pages, self.free_count)
        return sum(x.numel() * x.element_size() for x in tensors)
