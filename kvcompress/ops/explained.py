"""Tensors of a call are looked at once, by the binding; what is wrong with them is looked for once it refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def explained_by(check: Callable[..., None]) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """An op that refuses, and changes nothing then, whatever `check` does, which takes the same arguments: the error is
    the ValueError or TypeError of check for the first of them that is wrong, or else the op's own."""

    def of(op: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        check.__qualname__ = op.__qualname__  # by which Python names what takes no such argument

        @functools.wraps(op)
        def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            try:
                return op(*arguments, **options)
            except Exception as error:
                refused = error
            try:
                check(*arguments, **options)
                raise refused
            finally:
                del refused  # its traceback knows this frame, which would hold the arguments until they are collected

        return call

    return of


def need_one_device(*arguments: object) -> None:
    """ValueError for the first tensor that is not where the first argument is. A fake asks: PyTorch takes an op to it
    as soon as one of its tensors is meta, whatever the others are."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    for x in arguments:
        if isinstance(x, Tensor) and x.device != first.device:
            raise ValueError(f"all tensors must be on {first.device}, where queries are, got one on {x.device}")
