"""The gates of DMC: which token merges, with what weight, and which keys a merge hides."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..support.checks import (
    dense,
    need,
    need_choice,
    need_device,
    need_float,
    need_integer,
    need_number,
    need_tensor,
)
from .native import native

IMPORTANCES = ("mean_logit", "mean_sigmoid", "first")
SMALLEST, LARGEST = 1e-6, 1e6  # factors and shifts of logits: float32 holds their products and quotients
_WORD = (1 << 32) - 1


class Noise(NamedTuple):
    """Where the noise of dmc_decisions comes from: the same numbers give the same noise, on the CPU and on CUDA.

    seed: 0..2**63 - 1. offset: running number of the draw, for instance the micro-step. stream: layer * heads + first
    head, sample: first sequence, token: first position of the call, counted over all devices and chunks, so that a
    shard draws what the whole would. All but the seed are taken modulo 2**32.
    """

    seed: int
    offset: int = 0
    stream: int = 0
    sample: int = 0
    token: int = 0


_NONE = Noise(0)


class Decisions(NamedTuple):
    """alpha: the relaxed decision, 0..1. hard: 0 or 1, with the gradient of alpha (straight-through). tempered: the
    logit whose sigmoid alpha is, for dmc_mask. float32 [B, H, T]."""

    alpha: Tensor
    hard: Tensor
    tempered: Tensor


def dmc_decisions(
    logits: Tensor,
    *,
    shift: float = 5.0,
    temperature: float = 0.1,
    scale: float = 1.0,
    margin: float = 0.0,
    noise: Noise | Tensor | None = None,
    hard: bool = False,
) -> Decisions:
    """Decisions of DMC and DMS, relaxed by Gumbel-sigmoid: does a token merge into the entry before it?

    logits: [B, H, T], any strides: the key neuron, keys[..., n], or an adapter's output. shift, temperature: c and tau.
    noise: None; a Noise; or float32 [B, H, T] that is added as it is. hard: no relaxation, for evaluation.
    Returns Decisions with y = scale*logits - shift + noise: tempered = y / temperature, alpha = sigmoid(tempered),
    hard = 1 where y > margin, else 0 (a tie and NaN are 0). With hard=True tempered is inf or -inf and alpha is hard,
    so that dmc_mask gives -inf or 0, and nothing has a gradient. Token 0 is treated like the others: what forces it to
    0 is dmc_accumulate. Differentiable in logits.
    Raises ValueError for wrong shapes or dtypes, a temperature outside 1e-6..1e6, a shift, scale or margin beyond
    1e6 either way, or numbers of noise out of range.
    Source: DMC ("Dynamic Memory Compression"), section 3; Philox 4x32-10 for the noise, see csrc/kvc.h.
    """
    need_float("logits", logits, 3, "[B, H, T]")
    need_number("temperature", temperature, SMALLEST, LARGEST)
    for name, number in (("shift", shift), ("scale", scale), ("margin", margin)):
        need_number(name, number, -LARGEST, LARGEST)
    given = noise if isinstance(noise, Tensor) else None
    if given is None and noise is not None and (not isinstance(noise, tuple) or not 1 <= len(noise) <= len(_NONE)):
        raise TypeError(f"noise must be an ops.Noise, a torch.Tensor or None, got {type(noise).__name__}")
    drawn = _NONE if given is not None or noise is None else Noise(*noise)
    if drawn is not _NONE:
        for name, value in zip(drawn._fields, drawn, strict=True):
            need_integer(f"noise.{name}", value, 0)
    if given is not None:
        need_float32("noise", given, tuple(logits.shape))
        need_device(logits, noise=given)
    return Decisions(
        *native.dmc_decisions(
            logits, dense(given), drawn is not _NONE, drawn.seed, *(x & _WORD for x in drawn[1:]),
            shift, temperature, scale, margin, hard,
        )
    )  # fmt: skip


@torch.library.register_fake("kvcompress::dmc_decisions")
def _(logits, *settings):  # type: ignore[no-untyped-def]
    return tuple(logits.new_empty(logits.shape, dtype=torch.float32) for _ in range(3))


def _decisions_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *_, ctx.temperature, ctx.scale, _, ctx.hard = inputs
    ctx.dtype, ctx.inputs = inputs[0].dtype, len(inputs)
    ctx.save_for_backward(output[2])
    ctx.set_materialize_grads(False)


def _decisions_backward(ctx, dalpha, dhard, dtempered):  # type: ignore[no-untyped-def]
    (tempered,) = ctx.saved_tensors
    none = [None] * (ctx.inputs - 1)
    total = dtempered
    for grad in () if ctx.hard else (dalpha, dhard):
        if grad is not None:
            # 1 - alpha would be 0 long before its gradient is
            part = tempered.sigmoid() * (-tempered).sigmoid() * grad
            total = part if total is None else total + part
    if total is None or ctx.hard:
        return None, *none
    return (total * (ctx.scale / ctx.temperature)).to(ctx.dtype), *none


torch.library.register_autograd("kvcompress::dmc_decisions", _decisions_backward, setup_context=_decisions_setup)


def dmc_importance(
    logits: Tensor, kv_heads: int, *, shift: float = 5.0, eps: float = 0.0, reduce: str = "mean_logit"
) -> Tensor:
    """Weight of each token in the average that forms an entry, from the query neuron.

    logits: [B, Hq, T], any strides: queries[..., n]. kv_heads: Hkv, which divides Hq. shift: c. eps: added at the end.
    reduce: how the G = Hq/Hkv query heads of a KV head give one weight: "mean_logit" sigmoid(mean + shift),
    "mean_sigmoid" mean of sigmoid(logit + shift), "first" that of the first head.
    Returns float32 [B, Hkv, T]: max(that, 2**-40) + eps. Differentiable in logits.
    Raises ValueError for wrong shapes, dtypes, kv_heads, shift, eps or reduce. Source: DMC, section 3.
    """
    need_float("logits", logits, 3, "[B, Hq, T]")
    need_integer("kv_heads", kv_heads, 1)
    heads = logits.shape[1]
    need(heads >= kv_heads and heads % kv_heads == 0, f"kv_heads must divide the logits' {heads} heads, got {kv_heads}")
    need_number("shift", shift, -LARGEST, LARGEST)
    need_number("eps", eps, 0, LARGEST)
    return native.dmc_importance(logits, kv_heads, shift, eps, need_choice("reduce", reduce, IMPORTANCES))


@torch.library.register_fake("kvcompress::dmc_importance")
def _(logits, kv_heads, shift, eps, reduce):  # type: ignore[no-untyped-def]
    return logits.new_empty((logits.shape[0], kv_heads, logits.shape[2]), dtype=torch.float32)


def _importance_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, ctx.kv_heads, ctx.shift, _, ctx.reduce = inputs
    ctx.save_for_backward(logits)


def _importance_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    (logits,) = ctx.saved_tensors
    x = logits.float().unflatten(1, (ctx.kv_heads, -1))
    G = x.shape[2]
    if ctx.reduce == 0:
        x = x.mean(2, keepdim=True).expand_as(x)
    x = x + ctx.shift
    found = x.sigmoid() * (-x).sigmoid() * grad[:, :, None]
    if ctx.reduce == 2:
        found[:, :, 1:] = 0
    else:
        found = found / G
    return found.flatten(1, 2).to(logits.dtype), None, None, None, None


torch.library.register_autograd("kvcompress::dmc_importance", _importance_backward, setup_context=_importance_setup)


def dmc_mask(tempered: Tensor) -> Tensor:
    """Bias of each key in DMC's training attention: how much of it the next token's decision leaves.

    tempered: float32 [B, H, T], as dmc_decisions gives it.
    Returns float32 [B, H, T], the key_bias of attention: log(1 - alpha) of the next token, computed from its logit; 0
    for the last token. Differentiable in tempered. Raises ValueError for a wrong shape or dtype.
    Source: DMC, appendix H (which prints alpha for the logit); of DMS the same, for keys outside the window alone.
    """
    need_float32("tempered", tempered, None)
    return native.dmc_mask(tempered.contiguous())


@torch.library.register_fake("kvcompress::dmc_mask")
def _(tempered: Tensor) -> Tensor:
    return tempered.new_empty(tempered.shape)


def _mask_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _mask_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    (tempered,) = ctx.saved_tensors
    found = torch.zeros_like(tempered)
    found[..., 1:] = -tempered[..., 1:].sigmoid() * grad[..., :-1]
    return found


torch.library.register_autograd("kvcompress::dmc_mask", _mask_backward, setup_context=_mask_setup)


def need_float32(name: str, x: Tensor, shape: tuple[int, ...] | None) -> None:
    """shape: None = any of three dimensions."""
    if isinstance(x, Tensor) and x.dtype == torch.float32 and (x.ndim == 3 if shape is None else x.shape == shape):
        return
    need_tensor(name, x)
    need(x.dtype == torch.float32, f"{name} must be float32, got {x.dtype}")
    need(shape is not None, f"{name} must be [B, H, T], got shape {tuple(x.shape)}")
    raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
