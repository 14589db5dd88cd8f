"""Attention of a layer whose distant keys are those of another: near and far tokens as two branches of one softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..support.checks import MOST_INT32, need, need_device, need_integer, need_tensors
from .attention import attention
from .merge import merge_states


def pod_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lead_queries: Tensor,
    lead_keys: Tensor,
    *,
    sinks: int,
    recent: int,
    lengths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention with own logits for near tokens and a lead layer's logits for distant ones, in one softmax.

    queries: [B, Hq, S, D], the last S tokens of the keys. keys, values: [B, Hkv, T, D]. lead_queries, lead_keys: as
    queries and keys, of the layer that leads; all rotated. A query at position i sees key j <= i by its own query and
    key where j < sinks or j > i - recent, by the lead's elsewhere; the value is always its own. lengths, scale,
    softcap (of the logits of both kinds), sink_logits: as for attention; the sink is one column of the whole softmax.
    Returns (out [B, Hq, S, D], lse float32 [B, Hq, S] of all logits, gate float32 [B, Hq, S]): gate is the probability
    of the near tokens and the sink, 1 where no key is distant. Memory linear in S and T; differentiable, a
    query without distant keys gives its lead gradients of 0.
    Raises ValueError for wrong shapes, dtypes, scale and softcap, sinks below 0 or recent below 1; RuntimeError as
    attention does.
    Source: PoD, section 2.2, equations 3 and 4.
    """
    need_tensors(queries=queries, keys=keys, values=values, lead_queries=lead_queries, lead_keys=lead_keys)
    for name, x, like, own in (
        ("lead_queries", lead_queries, queries, "queries"),
        ("lead_keys", lead_keys, keys, "keys"),
    ):
        need_device(like, **{name: x})
        need(
            x.shape == like.shape and x.dtype == like.dtype,
            f"{name} must be {like.dtype} {tuple(like.shape)} as {own}, got {x.dtype} {tuple(x.shape)}",
        )
    need_integer("recent", recent, 1, MOST_INT32)
    need_integer("sinks", sinks, 0, MOST_INT32)
    logits: dict[str, Any] = {"window": recent, "sinks": sinks, "lengths": lengths, "scale": scale, "softcap": softcap}
    near = attention(queries, keys, values, sink_logits=sink_logits, **logits)
    if keys.shape[2] <= sinks + recent:  # nothing is distant
        return *near, torch.ones_like(near[1])
    far = attention(lead_queries, lead_keys, values, complement=True, **logits)
    # -inf minus -inf is no number: what has no distant keys is all near
    gate = torch.where(far[1] == float("-inf"), torch.inf, near[1] - far[1]).sigmoid()
    return *merge_states(near, far), gate
