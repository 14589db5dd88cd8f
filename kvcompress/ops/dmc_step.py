"""One decoded step of DMC's cache, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import (
    dense,
    dense_last,
    need,
    need_choice,
    need_number,
    need_parts,
    need_scale,
    need_sink_logits,
    need_softcap,
    need_tables,
)
from .dmc_accumulate import need_neuron
from .dmc_append import Tail, need_tail
from .dmc_gates import IMPORTANCES, LARGEST
from .explained import explained_by, need_one_device
from .native import native
from .no_gradient import without_gradient
from .paged_step import NO_STEP_GRADIENT, need_step
from .pages import PageTable, need_rows, need_table

NO_GRADIENT = NO_STEP_GRADIENT.format("dmc_step_")


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable, tail: Tail,
    places: Tensor, *, neuron: int, offsets: Tensor | None = None, alpha: Tensor | None = None,
    omega: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, window: int | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    need_table(table)
    need_step(queries, k_pages, table, key_scales is not None or value_scales is not None)
    (B, _, S, D), R, device = queries.shape, table.block_table.shape[0], table.refs.device
    need(S == 1, f"queries must be of one token, got {S}")
    Hkv = R // B
    token, dtype = (B, Hkv, 1, D), need_rows(keys, k_pages, v_pages, key_scales, value_scales, table, D)
    need_parts(
        device, ("keys", keys, dtype, token), ("values", values, dtype, token),
        ("places", places, torch.int32, (B, 1)),
    )  # fmt: skip
    need(places.is_contiguous(), "places must be contiguous")
    need_tail(tail, R, window, D, device)
    for name, gate in (("alpha", alpha), ("omega", omega)):
        if gate is not None:
            need_parts(device, (name, gate, torch.float32, (B, Hkv, 1)))
    if offsets is not None:
        need_parts(device, ("offsets", offsets, torch.int32, (B, 1)))
    if cos is not None or sin is not None:
        need_tables(cos, sin, D, device)


@explained_by(_check)
def dmc_step_(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: PageTable,
    tail: Tail,
    places: Tensor,
    *,
    neuron: int,
    offsets: Tensor | None = None,
    alpha: Tensor | None = None,
    omega: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    window: int | None = None,
    shift: float = 5.0,
    margin: float = 0.0,
    omega_shift: float = 5.0,
    eps: float = 0.0,
    reduce: str = "mean_logit",
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One new token of every sequence of a DMC cache: decides, appends or merges it in place, and attends from it.

    queries: [B, Hq, 1, D], D 1..512; keys, values: [B, Hkv, 1, D] in the pages' dtype; un-rotated. k_pages, v_pages,
    table, tail, window, key_scales, value_scales: as in dmc_append_. places: int32 [B, 1], contiguous, the tokens'
    places, each of which grows by one. offsets: int32 [B, 1], to be added to the places for the rows of cos and sin;
    None = 0. neuron: the coordinate of queries and keys that decides and is 0 in attention, negative from the end.
    alpha, omega: float32 [B, Hkv, 1], as in dmc_append_; None = dmc_decisions(keys[..., neuron], shift, margin,
    hard=True).hard and dmc_importance(queries[..., neuron], Hkv, shift=omega_shift, eps, reduce). cos, sin: float32
    [T, rotary_dim/2]; None = nothing is rotated. scale, softcap, sink_logits: as in decode.
    Returns (out [B, Hq, 1, D] in the queries' dtype, lse float32 [B, Hq, 1]): the bits of dmc_decisions,
    dmc_importance, rope, dmc_append_ and decode in turn. Waits for nothing on CUDA.
    Raises ValueError for wrong shapes, dtypes, devices or numbers; RuntimeError as dmc_append_ does, or if a row names
    a page that does not exist (nothing is changed then; on CUDA free_count[1] grows there too); NotImplementedError if
    a backward pass comes here. Source: DMC, algorithm 1.
    """
    B, Hq, _, D = queries.shape
    need(B > 0, "queries must be of at least one sequence, got 0")
    for name, number in (("shift", shift), ("margin", margin), ("omega_shift", omega_shift)):
        need_number(name, number, -LARGEST, LARGEST)
    need_number("eps", eps, 0, LARGEST)
    place = need_neuron(neuron, D)
    need(place >= 0, f"neuron must be a coordinate, got {neuron}")
    return without_gradient(
        NO_GRADIENT, (queries, keys, values), native.dmc_step_, dense_last(queries), dense_last(keys),
        dense_last(values), k_pages, v_pages, *table, *tail, places, dense(offsets), dense(alpha), dense(omega),
        dense(cos), dense(sin), place, 0 if window is None else window or -1, shift, margin, omega_shift, eps,
        need_choice("reduce", reduce, IMPORTANCES), need_scale(scale, D), need_sink_logits(sink_logits, Hq, queries),
        need_softcap(softcap), key_scales, value_scales,
    )  # fmt: skip


@torch.library.register_fake("kvcompress::dmc_step_")
def _(queries, *rest):  # type: ignore[no-untyped-def]
    need_one_device(queries, *rest)
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)
