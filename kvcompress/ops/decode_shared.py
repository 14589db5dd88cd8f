"""Attention by probabilities that another layer has computed, joined with a layer's own near keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..support.checks import (
    dense,
    dense_last,
    need,
    need_device,
    need_float,
    need_number,
    need_sequence,
    need_tensors,
)
from .decode import need_ends, need_lines, need_probabilities
from .explained import explained_by
from .native import MAX_HEAD_DIM, native
from .no_gradient import without_gradient
from .quantize import need_values


def _check(
    near: tuple[Tensor, Tensor], probabilities: Tensor, far_lse: Tensor, v_pages: Tensor, begin: Tensor, end: Tensor,
    *, block_table: Tensor, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    need_sequence("near", near, "(out, lse)")
    out, near_lse = near
    need_tensors(near_lse=near_lse, far_lse=far_lse, v_pages=v_pages, begin=begin, end=end, block_table=block_table)
    need_float("near", out, 4, "[B, Hq, 1, D]")
    B, Hq, S, D = out.shape
    need(S == 1, f"near must be of one query per head, [B, Hq, 1, D], got shape {tuple(out.shape)}")
    need(1 <= D <= MAX_HEAD_DIM, f"near must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need_probabilities(probabilities, B, Hq)
    for name, x in (("lse of near", near_lse), ("far_lse", far_lse)):
        good = x.dtype == torch.float32 and tuple(x.shape) == (B, Hq, 1)
        need(good, f"{name} must be float32 {(B, Hq, 1)}, got {x.dtype} {tuple(x.shape)}")
    if value_scales is None:
        need_float("v_pages", v_pages, 3, "[pages, P, D]")
        need(v_pages.shape[2] == D, f"v_pages must have head dim {D}, got {v_pages.shape[2]}")
    else:
        need_values(v_pages, value_scales, D)
        need_device(out, value_scales=value_scales)
    P = v_pages.shape[1]
    need(P > 0 and P & (P - 1) == 0, f"v_pages must have a page size that is a power of two, got {P}")
    need(v_pages.is_contiguous(), "v_pages must be contiguous")
    need_lines("block_table", block_table, need_ends(begin, end, B, Hq))
    need_device(
        out, near_lse=near_lse, far_lse=far_lse, probabilities=probabilities, v_pages=v_pages, block_table=block_table,
        begin=begin, end=end,
    )  # fmt: skip


@explained_by(_check)
def decode_shared(
    near: tuple[Tensor, Tensor],
    probabilities: Tensor,
    far_lse: Tensor,
    v_pages: Tensor,
    begin: Tensor,
    end: Tensor,
    *,
    block_table: Tensor,
    tau: float | None = None,
    value_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query's attention to near keys, joined with that to distant ones by another layer's probabilities.

    near: (out [B, Hq, 1, D], lse float32 [B, Hq, 1]) of decode over the near keys, D 1..512. probabilities, far_lse:
    what decode wrote and returned for the same tokens in the layer that leads, float32 [B, Hq, columns], any strides
    but the last, and float32 [B, Hq, 1]. v_pages: contiguous [pages, P, D], the layer's own values, P a power of two.
    value_scales: as in decode, of v_pages that hold codes.
    block_table: int32 [R, blocks], R = B*Hkv: value t of row r lies at [block_table[r, t // P], t % P]. begin, end:
    int32 [R]: column j weighs value begin_r + j < end_r. tau: a query head is skipped, and its near attention taken
    alone, if it has distant keys and gives the near ones at least this probability; the values of a KV head that are
    needed by none of its query heads are not read. None or 1 = nothing is skipped, 0 = everything.
    sink_logits are given to decode of the near keys alone: near's lse then includes the sink, the result is that of one
    softmax over near keys, distant ones and the sink, and tau is compared with the probability of near keys and sink.
    Returns (out [B, Hq, 1, D] in near's dtype, skipped bool [B, Hq, 1]). A side whose lse is -inf counts nothing.
    Raises ValueError for wrong shapes and tau, RuntimeError for rows outside the pages or longer than probabilities has
    columns, NotImplementedError if a backward pass comes here.
    Source: PoD, section 2.3, equation 4.
    """
    if tau is not None:
        need_number("tau", tau, 0, 1)
    out, near_lse = near
    found, skipped = without_gradient(
        "decode_shared has no gradient: it is for generation; use pod_attention, which is differentiable",
        (out, near_lse, probabilities, far_lse, v_pages), native.decode_shared, out.contiguous(),
        near_lse.contiguous(), dense_last(probabilities), far_lse.contiguous(), v_pages, dense(block_table),
        begin.contiguous(), end.contiguous(), gate_threshold(tau), value_scales,
    )  # fmt: skip
    return found, skipped.bool()


def gate_threshold(tau: float | None) -> float:
    """The least difference near lse - far lse of a gate of at least tau: ln(tau / (1 - tau)); +inf = none is skipped,
    as a gate that rounds to 1 must not be."""
    return math.inf if tau is None or tau == 1 else -math.inf if tau == 0 else math.log(tau / (1 - tau))


@torch.library.register_fake("kvcompress::decode_shared")
def _(near, near_lse, probabilities, far_lse, v_pages, block_table, begin, end, threshold, value_scales=None):  # type: ignore[no-untyped-def]
    parts = {"block_table": block_table, "value_scales": value_scales}
    _check((near, near_lse), probabilities, far_lse, v_pages, begin, end, **parts)
    return near.new_empty(near.shape), near.new_empty(near.shape[:3], dtype=torch.uint8)
