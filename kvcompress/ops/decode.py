"""Attention of a few queries over rows in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..support.checks import (
    dense,
    dense_last,
    need,
    need_device,
    need_float,
    need_int32,
    need_integer,
    need_scale,
    need_sink_logits,
    need_softcap,
    need_tensor,
    need_tensors,
)
from .explained import explained_by
from .native import MAX_HEAD_DIM, native
from .no_gradient import without_gradient
from .quantize import need_pages


def _check(
    queries: Tensor, k_pages: Tensor, v_pages: Tensor, end: Tensor, *, block_table: Tensor | None = None,
    value_table: Tensor | None = None, begin: Tensor | None = None, probabilities: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    need_float("queries", queries, 4, "[B, Hq, S, D]")
    need_tensors(k_pages=k_pages, v_pages=v_pages, end=end)
    B, Hq, _, D = queries.shape
    need_pages(k_pages, v_pages, key_scales, value_scales, D, (k_pages if value_table is None else v_pages).shape[0])
    need(1 <= D <= MAX_HEAD_DIM, f"queries must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    R, P = need_ends(begin, end, B, Hq), k_pages.shape[1]
    if block_table is None:
        need(k_pages.shape[0] >= R, f"k_pages must hold one page for each of {R} rows, got {k_pages.shape[0]}")
    else:
        need_lines("block_table", block_table, R)
        need(P > 0 and P & (P - 1) == 0, f"k_pages must have a page size that is a power of two, got {P}")
    if value_table is not None:
        need(block_table is not None, "value_table needs a block_table")
        need_lines("value_table", value_table, R)
    need_device(
        queries, k_pages=k_pages, v_pages=v_pages, block_table=block_table, value_table=value_table, begin=begin,
        end=end, key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    need(k_pages.is_contiguous() and v_pages.is_contiguous(), "k_pages and v_pages must be contiguous")
    if probabilities is not None:
        need(queries.shape[2] == 1, f"probabilities are of one query per head, got {queries.shape[2]}")
        need_probabilities(probabilities, B, Hq)
        need(probabilities.is_contiguous(), "probabilities must be contiguous")
        need_device(queries, probabilities=probabilities)


@explained_by(_check)
def decode(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    end: Tensor,
    *,
    block_table: Tensor | None = None,
    value_table: Tensor | None = None,
    begin: Tensor | None = None,
    sinks: int = 0,
    scale: float | None = None,
    causal: bool = False,
    probabilities: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a few queries over rows of any length kept in pages.

    queries: [B, Hq, S, D], D 1..512. k_pages, v_pages: contiguous [pages, P, D], P a power of two. block_table: int32
    [R, blocks], R = B*Hkv: key t of row r lies at [block_table[r, t // P], t % P]; None = row r is page r, whatever
    P. value_table: int32 [R, blocks], the same of values where they do not lie as the keys do (each of the two may then
    have its own number of pages and of blocks); None = as the keys. begin, end: int32 [R]: a query sees keys
    begin_r <= t < end_r, and the first `sinks` of those before begin_r; causal: the row's last S keys are the queries'
    own tokens, query s sees t < end_r - (S-1-s).
    scale: factor of the logits, None = 1/sqrt(D). probabilities: contiguous float32 [B, Hq, columns], written, for
    S = 1 without sinks: column j of a head becomes the softmax probability of key begin_r + j; columns behind a row's
    keys keep what they had. softcap: logits become softcap * tanh(logit / softcap); None = as they are.
    sink_logits: float32 [Hq] whatever the dtype of queries (callers convert), finite or -inf = none: one more column in
    the softmax of each query of a head, of a key without a value, which adds exp(sink_logits) to the sum; not scaled,
    not capped. lse includes it: of segments that are merged, exactly one is given it.
    key_scales, value_scales: contiguous float16 [pages, P], where keys and values are codes as quantize makes them:
    k_pages int8, v_pages int8, or uint8 [pages, P, D/2] of 4 bits (k8v4). On the CPU up to 8 queries of a row (G*S) are
    multiplied as 16-bit integers: out, of 4 bits before it is turned back, is what the dequantised rows would give but
    for 0.2 % of the largest share that a value of 128 has in it, at worst; on CUDA weights of 16-bit queries have 8
    bits (kvc.h has the bounds).
    Returns (out [B, Hq, S, D] in the queries' dtype, lse float32 [B, Hq, S], natural logarithm). A query that sees no
    key gets out 0 and lse -inf, with a sink lse = sink. Raises ValueError for wrong shapes, dtypes, scale or
    softcap, RuntimeError for rows outside the pages or longer than probabilities has columns, NotImplementedError if a
    backward pass comes here (attention is differentiable).
    """
    need_integer("sinks", sinks, 0)
    rows = dense_last(queries), k_pages, v_pages, dense(block_table), dense(value_table), dense(begin), end.contiguous()
    logits = need_sink_logits(sink_logits, queries.shape[1], queries), need_softcap(softcap)
    factor, op = need_scale(scale, queries.shape[3]), native.decode
    arguments: tuple[Any, ...] = (*rows, factor, causal, sinks, *logits, key_scales, value_scales)
    if probabilities is not None:
        need(sinks == 0, f"sinks must be 0 where probabilities are written, got {sinks}")
        op, arguments = native.decode_probabilities, (*rows, probabilities, factor, *logits, key_scales, value_scales)
    return without_gradient(
        "decode has no gradient: it is for generation; use attention, which is differentiable, or torch.no_grad()",
        (queries, k_pages, v_pages, *(() if sink_logits is None else (sink_logits,))), op, *arguments,
    )  # fmt: skip


def need_ends(begin: Tensor | None, end: Tensor, B: int, Hq: int) -> int:
    """Where the keys of rows lie, of which there are as many as it gives."""
    R = end.shape[0] if end.ndim == 1 else 0
    need(
        B > 0 and R > 0 and R % B == 0 and Hq % (R // B) == 0,
        f"end must have B*Hkv entries with B = {B} and Hkv dividing Hq = {Hq}, got shape {tuple(end.shape)}",
    )
    need_int32("end", end, (R,))
    need_int32("begin", begin, (R,))
    return R


def need_lines(name: str, table: Tensor, R: int) -> None:
    need_tensor(name, table)
    need(table.ndim == 2, f"{name} must be [R, blocks], got shape {tuple(table.shape)}")
    need_int32(name, table, (R, table.shape[1]))


def need_probabilities(x: Tensor, batch: int, heads: int) -> None:
    wanted = f"probabilities must be float32 [{batch}, {heads}, columns]"
    need_tensor("probabilities", x)
    need(x.dtype == torch.float32 and x.ndim == 3, f"{wanted}, got {x.dtype} {tuple(x.shape)}")
    need(tuple(x.shape[:2]) == (batch, heads), f"{wanted}, got shape {tuple(x.shape)}")


def _fake(  # type: ignore[no-untyped-def]
    queries, k_pages, v_pages, block_table, value_table, begin, end, probabilities=None, *scales
):
    others = {"value_table": value_table, "begin": begin, "probabilities": probabilities}
    others |= dict(zip(("key_scales", "value_scales"), scales, strict=False))
    _check(queries, k_pages, v_pages, end, block_table=block_table, **others)
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)


# without scale, causal, sinks, sink_logits and softcap
torch.library.register_fake("kvcompress::decode", lambda *given: _fake(*given[:7], None, *given[12:]))
torch.library.register_fake("kvcompress::decode_probabilities", lambda *given: _fake(*given[:8], *given[11:]))
