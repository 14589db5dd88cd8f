"""DMC's cache: a new token opens a slot of its row or joins the newest one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..support.checks import (
    dense,
    dense_last,
    need,
    need_device,
    need_float,
    need_int32,
    need_integer,
    need_parts,
    need_tables,
)
from .dmc_accumulate import MAX_DMC_WINDOW, need_neuron
from .explained import explained_by
from .native import MAX_HEAD_DIM, native
from .no_gradient import change_without_gradient
from .pages import NO_GRADIENT, PageTable, need_stored, need_table


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


def _check(
    k_pages: Tensor, v_pages: Tensor, table: PageTable, tail: Tail, keys: Tensor, values: Tensor, alpha: Tensor,
    omega: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None, positions: Tensor | None = None,
    counts: Tensor | None = None, window: int | None = None, key_scales: Tensor | None = None,
    value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    need_table(table)
    coded = key_scales is not None or value_scales is not None
    if not coded or not isinstance(k_pages, Tensor) or k_pages.ndim != 3:
        need_float("k_pages", k_pages, 3, "[pages, P, D]")
    need_float("keys", keys, 4, "[B, Hkv, S, D]")
    (B, Hkv, S, D), R, device = keys.shape, table.block_table.shape[0], table.refs.device
    need(B * Hkv == R, f"keys must be [B, Hkv, S, D] with B*Hkv = {R}, got shape {tuple(keys.shape)}")
    need(1 <= D <= MAX_HEAD_DIM, f"keys must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need_stored(table, k_pages, v_pages, key_scales, value_scales, D, keys.dtype)
    need(k_pages.shape[1] >= 1, f"k_pages must be [pages, P, D] with P at least 1, got shape {tuple(k_pages.shape)}")
    need_parts(
        device, ("keys", keys, keys.dtype, (B, Hkv, S, D)), ("values", values, keys.dtype, (B, Hkv, S, D)),
        ("alpha", alpha, torch.float32, (B, Hkv, S)), ("omega", omega, torch.float32, (B, Hkv, S)),
    )  # fmt: skip
    need_tail(tail, R, window, D, device)
    if cos is not None or sin is not None:
        need_tables(cos, sin, D, device)
        if cos is not None and positions is None and S > cos.shape[0]:
            raise ValueError(f"cos and sin need {S} rows, got {cos.shape[0]}")
    need_int32("positions", positions, (B, S))
    need_int32("counts", counts, (R,))
    need_device(table.refs, positions=positions, counts=counts)


@explained_by(_check)
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
    if window is not None:
        need_integer("window", window, 1)
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
        need_neuron(neuron, keys.shape[3]),
        window or 0,
        key_scales,
        value_scales,
    )


def need_tail(tail: Tail, R: int, window: int | None, D: int, device: torch.device) -> None:
    if not isinstance(tail, Tail):
        raise TypeError(f"tail must be an ops.Tail, got {type(tail).__name__}")
    N = 1 if window is None else window
    need_integer("window", N, 1, MAX_DMC_WINDOW)
    for name, x, shape in zip(Tail._fields, tail, ((R, N, D), (R, N, D), (R, N), (R,)), strict=True):
        need_parts(device, (f"tail.{name}", x, torch.int32 if name == "counts" else torch.float32, shape))
        need(x.is_contiguous(), f"tail.{name} must be contiguous")


@torch.library.register_fake("kvcompress::dmc_append_")
def _(k_pages, v_pages, *given):  # type: ignore[no-untyped-def]
    table, tail, (cos, sin, positions, counts) = PageTable(*given[:5]), Tail(*given[5:9]), given[13:17]
    options = {"positions": positions, "counts": counts, "window": given[18] or None}
    options |= dict(zip(("key_scales", "value_scales"), given[19:], strict=False))
    _check(k_pages, v_pages, table, tail, *given[9:13], cos=cos, sin=sin, **options)
