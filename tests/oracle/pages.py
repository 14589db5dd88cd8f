"""Rows of slots in pages that may be shared until written: the bookkeeping, one page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def append_tokens_(
    arrays: Sequence[Tensor], tokens: Sequence[Tensor], table: Any, counts: Tensor | None = None
) -> None:
    """As ops.append_tokens_; table: anything with the fields of ops.PageTable."""
    R, (_, H, S), P = len(table.lengths), tokens[0].shape[:3], arrays[0].shape[1]
    added = [S] * R if counts is None else counts.tolist()
    starts, copied = table.lengths.tolist(), []
    tokens = [x.clone() for x in tokens]  # they may be views of arrays
    needed = sum(blocks(start + n, P) - blocks(start, P) for start, n in zip(starts, added, strict=True))
    for r, (start, n) in enumerate(zip(starts, added, strict=True)):
        shared = n > 0 and start % P > 0 and int(table.refs[table.block_table[r, start // P]]) > 1
        copied.append(int(table.block_table[r, start // P]) if shared else None)
    needed += sum(page is not None for page in copied)
    if needed > int(table.free_count[0]):
        raise RuntimeError(f"the pool is full: {needed} pages are needed, {int(table.free_count[0])} are free")
    for r, (start, n) in enumerate(zip(starts, added, strict=True)):
        if copied[r] is not None:
            page = take_page(table)
            table.block_table[r, start // P] = page
            for array in arrays:
                array[page, : start % P] = array[copied[r], : start % P]
        for block in range(blocks(start, P), blocks(start + n, P)):
            table.block_table[r, block] = take_page(table)
        table.lengths[r] = start + n
        for array, new in zip(arrays, tokens, strict=True):
            for i in range(n):
                block, place = divmod(start + i, P)
                array[int(table.block_table[r, block]), place] = new[r // H, r % H, S - n + i]
    for old in copied:
        if old is not None:
            give_up_page(table, old)


def truncate_rows_(table: Any, new_lengths: Tensor, page_size: int) -> None:
    """As ops.truncate_rows_."""
    for r, (old, new) in enumerate(zip(table.lengths.tolist(), new_lengths.tolist(), strict=True)):
        for block in range(blocks(new, page_size), blocks(old, page_size)):
            give_up_page(table, int(table.block_table[r, block]))
        table.lengths[r] = new


def compact_pages_(arrays: Sequence[Tensor], table: Any, indices: Tensor, kept: Tensor | None = None) -> None:
    """As ops.compact_pages_."""
    R, K, P = len(table.lengths), indices.shape[1], arrays[0].shape[1]
    counts, indices = [K] * R if kept is None else kept.tolist(), indices.clone()
    before = table.block_table.clone()
    identity = torch.arange(K, dtype=indices.dtype, device=indices.device)
    fresh = []
    for r, count in enumerate(counts):
        for block in range(blocks(count, P)):
            stretch = slice(block * P, min((block + 1) * P, count))
            moves = not torch.equal(indices[r, stretch], identity[stretch])
            if moves and int(table.refs[before[r, block]]) > 1:
                fresh.append((r, block))
    if len(fresh) > int(table.free_count[0]):
        raise RuntimeError(f"the pool is full: {len(fresh)} pages are needed, {int(table.free_count[0])} are free")
    for r, block in fresh:
        table.block_table[r, block] = take_page(table)
    copies = [array.clone() for array in arrays]
    for r, count in enumerate(counts):
        for j, index in enumerate(indices[r, : max(count, 0)].tolist()):
            if j != index or (r, j // P) in fresh:
                for array, copy in zip(arrays, copies, strict=True):
                    array[int(table.block_table[r, j // P]), j % P] = copy[int(before[r, index // P]), index % P]
    for r, count in enumerate(counts):
        if count < 0:
            continue
        for block in range(blocks(count, P)):
            if (r, block) in fresh:
                give_up_page(table, int(before[r, block]))
        for block in range(blocks(count, P), blocks(int(table.lengths[r]), P)):
            give_up_page(table, int(before[r, block]))
        table.lengths[r] = count


def blocks(tokens: int, page_size: int) -> int:
    return -(-max(tokens, 0) // page_size)


def take_page(table: Any) -> int:
    table.free_count[0] -= 1
    page = int(table.free_pages[table.free_count[0]])
    table.refs[page] = 1
    return page


def give_up_page(table: Any, page: int) -> None:
    table.refs[page] -= 1
    if table.refs[page] == 0:
        table.free_pages[table.free_count[0]] = page
        table.free_count[0] += 1
