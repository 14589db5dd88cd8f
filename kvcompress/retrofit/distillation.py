"""How far a model's next tokens are from a teacher's, with the gradient made on the way.

Logits of a pass are its largest tensors. Written as operations of their own, a divergence makes some ten more of that
size in float32; here a few rows at a time go through, and what stays is their gradient, in the logits' dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ON_CPU, _ELSEWHERE = 1 << 20, 1 << 27  # numbers that go through at once: a cache holds them; enough for a device


class Distance(NamedTuple):
    """Sums over the tokens that have a label, float32. divergence: KL, from the teacher's distributions to the model's,
    with a gradient; nats: of the labels, without one. tokens: how many."""

    divergence: Tensor
    nats: Tensor
    tokens: Tensor


def distance(logits: Tensor, teacher: Tensor, labels: Tensor) -> Distance:
    """logits: [B, T, V] of a model, a position's for the token after it; teacher: those of a model of the same
    vocabulary, without gradient. labels: int64 [B, T], -100 = none, as the model's own loss has them.

    Raises ValueError for shapes that do not fit.
    """
    if logits.shape != teacher.shape:
        raise ValueError(f"teacher must have logits of the shape {tuple(logits.shape)}, got {tuple(teacher.shape)}")
    if labels.shape != logits.shape[:2]:
        raise ValueError(f"labels must be {tuple(logits.shape[:2])}, got {tuple(labels.shape)}")
    divergence, nats = _Distance.apply(logits, teacher.detach(), labels)
    return Distance(divergence, nats, (labels[:, 1:] != -100).sum())


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        (B, T, V), exact = logits.shape, torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows = max((_ON_CPU if logits.device.type == "cpu" else _ELSEWHERE) // V, 1)
        gradient = torch.empty_like(logits)
        gradient[:, -1:] = 0
        divergence, nats = logits.new_zeros((), dtype=exact), logits.new_zeros((), dtype=exact)
        for b in range(B):
            for begin in range(0, T - 1, rows):
                part = slice(begin, min(begin + rows, T - 1))
                wanted = labels[b, part.start + 1 : part.stop + 1]
                counts = wanted != -100  # others may hold anything
                own, theirs = (x[b, part][counts].to(exact).log_softmax(-1) for x in (logits, teacher))
                likely = theirs.exp()
                divergence += theirs.sub_(own).mul_(likely).sum()
                nats -= own.gather(1, wanted[counts][:, None]).sum()
                gradient[b, part] = 0
                gradient[b, part][counts] = own.exp_().sub_(likely).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(nats)
        return divergence, nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(gradient.dtype), None, None
