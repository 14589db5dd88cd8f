"""Attention over paged rows of different length, and the merge of two attention states."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention import capped


def decode(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    end: Tensor,
    *,
    block_table: Tensor | None = None,
    value_table: Tensor | None = None,
    begin: Tensor | None = None,
    sinks: int = 0,
    scale: float | None = None,
    causal: bool = False,
    probabilities: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ops.decode, in the dtype of queries; lse in that dtype too."""
    B, Hq, S, D = queries.shape
    Hkv = end.shape[0] // B
    G = Hq // Hkv
    scale = D**-0.5 if scale is None else scale
    out = torch.zeros_like(queries)
    lse = queries.new_full((B, Hq, S), float("-inf"))
    for r in range(B * Hkv):
        b, h = divmod(r, Hkv)
        if block_table is None:
            k, v = k_pages[r], v_pages[r]
        else:
            # pages that no query sees may be any number
            blocks = -(-int(end[r]) // k_pages.shape[1])
            tables = (block_table, block_table if value_table is None else value_table)
            k, v = (
                x[table[r, :blocks].long().clamp(0, len(x) - 1)].flatten(0, 1) if len(x) else x.flatten(0, 1)
                for x, table in zip((k_pages, v_pages), tables, strict=True)
            )
        first = 0 if begin is None else int(begin[r])
        for s in range(S):
            last = int(end[r]) - (S - 1 - s if causal else 0)
            seen = [*range(min(sinks, first, max(last, 0))), *range(first, last)]
            if not seen and sink_logits is None:
                continue
            heads = slice(h * G, (h + 1) * G)
            logits = capped(scale * queries[b, heads, s] @ k[seen].to(queries.dtype).T, softcap)
            if sink_logits is not None:  # one more key, without a value
                logits = torch.cat([logits, sink_logits[heads, None].to(logits.dtype)], -1)
            empty = (logits == -math.inf).all(-1, keepdim=True)  # nothing is attended to
            shares = logits.softmax(-1).masked_fill(empty, 0)[:, : len(seen)]
            out[b, heads, s] = shares @ v[seen].to(queries.dtype)
            lse[b, heads, s] = logits.logsumexp(-1)
            if probabilities is not None:
                probabilities[b, heads, : last - first] = shares.to(probabilities.dtype)
    return out, lse


def decode_shared(
    near: tuple[Tensor, Tensor],
    probabilities: Tensor,
    far_lse: Tensor,
    v_pages: Tensor,
    begin: Tensor,
    end: Tensor,
    *,
    block_table: Tensor,
    tau: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As ops.decode_shared, in the dtype of near."""
    near_out, near_lse = near
    near_out = torch.where(near_lse[..., None] == -math.inf, 0.0, near_out)  # whatever lies there
    found = near_out.clone()
    B, Hq, _, _ = near_out.shape
    Hkv = end.shape[0] // B
    skipped = torch.zeros(B, Hq, 1, dtype=torch.bool)
    for b in range(B):
        for h in range(Hq):
            r = b * Hkv + h // (Hq // Hkv)
            first, last = int(begin[r]), int(end[r])
            blocks = -(-last // v_pages.shape[1])
            pages = block_table[r, : blocks if len(v_pages) else 0].long().clamp(0, len(v_pages) - 1)
            values = v_pages[pages].flatten(0, 1)[first:last].to(found.dtype)
            both = near_lse[b, h, 0], far_lse[b, h, 0]
            if tau is not None and tau < 1 and last > first:
                skipped[b, h] = both[0] - both[1] >= (math.log(tau / (1 - tau)) if tau > 0 else -math.inf)
            if skipped[b, h] or last == first or both[1] == -math.inf:
                continue
            gate = torch.sigmoid(both[0] - both[1])
            far = probabilities[b, h, : last - first].to(found.dtype) @ values
            found[b, h, 0] = gate * near_out[b, h, 0] + (1 - gate) * far
    return found, skipped


def merge_states(*states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """As ops.merge_states."""
    outs = torch.stack([out for out, _ in states])
    lses = torch.stack([lse for _, lse in states])
    lse = lses.logsumexp(0)
    empty = lses == -math.inf
    weights = torch.where(empty, 0.0, torch.exp(lses - lse))
    outs = torch.where(empty[..., None], 0.0, outs)  # whatever lies there
    return (weights[..., None].to(outs.dtype) * outs).sum(0), lse
