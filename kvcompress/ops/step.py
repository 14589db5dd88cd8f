"""What the ops of a whole decoded step have in common: what they ask of a call, the call itself, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..support.checks import (
    dense,
    dense_last,
    need,
    need_device,
    need_float,
    need_parts,
    need_scale,
    need_sink_logits,
    need_softcap,
    need_tables,
)
from .explained import need_one_device
from .native import MAX_HEAD_DIM
from .no_gradient import without_gradient
from .pages import PageTable, need_page_size, need_rows, need_table

NO_STEP_GRADIENT = "{} has no gradient: it is for generation; use torch.no_grad(), or train without a cache"


def need_queries(queries: Tensor, name: str, rows: Tensor, one: bool = True) -> tuple[int, int, int, int]:
    """Queries of sequences whose KV heads have a row each; one: of one token. Gives B, Hkv, S and D."""
    need_float("queries", queries, 4, "[B, Hq, S, D]")
    (B, Hq, S, D), R = queries.shape, rows.shape[0]
    need(S == 1 or not one, f"queries must be of one token, got {S}")
    if B == 0 or R == 0 or R % B or Hq == 0 or Hq % (R // B):
        raise ValueError(f"{name} must have B*Hkv rows with B = {B} and Hkv dividing Hq = {Hq}, got {R}")
    need(1 <= D <= MAX_HEAD_DIM, f"queries must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need_device(rows, queries=queries)
    return B, R // B, S, D


def need_paged_queries(
    queries: Tensor, k_pages: Tensor, table: PageTable, coded: bool, one: bool = True
) -> tuple[int, int, int, int]:
    """The same of rows in a table, and pages as need_page_size wants them."""
    need_table(table)
    need_page_size(k_pages, coded)
    return need_queries(queries, "block_table", table.block_table, one)


def need_paged_step(
    queries: Tensor, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor, table: PageTable,
    key_scales: Tensor | None, value_scales: Tensor | None, cos: Tensor | None, sin: Tensor | None, *,
    value_table: PageTable | None = None, one: bool = True,
) -> tuple[int, int, int]:  # fmt: skip
    """A step whose new tokens go into pages; gives B, Hkv and D."""
    B, Hkv, S, D = need_paged_queries(queries, k_pages, table, key_scales is not None or value_scales is not None, one)
    dtype = need_rows(keys, k_pages, v_pages, key_scales, value_scales, table, D, value_table)
    need_tokens(keys, values, dtype, (B, Hkv, S, D), table.refs.device)
    need_rotation(cos, sin, D, table.refs.device)
    return B, Hkv, D


def need_tokens(
    keys: Tensor, values: Tensor, dtype: torch.dtype, shape: tuple[int, int, int, int], device: torch.device
) -> None:
    need_parts(device, ("keys", keys, dtype, shape), ("values", values, dtype, shape))


def need_rotation(cos: Tensor | None, sin: Tensor | None, D: int, device: torch.device) -> None:
    if cos is not None or sin is not None:
        need_tables(cos, sin, D, device)


def need_places(places: Tensor, B: int, device: torch.device) -> None:
    need_parts(device, ("places", places, torch.int32, (B, 1)))
    need(places.is_contiguous(), "places must be contiguous")


def run_step(
    message: str, op: Callable[..., Any], queries: Tensor, keys: Tensor | None, values: Tensor | None,
    rows: tuple[object, ...], cos: Tensor | None, sin: Tensor | None, settings: tuple[object, ...],
    scale: float | None, softcap: float | None, sink_logits: Tensor | None, *others: object,
) -> Any:  # fmt: skip
    """op of the tokens, rows, tables, settings, softmax and others; message: of a backward pass that comes here."""
    B, Hq, _, D = queries.shape
    need(B > 0, "queries must be of at least one sequence, got 0")
    tokens: tuple[Tensor, ...] = (queries,)
    if keys is not None and values is not None:
        tokens = (queries, keys, values)
        keys, values = dense_last(keys), dense_last(values)
    return without_gradient(
        message, tokens, op, dense_last(queries), keys, values, *rows, dense(cos), dense(sin), *settings,
        need_scale(scale, D), need_sink_logits(sink_logits, Hq, queries), need_softcap(softcap), *others,
    )  # fmt: skip


def step_results(queries: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """out and lse of a fake."""
    need_one_device(queries, *others)
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)
