"""Which distant tokens of a prompt stay, where PoD is combined with a pruner: chosen once per block, at its lead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..caches.choose import nan_error
from ..hf.facts import Facts
from ..pruners.base import Candidates, Pruner
from .layer import PoDLayer


def select_distant(layers: Sequence[PoDLayer], facts: Facts, pruner: Pruner, keep: int) -> None:
    """Leaves `keep` distant tokens per KV head in layers, the lowest of a model's first, and the near ones; up to a
    page more, as pages go as a whole.

    The lead of a block scores its own keys by its latest queries; its keys and the values of every layer of the block
    stay for the tokens that it chooses. Near or distant is what a token is by its place; keys keep their rotation.
    A sequence that had no tokens in the call stays as it is. Raises RuntimeError for NaN scores, before anything is
    changed.
    Source: PoD, section 3.1 (PoD + SnapKV); that the lead chooses is ours.
    """
    first = layers[0]  # leads every head
    if first.recent is None:  # no token was read: a prompt of one new token leaves that to who goes on
        return
    config, P = first.config, first.pool_settings.page_size
    held, new = first.held, first.recent.valid
    gone = [max(n - config.window - keep, 0) // P if had else 0 for n, had in zip(held, new, strict=True)]
    if not any(gone):
        return
    stay = [n - pages * P for n, pages in zip(held, gone, strict=True)]
    chosen: dict[tuple[int, int, int], Tensor] = {}  # (lead, sequence, KV head): slots that stay
    for layer in layers:
        heads = [head for head, lead in enumerate(config.lead[layer.index]) if lead == layer.index]
        for b in [b for b, pages in enumerate(gone) if heads and pages]:
            for head, slots in zip(heads, _choose(layer, facts, b, heads, pruner, stay[b]), strict=True):
                chosen[layer.index, b, head] = slots
    for layer in layers:
        _keep(layer, chosen, gone, stay)


def _choose(layer: PoDLayer, facts: Facts, b: int, heads: list[int], pruner: Pruner, stay: int) -> Tensor:
    """int32 [heads, stay], rising: the slots of sequence b that stay in some KV heads of a layer that lead."""
    assert layer.recent is not None
    keys, values = layer.rows
    config, rotary, n = layer.config, facts[layer.index].query_rotary, layer.held[b]
    rows = [b * keys.heads + head for head in heads]
    queries, valid = layer.recent.get()
    G = queries.shape[1] // keys.heads
    asking = [head * G + g for head in heads for g in range(G)]
    last = queries[b : b + 1, asking, queries.shape[2] - valid[b] :]
    seen, device = layer.next[b], queries.device
    places = torch.arange(seen - valid[b], seen, dtype=torch.int32, device=device)[None]
    rotated = rotary.rotate(last, places, seen, layer.rope_lengths[b : b + 1])
    offer = Candidates(
        queries=rotated, keys=keys.first_slots(rows, n)[None], count=n, chunk_length=valid[b], guide_length=0,
        softmax=layer.softmax.of_heads(asking), layer=layer.index, whole=n == seen, unrotated=last, position=seen,
        values=values.first_slots(rows, n)[None] if pruner.uses_values else None, rotary=rotary,
        in_sight=layer.rope_lengths[b],
    )  # fmt: skip
    scores = pruner.rank(offer, stay).scores[:, config.sinks : n - config.recent]
    if scores.isnan().any():
        raise nan_error(pruner, layer.index)
    far = ops.select_topk(scores.contiguous(), stay - config.window) + config.sinks
    near = torch.arange(n, dtype=torch.int32, device=device).expand(len(heads), -1)
    return torch.cat([near[:, : config.sinks], far, near[:, n - config.recent :]], 1)


def _keep(layer: PoDLayer, chosen: dict[tuple[int, int, int], Tensor], gone: list[int], stay: list[int]) -> None:
    keys, values = layer.rows
    leads = layer.config.lead[layer.index]
    longest, index, kept, pages = max(stay), [], [], []
    like = next(iter(chosen.values()))
    for b, cut in enumerate(gone):
        for head, lead in enumerate(leads):
            slots = chosen[lead, b, head] if cut else like[:0]
            index.append(torch.nn.functional.pad(slots, (0, longest - slots.shape[0])))
            kept.append(stay[b] if cut else -1)
            pages.append(cut)
    every = torch.stack(index)
    values.keep(every, kept, pages)
    own = [lead == layer.index for _ in gone for lead in leads]
    if any(own):
        keys.keep(
            every,
            [count if mine else -1 for count, mine in zip(kept, own, strict=True)],
            [count if mine else 0 for count, mine in zip(pages, own, strict=True)],
        )
