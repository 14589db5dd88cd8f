"""The largest scores of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import dense, need, need_device, need_int32, need_integer, need_tensors
from .explained import explained_by
from .native import native


def _check(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> None:
    need_tensors(scores=scores)
    need(scores.dtype == torch.float32, f"scores must be float32, got {scores.dtype}")
    need(scores.ndim == 2, f"scores must be [R, T], got shape {tuple(scores.shape)}")
    good = isinstance(k, (int, torch.SymInt)) and not isinstance(k, bool) and 0 <= k <= scores.shape[1]
    need(good, f"k must be between 0 and T = {scores.shape[1]}, got {k!r}")
    need_int32("lengths", lengths, (scores.shape[0],))
    need_device(scores, lengths=lengths)


@explained_by(_check)
def select_topk(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> Tensor:
    """Places of the k largest scores of each row, in rising order.

    scores: float32 [R, T]. k: 0..T. lengths: int32 [R], candidates per row (the first ones), each at least k; None = T.
    Returns int32 [R, k]. Ties go to the lower index; NaN is never chosen; infinities are ordinary values.
    Raises ValueError for wrong shapes; RuntimeError if a row has fewer than k candidates that are not NaN (on CUDA the
    missing places are -1 instead: checking would wait for the device).
    """
    need_integer("k", k, 0)
    return native.select_topk(scores.contiguous(), k, dense(lengths))


@torch.library.register_fake("kvcompress::select_topk")
def _(scores: Tensor, k: int, lengths: Tensor | None) -> Tensor:
    _check(scores, k, lengths=lengths)
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)
