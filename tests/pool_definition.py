"""What a pool must hold: rows as lists of tensors, and no page lost or owned twice."""

from __future__ import annotations

import torch

from kvcompress import ops
from kvcompress.caches import PoolSettings
from kvcompress.caches.formats import keys_and_values
from kvcompress.caches.pool import PagePool

CPU = torch.device("cpu")
D = 4


def new_pool(rows: int = 3, page_size: int = 4, **options: object) -> PagePool:
    slots = {**keys_and_values(D, torch.float32), "positions": ((), torch.int32)}
    return PagePool(rows, slots, CPU, PoolSettings(page_size, **options))


def new_pool_beside(pool: PagePool) -> PagePool:
    """Of as many rows, over the same pages."""
    slots = {**keys_and_values(D, torch.float32), "positions": ((), torch.int32)}
    return PagePool(len(pool.bounds), slots, CPU, store=pool.store)


def numbered(rows: int, width: int, start: int = 0) -> torch.Tensor:
    """Keys [1, rows, width, D] that are all different."""
    return torch.arange(start, start + rows * width * D, dtype=torch.float32).reshape(1, rows, width, D)


def append(pool: PagePool, x: torch.Tensor, counts=None) -> None:
    """Keys x, values -x, and the first number of each key as its position."""
    pool.append((x, -x, x[..., 0].to(torch.int32)), counts)


def step(pool: PagePool, x: torch.Tensor, counts: list[int] | None = None) -> None:
    """The same for one token a row, as decoding adds it; counts 0 and 1, which the device alone knows."""
    on_device = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    tokens = (x, -x, x[..., 0].to(torch.int32))
    pool.step(
        lambda table: ops.append_tokens_(list(pool.store.arrays.values()), tokens, table, counts=on_device),
        known=counts is None,
    )


def check(*pairs: tuple[PagePool, list[torch.Tensor]]) -> None:
    """Each pool holds exactly its rows; no page of their common store is lost or has two owners that do not know it."""
    store = pairs[0][0].store
    store.count_free()
    named = torch.zeros(store.pages, dtype=torch.int32)
    for pool, rows in pairs:
        assert pool.store is store
        assert pool.lengths.tolist() == [len(row) for row in rows]
        assert all(bound >= len(row) for bound, row in zip(pool.bounds, rows, strict=True))
        assert not pool.exact or pool.bounds == pool.lengths.tolist()
        longest = max(len(row) for row in rows)
        gathered = [PagePool.gather(pool, longest + 2)] if pool.exact else []
        for k, v, positions in gathered:
            for r, row in enumerate(rows):
                assert torch.equal(k[r, : len(row)], row)
                assert torch.equal(v[r, : len(row)], -row)
                assert torch.equal(positions[r, : len(row)], row[:, 0].to(torch.int32))
                assert not k[r, len(row) :].any()
        for r, row in enumerate(rows):
            for page in pool.block_table[r, : -(-len(row) // pool.page_size)].tolist():
                named[page] += 1
    assert torch.equal(store.refs, named)
    free = store.free_pages[: int(store.free_count[0])].tolist()
    assert sorted(free) == (named == 0).nonzero().flatten().tolist()
