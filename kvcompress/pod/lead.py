"""Lead tables: which layer's queries and keys a KV head uses for distant tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..checks import need

Lead = tuple[tuple[int, ...], ...]  # [L][Hkv]


def check_lead(lead: Any) -> Lead:
    """A lead table as tuples. Raises ValueError for another shape, and for the first layer and KV head that break its
    rules: the lowest layer of a run of layers leads all of them, itself too."""
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
            before = 0 if layer == 0 else rows[layer - 1][head]
            need(
                above in (layer, before) and (layer > 0 or above == 0),
                f"{place} must be {' or '.join(str(x) for x in sorted({before, layer}))} (the lead of the layer below, "
                f"or the layer itself), got {above}",
            )
    return tuple(tuple(row) for row in rows)


def followers(lead: Sequence[Sequence[int]]) -> int:
    """How many (layer, KV head) follow another layer."""
    return sum(above != layer for layer, row in enumerate(lead) for above in row)


def follower_share(lead: Sequence[Sequence[int]]) -> float:
    """Share of (layer, KV head) that follow: phi."""
    return followers(lead) / sum(map(len, lead))


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
