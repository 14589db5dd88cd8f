"""Attention with the masks of the methods, written to be read: the whole [S, T] matrix at once."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(
    S: int,
    T: int,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    complement: bool = False,
    lengths: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys a query sees: bool [B, S, T], B = 1 without lengths; queries are the last S of a sequence's keys."""
    ends = torch.tensor([T], device=device) if lengths is None else lengths.long()
    position = ends[:, None, None] - S + torch.arange(S, device=device)[:, None]
    key = torch.arange(T, device=device)
    seen = (key < ends[:, None, None]) & (position >= 0)
    if causal:
        seen = seen & (key <= position)
    if window is not None:
        near = (key < sinks) | (key > position - window)
        seen = seen & (~near if complement else near)
    return seen


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


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
    """As ops.attention, in the inputs' dtype; differentiable by autograd."""
    S, D = queries.shape[2:]
    T, G = keys.shape[2], queries.shape[1] // keys.shape[1]
    k, v = (x.repeat_interleave(G, 1) for x in (keys, values))
    logits = capped(queries @ k.mT * (D**-0.5 if scale is None else scale), softcap)
    if key_bias is not None:
        ends = torch.full((1,), T, device=keys.device) if lengths is None else lengths.long()
        own = (
            torch.arange(T, device=keys.device)
            == ends[:, None, None] - S + torch.arange(S, device=keys.device)[:, None]
        )
        bias = key_bias.to(logits.dtype).repeat_interleave(G, 1)[:, :, None, :]
        logits = logits + torch.where(own[:, None], 0, bias)
    seen = visible(
        S, T, causal=causal, window=window, sinks=sinks, complement=complement, lengths=lengths, device=keys.device
    )[:, None]
    logits = logits.masked_fill(~seen, float("-inf"))
    if sink_logits is not None:  # one more key, with a value of 0; not for padding
        column = sink_logits.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        ends = torch.full((1,), T, device=keys.device) if lengths is None else lengths.long()
        padding = (ends[:, None] - S + torch.arange(S, device=keys.device) < 0)[:, None, :, None]
        logits = torch.cat([logits, column.masked_fill(padding, float("-inf"))], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    # a row of -inf alone has no softmax, and no gradient: it is computed as a row of zeros and then taken out
    empty = (logits == float("-inf")).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0)
    out = logits.softmax(-1) @ v
    lse = logits.logsumexp(-1)
    return out.masked_fill(empty, 0), lse.masked_fill(empty[..., 0], float("-inf"))
