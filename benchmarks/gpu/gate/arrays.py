"""Arrays for calls whose launches are only noted: never written, never read."""

from __future__ import annotations

import torch
from torch import Tensor


def floats(*shape: int) -> Tensor:
    return torch.empty(shape)


def ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)
