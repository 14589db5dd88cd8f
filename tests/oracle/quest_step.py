"""One decoded step that reads only the pages that may matter to it: rotation, append, choice and attention in turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decode import decode
from .pages import append_tokens_
from .rope import rope


def quest_step_(
    queries: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    ranges: Tensor,
    table: Any,
    *,
    pages_read: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    **softmax: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.quest_step_; table: anything with the fields of ops.PageTable."""
    B, P = queries.shape[0], k_pages.shape[1]
    if keys is not None and values is not None:
        if cos is not None and sin is not None:
            queries, keys = (rope(x, cos, sin, table.lengths.view(B, -1)[:, :1]) for x in (queries, keys))
        append_tokens_([k_pages, v_pages], [keys, values], table)
        note_key_(k_pages, ranges, table)
    chosen = choose(queries, ranges, table.lengths, P, min(pages_read, table.block_table.shape[1]))
    pages = table.block_table.gather(1, chosen.clamp(min=0).long())
    # the newest page comes last and is the only one that is not full
    end = table.lengths - (-(-table.lengths // P) - (chosen >= 0).sum(1)) * P
    out, lse = decode(queries, k_pages, v_pages, end.to(torch.int32), block_table=pages, **softmax)
    return out, lse, chosen


def note_key_(k_pages: Tensor, ranges: Tensor, table: Any) -> None:
    """Joins the range of every row's newest page with the row's newest key."""
    P = k_pages.shape[1]
    for r, length in enumerate(table.lengths.tolist()):
        block, slot = divmod(length - 1, P)
        key = k_pages[table.block_table[r, block], slot]
        bounds = torch.cat([key, -key])
        ranges[r, block] = torch.maximum(ranges[r, block], bounds) if slot else bounds


def choose(queries: Tensor, ranges: Tensor, lengths: Tensor, page_size: int, width: int) -> Tensor:
    """Places of the pages that rotated queries [B, Hq, 1, D] read, int32 [R, width], -1 behind the last one."""
    R = lengths.shape[0]
    q = queries.reshape(R, -1, queries.shape[3]).double()
    scores = torch.matmul(torch.cat([q, -q], dim=-1).relu(), ranges.double().transpose(1, 2)).amax(1)
    scores.masked_fill_(scores.isnan(), torch.inf)
    chosen = torch.full((R, width), -1, dtype=torch.int32, device=lengths.device)
    for r, length in enumerate(lengths.tolist()):
        blocks = -(-length // page_size)
        count = min(width, blocks)
        older = scores[r, : max(blocks - 1, 0)].sort(descending=True, stable=True).indices[: max(count - 1, 0)]
        read = [*older.sort().values.tolist(), *([blocks - 1] if blocks else [])]
        chosen[r, :count] = torch.tensor(read, dtype=torch.int32)
    return chosen
