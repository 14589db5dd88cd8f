"""Attention with a lead's logits for distant keys: one softmax over keys that are there twice."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import capped, visible


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
    """As ops.pod_attention, in the inputs' dtype; differentiable by autograd.

    Every key is there twice, as a near one with the logit of its own layer and as a distant one with that of the lead;
    one ordinary softmax is over those of both kinds that are seen.
    """
    S, D = queries.shape[2:]
    T, G = keys.shape[2], queries.shape[1] // keys.shape[1]
    k, lead_k = (x.repeat_interleave(G, 1) for x in (keys, lead_keys))
    v = torch.cat([values, values], 2).repeat_interleave(G, 1)
    sets = [
        visible(S, T, window=recent, sinks=sinks, complement=distant, lengths=lengths, device=keys.device)
        for distant in (False, True)
    ]
    seen = torch.cat(sets, -1)[:, None]
    products = torch.cat([queries @ k.mT, lead_queries @ lead_k.mT], -1)
    logits = capped(products * (D**-0.5 if scale is None else scale), softcap).masked_fill(~seen, float("-inf"))
    if sink_logits is not None:  # one more key, near and with a value of 0; not for padding
        column = sink_logits.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        column = column.masked_fill(~seen.any(-1, keepdim=True), float("-inf"))
        logits, v = torch.cat([column, logits], -1), torch.nn.functional.pad(v, (0, 0, 1, 0))
    # a row of -inf alone has no softmax, and no gradient: it is computed as a row of zeros and then taken out
    empty = (logits == float("-inf")).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0)
    probabilities = logits.softmax(-1)
    out, lse, near = probabilities @ v, logits.logsumexp(-1), probabilities[..., :-T].sum(-1)
    empty_rows = empty[..., 0]
    return out.masked_fill(empty, 0), lse.masked_fill(empty_rows, float("-inf")), near.masked_fill(empty_rows, 1)
