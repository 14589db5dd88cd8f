"""DMC's cache: a new token opens a slot of its row or joins the newest one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import FLOATS, dense, dense_last, need, need_device, need_float, need_int32, need_integer, need_tensor
from .dmc_accumulate import MAX_DMC_WINDOW, need_neuron
from .native import MAX_HEAD_DIM, native
from .no_gradient import change_without_gradient
from .pages import NO_GRADIENT, PageTable, need_table
from .quantize import need_pages


class Tail(NamedTuple):
    """What the newest slot of R rows is made of, changed in place; a fork copies it.

    keys, values: float32 [R, N, D], un-rotated. weights: float32 [R, N]. counts: int32 [R], tokens in the slot, 0 =
    nothing there. Without a window N is 1, keys and values are averages and weights their sum of omega; with one, N is
    the window and token i of the slot lies at i % N.
    """

    keys: Tensor
    values: Tensor
    weights: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, rows: int, head_dim: int, *, window: int | None = None, device: torch.device | None = None) -> Tail:
        """Of rows that hold nothing."""
        N = window or 1
        keys, values = (torch.zeros(rows, N, head_dim, device=device) for _ in range(2))
        counts = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(keys, values, torch.zeros(rows, N, device=device), counts)


def dmc_append_(
    k_pages: Tensor,
    v_pages: Tensor,
    table: PageTable,
    tail: Tail,
    keys: Tensor,
    values: Tensor,
    alpha: Tensor,
    omega: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    neuron: int | None = None,
    window: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Adds new tokens to all rows of a DMC cache in place: each opens a slot or is merged into its row's newest one.

    k_pages, v_pages: contiguous [pages, P, D], D 1..512. table: their pages, R = B*Hkv rows. tail: the state of each
    row's newest slot. keys, values: [B, Hkv, S, D], un-rotated, the pages' dtype. alpha, omega: float32 [B, Hkv, S]: a
    token with alpha above 1/2 is merged, others open a slot, and so does the first of a row whose length or tail count
    is 0; omega above 0 is its weight. cos, sin: float32 [T, rotary_dim/2]; positions: int32 [B, S], rows of them;
    None = 0..S-1; without cos and sin keys are not rotated. counts: int32 [R], 0..S: row r gets its last counts[r]
    tokens; None = all S. neuron: coordinate of the keys that is 0 before and after rotation, negative from the end.
    window: a slot averages its last tokens alone, 1..64; None = all of them. key_scales, value_scales: as in decode,
    changed in place too: k_pages and v_pages hold codes, those of the averages in float32, and keys and values are of
    any one dtype.
    A slot holds the average of its tokens, keys rotated at the newest one's position; older slots never change. One
    call with S tokens is S calls with one, and equals dmc_accumulate with the same decisions. A page that others share
    is copied before it is written; pages come from the free list. What is added may be views of what is changed, which
    itself may not share memory. Waits for nothing on CUDA.
    Raises ValueError for wrong shapes and for pages that are leaves that require grad; RuntimeError if the free list
    is too short, a row outgrows its line of the table or a position is outside the tables (nothing is changed then; on
    CUDA free_count[1] grows where pages or columns run out, and a position outside gives a NaN key);
    NotImplementedError if a backward pass comes here.
    Source: DMC, algorithm 1.
    """
    need_table(table)
    if not isinstance(tail, Tail):
        raise TypeError(f"tail must be an ops.Tail, got {type(tail).__name__}")
    R = table.block_table.shape[0]
    coded = key_scales is not None or value_scales is not None
    for name, x, ndim in (("k_pages", k_pages, 3), ("keys", keys, 4)):
        if not isinstance(x, Tensor) or x.ndim != ndim or (x.dtype not in FLOATS and not (coded and x is k_pages)):
            need_float(name, x, ndim, "[pages, P, D]" if ndim == 3 else "[B, Hkv, S, D]")
    (B, Hkv, S, D), dtype, device = keys.shape, keys.dtype, table.refs.device
    N = 1 if window is None else window
    if isinstance(N, bool) or not isinstance(N, int):
        need_integer("window", N, 1, MAX_DMC_WINDOW)
    if not 1 <= D <= MAX_HEAD_DIM or not 1 <= N <= MAX_DMC_WINDOW or B * Hkv != R:
        need(B * Hkv == R, f"keys must be [B, Hkv, S, D] with B*Hkv = {R}, got shape {tuple(keys.shape)}")
        need(1 <= D <= MAX_HEAD_DIM, f"keys must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
        need_integer("window", N, 1, MAX_DMC_WINDOW)
    shape, gates, single = (table.refs.shape[0], k_pages.shape[1], D), (B, Hkv, S), torch.float32
    of_keys = of_values = (dtype, shape)
    if coded:
        need_pages(k_pages, v_pages, key_scales, value_scales, D, shape[0])
        need_device(table.refs, key_scales=key_scales, value_scales=value_scales)
        of_keys, of_values = (torch.int8, shape), (v_pages.dtype, (*shape[:2], v_pages.shape[2]))
    # messages only where they are needed: a decode step comes by for every layer
    for name, x, kind, size in (
        ("k_pages", k_pages, *of_keys), ("v_pages", v_pages, *of_values), ("keys", keys, dtype, keys.shape),
        ("values", values, dtype, keys.shape), ("alpha", alpha, single, gates), ("omega", omega, single, gates),
        ("tail.keys", tail[0], single, (R, N, D)), ("tail.values", tail[1], single, (R, N, D)),
        ("tail.weights", tail[2], single, (R, N)), ("tail.counts", tail[3], torch.int32, (R,)),
    ):  # fmt: skip
        if not isinstance(x, Tensor):
            need_tensor(name, x)
        if x.dtype != kind or x.shape != size or x.device != device:
            raise ValueError(
                f"{name} must be {kind} {tuple(size)} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages), *zip(_TAIL, tail, strict=True)):
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if shape[1] < 1:
        raise ValueError(f"k_pages must be [pages, P, D] with P at least 1, got shape {tuple(k_pages.shape)}")
    if cos is not None or sin is not None:
        need_tables(cos, sin, D, device)
        if cos is not None and positions is None and S > cos.shape[0]:
            raise ValueError(f"cos and sin need {S} rows, got {cos.shape[0]}")
    if positions is not None or counts is not None:
        need_int32("positions", positions, (B, S))
        need_int32("counts", counts, (R,))
        need_device(table.refs, positions=positions, counts=counts)
    change_without_gradient(
        NO_GRADIENT.format("dmc_append_"),
        "k_pages and v_pages",
        (k_pages, v_pages),
        (keys, values, alpha, omega),
        native.dmc_append_,
        k_pages,
        v_pages,
        *table,
        *tail,
        dense_last(keys),
        dense_last(values),
        alpha.contiguous(),
        omega.contiguous(),
        dense(cos),
        dense(sin),
        dense(positions),
        dense(counts),
        need_neuron(neuron, D),
        window or 0,
        key_scales,
        value_scales,
    )


_TAIL = tuple(f"tail.{name}" for name in Tail._fields)


def need_tables(cos: Tensor | None, sin: Tensor | None, D: int, device: torch.device) -> None:
    if cos is None or sin is None:
        raise ValueError("cos and sin must be given together")
    for name, x in (("cos", cos), ("sin", sin)):
        need_tensor(name, x)
        if x.dtype != torch.float32 or x.ndim != 2 or x.shape != cos.shape or x.device != device:
            raise ValueError(
                f"{name} must be float32 [T, rotary_dim/2] on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    if 2 * cos.shape[1] > D:
        raise ValueError(f"cos and sin rotate {2 * cos.shape[1]} dimensions, but keys have only {D}")


@torch.library.register_fake("kvcompress::dmc_append_")
def _(*arguments):  # type: ignore[no-untyped-def]
    return None
