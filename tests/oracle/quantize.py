"""Vectors as codes and one float16 scale each."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = {"int8": 127, "int4": 7}


def quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """As ops.quantize, of float32, bfloat16 or float16."""
    levels, x = LEVELS[format], turned(x.float()) if format == "int4" else x.float()
    most = x.abs().amax(-1)
    scales = (most / levels).half()
    # as float16 numbers above 0 rise, so do their bits
    above = (scales.view(torch.int16) + 1).view(torch.float16)
    scales = torch.where(scales.double() * levels < most.double(), above, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    divided = (x / scales.float()[..., None]).nan_to_num(0, 0, 0)
    whole = (scales > 0)[..., None]
    codes = torch.where(whole, divided.clamp(-levels, levels).round(), 0).to(torch.int8)
    if format == "int8":
        return codes, scales
    low, high = codes.view(torch.uint8).bitwise_and(15).chunk(2, -1)
    return low | high << 4, scales


def unpacked(codes: Tensor, format: str) -> Tensor:
    """The codes as int8 [..., D]."""
    if format == "int8":
        return codes
    halves = torch.cat([codes & 15, codes >> 4], -1).to(torch.int8)
    return torch.where(halves > 7, halves - 16, halves)


def dequantize(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """As ops.dequantize, of any dtype."""
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    x = unpacked(codes, format).to(kind) * scales.to(kind)[..., None]
    return (turned(x) if format == "int4" else x).to(dtype)


def turned(x: Tensor) -> Tensor:
    """Times Hadamard's matrix over the root of its size, in blocks of the largest power of two that divides D."""
    D = x.shape[-1]
    block, half = D & -D, 1
    while half < block:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack([a + b, a - b], -2).flatten(-3), 2 * half
    return x * (1 / torch.tensor(block, dtype=x.dtype).sqrt())
