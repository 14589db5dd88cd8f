"""One decoded step of a cache that keeps its tokens, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import dense, need_device, need_int32
from .explained import explained_by
from .native import native
from .pages import PageTable
from .step import NO_STEP_GRADIENT, need_paged_step, run_step, step_results

NO_GRADIENT = NO_STEP_GRADIENT.format("paged_step_")


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable, *,
    shift: Tensor | None = None, begin: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    B, Hkv, _ = need_paged_step(
        queries, keys, values, k_pages, v_pages, table, key_scales, value_scales, cos, sin, one=False
    )
    need_int32("shift", shift, (B * Hkv,))
    need_int32("begin", begin, (B * Hkv,))
    need_device(table.refs, shift=shift, begin=begin)


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
    out, lse = run_step(
        NO_GRADIENT, native.paged_step_, queries, keys, values,
        (k_pages, v_pages, *table, dense(shift), dense(begin)), cos, sin, (), scale, softcap, sink_logits,
        key_scales, value_scales,
    )  # fmt: skip
    return out, lse


torch.library.register_fake("kvcompress::paged_step_", step_results)
