"""Pages of rows that lie in the host's memory meanwhile, and come back to other places."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from .pool import PagePool


class Swapped(NamedTuple):
    """Of R rows. lengths: int32 [R], their slots. there: int32 [R], the first of these, whose pages others hold too:
    the rows still name them. arrays: for each name in slots [pages, P, ...], the pages behind those, row by row."""

    lengths: Tensor
    there: Tensor
    arrays: dict[str, Tensor]

    @property
    def pages(self) -> int:
        return len(next(iter(self.arrays.values())))


def own_pages(pool: PagePool, every: bool = False) -> Tensor:
    """bool [R, blocks]: entries of a table behind the pages that rows begin with and others hold, too; every: all."""
    named = pool.store.named(pool._rows)
    if every:
        return named
    shared = named & (pool.store.refs[torch.where(named, pool.block_table, 0)] > 1)
    return named & (shared.int().cumprod(1) == 0)


@torch.inference_mode(False)
def swap_out(pool: PagePool, every: bool = False) -> Swapped:
    """Copies what the rows hold of their own to the host, or every page, and gives these up. Waits for the device.
    Until they are back the pool is only asked what it takes: it answers as if they were."""
    store, rows = pool.store, pool._rows
    with store.lock:
        own, lengths, P = own_pages(pool, every), rows.lengths.clone(), store.settings.page_size
        there = torch.minimum(lengths, ((store.named(rows) & ~own).sum(1) * P).to(torch.int32))
        pages = rows.block_table[own].long()
        arrays = {name: array[pages].cpu() for name, array in store.arrays.items()}
        ops.truncate_rows_(store.table(rows), there, P)
        held, shared = torch.stack([lengths, there]).tolist()
        pool.bounds, pool.exact, pool._stock = held, True, store.stock
        pool._last_shared = [0 < slots == kept for slots, kept in zip(held, shared, strict=True)]
        pool._shares = any(shared)
        return Swapped(lengths, there, arrays)


@torch.inference_mode(False)
def swap_in(pool: PagePool, swapped: Swapped) -> None:
    """Makes the rows what they were, over pages that are free. Waits for the device. Raises RuntimeError where these do
    not suffice; nothing is changed then."""
    store, rows = pool.store, pool._rows
    with store.lock:
        pool._widen(max(swapped.lengths.tolist(), default=0))  # the table may have been cut meanwhile
        count, named = swapped.pages, store.named(rows)
        store.count_free()
        store.provide(count)
        end = int(store.free_count[0])
        pages = store.free_pages[end - count : end].clone()  # handed out from the end
        for name, array in store.arrays.items():
            array[pages.long()] = swapped.arrays[name].to(array.device)
        store.refs[pages.long()] = 1
        store.free_count[0] -= count
        store.free_at_least -= count
        rows.lengths.copy_(swapped.lengths)
        rows.block_table[store.named(rows) & ~named] = pages
