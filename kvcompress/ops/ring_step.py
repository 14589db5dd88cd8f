"""One decoded step of a cache whose newest tokens lie in rings, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import MOST_INT32, dense, need, need_device, need_float, need_integer, need_number, need_parts
from .dmc_accumulate import need_neuron
from .dmc_gates import LARGEST
from .explained import explained_by
from .native import native
from .pages import PageTable, need_page_size, need_stored, need_table
from .quantize import need_pages
from .step import NO_STEP_GRADIENT, need_places, need_queries, need_rotation, need_tokens, run_step, step_results

NO_TABLE = (None,) * len(PageTable._fields)

NO_GRADIENT = NO_STEP_GRADIENT.format("ring_step_")


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, k_ring: Tensor, v_ring: Tensor, places: Tensor, *, window: int,
    sinks: int = 0, chunked: bool = False, k_far: Tensor | None = None, v_far: Tensor | None = None,
    base: Tensor | None = None, marks: Tensor | None = None, alpha: Tensor | None = None,
    k_pages: Tensor | None = None, v_pages: Tensor | None = None, table: PageTable | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, k_ring_scales: Tensor | None = None,
    v_ring_scales: Tensor | None = None, k_far_scales: Tensor | None = None, v_far_scales: Tensor | None = None,
    neuron: int | None = None, cos: Tensor | None = None, sin: Tensor | None = None, **others: object,
) -> None:  # fmt: skip
    coded = k_ring_scales is not None or v_ring_scales is not None
    if not coded or not isinstance(k_ring, Tensor) or k_ring.ndim != 3:
        need_float("k_ring", k_ring, 3, "[R, capacity, D]")
    B, Hkv, _, D = need_queries(queries, "k_ring", k_ring)
    (R, capacity, _), dtype, device = k_ring.shape, k_ring.dtype, k_ring.device
    need_integer("window", window, 1, MOST_INT32)
    need_integer("sinks", sinks, 0, MOST_INT32 - window)
    need(capacity <= sinks + window, f"k_ring must have at most {sinks + window} slots, got {capacity}")
    if coded:
        need_float("keys", keys, 4, "[B, Hkv, 1, D]")
        need(table is None and neuron is None, "k_ring_scales must not come with a table or a neuron")
    number = keys.dtype if coded else dtype
    stored = [("ring", capacity, (k_ring, v_ring, k_ring_scales, v_ring_scales))]
    if k_far is not None or v_far is not None:
        if k_far is None or v_far is None:
            raise ValueError("k_far and v_far must be given together")
        stored.append(("far", sinks, (k_far, v_far, k_far_scales, v_far_scales)))
    for name, slots, (k, v, k_scales, v_scales) in stored:
        kind, width = dtype, D
        if coded or k_scales is not None or v_scales is not None:
            names = [f"{x}_{name}{end}" for end in ("", "_scales") for x in "kv"]
            need_pages(k, v, k_scales, v_scales, D, R, names)
            kind, width = v_ring.dtype, v_ring.shape[-1]
            need_device(k_ring, **dict(zip(names[2:], (k_scales, v_scales), strict=True)))
        need_parts(device, (f"k_{name}", k, dtype, (R, slots, D)), (f"v_{name}", v, kind, (R, slots, width)))
    need_tokens(keys, values, number, (B, Hkv, 1, D), device)
    need_places(places, B, device)
    whole = {"k_ring": k_ring, "v_ring": v_ring}
    whole |= {} if k_far is None or v_far is None else {"k_far": k_far, "v_far": v_far}
    if base is not None:
        need_parts(device, ("base", base, torch.int32, (B, 1)))
    if marks is not None:
        need_parts(device, ("marks", marks, torch.bool, (R, capacity)))
        whole["marks"] = marks
        need(alpha is not None or neuron is not None, "marks need alpha or a neuron, got neither")
    if alpha is not None:
        need_parts(device, ("alpha", alpha, torch.float32, (B, Hkv, 1)))
    for name, x in whole.items():
        need(x.is_contiguous(), f"{name} must be contiguous")
    given = (table, k_pages, v_pages, key_scales, value_scales)
    if any(x is not None for x in given):
        need_far_pages(*given, k_ring, marks)
    need(not (sinks and (chunked or table is not None)), f"sinks must be 0 with chunks or pages, got {sinks}")
    need(not (chunked and table is not None), "chunked must be False with pages, got True")
    need_rotation(cos, sin, D, device)


@explained_by(_check)
def ring_step_(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    places: Tensor,
    *,
    window: int,
    sinks: int = 0,
    chunked: bool = False,
    own: bool = False,
    k_far: Tensor | None = None,
    v_far: Tensor | None = None,
    base: Tensor | None = None,
    marks: Tensor | None = None,
    alpha: Tensor | None = None,
    k_pages: Tensor | None = None,
    v_pages: Tensor | None = None,
    table: PageTable | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    k_ring_scales: Tensor | None = None,
    v_ring_scales: Tensor | None = None,
    k_far_scales: Tensor | None = None,
    v_far_scales: Tensor | None = None,
    neuron: int | None = None,
    factor: float = 1.0,
    shift: float = 5.0,
    margin: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates a new token of every sequence, writes it into the sequence's rings in place, and attends from it.

    queries: [B, Hq, 1, D], D 1..512; keys, values: [B, Hkv, 1, D] in the rings' dtype; un-rotated. k_ring, v_ring:
    contiguous [R, capacity, D], R = B*Hkv: token t lies in slot t if t < sinks, else in sinks + (t - sinks) % window;
    capacity is at most sinks + window, and enough for the slots that there are. places: int32 [B, 1], contiguous,
    tokens that each sequence has had, each of which grows by one. base: int32 [B, 1]; a token stands at its place -
    base; None = 0. chunked: a query sees the slots up to its own token's alone; else all tokens that are there.
    The first `sinks` tokens never leave, and become far. Without k_far and v_far: all of them, once a token is gone;
    for them the query stands at sinks + window - 1. With these, contiguous [R, sinks, D], their keys at position 0 and
    their values, written too: those that have left the window; for them the query stands at window.
    marks: contiguous bool [R, capacity], written: whether alpha, float32 [B, Hkv, 1], is above 1/2; alpha None =
    dmc_decisions(keys[..., neuron], factor, shift, margin, hard=True).hard. k_pages, v_pages, table: as in paged_step_;
    key_scales, value_scales: as in decode, changed in place too, where pages hold codes; k_ring_scales, v_ring_scales,
    k_far_scales, v_far_scales: the same of rings of codes, which take keys and values of any dtype, no pages and no
    neuron.
    A token that leaves the ring is appended there if the one after it (own: it itself, and a first token never is) is
    not marked, and queries see all of a row's pages. neuron: the coordinate of queries and keys that is 0 in attention,
    negative from the end; None = none.
    cos, sin: float32 [T, rotary_dim/2]; None = nothing is rotated. scale, softcap, sink_logits: as in decode.
    Returns (out [B, Hq, 1, D] in the queries' dtype, lse float32 [B, Hq, 1]): the bits of dmc_decisions, rope,
    append_tokens_, decode and merge_states in turn. Waits for nothing on CUDA.
    Raises ValueError for wrong shapes, dtypes, devices or numbers; RuntimeError if a place has no slot, a position is
    outside the tables, a row names a page that does not exist, or as append_tokens_ does (nothing is changed then; on
    CUDA free_count[1] grows where pages or columns run out or a page does not exist, a place without a slot is not
    written, and it or a position outside gives NaN);
    NotImplementedError if a backward pass comes here.
    Source: StreamingLLM, section 3.2; LM-Infinite, section 4; DMS.
    """
    need((k_pages is None) == (v_pages is None) == (table is None), "k_pages, v_pages and table must be given together")
    for name, number in (("factor", factor), ("shift", shift), ("margin", margin)):
        need_number(name, number, -LARGEST, LARGEST)
    place = -1 if neuron is None else need_neuron(neuron, queries.shape[3])
    out, lse = run_step(
        NO_GRADIENT, native.ring_step_, queries, keys, values,
        (k_ring, v_ring, places, k_far, v_far, marks, k_pages, v_pages, *(table or NO_TABLE), dense(base),
         dense(alpha)),
        cos, sin, (window, sinks, chunked, own, place, factor, shift, margin), scale, softcap, sink_logits, key_scales,
        value_scales, k_ring_scales, v_ring_scales, k_far_scales, v_far_scales,
    )  # fmt: skip
    return out, lse


def need_far_pages(
    table: PageTable | None, k_pages: Tensor | None, v_pages: Tensor | None, key_scales: Tensor | None,
    value_scales: Tensor | None, k_ring: Tensor, marks: Tensor | None,
) -> None:  # fmt: skip
    """Pages of rows like the rings', which come with marks."""
    if table is None or k_pages is None or v_pages is None or marks is None:
        raise ValueError("k_pages, v_pages, marks and table must be given together, or only marks, or none")
    need_table(table)
    (R, _, D), dtype = k_ring.shape, k_ring.dtype
    need_device(k_ring, table=table.refs)
    need_page_size(k_pages, key_scales is not None or value_scales is not None)
    need_stored(table, k_pages, v_pages, key_scales, value_scales, D, dtype)
    need(table.block_table.shape[0] == R, f"table must have {R} rows, got {table.block_table.shape[0]}")


torch.library.register_fake("kvcompress::ring_step_", step_results)
