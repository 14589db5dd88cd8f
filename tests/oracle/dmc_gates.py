"""The gates of DMC: which token merges, with what weight, and which keys a merge hides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OMEGA_FLOOR = 2.0**-40  # keeps the running weight above 0
_MASK = 0xFFFFFFFF


def dmc_decisions(
    logits: Tensor,
    *,
    shift: float = 5.0,
    temperature: float = 0.1,
    scale: float = 1.0,
    margin: float = 0.0,
    noise: Any = None,
    hard: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.dmc_decisions; noise: a tensor, or anything with the fields of ops.Noise."""
    x = _wide(logits) * scale - shift
    if isinstance(noise, Tensor):
        x = x + noise
    elif noise is not None:
        x = x + logistic_noise(x.shape, *noise, device=x.device).to(x.dtype)
    merges = x > margin
    tempered = x / temperature
    if hard:
        tempered = torch.where(merges, torch.inf, -torch.inf).to(x.dtype)
    alpha = tempered.sigmoid()
    # the value of the threshold, the gradient of the sigmoid
    return alpha, merges.to(x.dtype) + (alpha - alpha.detach()), tempered


def dmc_importance(
    logits: Tensor, kv_heads: int, *, shift: float = 5.0, eps: float = 0.0, reduce: str = "mean_logit"
) -> Tensor:
    """As ops.dmc_importance."""
    x = _wide(logits).unflatten(1, (kv_heads, -1))
    if reduce == "mean_logit":
        x = (x.mean(2) + shift).sigmoid()
    elif reduce == "mean_sigmoid":
        x = (x + shift).sigmoid().mean(2)
    else:
        x = (x[:, :, 0] + shift).sigmoid()
    return x.clamp(min=OMEGA_FLOOR) + eps


def dmc_mask(tempered: Tensor) -> Tensor:
    """As ops.dmc_mask."""
    bias = torch.nn.functional.logsigmoid(-tempered)
    return torch.cat([bias[..., 1:], torch.zeros_like(bias[..., :1])], -1)


def logistic_noise(
    shape: torch.Size,
    seed: int,
    offset: int,
    stream: int = 0,
    sample: int = 0,
    token: int = 0,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """float64 [B, H, T]: log(u / (1 - u)), u = (x + 1/2) / 2^23 from the first 23 bits x of Philox."""
    sizes = ((sample, shape[0]), (stream, shape[1]), (token, shape[2]))
    numbers = [torch.arange(first, first + n, device=device) & _MASK for first, n in sizes]
    b, h, t = torch.meshgrid(*numbers, indexing="ij")
    odd = 2 * (philox((t, h, b, torch.full_like(t, offset & _MASK)), (seed & _MASK, seed >> 32 & _MASK)) >> 9) + 1
    return odd.double().log() - (2**24 - odd).double().log()


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> Tensor:
    """First word of Philox 4x32-10 (Salmon et al. 2011); words are int64 tensors in [0, 2^32)."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        # products wrap at 2^64, of which the shift and the mask make the right words all the same
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (second >> 32 & _MASK) ^ b ^ low,
            second & _MASK,
            (first >> 32 & _MASK) ^ d ^ high,
            first & _MASK,
        )
        low, high = low + 0x9E3779B9 & _MASK, high + 0xBB67AE85 & _MASK
    return a


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
