"""DMC's cache: every new token opens a slot or joins the newest one, one token after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .pages import blocks, give_up_page, take_page
from .rope import rope


def dmc_append_(
    k_pages: Tensor,
    v_pages: Tensor,
    table: Any,
    tail: Any,
    keys: Tensor,
    values: Tensor,
    alpha: Tensor,
    omega: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    neuron: int | None = None,
    window: int | None = None,
) -> None:
    """As ops.dmc_append_; table, tail: anything with the fields of ops.PageTable and ops.Tail."""
    R, (_, H, S, _), P = len(table.lengths), keys.shape, k_pages.shape[1]
    lengths, added = table.lengths.tolist(), [S] * R if counts is None else counts.tolist()
    keys, values, alpha, omega = (x.clone() for x in (keys, values, alpha, omega))  # they may be views of pages or tail
    positions = None if positions is None else positions.clone()
    merges, copied, needed = [], [], 0
    for r in range(R):
        joins, open_slot = [], lengths[r] > 0 and int(tail.counts[r]) > 0
        for s in range(S - added[r], S):
            joins.append(open_slot and float(alpha[r // H, r % H, s]) > 0.5)
            open_slot = True
        writes_last = (lengths[r] > 0 and any(joins[:1])) or (added[r] > 0 and lengths[r] % P > 0)
        last = int(table.block_table[r, (lengths[r] - 1) // P]) if writes_last else -1
        copied.append(last if writes_last and int(table.refs[last]) > 1 else None)
        needed += blocks(lengths[r] + joins.count(False), P) - blocks(lengths[r], P) + (copied[r] is not None)
        merges.append(joins)
    if needed > int(table.free_count[0]):
        raise RuntimeError(f"the pool is full: {needed} pages are needed, {int(table.free_count[0])} are free")
    for r, joins in enumerate(merges):
        length, page = lengths[r], copied[r]
        if page is not None:
            own = take_page(table)
            table.block_table[r, (length - 1) // P] = own
            for pages in (k_pages, v_pages):
                pages[own] = pages[page]
        for block in range(blocks(length, P), blocks(length + joins.count(False), P)):
            table.block_table[r, block] = take_page(table)
        for i, joined in enumerate(joins):
            b, h, s = r // H, r % H, S - len(joins) + i
            key = keys[b, h, s].float().clone()
            if neuron is not None:
                key[neuron] = 0
            if not joined:
                length += 1
            add_to_tail(tail, r, key, values[b, h, s].float(), omega[b, h, s], joined, window)
            key, value = mean_of_tail(tail, r, window)
            if cos is not None and sin is not None:
                position = s if positions is None else int(positions[b, s])
                key = rope(key[None, None, None], cos[position : position + 1], sin[position : position + 1])[0, 0, 0]
            if neuron is not None:
                key[neuron] = 0
            page, place = int(table.block_table[r, (length - 1) // P]), (length - 1) % P
            k_pages[page, place], v_pages[page, place] = key.to(k_pages.dtype), value.to(v_pages.dtype)
        table.lengths[r] = length
    for page in copied:
        if page is not None:
            give_up_page(table, page)


def add_to_tail(
    tail: Any, r: int, key: Tensor, value: Tensor, weight: Tensor, joined: bool, window: int | None
) -> None:
    count = int(tail.counts[r]) if joined else 0
    tail.counts[r] = count + 1
    if window is not None:  # a ring of the newest slot's last tokens
        place = count % window
        tail.keys[r, place], tail.values[r, place], tail.weights[r, place] = key, value, weight
        return
    old = tail.weights[r, 0] if joined else torch.zeros_like(weight)
    z = old + weight
    for mean, x in ((tail.keys, key), (tail.values, value)):
        mean[r, 0] = old / z * mean[r, 0] + weight / z * x if joined else x
    tail.weights[r, 0] = z


def mean_of_tail(tail: Any, r: int, window: int | None) -> tuple[Tensor, Tensor]:
    if window is None:
        return tail.keys[r, 0].clone(), tail.values[r, 0].clone()
    held = min(int(tail.counts[r]), window)
    share = tail.weights[r, :held] / tail.weights[r, :held].sum()
    return share @ tail.keys[r, :held], share @ tail.values[r, :held]
