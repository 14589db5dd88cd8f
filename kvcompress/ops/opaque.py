"""Ops that torch.compile does not look into: their bodies are Python, and work on objects that no compiler knows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .native import native

_LIBRARY = torch.library.Library("kvcompress", "FRAGMENT")
_NUMBERS = itertools.count()
_HELD: WeakValueDictionary[int, Any] = WeakValueDictionary()


class Handled:
    """An object that ops know by its number. handle: int64 [], on the CPU. As a tensor it is an input of what is
    compiled, which then serves all objects; an op that works on one declares that it changes the handle: such ops are
    neither dropped nor put in another order. A copy, or what was pickled, has a handle of its own."""

    handle: Tensor

    def take_handle(self) -> None:
        """Gives the object a number of its own."""
        number = next(_NUMBERS)
        with torch.inference_mode(False):
            self.handle = torch.tensor(number, device="cpu")
        _HELD[number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.take_handle()


def held(handle: Tensor) -> Any:
    """The object of a handle, which somebody else keeps alive."""
    return _HELD[int(handle)]


def opaque_op(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers kvcompress::<schema>. fake: what body returns, by shapes alone. Returns what calls it.

    CUDA graphs of torch.compile leave such an op out: body works on the host."""
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    # compiled code calls it, which would have its frames compiled too
    _LIBRARY.impl(name, torch.compiler.disable(body), "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvcompress::{name}", fake, lib=_LIBRARY)
    return getattr(native, name).default
