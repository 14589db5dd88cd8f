"""One decoded step of DMC's cache, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import dense, need, need_choice, need_number, need_parts
from .dmc_accumulate import need_neuron
from .dmc_append import Tail, need_tail
from .dmc_gates import IMPORTANCES, LARGEST
from .explained import explained_by
from .native import native
from .pages import PageTable
from .step import NO_STEP_GRADIENT, need_paged_step, need_places, run_step, step_results

NO_GRADIENT = NO_STEP_GRADIENT.format("dmc_step_")


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable, tail: Tail,
    places: Tensor, *, neuron: int, offsets: Tensor | None = None, alpha: Tensor | None = None,
    omega: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, window: int | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    B, Hkv, D = need_paged_step(queries, keys, values, k_pages, v_pages, table, key_scales, value_scales, cos, sin)
    device = table.refs.device
    need_places(places, B, device)
    need_tail(tail, B * Hkv, window, D, device)
    for name, gate in (("alpha", alpha), ("omega", omega)):
        if gate is not None:
            need_parts(device, (name, gate, torch.float32, (B, Hkv, 1)))
    if offsets is not None:
        need_parts(device, ("offsets", offsets, torch.int32, (B, 1)))


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
    for name, number in (("shift", shift), ("margin", margin), ("omega_shift", omega_shift)):
        need_number(name, number, -LARGEST, LARGEST)
    need_number("eps", eps, 0, LARGEST)
    place = need_neuron(neuron, queries.shape[3])
    need(place >= 0, f"neuron must be a coordinate, got {neuron}")
    out, lse = run_step(
        NO_GRADIENT, native.dmc_step_, queries, keys, values,
        (k_pages, v_pages, *table, *tail, places, dense(offsets), dense(alpha), dense(omega)), cos, sin,
        (place, 0 if window is None else window or -1, shift, margin, omega_shift, eps,
         need_choice("reduce", reduce, IMPORTANCES)),
        scale, softcap, sink_logits, key_scales, value_scales,
    )  # fmt: skip
    return out, lse


torch.library.register_fake("kvcompress::dmc_step_", step_results)
