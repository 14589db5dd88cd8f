"""One decoded step of a cache whose newest tokens lie in rings: rotation, writing and attention in turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decode import decode, merge_states
from .dmc_gates import dmc_decisions
from .pages import append_tokens_
from .rope import rope


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
    table: Any = None,
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
    """As ops.ring_step_; table: anything with the fields of ops.PageTable."""
    (B, Hkv, _, D), device = keys.shape, keys.device
    rows = torch.arange(B * Hkv, device=device)
    t = places.expand(B, Hkv).reshape(-1).long()  # of each row
    slots = torch.where(t < sinks, t, sinks + (t - sinks) % window)
    marked = None
    if marks is not None:
        if alpha is None:
            alpha = dmc_decisions(keys[..., neuron], shift=shift, scale=factor, margin=margin, hard=True)[1]
        marked = alpha.flatten() > 0.5

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        """Rotated, the neuron 0 before and after."""
        x = x.clone()
        if neuron is not None:
            x[..., neuron] = 0
        if cos is not None and sin is not None:
            x = rope(x, cos, sin, positions)
        if neuron is not None:
            x[..., neuron] = 0
        return x

    positions = places.long() if base is None else places.long() - base
    q, k = turned(queries, positions), turned(keys, positions)
    options = {"scale": scale, "softcap": softcap}
    if table is not None:
        assert marks is not None and marked is not None and k_pages is not None and v_pages is not None
        behind = ((t + (0 if own else 1)) % window).clamp(max=marks.shape[1] - 1)  # it is there where a token leaves
        drops = marked if window == 1 and not own else marks[rows, behind]
        left = [x[rows, slots].view(B, Hkv, 1, D) for x in (k_ring, v_ring)]
        append_tokens_([k_pages, v_pages], left, table, ((t >= window) & ~drops).int())
    k_ring[rows, slots] = k.reshape(-1, D).to(k_ring.dtype)
    v_ring[rows, slots] = values.reshape(-1, D).to(v_ring.dtype)
    if marks is not None and marked is not None:
        marks[rows, slots] = marked & (t > 0) if own else marked
    places += 1

    far_end = torch.zeros_like(t)
    if sinks and k_far is not None and v_far is not None:
        new = (t < sinks).nonzero().flatten()
        k_far[new, t[new]] = turned(keys, torch.zeros_like(places)).reshape(-1, D)[new].to(k_far.dtype)
        v_far[new, t[new]] = values.reshape(-1, D)[new].to(v_far.dtype)
        far_end = (t + 1 - window).clamp(0, sinks)
    elif sinks:
        far_end = torch.where(t >= sinks + window, sinks, 0)
    end = t % window + 1 if chunked else (t + 1).clamp(max=sinks + window)
    near = decode(q, k_ring, v_ring, end.int(), begin=far_end.int(), sink_logits=sink_logits, **options)  # type: ignore[arg-type]
    if table is not None and k_pages is not None and v_pages is not None:
        far = decode(q, k_pages, v_pages, table.lengths, block_table=table.block_table, **options)  # type: ignore[arg-type]
        return merge_states(near, far)
    if not sinks:
        return near
    q = turned(queries, torch.full_like(places, sinks + window - 1 if k_far is None else window))
    held = (k_ring, v_ring) if k_far is None or v_far is None else (k_far, v_far)
    return merge_states(near, decode(q, *held, far_end.int(), **options))  # type: ignore[arg-type]
