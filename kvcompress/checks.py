"""Checks of arguments that the ops share: each names the argument, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST, LARGEST = 2.0**-126, 3.4028234663852886e38  # normal numbers of float32


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def need_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def need_float(name: str, x: Tensor, ndim: int, shape: str) -> None:
    need_tensor(name, x)
    need(x.dtype in FLOATS, f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
    need(x.ndim == ndim, f"{name} must be {shape}, got shape {tuple(x.shape)}")


def need_device(like: Tensor, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            need_tensor(name, x)
            need(x.device == like.device, f"{name} must be on {like.device}, got {x.device}")


def need_int32(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None:
        need_tensor(name, x)
        need(x.dtype == torch.int32, f"{name} must be int32, got {x.dtype}")
        need(tuple(x.shape) == shape, f"{name} must have shape {shape}, got {tuple(x.shape)}")


def need_choice(name: str, value: str, choices: tuple[str, ...]) -> int:
    need(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return choices.index(value)


def need_integer(name: str, value: int, least: int, most: int = (1 << 63) - 1) -> None:
    need(isinstance(value, int), f"{name} must be an integer, got {value!r}")
    need(value >= least, f"{name} must be at least {least}, got {value}")
    need(value <= most, f"{name} must be at most {most}, got {value}")


def need_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the logits; None = 1/sqrt(head_dim)."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    need(math.isfinite(scale) and abs(scale) <= LARGEST, f"scale must be finite in float32, got {scale}")
    return scale


def need_softcap(softcap: float | None) -> float:
    """What the native ops take: 0 = none."""
    if softcap is None:
        return 0.0
    good = SMALLEST <= softcap <= LARGEST
    need(good, f"softcap must be above 0 and finite in float32, or None, got {softcap}")
    return softcap


def need_sink_logits(sink_logits: Tensor | None, heads: int, like: Tensor) -> Tensor | None:
    if sink_logits is None:
        return None
    need_tensor("sink_logits", sink_logits)
    need(sink_logits.dtype == torch.float32, f"sink_logits must be float32, got {sink_logits.dtype}")
    need(tuple(sink_logits.shape) == (heads,), f"sink_logits must be [{heads}], got shape {tuple(sink_logits.shape)}")
    need_device(like, sink_logits=sink_logits)
    return sink_logits.contiguous()


def need_integers(name: str, values: Sequence[int], count: int) -> Tensor:
    """As an int64 tensor [count]."""
    need(len(values) == count, f"{name} must have {count} elements, got {len(values)}")
    for j, value in enumerate(values):
        need_integer(f"{name}[{j}]", value, 0)
    return torch.tensor(values, dtype=torch.int64)


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def dense_last(x: Tensor) -> Tensor:
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
