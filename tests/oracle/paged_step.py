"""One decoded step of a cache that keeps its tokens: rotation, append and attention in turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decode import decode
from .pages import append_tokens_
from .rope import rope


def paged_step_(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Any,
    *,
    shift: Tensor | None = None,
    begin: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    **softmax: Any,
) -> tuple[Tensor, Tensor]:
    """As ops.paged_step_; table: anything with the fields of ops.PageTable."""
    B, _, S, _ = queries.shape
    first = table.lengths if shift is None else table.lengths + shift
    positions = first.view(B, -1)[:, :1] + torch.arange(S, dtype=torch.int32, device=first.device)
    if cos is not None and sin is not None:
        queries, keys = (rope(x, cos, sin, positions) for x in (queries, keys))
    append_tokens_([k_pages, v_pages], [keys, values], table)
    return decode(
        queries, k_pages, v_pages, table.lengths, block_table=table.block_table, begin=begin, causal=True, **softmax
    )
