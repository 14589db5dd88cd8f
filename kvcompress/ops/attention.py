"""Attention of many queries over contiguous keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import (
    dense,
    dense_last,
    need,
    need_device,
    need_heads,
    need_int32,
    need_integer,
    need_scale,
    need_sink_logits,
    need_softcap,
    need_tensors,
)
from .explained import explained_by
from .native import MAX_HEAD_DIM, native


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool = True, window: int | None = None,
    complement: bool = False, key_bias: Tensor | None = None, lengths: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    B, Hq, S, D, Hkv, T = need_heads(queries, keys, "[B, Hq, S, D]", "[B, Hkv, T, D]")
    need_tensors(values=values)
    need(values.shape == keys.shape, f"values must be {tuple(keys.shape)} as keys, got {tuple(values.shape)}")
    for name, x in (("keys", keys), ("values", values)):
        need(x.dtype == queries.dtype, f"{name} must be {queries.dtype} as queries, got {x.dtype}")
    need(1 <= D <= MAX_HEAD_DIM, f"queries must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need(S <= T, f"queries must be the last of the keys' tokens, got {S} queries and {T} keys")
    need(window is None or causal, "window needs causal=True")
    need(window is not None or not complement, "complement needs a window")
    if key_bias is not None:
        need_tensors(key_bias=key_bias)
        need(key_bias.dtype == torch.float32, f"key_bias must be float32, got {key_bias.dtype}")
        need(tuple(key_bias.shape) == (B, Hkv, T), f"key_bias must be {(B, Hkv, T)}, got shape {tuple(key_bias.shape)}")
    need_int32("lengths", lengths, (B,))
    need_device(queries, keys=keys, values=values, key_bias=key_bias, lengths=lengths)


@explained_by(_check)
def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    complement: bool = False,
    key_bias: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of many queries, with the masks of the methods; memory linear in S and T, differentiable.

    queries: [B, Hq, S, D], the last S tokens of the keys. keys, values: [B, Hkv, T, D], S <= T, D 1..512, the queries'
    dtype. lengths: int32 [B], keys that exist in each sequence, its last S being the queries' own tokens; None = all T.
    Query s stands at position i = lengths - S + s; where that is negative it is padding and sees nothing. It sees key
    t <= i (causal), all keys (causal=False); with window: t < sinks or t > i - window; with complement: what window
    leaves out, sinks <= t <= i - window. key_bias: float32 [B, Hkv, T], finite or -inf, added to the logit of a key for
    every query but the key's own position (DMC's mask). scale: factor of the logits, None = 1/sqrt(D). softcap: logits
    become softcap * tanh(logit / softcap), before key_bias and mask; None = as they are.
    sink_logits: float32 [Hq] whatever the dtype of queries (callers convert), finite or -inf = none: one more column in
    the softmax of each query of a head, of a key without a value, which adds exp(sink_logits) to the sum; not scaled,
    not capped. Of branches that are merged, one is given them.
    Returns (out [B, Hq, S, D], lse float32 [B, Hq, S], natural logarithm, the sink included). A query that sees no key
    gets out 0 and lse -inf, with a sink lse = sink; padding always -inf. Where lse is -inf gradients are 0, whatever
    comes back for out and lse. Gradients flow to queries, keys, values, key_bias and sink_logits, from out and from
    lse, so that merge_states of several branches differentiates exactly; the same bits for any number of threads.
    Raises ValueError for wrong shapes, dtypes, window, sinks, complement, scale or softcap; RuntimeError for lengths
    out of range.
    """
    if window is not None:
        need_integer("window", window, 1)
    need_integer("sinks", sinks, 0)
    return native.attention(
        dense_last(queries),
        dense_last(keys),
        dense_last(values),
        dense(key_bias),
        dense(lengths),
        need_scale(scale, queries.shape[3]),
        causal,
        window or 0,
        sinks,
        complement,
        need_sink_logits(sink_logits, queries.shape[1], queries),
        need_softcap(softcap),
    )


@torch.library.register_fake("kvcompress::attention")
def _(  # type: ignore[no-untyped-def]
    queries, keys, values, key_bias, lengths, scale, causal, window, sinks, complement, sink_logits=None, softcap=0.0,
):  # fmt: skip
    wishes = {"window": window or None, "causal": causal, "complement": complement}
    _check(queries, keys, values, key_bias=key_bias, lengths=lengths, **wishes)
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)


@torch.library.register_fake("kvcompress::attention_backward")
def _(  # type: ignore[no-untyped-def]
    dout, dlse, queries, keys, values, key_bias, lengths, out, lse, scale, causal, window, sinks, complement,
    sink_logits=None, softcap=0.0,
):  # fmt: skip
    bias = keys.new_empty((*keys.shape[:2], 0 if key_bias is None else keys.shape[2]), dtype=torch.float32)
    of_sinks = queries.new_empty(0 if sink_logits is None else queries.shape[1], dtype=torch.float32)
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape), keys.new_empty(keys.shape), bias, of_sinks


def _attention_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    queries, keys, values, key_bias, lengths, *ctx.settings, sink_logits, ctx.softcap = inputs
    ctx.save_for_backward(queries, keys, values, key_bias, lengths, sink_logits, *output)
    ctx.set_materialize_grads(False)


def _attention_backward(ctx, dout: Tensor | None, dlse: Tensor | None):  # type: ignore[no-untyped-def]
    queries, keys, values, key_bias, lengths, sink_logits, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dense_last(dout)
    grads = native.attention_backward(
        dout, dense(dlse), queries, keys, values, key_bias, lengths, out, lse, *ctx.settings, sink_logits, ctx.softcap
    )
    of_bias, of_sinks = (
        grad if x is not None else None for x, grad in zip((key_bias, sink_logits), grads[3:], strict=True)
    )
    return *grads[:3], of_bias, None, *(None for _ in ctx.settings), of_sinks, None


def _attention_no_second(ctx, *grads):  # type: ignore[no-untyped-def]
    raise NotImplementedError("attention is differentiable once; second derivatives are not supported")


torch.library.register_autograd("kvcompress::attention", _attention_backward, setup_context=_attention_setup)
torch.library.register_autograd(
    "kvcompress::attention_backward", _attention_no_second, setup_context=lambda ctx, inputs, output: None
)
