"""One decoded step of a cache that keeps its tokens, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import (
    FLOATS,
    dense,
    dense_last,
    need,
    need_device,
    need_float,
    need_int32,
    need_scale,
    need_sink_logits,
    need_softcap,
    need_tensor,
)
from .dmc_append import need_tables
from .explained import explained_by, need_one_device
from .native import MAX_HEAD_DIM, native
from .no_gradient import without_gradient
from .pages import PageTable, need_table
from .quantize import need_pages

NO_STEP_GRADIENT = "{} has no gradient: it is for generation; use torch.no_grad(), or train without a cache"

NO_GRADIENT = NO_STEP_GRADIENT.format("paged_step_")


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable, *,
    shift: Tensor | None = None, begin: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    """ValueError or TypeError for the first argument of paged_step_ that is wrong."""
    need_table(table)
    coded = key_scales is not None or value_scales is not None
    need_step(queries, k_pages, table, coded)
    (B, _, S, D), R = queries.shape, table.block_table.shape[0]
    Hkv, device = R // B if B else 0, table.refs.device
    dtype = need_rows(keys, k_pages, v_pages, key_scales, value_scales, table, D)
    need_parts(device, ("keys", keys, dtype, (B, Hkv, S, D)), ("values", values, dtype, (B, Hkv, S, D)))
    if shift is not None or begin is not None:
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
    if not isinstance(queries, Tensor) or queries.ndim != 4 or queries.dtype not in FLOATS:
        need_float("queries", queries, 4, "[B, Hq, S, D]")
    B, Hq, _, D = queries.shape
    R = table.block_table.shape[0]
    if B == 0 or R == 0 or R % B or Hq == 0 or Hq % (R // B):
        raise ValueError(f"block_table must have B*Hkv rows with B = {B} and Hkv dividing Hq = {Hq}, got {R}")
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"queries must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need_device(table.refs, queries=queries)


def need_page_size(k_pages: Tensor, coded: bool) -> None:
    """Pages of floats, or of codes, whose size is a power of two."""
    if not isinstance(k_pages, Tensor) or k_pages.ndim != 3 or not (coded or k_pages.dtype in FLOATS):
        need_float("k_pages", k_pages, 3, "[pages, P, D]")
    P = k_pages.shape[1]
    if P < 1 or P & (P - 1):
        raise ValueError(f"k_pages must have a page size that is a power of two, got {P}")


def need_stored(
    table: PageTable, k_pages: Tensor, v_pages: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, D: int,
    dtype: torch.dtype, value_table: PageTable | None = None,
) -> None:  # fmt: skip
    """All pages of a table, of numbers of this dtype or of codes. value_table: of the values, None = the same."""
    pages = (table.refs.shape[0], k_pages.shape[1], D)
    value_pages: tuple[int, ...] = ((value_table or table).refs.shape[0], *pages[1:])
    kinds = (dtype, dtype)
    if key_scales is not None or value_scales is not None:
        need_pages(k_pages, v_pages, key_scales, value_scales, D, value_pages[0])
        need_device(table.refs, key_scales=key_scales, value_scales=value_scales)
        kinds, value_pages = (torch.int8, v_pages.dtype), tuple(v_pages.shape)
    need_parts(table.refs.device, ("k_pages", k_pages, kinds[0], pages), ("v_pages", v_pages, kinds[1], value_pages))


def need_rows(
    keys: Tensor, k_pages: Tensor, v_pages: Tensor, key_scales: Tensor | None, value_scales: Tensor | None,
    table: PageTable, D: int, value_table: PageTable | None = None,
) -> torch.dtype:  # fmt: skip
    """The same of rows that take new tokens; gives the dtype that their keys and values must have."""
    need_stored(table, k_pages, v_pages, key_scales, value_scales, D, k_pages.dtype, value_table)
    if key_scales is None and value_scales is None:
        return k_pages.dtype
    need_float("keys", keys, 4, "[B, Hkv, S, D]")
    return keys.dtype


def need_parts(device: torch.device, *parts: tuple[str, Tensor, torch.dtype, tuple[int, ...]]) -> None:
    """Tensors of one dtype and shape each, on a device; those whose names end in pages are contiguous."""
    for name, x, kind, size in parts:
        if not isinstance(x, Tensor):
            need_tensor(name, x)
        if x.dtype != kind or x.shape != size or x.device != device:
            raise ValueError(f"{name} must be {kind} {size} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}")
        if name.endswith("pages") and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


@torch.library.register_fake("kvcompress::paged_step_")
def _(queries, *rest):  # type: ignore[no-untyped-def]
    need_one_device(queries, *rest)
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)
