"""Ops without a derivative: a backward pass that reaches one is refused, and does not end there in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..support.checks import need


class _NoGradient(torch.autograd.Function):
    """Its first tensor, as a function of all; a gradient that comes back for it is refused."""

    @staticmethod
    def forward(ctx, message, in_place, x, *others):  # type: ignore[no-untyped-def]
        ctx.message = message
        if in_place:
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise NotImplementedError(ctx.message)


def _tracked(inputs: Sequence[Tensor]) -> bool:
    """Whether autograd would follow these inputs; not so in a cache."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def without_gradient(message: str, inputs: Sequence[Tensor], op: Callable[..., Any], *arguments: object) -> Any:
    """op(*arguments); a gradient that comes back for its results, which depend on inputs, is refused."""
    if not _tracked(inputs):
        return op(*arguments)
    with torch.no_grad():
        results = op(*arguments)
    if isinstance(results, Tensor):
        return _NoGradient.apply(message, False, results, *inputs)
    return tuple(_NoGradient.apply(message, False, x, *inputs) for x in results)


def change_without_gradient(
    message: str,
    name: str,
    changed: Sequence[Tensor],
    inputs: Sequence[Tensor],
    op: Callable[..., Any],
    *arguments: object,
) -> None:
    """op(*arguments), which changes tensors in place; a gradient that comes back for those is refused."""
    if not _tracked((*changed, *inputs)):
        op(*arguments)
        return
    for x in changed:
        need(
            not (x.is_leaf and x.requires_grad), f"{name} must not be a leaf that requires grad: it is changed in place"
        )
    with torch.no_grad():
        op(*arguments)
    for x in changed:
        if x.is_floating_point():
            _NoGradient.apply(message, True, x, *inputs)
