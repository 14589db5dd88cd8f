"""One decoded step of a cache that keeps its tokens, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import (
    dense,
    dense_last,
    need,
    need_device,
    need_float,
    need_int32,
    need_parts,
    need_scale,
    need_sink_logits,
    need_softcap,
    need_tables,
)
from .explained import explained_by, need_one_device
from .native import MAX_HEAD_DIM, native
from .no_gradient import without_gradient
from .pages import PageTable, need_page_size, need_rows, need_table

NO_STEP_GRADIENT = "{} has no gradient: it is for generation; use torch.no_grad(), or train without a cache"

NO_GRADIENT = NO_STEP_GRADIENT.format("paged_step_")


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable, *,
    shift: Tensor | None = None, begin: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    need_table(table)
    coded = key_scales is not None or value_scales is not None
    need_step(queries, k_pages, table, coded)
    (B, _, S, D), R = queries.shape, table.block_table.shape[0]
    Hkv, device = R // B if B else 0, table.refs.device
    dtype = need_rows(keys, k_pages, v_pages, key_scales, value_scales, table, D)
    need_parts(device, ("keys", keys, dtype, (B, Hkv, S, D)), ("values", values, dtype, (B, Hkv, S, D)))
    need_int32("shift", shift, (R,))
    need_int32("begin", begin, (R,))
    need_device(table.refs, shift=shift, begin=begin)
    if cos is not None or sin is not None:
        need_tables(cos, sin, D, table.refs.device)


@explained_by(_check)
def paged_step_(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: PageTable,
    *,
    shift: Tensor | None = None,
    begin: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates a few new tokens of every sequence, appends them to its rows in place, and attends from them.

    queries: [B, Hq, S, D], D 1..512; keys, values: [B, Hkv, S, D] in the pages' dtype; un-rotated. k_pages, v_pages:
    contiguous [pages, P, D], P a power of two, of the rows of table, R = B*Hkv. The tokens stand at positions lengths +
    shift and on, lengths of before the call; shift: int32 [R], None = 0; that of a sequence's first row counts. cos,
    sin: float32 [T, rotary_dim/2], indexed by position; None = nothing is rotated. begin: int32 [R]: a query sees a
    row's keys from there on, up to its own token; None = 0. scale, softcap, sink_logits: as in decode.
    key_scales, value_scales: as in decode, changed in place too: k_pages and v_pages hold codes, and the rotated keys
    and the values, then of any one dtype, are quantised before they are appended.
    Returns (out [B, Hq, S, D] in the queries' dtype, lse float32 [B, Hq, S]): the bits of rope, quantize,
    append_tokens_ and decode(causal=True) in turn. Waits for nothing on CUDA.
    Raises ValueError for wrong shapes, dtypes or devices; RuntimeError if the free list is too short, a row outgrows
    its line of the table or names a page that does not exist, or a position or begin is out of range (nothing is
    changed then; on CUDA free_count[1] grows where pages or columns run out or a page does not exist, and a position
    outside gives NaN); NotImplementedError if a backward pass comes here.
    """
    B, Hq, _, D = queries.shape
    need(B > 0, "queries must be of at least one sequence, got 0")
    return without_gradient(
        NO_GRADIENT, (queries, keys, values), native.paged_step_, dense_last(queries), dense_last(keys),
        dense_last(values), k_pages, v_pages, *table, dense(shift), dense(begin), dense(cos),
        dense(sin), need_scale(scale, D), need_sink_logits(sink_logits, Hq, queries), need_softcap(softcap),
        key_scales, value_scales,
    )  # fmt: skip


def need_step(queries: Tensor, k_pages: Tensor, table: PageTable, coded: bool = False) -> None:
    """Queries that the rows of a table belong to, and pages as need_page_size wants them."""
    need_page_size(k_pages, coded)
    need_float("queries", queries, 4, "[B, Hq, S, D]")
    B, Hq, _, D = queries.shape
    R = table.block_table.shape[0]
    if B == 0 or R == 0 or R % B or Hq == 0 or Hq % (R // B):
        raise ValueError(f"block_table must have B*Hkv rows with B = {B} and Hkv dividing Hq = {Hq}, got {R}")
    need(1 <= D <= MAX_HEAD_DIM, f"queries must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need_device(table.refs, queries=queries)


@torch.library.register_fake("kvcompress::paged_step_")
def _(queries, *rest):  # type: ignore[no-untyped-def]
    need_one_device(queries, *rest)
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)
