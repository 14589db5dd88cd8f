"""Rotation of queries and keys. RoFormer, equation 34, halves paired."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, inverse: bool = False) -> Tensor:
    """As ops.rope, in the dtype of x."""
    B, _, T, _ = x.shape
    if positions is None:
        positions = torch.arange(T, device=x.device).expand(B, T)
    c = cos[positions.long()][:, None].to(x.dtype)  # [B, 1, T, half]
    s = sin[positions.long()][:, None].to(x.dtype)
    if inverse:
        s = -s
    half = cos.shape[1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * c - high * s, high * c + low * s, rest], dim=-1)
