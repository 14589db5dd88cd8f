"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import dense, dense_last, need, need_device, need_float, need_int32, need_tensors
from .explained import explained_by
from .native import native


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, **others: object) -> None:
    need_float("x", x, 4, "[B, H, T, D]")
    B, _, T, D = x.shape
    need_tensors(cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        need(table.dtype == torch.float32, f"{name} must be float32, got {table.dtype}")
    need(cos.ndim == 2 and cos.shape == sin.shape, f"cos and sin must be [P, rotary_dim/2], got {tuple(cos.shape)}")
    need(2 * cos.shape[1] <= D, f"cos and sin rotate {2 * cos.shape[1]} dimensions, but x has only {D}")
    need_int32("positions", positions, (B, T))
    need(positions is not None or T <= cos.shape[0], f"cos and sin need {T} rows, got {cos.shape[0]}")
    need_device(x, cos=cos, sin=sin, positions=positions)


@explained_by(_check)
def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, inverse: bool = False) -> Tensor:
    """Rotates queries or keys by the angles of their positions; differentiable in x.

    x: [B, H, T, D]. cos, sin: float32 [P, rotary_dim/2], one row per position, rotary_dim <= D even; the rest of D
    passes through. positions: int32 [B, T], rows of the tables; None = 0..T-1. inverse: rotate back.
    Returns [B, H, T, D], contiguous, dtype of x, computed in float32. R(a)R(b) = R(a+b): keys move from one position to
    another by a second call with the rows of the difference (inverse=True for a negative one).
    Raises ValueError for wrong shapes or dtypes, RuntimeError for a position outside the tables (on CUDA such a
    token becomes NaN instead: checking would wait for the device).
    Source: RoFormer, equation 34, with halves paired as transformers' rotate_half.
    """
    return native.rope(dense_last(x), cos.contiguous(), sin.contiguous(), dense(positions), inverse)


@torch.library.register_fake("kvcompress::rope")
def _(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    _check(x, cos, sin, positions)
    return x.new_empty(x.shape)


def _rope_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, cos, sin, positions, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _rope_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    # a rotation's transpose is the rotation back
    cos, sin, positions = ctx.saved_tensors
    return native.rope(dense_last(grad), cos, sin, positions, not ctx.inverse), None, None, None, None


torch.library.register_autograd("kvcompress::rope", _rope_backward, setup_context=_rope_setup)
