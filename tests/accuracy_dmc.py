"""Bounds as those of accuracy.py, of DMC's gates and partial averages."""

from __future__ import annotations

import math
from typing import Any

import torch
from accuracy import FEW, U, independent, least, rounded, roundings
from torch import Tensor

# ---- gates ----


def _sigmoid(x: Tensor, error: Tensor) -> Tensor:
    """sigmoid' <= sigmoid * (1 - sigmoid) * exp(error) on the way; few roundings of its own, relative to itself."""
    y = x.sigmoid()
    return y * (1 - y) * torch.expm1(error) + FEW * U * y + least(torch.float32)


def decisions(
    logits: Tensor, exact: tuple[Tensor, Tensor, Tensor], *, noise: Any = None, shift: float = 5.0,
    temperature: float = 0.1, scale: float = 1.0, margin: float = 0.0, hard: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of alpha, hard and tempered, `exact`; a hard decision is open where the logit is as near to the margin as it may
    be off."""
    scaled = logits.double() * scale
    y = exact[2] * temperature if not hard else scaled - shift
    error = U * (scaled.abs() + (scaled - shift).abs())
    if noise is not None:  # drawn: the difference of two logarithms of at most 16.7
        drawn = 0 if isinstance(noise, Tensor) else U * 2 * 16.7
        error = error + drawn + U * (y - scaled + shift).abs() + U * y.abs()
    is_open = ((y - margin).abs() <= error).double() * (y != margin)
    if hard:
        return is_open, is_open, torch.where(is_open > 0, math.inf, 0.0)
    of_tempered = error / temperature + 2 * U * exact[2].abs()
    return _sigmoid(exact[2], of_tempered), is_open, of_tempered + least(torch.float32)


def importance(
    logits: Tensor, kv_heads: int, *, shift: float = 5.0, eps: float = 0.0, reduce: str = "mean_logit"
) -> Tensor:
    x = logits.double().unflatten(1, (kv_heads, -1))
    if reduce == "first":
        x = x[:, :, :1]
    G = x.shape[2]
    if reduce == "mean_sigmoid":
        y = (x + shift).sigmoid()
        error = _sigmoid(x + shift, U * (x + shift).abs()).mean(2) + U * (roundings(G) + 1) * y.mean(2)
    else:
        mean = x.mean(2)
        error = _sigmoid(mean + shift, U * ((roundings(G) + 1) * x.abs().mean(2) + (mean + shift).abs()))
        y = (mean + shift).sigmoid()[:, :, None]
    return error + U * (y.mean(2) + eps)  # a floor under a number moves it no further


def mask(exact: Tensor) -> Tensor:
    """ln(1 - sigmoid): a sum of two numbers of one sign, each within few roundings of itself."""
    return FEW * U * torch.where(exact.isinf(), 0, exact).abs() + least(torch.float32)


# ---- averages ----


def accumulate(
    tensors: list[Tensor], grads: list[Tensor], *, neuron: int | None = None, window: int | None = None,
    initial: tuple[Tensor, Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Of keys, values, z, dkeys, dvalues, dalpha, domega.

    A scan is followed step by step, with the recursions of kvc_dmc.h; what a step adds to an error fades as what it is
    an error of does. `linear` adds up errors as they are, `square` their squares: independent ones are at most 4 roots.
    """
    keys, values, alpha, omega = (x.double() for x in tensors)
    dtype = tensors[0].dtype
    dk, dv = (g.to(dtype).double() for g in grads)
    keep = torch.ones(keys.shape[-1], dtype=torch.float64)
    if neuron is not None:
        keep[neuron] = 0
    x, g = torch.stack([keys * keep, values]), torch.stack([dk * keep, dv])  # [2, B, H, T, D]
    if initial is None:
        alpha = torch.cat([torch.zeros_like(alpha[..., :1]), alpha[..., 1:]], -1)
    if window is not None:
        found = _windows(x, g, alpha, omega, window, dtype)
    else:
        state = None
        if initial is not None:
            state = torch.stack([initial[0].double() * keep, initial[1].double()]), initial[2].double()
        found = _scan(x, g, alpha, omega, state, dtype)
    names = ("keys", "values", "z", "dkeys", "dvalues", "dalpha", "domega")
    return dict(zip(names, found, strict=True))


class _Fading:
    """The error of a state that keeps a share of itself at each step."""

    def __init__(self, like: Tensor) -> None:
        self.linear, self.square = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, keep: Tensor, added: Tensor) -> Tensor:
        self.linear, self.square = keep * self.linear + added, keep.square() * self.square + added.square()
        return torch.minimum(self.linear, 4 * self.square.sqrt())


def _scan(
    x: Tensor, g: Tensor, a: Tensor, w: Tensor, state: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> list[Tensor]:
    T = x.shape[3]
    mean, z = (torch.zeros_like(x[:, :, :, 0]), torch.zeros_like(w[..., 0])) if state is None else state
    of_mean, of_z, of_share = _Fading(mean), _Fading(z), _Fading(mean)
    eta = torch.zeros_like(z)  # relative error of z
    means, zs, before, etas, mean_errors = [], [], [(mean, z, eta)], [], []
    for t in range(T):
        old = a[..., t] * z
        z_new = old + w[..., t]
        b, c = (old / z_new)[..., None], (w[..., t] / z_new)[..., None]
        new = b * mean + c * x[:, :, :, t]
        # shares of a rounded z: what is kept weighs more or less by its error, an error of every later step
        of_weights = of_share.step(b, b * c * (mean - x[:, :, :, t]).abs() * eta[..., None])
        own = 4 * U * (b * mean.abs() + c * x[:, :, :, t].abs()) + U * new.abs()
        mean_errors.append(of_mean.step(b, own) + of_weights)
        eta = of_z.step(b[..., 0], U * b[..., 0] + U)
        mean, z = new, z_new
        means.append(mean), zs.append(z), etas.append(eta)
        before.append((mean, z, eta))
    stack = [torch.stack(list_, -1 if list_[0].ndim == w.ndim - 1 else 3) for list_ in (means, zs, etas, mean_errors)]
    outs, z, eta, out_error = stack
    previous = torch.stack([m for m, _, _ in before[:-1]], 3)
    previous_error = torch.cat([torch.zeros_like(out_error[:, :, :, :1]), out_error[:, :, :, :-1]], 3)
    z_before, eta_before = (torch.stack([b[i] for b in before[:-1]], -1) for i in (1, 2))
    found = [rounded(outs[i], out_error[i], dtype) for i in (0, 1)] + [z * eta + least(torch.float32)]

    # from the last token on; every z here is off by no more than `most`
    most = 2 * torch.cat([eta, eta_before], -1).amax(-1)
    share = a * z_before / z
    G, sizes = torch.zeros_like(mean), torch.zeros_like(mean)  # sizes: the same sums of what has no sign
    of_G, of_y = _Fading(G), _Fading(z[..., 0])
    y = torch.zeros_like(z[..., 0])
    dx, dx_error, da, dw = [], [], [], []
    for t in range(T - 1, -1, -1):
        b_next = share[..., t + 1, None] if t + 1 < T else torch.zeros_like(share[..., :1])
        own = 4 * U * b_next * G.abs() + U * g[:, :, :, t].abs()
        G, sizes = g[:, :, :, t] + b_next * G, g[:, :, :, t].abs() + b_next * sizes
        G_error = of_G.step(b_next, own + U * G.abs()) + most[..., None] * sizes
        ratio = w[..., t] / z[..., t]
        dx.append(ratio[..., None] * G)
        dx_error.append(ratio[..., None] * (G_error + (eta[..., t] + 3 * U)[..., None] * G.abs()))
        apart = previous[:, :, :, t] - x[:, :, :, t]
        db = (G * apart).sum((0, -1))
        n = 2 * G.shape[-1]
        terms = torch.stack([G_error * apart.abs(), G.abs() * (previous_error[:, :, :, t] + 2 * U * apart.abs())])
        db_error = independent(terms, (0, 1, -1)) + U * roundings(n) * (G * apart).abs().sum((0, -1))
        relative = 3 * most + 6 * U
        by_a = db * w[..., t] / z[..., t] ** 2
        y_error = torch.minimum(of_y.linear, 4 * of_y.square.sqrt())
        by_a_error = db_error * w[..., t] / z[..., t] ** 2 + by_a.abs() * relative
        zb = z_before[..., t]
        da.append(zb * (y_error + by_a_error + (2 * U + most) * (y.abs() + by_a.abs())))
        by_w = db * share[..., t] / z[..., t]
        exact_loses = 2.0**-48 * (sizes * (x[:, :, :, t].abs() + outs[:, :, :, t].abs())).sum((0, -1)) / z[..., t]
        of_w = db_error * share[..., t] / z[..., t] + by_w.abs() * relative
        dw.append(y_error + of_w + U * (y - by_w).abs() + exact_loses)  # the last: float64's, where terms cancel
        # y of the token before
        of_y.step(a[..., t], a[..., t] * by_a_error + 3 * U * a[..., t] * (y.abs() + by_a.abs()))
        y = a[..., t] * (y + by_a)
    gradients, of_gradients = (torch.stack(list_[::-1], 3) for list_ in (dx, dx_error))
    found += [rounded(gradients[i], of_gradients[i], dtype) for i in (0, 1)]
    da, dw = (torch.stack(list_[::-1], -1) + least(torch.float32) for list_ in (da, dw))
    if state is None:
        da[..., 0] = 0  # a decision that does not count
    return [*found, da, dw]


def _windows(x: Tensor, g: Tensor, a: Tensor, w: Tensor, window: int, dtype: torch.dtype) -> list[Tensor]:
    """All weights at once: [T, T], row t the tokens of its window."""
    T, D = x.shape[3:]
    t = torch.arange(T)
    seen = (t <= t[:, None]) & (t > t[:, None] - window)
    products = torch.zeros(*a.shape, T, dtype=torch.float64)  # a[j+1] ... a[t]
    for i in range(T):
        product = torch.ones_like(a[..., 0])
        for j in range(i, max(i - window, -1), -1):
            products[..., i, j] = product
            product = product * a[..., j]
    n = (t[:, None] - t).clamp(min=0)  # factors
    weights = products * w[..., None, :]
    z = weights.sum(-1)
    of_weights = U * torch.minimum(n + 1.0, 4 * (n + 1.0).sqrt()) * weights
    z_error = of_weights.sum(-1) + U * roundings(window) * z
    share = weights / z[..., None]
    relative = (U * roundings(2 * window + FEW) + z_error / z)[..., None]  # of a share
    out = share @ x
    out_error = relative * (share @ x.abs() + out.abs()) + U * roundings(window) * (share @ x.abs())
    found = [rounded(out[i], out_error[i], dtype) for i in (0, 1)] + [z_error + least(torch.float32)]
    dx = share.mT @ g
    dx_error = (relative + U * roundings(window)) * (share.mT @ g.abs())
    found += [rounded(dx[i], dx_error[i], dtype) for i in (0, 1)]
    # u[t, j] = <g_t, x_j - out_t> / z_t, made of the products <g_t, x_j>
    dots, sizes = (g @ x.mT).sum(0), (g.abs() @ x.abs().mT).sum(0)
    mean = (share * dots).sum(-1, keepdim=True)
    u = (dots - mean) / z[..., None] * seen
    dot_error = U * (roundings(2 * D) + 2) * sizes
    mean_error = (share * (dot_error + (relative + U * roundings(window)) * dots.abs())).sum(-1, keepdim=True)
    u_error = ((dot_error + mean_error) / z[..., None] + (relative + 4 * U) * u.abs()) * seen
    dw = (products * (u_error + U * (2 * n + roundings(window) + FEW) * u.abs())).sum(-2)
    # what lies before m in the window of t: sum over j < m of r[m-1, j] w[j] u[t, j], by a[m] of m's own product
    before = torch.cat([torch.zeros_like(weights[..., :1, :]), weights[..., :-1, :]], -2)  # [m, j]
    of_before = u_error + U * (2 * window + FEW) * u.abs()
    da = (products * (of_before @ before.mT) * (t[:, None] >= t)).sum(-2)
    da = da + U * roundings(window) * (products * (u.abs() @ before.mT)).sum(-2)
    da[..., 0] = 0
    return [*found, da + least(torch.float32) * (t > 0), dw + least(torch.float32)]
