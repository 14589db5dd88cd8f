"""Weights of a model that was trained on from another, as what differs: fewer bytes, the same bits.

Two numbers that training moved a little have a small distance when it is counted in steps of bfloat16; its two bytes
are laid apart, like with like, and packed. To make such a file:
Path("model.differences").write_bytes(pack(load_file(before), load_file(after))).
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..support.checks import need

_SIGN = 0x8000
_STRATEGIES = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY)  # which is best, the numbers say


def _order(bits: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Number of a float among all floats of 16 bits, the least first; -0.0 lies right below 0.0."""
    wide = bits.astype(np.int32)
    return np.where(wide & _SIGN, 0xFFFF - wide, wide + _SIGN)


def _bits(order: NDArray[np.int32]) -> NDArray[np.uint16]:
    return np.where(order >= _SIGN, order - _SIGN, 0xFFFF - order).astype(np.uint16)


def _flat(weights: dict[str, Tensor]) -> NDArray[np.uint16]:
    """All weights in a row, by name."""
    for name, x in weights.items():
        need(x.dtype == torch.bfloat16, f"weights must be bfloat16, got {x.dtype} for {name}")
    return np.concatenate([weights[name].contiguous().view(torch.uint16).numpy().ravel() for name in sorted(weights)])


def pack(before: dict[str, Tensor], after: dict[str, Tensor]) -> bytes:
    """What unpack makes `after` of. Raises ValueError for other names, shapes or dtypes in the two."""
    shapes = [{name: x.shape for name, x in weights.items()} for weights in (before, after)]
    need(shapes[0] == shapes[1], "after must have the names and shapes of before")
    distance = (_order(_flat(after)) - _order(_flat(before))) & 0xFFFF
    signed = distance.astype(np.uint16).view(np.int16).astype(np.int32)
    small = ((signed << 1) ^ (signed >> 15)).astype("<u2")  # 0, -1, 1, -2, ... as 0, 1, 2, 3, ...
    planes = small.view(np.uint8).reshape(-1, 2).T.tobytes()
    return min((_packed(planes, strategy) for strategy in _STRATEGIES), key=len)


def _packed(planes: bytes, strategy: int) -> bytes:
    made = zlib.compressobj(9, strategy=strategy)
    return made.compress(planes) + made.flush()


def unpack(before: dict[str, Tensor], packed: bytes) -> dict[str, Tensor]:
    """The weights that pack was given as `after`, bit for bit. Raises ValueError for bytes that do not fit."""
    flat = _flat(before)
    planes = np.frombuffer(zlib.decompress(packed), np.uint8)
    need(planes.size == 2 * flat.size, f"packed must hold {flat.size} weights, got {planes.size / 2:g}")
    small = np.ascontiguousarray(planes.reshape(2, -1).T).view("<u2").ravel().astype(np.int32)
    bits = _bits((_order(flat) + ((small >> 1) ^ -(small & 1))) & 0xFFFF)
    made, at = {}, 0
    for name in sorted(before):
        shape = before[name].shape
        made[name] = torch.from_numpy(bits[at : at + shape.numel()].copy()).view(torch.bfloat16).reshape(shape)
        at += shape.numel()
    return made
