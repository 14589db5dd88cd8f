"""One decoded step of a cache that reads only the pages that may matter to its query, in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..support.checks import need, need_float, need_integer, need_parts
from .explained import explained_by
from .native import native
from .pages import PageTable, need_stored
from .step import NO_STEP_GRADIENT, need_paged_queries, need_rotation, need_tokens, run_step, step_results


class QuestStep(NamedTuple):
    """out: [B, Hq, 1, D] in the queries' dtype. lse: float32 [B, Hq, 1]. chosen: int32 [R, min(pages_read, blocks)],
    the pages of each row that its query read, rising; -1 behind the last one of a row that has fewer."""

    out: Tensor
    lse: Tensor
    chosen: Tensor


NO_GRADIENT = NO_STEP_GRADIENT.format("quest_step_")


def _check(
    queries: Tensor, keys: Tensor | None, values: Tensor | None, k_pages: Tensor, v_pages: Tensor, ranges: Tensor,
    table: PageTable, *, pages_read: int, cos: Tensor | None = None, sin: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    coded = key_scales is not None or value_scales is not None
    B, Hkv, _, D = need_paged_queries(queries, k_pages, table, coded)
    (R, blocks), dtype, device = table.block_table.shape, k_pages.dtype, table.refs.device
    need_integer("pages_read", pages_read, 1)
    need_stored(table, k_pages, v_pages, key_scales, value_scales, D, dtype)
    if coded:
        need_float("ranges", ranges, 3, "[R, N, 2D]")
        dtype = ranges.dtype
    capacity = ranges.shape[1] if isinstance(ranges, Tensor) and ranges.ndim == 3 else 0
    need_parts(device, ("ranges", ranges, dtype, (R, max(capacity, blocks), 2 * D)))
    need(ranges.is_contiguous(), "ranges must be contiguous")
    if keys is None or values is None:
        given = [name for name, x in (("keys", keys), ("values", values), ("cos", cos), ("sin", sin)) if x is not None]
        need(not given, f"keys and values must be given together, and with cos and sin; got {', '.join(given)} alone")
    else:
        need_tokens(keys, values, dtype, (B, Hkv, 1, D), device)
        need_rotation(cos, sin, D, device)


@explained_by(_check)
def quest_step_(
    queries: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    ranges: Tensor,
    table: PageTable,
    *,
    pages_read: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> QuestStep:
    """Rotates a new token of every sequence, appends it in place, and attends to the pages that may matter to it.

    queries: [B, Hq, 1, D], D 1..512; keys, values: [B, Hkv, 1, D] in the pages' dtype; un-rotated. keys and values
    None: the rows hold their newest token already, and the queries are rotated. k_pages, v_pages: contiguous
    [pages, P, D], P a power of two, of the rows of table, R = B*Hkv. The tokens stand at positions `lengths`, those of
    before the call. cos, sin: float32 [T, rotary_dim/2], indexed by position; None = nothing is rotated, as it must be
    without keys. ranges: contiguous [R, N, 2D] in the pages' dtype, N at least the columns of table.block_table: the
    largest of a page's keys and of the negated ones, M and -m; that of the newest page is joined with the new key, and
    begins with it where the token is the page's first. A page's score is the largest over the row's query heads of
    relu(q)·M + relu(-q)·(-m), +inf where that is NaN; a row reads its newest page and the others of highest score
    (ties: the earlier one), pages_read >= 1 in all, or every page of fewer. scale, softcap, sink_logits: as in decode.
    key_scales, value_scales: as in paged_step_; ranges are then of what the codes of keys stand for, dequantised to the
    dtype of the new keys and values, which is that of ranges.
    Returns QuestStep: the results of rope, append_tokens_, select_topk and decode in turn. Waits for nothing on CUDA.
    Raises ValueError for wrong shapes, dtypes, devices or numbers; RuntimeError if the free list is too short, a row
    outgrows its line of the table or names a page that does not exist, or a position is out of range (nothing is
    changed then; on CUDA free_count[1] grows where pages or columns run out or a page does not exist, and a position
    outside gives NaN); NotImplementedError if a backward pass comes here. Source: Quest, section 3.
    """
    found = run_step(
        NO_GRADIENT, native.quest_step_, queries, keys, values, (k_pages, v_pages, ranges, *table, pages_read), cos,
        sin, (), scale, softcap, sink_logits, key_scales, value_scales,
    )  # fmt: skip
    return QuestStep(*found)


@torch.library.register_fake("kvcompress::quest_step_")
def _(queries, keys, values, k_pages, v_pages, ranges, block_table, *rest):  # type: ignore[no-untyped-def]
    found = step_results(queries, keys, values, k_pages, v_pages, ranges, block_table, *rest)
    return *found, block_table.new_empty(block_table.shape[0], min(rest[4], block_table.shape[1]))
