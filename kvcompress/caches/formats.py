"""Formats of stored keys and values: codes of 8 or 4 bits, each token's with a scale of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import ops

Slots = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

FORMATS = {"int8": ("int8", "int8"), "k8v4": ("int8", "int4")}  # of keys and of values
PAIR = ("keys", "values")
Dtypes = str | tuple[str | None, ...] | None  # of FORMATS, None = the model's; or one of each of the model's layers


@dataclass(frozen=True)
class Format:
    """How keys and values lie in pages. name: of FORMATS. dtype: of the model, in which they come and are given back.
    names: what lies there, of PAIR.

    A slot holds the codes and one float16 scale of its key, and of its value (ops.quantize): what drops, moves or
    shares a slot moves bytes.
    """

    name: str
    dtype: torch.dtype
    names: tuple[str, ...] = PAIR

    @staticmethod
    def of(name: str | None, dtype: torch.dtype, names: tuple[str, ...] = PAIR) -> Format | None:
        """None = as they are."""
        return None if name is None else Format(name, dtype, names)

    @property
    def exact(self) -> Format:
        """The same, but what codes stand for is not rounded to the model's dtype."""
        return replace(self, dtype=torch.float32)

    def code(self, name: str) -> str:
        """ops.quantize's name of what keys, or values, are."""
        return FORMATS[self.name][PAIR.index(name)]

    def slots(self, head_dim: int) -> Slots:
        """Raises ValueError for an odd size where two codes share a byte."""
        slots: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in self.names:
            code = self.code(name)
            if code == "int4" and head_dim % 2:
                raise ValueError(f"dtype {self.name!r} needs heads of an even size, got {head_dim}: take 'int8'")
            slots[name] = ((head_dim,), torch.int8) if code == "int8" else ((head_dim // 2,), torch.uint8)
        return slots | {scales_of(name): ((), torch.float16) for name in self.names}

    def encode(self, *tokens: Tensor) -> list[Tensor]:
        """What goes into the slots of names [..., D] each."""
        pairs = [ops.quantize(x, self.code(name)) for x, name in zip(tokens, self.names, strict=True)]
        return [codes for codes, _ in pairs] + [scales for _, scales in pairs]

    def decode(self, name: str, codes: Tensor, scales: Tensor) -> Tensor:
        """[..., D] in dtype. name: keys or values."""
        return ops.dequantize(codes, scales, self.code(name), self.dtype)


def scales_of(name: str) -> str:
    """The array of scales that stands beside keys or values."""
    return f"{name.removesuffix('s')}_scales"


def keys_and_values(head_dim: int, dtype: torch.dtype, form: Format | None = None) -> Slots:
    """What a slot holds in most caches. dtype: of the model."""
    return dict.fromkeys(PAIR, ((head_dim,), dtype)) if form is None else form.slots(head_dim)


def slot_nbytes(slots: Slots) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in slots.values())


def named_scales(arrays: Sequence[Tensor]) -> dict[str, Any]:
    """key_scales and value_scales of arrays as coded() orders them, if there are any."""
    return {scales_of(name): x for name, x in zip(PAIR, arrays[2:], strict=False)}


def decoded(form: Format | None, arrays: Sequence[Tensor]) -> Sequence[Tensor]:
    """Keys and values again, of what coded() gave."""
    if form is None:
        return arrays
    return [form.decode(name, x, scales) for name, x, scales in zip(PAIR, arrays[:2], arrays[2:], strict=True)]


def coded(form: Format | None, tokens: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tokens as pages hold them: one for each array of a slot."""
    return tokens if form is None else form.encode(*tokens)
