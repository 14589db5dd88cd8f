"""DMC's partial averages of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import dense_last, need, need_device, need_float, need_integer, need_sequence
from .dmc_gates import need_float32
from .explained import explained_by
from .native import MAX_HEAD_DIM, native

MAX_DMC_WINDOW = 64
_CHUNK = 64  # tokens between two saved states


def _check(
    keys: Tensor, values: Tensor, alpha: Tensor, omega: Tensor, *, window: int | None = None,
    initial: tuple[Tensor, Tensor, Tensor] | None = None, **others: object,
) -> None:  # fmt: skip
    need_float("keys", keys, 4, "[B, Hkv, T, D]")
    B, Hkv, T, D = keys.shape
    need_float("values", values, 4, "[B, Hkv, T, D]")
    need(values.shape == keys.shape, f"values must be {tuple(keys.shape)} as keys, got {tuple(values.shape)}")
    need(values.dtype == keys.dtype, f"values must be {keys.dtype} as keys, got {values.dtype}")
    need(1 <= D <= MAX_HEAD_DIM, f"keys must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need_float32("alpha", alpha, (B, Hkv, T))
    need_float32("omega", omega, (B, Hkv, T))
    if window is not None:
        need_integer("window", window, 1)
        need(
            window <= MAX_DMC_WINDOW or window >= T,
            f"window must be between 1 and {MAX_DMC_WINDOW}, or at least T = {T} (all tokens), got {window}",
        )
        need(initial is None, "initial must be None with a window: give the tokens of the window again instead")
    if initial is not None:
        need_sequence("initial", initial)
        need(len(initial) == 3, f"initial must hold averages of keys and of values and z, got {len(initial)} tensors")
        for i, (x, shape) in enumerate(zip(initial, ((B, Hkv, D), (B, Hkv, D), (B, Hkv)), strict=True)):
            need_float32(f"initial[{i}]", x, shape)
            need(not x.requires_grad, f"initial[{i}] must not require grad: initial has no gradient")
            need_device(keys, **{f"initial[{i}]": x})
    need_device(keys, values=values, alpha=alpha, omega=omega)


@explained_by(_check)
def dmc_accumulate(
    keys: Tensor,
    values: Tensor,
    alpha: Tensor,
    omega: Tensor,
    *,
    neuron: int | None = None,
    window: int | None = None,
    initial: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Partial averages that each token sees of the entry it belongs to, with its exact history; differentiable.

    keys, values: [B, Hkv, T, D], un-rotated, D 1..512, one dtype. alpha, omega: float32 [B, Hkv, T]: decisions 0..1 and
    weights above 0. neuron: coordinate of the keys that counts as 0, negative from the end; None = none. window: sums
    over the last tokens alone, the own one included: 1..64, or T and more, which is all of them; None = all (released
    models need 12). initial: what came before token 0: averages of keys and values, float32 [B, Hkv, D], and their
    weight z, float32 [B, Hkv], 0 where nothing did; not with window, and without gradient.
    With z[t] = alpha[t] z[t-1] + omega[t], out[t] = (alpha[t] z[t-1] out[t-1] + omega[t] x[t]) / z[t] for x keys and
    values. alpha counts as 0 at token 0 (without initial); where it is 0 the token is out[t] exactly.
    Returns the averages of keys and of values, as they came in, and z, float32 [B, Hkv, T]. Gradients flow to keys,
    values, alpha and omega, from the averages but not from z, and once. Time and memory are linear in T; float32
    inside; the same bits for any number of threads.
    Raises ValueError for wrong shapes, dtypes, neuron, window or initial.
    Source: DMC, eq 9.
    """
    if window is not None:
        need_integer("window", window, 1)
    before: tuple[Tensor | None, ...] = (None, None, None)
    if initial is not None:
        before = tuple(x.contiguous() for x in initial)
        need(not any(x.requires_grad for x in initial), "initial must not require grad")
    out = native.dmc_accumulate(
        dense_last(keys),
        dense_last(values),
        alpha.contiguous(),
        omega.contiguous(),
        *before,
        need_neuron(neuron, keys.shape[3]),
        window or 0,
    )
    return out[:3]


def need_neuron(neuron: int | None, D: int) -> int:
    """The coordinate as a number of 0..D-1, -1 for None."""
    if neuron is None:
        return -1
    if not isinstance(neuron, int) or isinstance(neuron, bool) or not -D <= neuron < D:
        raise ValueError(f"neuron must be between {-D} and {D - 1}, got {neuron!r}")
    return neuron % D


@torch.library.register_fake("kvcompress::dmc_accumulate")
def _(keys, values, alpha, omega, initial_k, initial_v, initial_z, neuron, window):  # type: ignore[no-untyped-def]
    initial = None if initial_z is None else (initial_k, initial_v, initial_z)
    _check(keys, values, alpha, omega, window=window or None, initial=initial)
    B, Hkv, T, D = keys.shape
    chunks = 0 if 0 < window < T else -(-T // _CHUNK)
    states = keys.new_empty((B, Hkv, chunks, 2, D), dtype=torch.float32)
    return keys.new_empty(keys.shape), keys.new_empty(keys.shape), torch.empty_like(alpha), states


@torch.library.register_fake("kvcompress::dmc_accumulate_backward")
def _(dout_k, dout_v, keys, values, alpha, *rest):  # type: ignore[no-untyped-def]
    return keys.new_empty(keys.shape), keys.new_empty(keys.shape), torch.empty_like(alpha), torch.empty_like(alpha)


def _accumulate_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    keys, values, alpha, omega, _, _, initial_z, *ctx.settings = inputs
    ctx.save_for_backward(keys, values, alpha, omega, initial_z, *output[2:])
    ctx.set_materialize_grads(False)


def _accumulate_backward(ctx, dout_k, dout_v, dz, dstates):  # type: ignore[no-untyped-def]
    keys, values, *others = ctx.saved_tensors
    if dz is not None or dstates is not None:
        raise NotImplementedError("dmc_accumulate has no gradient from z; take it from the averages")
    grads = (torch.zeros_like(keys) if x is None else dense_last(x) for x in (dout_k, dout_v))
    found = native.dmc_accumulate_backward(*grads, keys, values, *others, *ctx.settings)
    return *found, None, None, None, *(None for _ in ctx.settings)


def _accumulate_no_second(ctx, *grads):  # type: ignore[no-untyped-def]
    raise NotImplementedError("dmc_accumulate is differentiable once; second derivatives are not supported")


torch.library.register_autograd("kvcompress::dmc_accumulate", _accumulate_backward, setup_context=_accumulate_setup)
torch.library.register_autograd(
    "kvcompress::dmc_accumulate_backward", _accumulate_no_second, setup_context=lambda ctx, inputs, output: None
)
