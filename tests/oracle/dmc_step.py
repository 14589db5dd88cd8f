"""One decoded step of DMC's cache: decision, rotation, append or merge, and attention in turn."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .decode import decode
from .dmc_append import dmc_append_
from .dmc_gates import dmc_decisions, dmc_importance
from .rope import rope


def dmc_step_(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Any,
    tail: Any,
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
    **softmax: Any,
) -> tuple[Tensor, Tensor]:
    """As ops.dmc_step_; table, tail: anything with the fields of ops.PageTable and ops.Tail."""
    positions = places if offsets is None else places + offsets
    if alpha is None:
        alpha = dmc_decisions(keys[..., neuron], shift=shift, margin=margin, hard=True)[1]
    if omega is None:
        omega = dmc_importance(queries[..., neuron], keys.shape[1], shift=omega_shift, eps=eps, reduce=reduce)
    queries = queries.clone()
    queries[..., neuron] = 0
    if cos is not None and sin is not None:
        queries = rope(queries, cos, sin, positions)
        queries[..., neuron] = 0
    dmc_append_(
        k_pages, v_pages, table, tail, keys, values, alpha, omega, cos=cos, sin=sin, positions=positions,
        neuron=neuron, window=window,
    )  # fmt: skip
    places += 1
    return decode(queries, k_pages, v_pages, table.lengths, block_table=table.block_table, **softmax)
