"""Vectors as codes of 8 or 4 bits and one float16 scale each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..support.checks import FLOATS, dense_last, need, need_device, need_float, need_tensor, need_tensors
from .explained import explained_by
from .native import MAX_HEAD_DIM, native
from .no_gradient import without_gradient

CODES = {"int8": (8, torch.int8), "int4": (4, torch.uint8)}  # bits, and the dtype of the bytes
VALUE_CODES = (torch.int8, torch.uint8)  # what values of rows of codes may be

NO_GRADIENT = "{} has no gradient: codes are what caches store"


def _check(x: Tensor, format: str) -> None:
    bits, _ = _codes_of(format)
    need_tensors(x=x)
    need(x.ndim >= 1, f"x must be [..., D], got shape {tuple(x.shape)}")
    D = x.shape[-1]
    need(1 <= D <= MAX_HEAD_DIM, f"x must have a last dimension between 1 and {MAX_HEAD_DIM}, got {D}")
    need(bits == 8 or D % 2 == 0, f"x must have an even last dimension for int4, got {D}")
    need_float("x", x, x.ndim, "[..., D]")


@explained_by(_check)
def quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Vectors as codes and one scale each: scale * code is within scale / 2 of x, of "int4" of x turned.

    x: float32, bfloat16 or float16 [..., D], D 1..512, even for int4. format: "int8", codes -127..127, or "int4",
    codes -7..7: byte i < D/2 holds code i in its low half and code i + D/2 in its high half, in two's complement.
    Before "int4" x is turned by Hadamard's matrix over the root of its size, in blocks of the largest power of two that
    divides D, so that no number is much larger than the others.
    Returns (codes, scales): int8 [..., D] or uint8 [..., D/2], and float16 [...]: the largest |x|, turned, over 127 or
    7, rounded up where rounding down would leave it out of reach; 0 for zeros. A vector with a NaN, an infinity or a
    number that no float16 scale reaches (above 65504 * 127 or * 7) has the scale NaN and codes 0. Raises ValueError
    for wrong dtypes, formats and sizes, NotImplementedError if a backward pass comes here.
    """
    bits, _ = _codes_of(format)
    *leading, D = x.shape
    if x.ndim != 4:
        x = x.reshape(1, 1, -1, D) if x.ndim < 4 else x.flatten(0, -4)
    codes, scales = without_gradient(NO_GRADIENT.format("quantize"), (x,), native.quantize, dense_last(x), bits)
    return codes.view(*leading, codes.shape[-1]), scales.view(leading)


def dequantize(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The vectors that codes stand for: scale * code, of "int4" turned back, rounded once to dtype.

    codes, scales, format: as quantize returns and takes them. dtype: float32, bfloat16 or float16.
    Returns [..., D]. Raises ValueError for wrong dtypes, formats and sizes.
    """
    bits, kind = _codes_of(format)
    need_tensors(codes=codes, scales=scales)
    need(codes.dtype == kind, f"codes must be {kind} for {format}, got {codes.dtype}")
    need(codes.ndim >= 1, f"codes must be [..., bytes], got shape {tuple(codes.shape)}")
    D = codes.shape[-1] * 8 // bits
    need(1 <= D <= MAX_HEAD_DIM, f"codes must be of vectors of 1 to {MAX_HEAD_DIM} elements, got {D}")
    leading = codes.shape[:-1]
    need(
        scales.dtype == torch.float16 and scales.shape == leading,
        f"scales must be float16 {tuple(leading)}, got {scales.dtype} {tuple(scales.shape)}",
    )
    need(dtype in FLOATS, f"dtype must be float32, bfloat16 or float16, got {dtype}")
    need_device(codes, scales=scales)
    x = native.dequantize(codes.reshape(-1, codes.shape[-1]).contiguous(), scales.reshape(-1).contiguous(), bits, dtype)
    return x.view(*leading, D)


def _codes_of(format: str) -> tuple[int, torch.dtype]:
    if not isinstance(format, str) or format not in CODES:
        raise ValueError(f"format must be one of {', '.join(CODES)}, got {format!r}")
    return CODES[format]


PAGES = ("k_pages", "v_pages", "key_scales", "value_scales")


def need_pages(
    k_pages: Tensor, v_pages: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, head_dim: int,
    value_pages: int, names: Sequence[str] = PAGES,
) -> None:  # fmt: skip
    """Pages of keys [pages, P, head_dim] and of values, of one format: numbers of one dtype, or codes and scales.
    names: of the arguments."""
    k_name, v_name, *scale_names = names
    need_tensors(**{k_name: k_pages, v_name: v_pages})
    kinds: tuple[torch.dtype, ...]
    if key_scales is None and value_scales is None:
        need_float(k_name, k_pages, 3, "[pages, P, D]")
        kinds, width = (k_pages.dtype,), head_dim
    else:
        need(k_pages.dtype == torch.int8, f"{k_name} must be int8 where there are scales, got {k_pages.dtype}")
        need(k_pages.ndim == 3, f"{k_name} must be [pages, P, D], got shape {tuple(k_pages.shape)}")
        kinds, width = VALUE_CODES, values_width(v_pages, head_dim, v_name)
    need(k_pages.shape[2] == head_dim, f"{k_name} must have head dim {head_dim}, got {k_pages.shape[2]}")
    wanted = (value_pages, k_pages.shape[1], width)
    need(
        tuple(v_pages.shape) == wanted and v_pages.dtype in kinds,
        f"{v_name} must be {' or '.join(map(str, kinds))} {wanted}, got {v_pages.dtype} {tuple(v_pages.shape)}",
    )
    if key_scales is None and value_scales is None:
        return
    for name, scales, pages in zip(scale_names, (key_scales, value_scales), (k_pages, v_pages), strict=True):
        need_scales(name, scales, pages)


def values_width(v_pages: Tensor, head_dim: int, name: str = "v_pages") -> int:
    """Bytes of the codes of a value in such pages."""
    need(v_pages.dtype != torch.uint8 or head_dim % 2 == 0, f"{name} of 4 bits need an even head dim, got {head_dim}")
    return head_dim // 2 if v_pages.dtype == torch.uint8 else head_dim


def need_values(v_pages: Tensor, value_scales: Tensor, head_dim: int) -> None:
    """Pages [pages, P, ...] of values alone, as codes."""
    need(
        v_pages.dtype in VALUE_CODES and v_pages.ndim == 3 and v_pages.shape[2] == values_width(v_pages, head_dim),
        f"v_pages must be torch.int8 [pages, P, {head_dim}] or torch.uint8 [pages, P, {head_dim // 2}] where there are "
        f"scales, got {v_pages.dtype} {tuple(v_pages.shape)}",
    )
    need_scales("value_scales", value_scales, v_pages)


def need_scales(name: str, scales: Tensor | None, pages: Tensor) -> None:
    """A scale for each slot of pages."""
    shape = tuple(pages.shape[:2])
    if scales is not None:
        need_tensor(name, scales)
    if scales is None or scales.dtype != torch.float16 or tuple(scales.shape) != shape:
        found = "None" if scales is None else f"{scales.dtype} {tuple(scales.shape)}"
        raise ValueError(f"{name} must be torch.float16 {shape}, got {found}")
    need(scales.is_contiguous(), f"{name} must be contiguous")


@torch.library.register_fake("kvcompress::quantize")
def _(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    _check(x, "int8" if bits == 8 else "int4")
    *leading, D = x.shape
    codes = x.new_empty((*leading, D * bits // 8), dtype=torch.int8 if bits == 8 else torch.uint8)
    return codes, x.new_empty(leading, dtype=torch.float16)


@torch.library.register_fake("kvcompress::dequantize")
def _(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], codes.shape[1] * 8 // bits), dtype=dtype)
