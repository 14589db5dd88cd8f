"""Rows of slots in pages that may be shared: append, truncate, keep chosen slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..support.checks import (
    MOST_INT32,
    dense,
    need,
    need_device,
    need_float,
    need_int32,
    need_integer,
    need_parts,
    need_sequence,
    need_tensor,
    need_tensors,
)
from .explained import explained_by
from .native import native
from .no_gradient import change_without_gradient
from .quantize import need_pages


class PageTable(NamedTuple):
    """Which pages hold the slots of R rows, and which pages are free; int32 tensors on one device, changed in place.

    block_table: [R, blocks]: slot t of row r lies at [block_table[r, t // P], t % P] of every array. lengths: [R],
    slots per row. refs: [pages], how many rows name a page, those of other tables over the same pages included.
    free_pages: [pages], of which the first free_count[0] are free. free_count: [2]; free_count[1] counts calls that
    were refused on CUDA.
    """

    block_table: Tensor
    lengths: Tensor
    refs: Tensor
    free_pages: Tensor
    free_count: Tensor


NO_GRADIENT = (
    "{} has no gradient: pages are what caches store; for training give attention the keys and values themselves"
)


def need_table(table: PageTable, name: str = "table") -> None:
    """name: of the argument; that of one of several stands before the names of its parts too."""
    if not isinstance(table, PageTable):
        raise TypeError(f"{name} must be an ops.PageTable, got {type(table).__name__}")
    of = "" if name == "table" else f"{name}."
    need_tensors(**{f"{of}block_table": table.block_table, f"{of}refs": table.refs})
    lines, pages = table.block_table, table.refs.shape
    if lines.ndim != 2:
        raise ValueError(f"{of}block_table must be [R, blocks], got shape {tuple(lines.shape)}")
    shapes = (lines.shape, lines.shape[:1], pages, pages, (2,))
    for part, x, shape in zip(table._fields, table, shapes, strict=True):
        need_tensor(of + part, x)
        need_int32(of + part, x, tuple(shape))
        need_device(lines, **{of + part: x})
        need(x.is_contiguous(), f"{of}{part} must be contiguous")


def need_page_size(k_pages: Tensor, coded: bool) -> None:
    """Pages of floats, or of codes, whose size is a power of two."""
    if not coded or not isinstance(k_pages, Tensor) or k_pages.ndim != 3:
        need_float("k_pages", k_pages, 3, "[pages, P, D]")
    P = k_pages.shape[1]
    need(P >= 1 and P & (P - 1) == 0, f"k_pages must have a page size that is a power of two, got {P}")


def need_stored(
    table: PageTable, k_pages: Tensor, v_pages: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, D: int,
    dtype: torch.dtype, value_table: PageTable | None = None,
) -> None:  # fmt: skip
    """All pages of a table, of numbers of this dtype or of codes. value_table: of the values, None = the same."""
    pages = (table.refs.shape[0], k_pages.shape[1], D)
    value_pages: tuple[int, ...] = ((value_table or table).refs.shape[0], *pages[1:])
    kinds = (dtype, dtype)
    if key_scales is not None or value_scales is not None:
        need_pages(k_pages, v_pages, key_scales, value_scales, D, value_pages[0])
        need_device(table.refs, key_scales=key_scales, value_scales=value_scales)
        kinds, value_pages = (torch.int8, v_pages.dtype), tuple(v_pages.shape)
    need_parts(table.refs.device, ("k_pages", k_pages, kinds[0], pages), ("v_pages", v_pages, kinds[1], value_pages))


def need_rows(
    keys: Tensor, k_pages: Tensor, v_pages: Tensor, key_scales: Tensor | None, value_scales: Tensor | None,
    table: PageTable, D: int, value_table: PageTable | None = None,
) -> torch.dtype:  # fmt: skip
    """The same of rows that take new tokens; gives the dtype that their keys and values must have."""
    need_stored(table, k_pages, v_pages, key_scales, value_scales, D, k_pages.dtype, value_table)
    if key_scales is None and value_scales is None:
        return k_pages.dtype
    need_float("keys", keys, 4, "[B, Hkv, S, D]")
    return keys.dtype


def _need_arrays(arrays: Sequence[Tensor], table: PageTable) -> None:
    need_sequence("arrays", arrays)
    need(1 <= len(arrays) <= 8, f"arrays must hold 1 to 8 tensors, got {len(arrays)}")
    pages, device = table.refs.shape[0], table.refs.device
    for i, array in enumerate(arrays):
        need_tensor(f"arrays[{i}]", array)
    P = arrays[0].shape[1] if arrays[0].ndim > 1 else 0
    for i, array in enumerate(arrays):
        if P == 0 or array.shape[:2] != (pages, P):
            raise ValueError(f"arrays must be [{pages}, P, ...] with one P, got shape {tuple(array.shape)} at {i}")
        if array.device != device or not array.is_contiguous():
            raise ValueError(f"arrays must be contiguous and on {device}, which number {i} is not")


def _check_append(
    arrays: Sequence[Tensor], tokens: Sequence[Tensor], table: PageTable, *, counts: Tensor | None = None
) -> None:
    need_table(table)
    _need_arrays(arrays, table)
    R = table.block_table.shape[0]
    need_sequence("tokens", tokens)
    need(len(tokens) == len(arrays), f"tokens must hold {len(arrays)} tensors, one for each array, got {len(tokens)}")
    for i, x in enumerate(tokens):
        need_tensor(f"tokens[{i}]", x)
    first = tokens[0].shape[:3]
    need(len(first) == 3 and first[0] * first[1] == R, f"tokens must be [B, H, S, ...] with B*H = {R}")
    for array, x in zip(arrays, tokens, strict=True):
        if x.shape[:3] != first or x.shape[3:] != array.shape[2:]:
            shape = (*first, *array.shape[2:])
            raise ValueError(f"tokens must be {shape} for their array, got {tuple(x.shape)}")
        need(
            x.dtype == array.dtype and x.device == array.device,
            f"tokens must be {array.dtype} on {array.device} as their array, got {x.dtype}, {x.device}",
        )
    need_int32("counts", counts, (R,))
    need_device(table.refs, counts=counts)


@explained_by(_check_append)
def append_tokens_(
    arrays: Sequence[Tensor], tokens: Sequence[Tensor], table: PageTable, *, counts: Tensor | None = None
) -> None:
    """Appends new tokens to all rows in place, taking pages from the free list; shared pages are copied first.

    arrays: up to 8 contiguous [pages, P, ...] of any dtype, one for keys, one for values, others that move with them;
    none may share memory with another.
    tokens: for each array, in its dtype, [B, H, S, ...] with B*H = R, any strides in the first three dimensions; they
    may be views of arrays. counts: int32 [R], 0..S: row r gets its last counts[r] tokens; None = all S.
    Waits for nothing on CUDA. Raises ValueError for wrong shapes and for arrays that are leaves that require grad,
    RuntimeError if the free list is too short, a row outgrows its line of the table, or arrays share memory; nothing is
    changed then (on CUDA free_count[1] grows where pages or columns run out or a page does not exist). Tokens in pages
    have no gradient: NotImplementedError if a backward pass comes here.
    """
    need_sequence("arrays", arrays)
    need_sequence("tokens", tokens)
    readable = []
    for x in tokens:
        plain = x.ndim == 4 and x.stride(3) == 1
        readable.append(x if plain or x[:1, :1, :1].is_contiguous() else x.contiguous())
    op, message = native.append_tokens_, NO_GRADIENT.format("append_tokens_")
    change_without_gradient(message, "arrays", arrays, tokens, op, list(arrays), readable, *table, dense(counts))


@torch.library.register_fake("kvcompress::append_tokens_")
def _(arrays, tokens, block_table, lengths, refs, free_pages, free_count, counts):  # type: ignore[no-untyped-def]
    _check_append(arrays, tokens, PageTable(block_table, lengths, refs, free_pages, free_count), counts=counts)


def _check_truncate(table: PageTable, new_lengths: Tensor, page_size: int) -> None:
    need_table(table)
    need_tensor("new_lengths", new_lengths)
    need_int32("new_lengths", new_lengths, (table.block_table.shape[0],))
    need_device(table.refs, new_lengths=new_lengths)
    need_integer("page_size", page_size, 1, MOST_INT32 // max(table.block_table.shape[1], 1))


@explained_by(_check_truncate)
def truncate_rows_(table: PageTable, new_lengths: Tensor, page_size: int) -> None:
    """Shortens rows in place; pages that nobody names any more return to the free list.

    table: as for append_tokens_. new_lengths: int32 [R], each at most the row's length. page_size: slots per page.
    Raises ValueError for wrong shapes, RuntimeError for a length out of range (nothing is changed then; on CUDA it is
    clamped).
    """
    need_integer("page_size", page_size, 1)
    native.truncate_rows_(*table, new_lengths.contiguous(), page_size)


@torch.library.register_fake("kvcompress::truncate_rows_")
def _(block_table, lengths, refs, free_pages, free_count, new_lengths, page_size):  # type: ignore[no-untyped-def]
    _check_truncate(PageTable(block_table, lengths, refs, free_pages, free_count), new_lengths, page_size)


def _check_compact(arrays: Sequence[Tensor], table: PageTable, indices: Tensor, *, kept: Tensor | None = None) -> None:
    need_table(table)
    _need_arrays(arrays, table)
    R = table.block_table.shape[0]
    need_tensor("indices", indices)
    need(indices.ndim == 2, f"indices must be [R, K], got shape {tuple(indices.shape)}")
    need_int32("indices", indices, (R, indices.shape[1]))
    need_int32("kept", kept, (R,))
    need_device(table.refs, indices=indices, kept=kept)


@explained_by(_check_compact)
def compact_pages_(arrays: Sequence[Tensor], table: PageTable, indices: Tensor, *, kept: Tensor | None = None) -> None:
    """Keeps the chosen slots of every row, in place and in all arrays, and frees the pages that become empty.

    arrays, table: as for append_tokens_. indices: int32 [R, K]: slot j of row r becomes its slot indices[r, j] for
    j < kept[r]; those rise strictly within the row. kept: int32 [R], 0..K; negative leaves a row as it is; None = K.
    Pages that other rows share are copied, not written. Raises ValueError for wrong shapes, RuntimeError for indices
    that do not rise or lie outside, or if the copies find no free page; nothing is changed then (on CUDA bad indices
    leave their places unwritten, and free_count[1] grows where pages run out). ValueError for arrays that are leaves
    that require grad, NotImplementedError if a backward pass comes here.
    """
    need_sequence("arrays", arrays)
    op, message = native.compact_pages_, NO_GRADIENT.format("compact_pages_")
    change_without_gradient(message, "arrays", arrays, (), op, list(arrays), *table, indices.contiguous(), dense(kept))


@torch.library.register_fake("kvcompress::compact_pages_")
def _(arrays, block_table, lengths, refs, free_pages, free_count, indices, kept):  # type: ignore[no-untyped-def]
    _check_compact(arrays, PageTable(block_table, lengths, refs, free_pages, free_count), indices, kept=kept)
