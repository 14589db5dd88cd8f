"""One decoded step of a layer of PoD, in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..support.checks import dense, dense_last, need, need_float, need_integer, need_number, need_parts, need_tensor
from .decode import need_probabilities
from .decode_shared import gate_threshold
from .explained import explained_by
from .native import native
from .pages import PageTable, need_table
from .quantize import need_scales
from .step import NO_STEP_GRADIENT, need_paged_step, need_places, run_step, step_results


class Lead(NamedTuple):
    """What a layer that follows reads of the one that leads it. queries: [B, Hq, 1, D], rotated. k_pages:
    [pages, P, D]. block_table: int32 [R, blocks], where its keys lie. key_scales: float16 [pages, P], of codes."""

    queries: Tensor
    k_pages: Tensor
    block_table: Tensor
    key_scales: Tensor | None = None


class PodStep(NamedTuple):
    """out: [B, Hq, 1, D]. turned: the rotated queries. lse: float32 [B, Hq, 1]; not set where probabilities were
    shared. skipped: bool [B, Hq, 1], heads that took near tokens alone; set where they were."""

    out: Tensor
    turned: Tensor
    lse: Tensor
    skipped: Tensor


FAR = ("none", "own", "led", "shared")
NO_GRADIENT = NO_STEP_GRADIENT.format("pod_step_")


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable,
    value_table: PageTable, places: Tensor, *, sinks: int, recent: int, first: int, far: str = "none",
    moved: Tensor | None = None, probabilities: Tensor | None = None, far_lse: Tensor | None = None,
    lead: Lead | None = None, tau: float | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    need_table(value_table, "value_table")
    coded = key_scales is not None or value_scales is not None
    B, Hkv, D = need_paged_step(
        queries, keys, values, k_pages, v_pages, table, key_scales, value_scales, cos, sin, value_table=value_table
    )
    Hq, R, P, device = queries.shape[1], B * Hkv, k_pages.shape[1], table.refs.device
    need_places(places, B, device)
    lines = (R, value_table.block_table.shape[1])
    need_parts(device, ("value_table.block_table", value_table.block_table, torch.int32, lines))
    if moved is not None:
        need_parts(device, ("moved", moved, torch.int32, (R,)))
    for name, number, least in (("sinks", sinks, 0), ("recent", recent, 1), ("first", first, 0)):
        need_integer(name, number, least)
    if far not in FAR:
        raise ValueError(f"far must be one of {', '.join(FAR)}, got {far!r}")
    if tau is not None:
        need_number("tau", tau, 0, 1)
    if far_lse is not None:
        need_tensor("far_lse", far_lse)
    if probabilities is not None:
        need_tensor("probabilities", probabilities)
        if far != "none":
            need_probabilities(probabilities, B, Hq)
    if lead is not None and not isinstance(lead, Lead):
        raise TypeError(f"lead must be an ops.Lead, got {type(lead).__name__}")
    if far in ("own", "shared"):
        if far_lse is None or (far == "shared" and probabilities is None):
            raise ValueError(f"far_lse{' and probabilities' if far == 'shared' else ''} must be given with far={far!r}")
        need_parts(device, ("far_lse", far_lse, torch.float32, (B, Hq, 1)))
        if probabilities is not None:
            written = probabilities.is_contiguous() and far_lse.is_contiguous()
            need(far == "shared" or written, "probabilities and far_lse must be contiguous")
    if far == "led":
        if lead is None:
            raise TypeError("lead must be an ops.Lead with far='led', got None")
        if not coded:
            need_float("lead.k_pages", lead.k_pages, 3, "[pages, P, D]")
        need_tensor("lead.block_table", lead.block_table)
        need(lead.block_table.ndim == 2, f"lead.block_table must be [R, blocks], got {tuple(lead.block_table.shape)}")
        need_parts(
            device, ("lead.queries", lead.queries, queries.dtype, (B, Hq, 1, D)),
            ("lead.k_pages", lead.k_pages, k_pages.dtype, (lead.k_pages.shape[0], P, D)),
            ("lead.block_table", lead.block_table, torch.int32, (R, *lead.block_table.shape[1:2])),
        )  # fmt: skip
        need(coded or lead.key_scales is None, "lead.key_scales must be None where there are no key_scales")
        if coded:
            need_scales("lead.key_scales", lead.key_scales, lead.k_pages)


@explained_by(_check)
def pod_step_(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: PageTable,
    value_table: PageTable,
    places: Tensor,
    *,
    sinks: int,
    recent: int,
    first: int,
    far: str = "none",
    moved: Tensor | None = None,
    probabilities: Tensor | None = None,
    far_lse: Tensor | None = None,
    lead: Lead | None = None,
    tau: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> PodStep:
    """One new token of every sequence of a layer: stores its key and value in place, and attends to near and far ones.

    queries: [B, Hq, 1, D], D 1..512; keys, values: [B, Hkv, 1, D] in the pages' dtype; un-rotated. k_pages, v_pages:
    contiguous [pages, P, D], P a power of two, each with a table of its own over R = B*Hkv rows: table, value_table.
    places: int32 [B, 1], contiguous, the tokens' positions, each of which grows by one. near: the first `sinks` keys
    that a row holds and its last `recent`; the value of a key in page i of its row is in page i of the values' row if
    i < first, else in page i + moved[r]; moved: int32 [R], None = 0. distant: the values' tokens between the first
    `sinks` and the last `recent`.
    far: "none" = near tokens alone. "own" = distant ones by the layer's own keys; far_lse [B, Hq, 1] and probabilities
    [B, Hq, columns] (None = not wanted), both contiguous float32, are written for the layers that follow. "led" = by
    the queries and keys of `lead`. "shared" = by probabilities and far_lse that the lead has written; heads whose gate
    is at least tau take near tokens alone. cos, sin: float32 [T, rotary_dim/2], indexed by place; None = nothing is
    rotated. scale, softcap, sink_logits: as in decode; sinks of the softmax count as near. key_scales, value_scales: as
    in decode, changed in place too: k_pages, v_pages and the lead's pages hold codes, and the rotated key and the
    value, of any one dtype, are quantised before they are stored.
    Returns PodStep: the results of rope, append_tokens_, decode, merge_states and decode_shared in turn.
    Raises ValueError for wrong shapes, dtypes, devices or numbers; RuntimeError if a free list is too short, a row
    outgrows its line or names a page that does not exist, a place is outside the tables, moved leads out of the values'
    row, or distant tokens have no columns or no keys of the lead (nothing is changed then; on CUDA free_count[1] of
    both tables grows where pages or columns of a table run out or a page does not exist, and a place outside gives
    NaN); NotImplementedError if a backward pass comes here.
    Source: PoD, sections 2.2 and 2.3.
    """
    if tau is not None:
        need_number("tau", tau, 0, 1)
    q, k_lead, t_lead, scales_lead = (None, None, None, None) if lead is None else lead
    if far != "own":  # what is read may lie anyhow; what is written lies where the caller looks for it
        probabilities = None if probabilities is None else dense_last(probabilities)
        far_lse = dense(far_lse)
    out, turned, lse, skipped = run_step(
        NO_GRADIENT, native.pod_step_, queries, keys, values,
        (k_pages, v_pages, *table, *value_table, places, dense(moved)), cos, sin,
        (sinks, recent, first, FAR.index(far), probabilities, far_lse, None if q is None else dense_last(q), k_lead,
         dense(t_lead)),
        scale, softcap, sink_logits, gate_threshold(tau), key_scales, value_scales, scales_lead,
    )  # fmt: skip
    return PodStep(out, turned, lse, skipped.bool() if far == "shared" else skipped)


@torch.library.register_fake("kvcompress::pod_step_")
def _(queries, *rest):  # type: ignore[no-untyped-def]
    out, lse = step_results(queries, *rest)
    return out, torch.empty_like(out), lse, lse.new_empty(lse.shape, dtype=torch.uint8)
