"""DMC's partial averages of keys and values, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def dmc_accumulate(
    keys: Tensor,
    values: Tensor,
    alpha: Tensor,
    omega: Tensor,
    *,
    neuron: int | None = None,
    window: int | None = None,
    initial: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.dmc_accumulate; differentiable by autograd. Computed in float32, in float64 for float64 inputs."""
    D, wide = keys.shape[3], torch.promote_types(keys.dtype, torch.float32)
    if initial is None:
        alpha = torch.cat([torch.zeros_like(alpha[..., :1]), alpha[..., 1:]], -1)
    k, v, a, w = (x.to(wide) for x in (keys, values, alpha, omega))
    if neuron is not None:
        live = torch.ones(D, dtype=wide, device=k.device)
        live[neuron] = 0
        k = k * live
        initial = None if initial is None else (initial[0] * live, *initial[1:])
    sums = _scan(k, v, a, w, initial) if window is None else _windows(k, v, a, w, window)
    return sums[0].to(keys.dtype), sums[1].to(values.dtype), sums[2]


def _scan(
    k: Tensor, v: Tensor, a: Tensor, w: Tensor, initial: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """z_i = a_i z_{i-1} + w_i; the averages with the shares a_i z_{i-1} / z_i of the old and w_i / z_i of the new."""
    if initial is None:
        mean_k, mean_v, z = torch.zeros_like(k[:, :, 0]), torch.zeros_like(v[:, :, 0]), torch.zeros_like(w[..., 0])
    else:
        mean_k, mean_v, z = (x.to(k.dtype) for x in initial)
    found = []
    for t in range(k.shape[2]):
        old = a[..., t] * z
        z = old + w[..., t]
        keep, add = (old / z)[..., None], (w[..., t] / z)[..., None]
        mean_k, mean_v = keep * mean_k + add * k[:, :, t], keep * mean_v + add * v[:, :, t]
        found.append((mean_k, mean_v, z))
    return _stacked(found, k, v, w)


def _windows(k: Tensor, v: Tensor, a: Tensor, w: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the last `window` tokens alone, each with the product of the decisions after it."""
    found = []
    for t in range(k.shape[2]):
        product, weights = torch.ones_like(w[..., 0]), []
        for j in range(t, max(t - window, -1), -1):
            weights.append(product * w[..., j])
            product = product * a[..., j]
        weight = torch.stack(weights[::-1], -1)
        z, first = weight.sum(-1), t + 1 - len(weights)
        share = (weight / z[..., None])[..., None]
        found.append(((share * k[:, :, first : t + 1]).sum(2), (share * v[:, :, first : t + 1]).sum(2), z))
    return _stacked(found, k, v, w)


def _stacked(
    found: list[tuple[Tensor, Tensor, Tensor]], k: Tensor, v: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not found:
        return torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(w)
    keys, values, z = zip(*found, strict=True)
    return torch.stack(keys, 2), torch.stack(values, 2), torch.stack(z, 2)
