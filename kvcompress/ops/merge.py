"""Joining attention over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import need, need_device, need_float, need_sequence, need_tensors
from .explained import explained_by
from .native import native


def _check(*states: tuple[Tensor, Tensor]) -> None:
    need(len(states) > 0, "states must hold at least one (out, lse) pair, got none")
    for i, state in enumerate(states):
        need_sequence(f"states[{i}]", state, "(out, lse)")
        need(len(state) == 2, f"states[{i}] must be (out, lse), got {len(state)} elements")
        need_tensors(out=state[0], lse=state[1])
    out, lse = states[0]
    need_float("out", out, 4, "[B, Hq, S, D]")
    need(lse.dtype == torch.float32, f"lse must be float32, got {lse.dtype}")
    need(lse.shape == out.shape[:3], f"lse must be {tuple(out.shape[:3])}, got {tuple(lse.shape)}")
    need_device(out, lse=lse)
    for other, other_lse in states[1:]:
        need(
            other.shape == out.shape and other.dtype == out.dtype,
            f"every out must be {out.dtype} {tuple(out.shape)}, got {other.dtype} {tuple(other.shape)}",
        )
        need(other_lse.dtype == torch.float32, f"lse must be float32, got {other_lse.dtype}")
        need(other_lse.shape == lse.shape, f"every lse must be {tuple(lse.shape)}, got {tuple(other_lse.shape)}")
        need_device(out, out=other, lse=other_lse)


@explained_by(_check)
def merge_states(*states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint sets of keys from their (out, lse).

    states: one or more (out [B, Hq, S, D], lse float32 [B, Hq, S]). Returns (out, lse) of attention over all the sets
    together. A set with lse -inf (no keys) changes nothing. Differentiable in every out and lse.
    Raises ValueError for no states or unequal shapes.
    """
    if len(states) == 1:  # which nobody else looks at
        _check(*states)
    out, lse = states[0]
    for other, other_lse in states[1:]:
        out, lse = native.merge_states(out.contiguous(), lse.contiguous(), other.contiguous(), other_lse.contiguous())
    return out, lse


@torch.library.register_fake("kvcompress::merge_states")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _check((out_a, lse_a), (out_b, lse_b))
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _merge_backward(ctx, dout: Tensor | None, dlse: Tensor | None):  # type: ignore[no-untyped-def]
    # with w = exp(lse_x - lse): d out_x = w dout, d lse_x = w (dlse + <dout, out_x - out>)
    out_a, lse_a, out_b, lse_b, out, lse = ctx.saved_tensors
    grads: list[Tensor] = []
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(part_lse == float("-inf"), 0.0, torch.exp(part_lse - lse))
        share = torch.zeros_like(lse) if dlse is None else dlse
        if dout is not None:
            share = share + (dout.float() * (part.float() - out.float())).sum(-1)
        # what has no weight has no gradient, whatever dout and dlse hold there: 0 * NaN would be NaN
        none = weight == 0
        of_out = torch.zeros_like(part)
        if dout is not None:
            of_out = torch.where(none[..., None], 0.0, weight[..., None] * dout).to(part.dtype)
        grads += [of_out, torch.where(none, 0.0, weight * share)]
    return tuple(grads)


torch.library.register_autograd("kvcompress::merge_states", _merge_backward, setup_context=_merge_setup)
