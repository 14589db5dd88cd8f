"""One decoded step of a layer of PoD: rotation, two appends, near and distant tokens in turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decode import decode, decode_shared, merge_states
from .pages import append_tokens_
from .rope import rope


def pod_step_(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Any,
    value_table: Any,
    places: Tensor,
    *,
    sinks: int,
    recent: int,
    first: int,
    far: str = "none",
    moved: Tensor | None = None,
    probabilities: Tensor | None = None,
    far_lse: Tensor | None = None,
    lead: Any = None,
    tau: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    sink_logits: Tensor | None = None,
    **softmax: Any,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As ops.pod_step_; tables: anything with the fields of ops.PageTable."""
    if cos is not None and sin is not None:
        queries, keys = (rope(x, cos, sin, places) for x in (queries, keys))
    append_tokens_([k_pages], [keys], table)
    append_tokens_([v_pages], [values], value_table)
    places += 1
    held, total, lines = table.lengths, value_table.lengths, value_table.block_table
    pages = torch.arange(table.block_table.shape[1], device=held.device).expand(len(held), -1)
    if moved is not None:
        pages = torch.where(pages < first, pages, pages + moved[:, None])
    near_lines = lines.gather(1, pages.clamp(0, lines.shape[1] - 1))
    near = decode(
        queries, k_pages, v_pages, held, block_table=table.block_table, value_table=near_lines,
        begin=(held - recent).clamp(min=0), sinks=sinks, sink_logits=sink_logits, **softmax,
    )  # fmt: skip
    begin = total.clamp(max=sinks)
    end = torch.maximum(total - recent, begin)
    if far == "none":
        return near[0], queries, near[1], None
    if far == "shared":
        assert probabilities is not None and far_lse is not None
        out, skipped = decode_shared(near, probabilities, far_lse, v_pages, begin, end, block_table=lines, tau=tau)
        return out, queries, None, skipped
    own = far == "own"
    distant = decode(
        queries if own else lead.queries, k_pages if own else lead.k_pages, v_pages, end, begin=begin,
        block_table=table.block_table if own else lead.block_table, value_table=lines,
        probabilities=probabilities if own else None, **softmax,
    )  # fmt: skip
    if own and far_lse is not None:
        far_lse.copy_(distant[1])
    out, lse = merge_states(near, distant)
    return out, queries, lse, None
