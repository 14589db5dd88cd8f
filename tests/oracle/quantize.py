"""Vectors as codes and one float16 scale each."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = {"int8": 127, "int4": 7}


def quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """As ops.quantize, of float32, bfloat16 or float16."""
    levels, x = LEVELS[format], x.float()
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
    return (unpacked(codes, format).double() * scales.double()[..., None]).to(dtype)
