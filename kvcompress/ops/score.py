"""Scores of keys by the attention that a window of queries pays to them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import (
    dense,
    dense_last,
    need,
    need_choice,
    need_device,
    need_heads,
    need_int32,
    need_integer,
    need_scale,
    need_sink_logits,
    need_softcap,
)
from .explained import explained_by
from .native import MAX_HEAD_DIM, native
from .no_gradient import without_gradient

REDUCTIONS = ("mean", "sum", "max")
POOLINGS = ("avg", "max")


def _need_sizes(*sizes: int) -> None:
    for name, size in zip(("skip_last", "mask_first", "mask_last", "kernel_size"), sizes, strict=True):
        need_integer(name, size, 0)


def _check(
    queries: Tensor, keys: Tensor, *, kernel_size: int = 5, lengths: Tensor | None = None,
    skip_last: int | None = None, mask_first: int = 0, mask_last: int = 0, **others: object,
) -> None:  # fmt: skip
    B, Hq, W, D, Hkv, T = need_heads(queries, keys, "[B, Hq, W, D]", "[B, Hkv, T, D]")
    need(W >= 1, f"queries must hold at least 1 token, got {W}")
    skip_last = W if skip_last is None else skip_last
    _need_sizes(skip_last, mask_first, mask_last, kernel_size)
    need(T >= W, f"keys must be at least as many as the window's {W} queries, got {T}")
    need(skip_last < T, f"keys must be longer than skip_last = {skip_last} (default: the window), got {T}")
    need(kernel_size >= 1 and kernel_size % 2 == 1, f"kernel_size must be odd and at least 1, got {kernel_size}")
    need_int32("lengths", lengths, (B,))
    if queries.is_cuda:
        need(D <= MAX_HEAD_DIM, f"queries on CUDA must have a head dim of at most {MAX_HEAD_DIM}, got {D}")
    need_device(queries, keys=keys, lengths=lengths)


@explained_by(_check)
def window_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float | None = None,
    reduce: str = "mean",
    pooling: str = "avg",
    kernel_size: int = 5,
    lengths: Tensor | None = None,
    skip_last: int | None = None,
    mask_first: int = 0,
    mask_last: int = 0,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention that a window of queries pays to each key: SnapKV, CGE, H2O and TOVA are settings of it.

    queries: [B, Hq, W, D] rotated, the last W tokens. keys: [B, Hkv, T, D] rotated, T >= W. lengths: int32 [B], keys
    per sequence, at least W and skip_last, at most T; None = all T. scale: factor of the logits, None =
    1/sqrt(D). skip_last: keys at the end that get no score, None = W. mask_first, mask_last: keys at the start and at
    the end that are left out of the softmax; their scores are 0. softcap: logits become softcap * tanh(logit /
    softcap); None = as they are. sink_logits: float32 [Hq] whatever the dtype of queries (callers convert), finite or
    -inf = none: exp(sink_logits) is added to the softmax's sum for each query of a head, whatever is masked.
    Returns float32 [B, Hkv, T - skip_last]: softmax over all keys that a query sees (causal inside the window), then
    `reduce` (mean, sum or max) over the W queries and the G query heads of a KV head, then `pooling` over kernel_size
    neighbours (avg: zeros count at the edges; max: neighbours that exist). Entries past lengths - skip_last are 0.
    Raises ValueError for wrong shapes, dtypes, scale or softcap, T <= skip_last or an even kernel_size, and on CUDA for
    a head dim above 512; RuntimeError for lengths out of range; NotImplementedError if a backward pass comes here
    (reference.window_scores is differentiable).
    Memory: at most 10 MiB more than linear in T, on CUDA linear in W and T; the [W, T] matrix is never held. On CUDA,
    products of 16-bit queries and keys of the same dtype run on tensor cores.
    Source: SnapKV, section 4; IntelLLM, Algorithm 1; H2O (all queries, sum, skip_last 0); TOVA (W 1, skip_last 0).
    """
    skip_last = queries.shape[2] if skip_last is None else skip_last
    _need_sizes(skip_last, mask_first, mask_last, kernel_size)
    return without_gradient(
        "window_scores has no gradient; detach the scores",
        (queries, keys, *(() if sink_logits is None else (sink_logits,))),
        native.window_scores,
        dense_last(queries),
        dense_last(keys),
        dense(lengths),
        need_scale(scale, queries.shape[3]),
        need_choice("reduce", reduce, REDUCTIONS),
        need_choice("pooling", pooling, POOLINGS),
        kernel_size,
        skip_last,
        mask_first,
        mask_last,
        need_sink_logits(sink_logits, queries.shape[1], queries),
        need_softcap(softcap),
    )


@torch.library.register_fake("kvcompress::window_scores")
def _(queries, keys, lengths, scale, reduce, pool, kernel_size, skip_last, *rest):  # type: ignore[no-untyped-def]
    _check(queries, keys, kernel_size=kernel_size, lengths=lengths, skip_last=skip_last)
    shape = (queries.shape[0], keys.shape[1], keys.shape[2] - skip_last)
    return queries.new_empty(shape, dtype=torch.float32)
