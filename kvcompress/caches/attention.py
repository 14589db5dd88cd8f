"""Attention of a part of a prompt over what is held and itself: ours, or PyTorch's where that is the faster."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from .. import ops
from ..ops.softmax import Softmax


def prompt_attention(queries: Tensor, keys: Tensor, values: Tensor, lengths: list[int], softmax: Softmax) -> Tensor:
    """Causal attention whose queries [B, Hq, S, D] are the last S of each sequence's lengths[b] keys [B, Hkv, T, D].

    Queries before a sequence's first key are padding; theirs is 0.
    """
    S, T = queries.shape[2], keys.shape[2]
    whole = min(lengths) == T
    plain = softmax.softcap is None and softmax.sink_logits is None
    flash = queries.dtype != torch.float32 and queries.shape[3] <= 256  # else SDPA would take memory of S * T
    if queries.device.type != "cpu" and whole and plain and flash:
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=causal_lower_right(S, T), scale=softmax.scale, enable_gqa=True
        )
    return prompt_state(queries, keys, values, lengths, softmax)[0]


def prompt_state(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: list[int], softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """The same, with the logarithms of what its softmax divides by: float32 [B, Hq, S]."""
    ends = None if min(lengths) == keys.shape[2] else torch.tensor(lengths, dtype=torch.int32, device=keys.device)
    return ops.attention(queries, keys, values, lengths=ends, **softmax.options)


def ragged_attention(queries: Tensor, keys: Tensor, values: Tensor, lengths: list[int], softmax: Softmax) -> Tensor:
    """The same over rows [R, T, D], R = B*Hkv, each of its own length."""
    (B, Hq, S, D), R = queries.shape, len(lengths)
    heads, G = R // B, B * Hq // R
    rows = queries.unflatten(1, (heads, G))  # [B, Hkv, G, S, D]
    k, v = (x.unflatten(0, (B, heads)) for x in (keys, values))
    if softmax.sink_logits is None:  # a row is a batch entry of one KV head
        out = prompt_attention(rows.flatten(0, 1), k.reshape(R, 1, -1, D), v.reshape(R, 1, -1, D), lengths, softmax)
        return out.view(B, Hq, S, D)
    parts = []
    for h in range(heads):
        own = softmax.of_heads(slice(h * G, (h + 1) * G))
        parts.append(prompt_attention(rows[:, h], k[:, h : h + 1], v[:, h : h + 1], lengths[h::heads], own))
    return torch.cat(parts, 1)
