"""Lead tables: which layer's queries and keys a KV head uses for distant tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..ops.softmax import Softmax
from ..support.checks import need

Lead = tuple[tuple[int, ...], ...]  # [L][Hkv]
Kinds = tuple[int | None, ...]  # [L], see kinds_of


def check_lead(lead: Any) -> Lead:
    """A lead table as tuples. Raises ValueError for another shape, and for the first layer and KV head whose lead is no
    lower layer that leads itself. Which layers can share keys a model alone says: check_kinds."""
    good = isinstance(lead, (Sequence, Tensor)) and not isinstance(lead, str)
    rows = lead.tolist() if isinstance(lead, Tensor) else list(lead) if good else []
    need(
        len(rows) > 0 and all(isinstance(row, (list, tuple)) and len(row) > 0 for row in rows),
        "lead must be [L][Hkv], one row of layers per layer",
    )
    for layer, row in enumerate(rows):
        need(len(row) == len(rows[0]), f"lead[{layer}] must have {len(rows[0])} KV heads as lead[0], got {len(row)}")
        for head, above in enumerate(row):
            place = f"lead[{layer}][{head}]"
            need(isinstance(above, int) and not isinstance(above, bool), f"{place} must be a layer, got {above!r}")
            if above != layer and not (0 <= above < layer and rows[above][head] == above):
                _refuse(rows, layer, head, None if layer == 0 else layer - 1)
    return tuple(tuple(row) for row in rows)


def check_kinds(lead: Lead, kinds: Sequence[int | None]) -> None:
    """Raises ValueError for the first layer and KV head that break a table's rules in a model: the lowest layer of a
    run of layers of one kind leads all of them, itself too; a layer of no kind leads itself."""
    below: dict[int, int] = {}  # the nearest lower layer, by kind
    for layer, (row, kind) in enumerate(zip(lead, kinds, strict=True)):
        for head, above in enumerate(row):
            if kind is None:
                need(
                    above == layer,
                    f"lead[{layer}][{head}] must be {layer} (the layer itself: it does not see all tokens), "
                    f"got {above}",
                )
            elif above not in (layer, lead[below[kind]][head] if kind in below else layer):
                _refuse(lead, layer, head, below.get(kind))
        if kind is not None:
            below[kind] = layer


def _refuse(lead: Sequence[Sequence[int]], layer: int, head: int, below: int | None) -> None:
    choices = sorted({layer} if below is None else {lead[below][head], layer})
    what = "the layer itself" if below is None else f"the lead of layer {below}, the next of its kind below, or itself"
    raise ValueError(
        f"lead[{layer}][{head}] must be {' or '.join(str(x) for x in choices)} ({what}), got {lead[layer][head]}"
    )


def need_alike(layer: int, lead: int, softmax: Softmax, theirs: Softmax) -> None:
    """Raises ValueError where the logits of a layer and of its lead are not of one measure."""
    need(
        (softmax.scale, softmax.softcap) == (theirs.scale, theirs.softcap),
        f"layer {layer} must make logits as layer {lead}, which leads it, got scale {softmax.scale}, softcap "
        f"{softmax.softcap} and {theirs.scale}, {theirs.softcap}",
    )


def followers(lead: Sequence[Sequence[int]]) -> int:
    """How many (layer, KV head) follow another layer."""
    return sum(above != layer for layer, row in enumerate(lead) for above in row)


def follower_share(lead: Sequence[Sequence[int]], kinds: Sequence[int | None] | None = None) -> float:
    """Share of (layer, KV head) that follow, of layers that see all tokens: phi."""
    rows = len(lead) if kinds is None else sum(kind is not None for kind in kinds)
    return followers(lead) / max(rows * len(lead[0]), 1)


class LeadTable:
    """What follows from a lead table, the first tokens (sinks) and the last ones (recent) that are near."""

    lead: Lead
    sinks: int
    recent: int

    @property
    def window(self) -> int:
        """Tokens that are near at most, whose keys every layer keeps: sinks + recent."""
        return self.sinks + self.recent

    @property
    def followers(self) -> int:
        """How many (layer, KV head) follow another layer."""
        return followers(self.lead)

    @property
    def share(self) -> float:
        """Share of (layer, KV head) that follow, and of distant keys that need not be kept: phi."""
        return follower_share(self.lead)
