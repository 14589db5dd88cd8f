"""Attention with a lead's logits for distant keys: one softmax over keys that are twice as long and twice as wide."""

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

    Queries [q, q_lead] meet keys [k, 0] for near tokens and [0, k_lead] for distant ones: the logits of both kinds come
    out of one product, and one ordinary softmax is over all of them.
    """
    S, D = queries.shape[2:]
    T, G = keys.shape[2], queries.shape[1] // keys.shape[1]
    q = torch.cat([queries, lead_queries], -1)
    wide = torch.nn.functional.pad
    k = torch.cat([wide(keys, (0, D)), wide(lead_keys, (D, 0))], 2).repeat_interleave(G, 1)
    v = torch.cat([values, values], 2).repeat_interleave(G, 1)
    sets = [
        visible(S, T, window=recent, sinks=sinks, complement=distant, lengths=lengths, device=keys.device)
        for distant in (False, True)
    ]
    seen = torch.cat(sets, -1)[:, None]
    logits = capped(q @ k.mT * (D**-0.5 if scale is None else scale), softcap).masked_fill(~seen, float("-inf"))
    # a row of -inf alone has no softmax, and no gradient: it is computed as a row of zeros and then taken out
    empty = ~seen.any(-1, keepdim=True).expand_as(logits[..., :1])
    if sink_logits is not None:  # one more key, near and with a value of 0
        column = sink_logits.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        logits, v = torch.cat([column, logits], -1), wide(v, (0, 0, 1, 0))
    logits = logits.masked_fill(empty, 0)
    probabilities = logits.softmax(-1)
    out, lse, near = probabilities @ v, logits.logsumexp(-1), probabilities[..., :-T].sum(-1)
    empty_rows = empty[..., 0]
    return out.masked_fill(empty, 0), lse.masked_fill(empty_rows, float("-inf")), near.masked_fill(empty_rows, 1)
