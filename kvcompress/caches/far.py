"""The far segment of a layer's rows: compressed tokens at ids by rank, a gap before the near ones (RGL)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..hf.facts import LayerFacts
from ..positions import RotaryTables
from .policy import Policy
from .rows import BatchState, by_sequence, spread


@dataclass
class Ranks:
    """How far queries stand from a far segment. slots: int32 [R, S], those of their tokens. bound: above every id.
    lengths: keys in sight when each sequence's frequencies were settled."""

    slots: Tensor
    bound: int
    lengths: list[int]


class FarSegment(BatchState):
    """The first `split` slots of every row stand at ids 0, 1, ... (shared: all at 0), as queries see them whose own ids
    follow those of the segment by `blank` unused ones. What is near stands where it was.

    split: int32 [R], None before anything was dropped. near: tokens of a sequence outside the segment. blank: of each
    sequence (with reading="constant": the distance itself).
    """

    def __init__(self, batch: int) -> None:
        self.split: Tensor | None = None
        self.near, self.blank = [0] * batch, [0] * batch
        self._blanks: Tensor | None = None  # int32 [R, 1], on the device

    def turned(self, queries: Tensor, ranks: Ranks, policy: Policy, rotary: RotaryTables) -> Tensor:
        """Queries [B, Hq, S, D] rotated as the segment sees them."""
        assert self.split is not None and policy.gap is not None
        (B, Hq, S, D), R = queries.shape, ranks.slots.shape[0]
        if self._blanks is None:
            each = torch.tensor(self.blank, dtype=torch.int32, device=queries.device)
            self._blanks = each.repeat_interleave(R // B)[:, None]
        if policy.gap.reading == "constant":
            ids = self._blanks.expand_as(ranks.slots).contiguous()
        else:
            ids = ranks.slots + self._blanks + (1 - self.split[:, None] if policy.gap.shared else 0)
        rows, bound = queries.reshape(R, B * Hq // R, S, D), ranks.bound + max(self.blank) + 2
        lengths = spread(ranks.lengths, R // B)
        return rotary.rotate(rows, ids.clamp_(min=0), bound, lengths).reshape(B, Hq, S, D)

    def both(
        self, keys: Tensor, queries: Tensor, near: Tensor, ranks: Ranks, policy: Policy, rotary: RotaryTables
    ) -> tuple[Tensor, Tensor]:
        """(keys, queries) of twice the head dim, whose products are those of the segment that a key is in.

        keys: [R, T, D]. queries, near: [B, Hq, S, D], not rotated and rotated as near tokens see them.
        """
        assert self.split is not None
        far = (torch.arange(keys.shape[1], device=keys.device) < self.split[:, None])[..., None]
        both = torch.cat([keys.masked_fill(~far, 0), keys.masked_fill(far, 0)], dim=-1)
        return both, torch.cat([self.turned(queries, ranks, policy, rotary), near], dim=-1)

    def renumber(
        self, keys: Tensor, old: Tensor, kept: Tensor, places: Tensor, shift: Tensor | None, whole: list[bool],
        policy: Policy, facts: LayerFacts, bound: int, lengths: list[int],
    ) -> Tensor:  # fmt: skip
        """Makes all but the near tokens of every row far: returns keys [R, K, D] at their new ids.

        old: int64 [R, K], the slots that they had. places: int64 [R, K], the slots that they get. kept: int32 [R],
        tokens of each row. shift: a near token in slot s stood at s + shift. whole: sequences that stay as they were.
        bound: above every position.
        """
        gap, heads = policy.gap, len(kept) // len(whole)
        assert gap is not None
        facts.key_rotary.check_one_table(max(bound - 1, *lengths))
        # near tokens of each row, all of one whose sequence is whole
        own = [bound if all_ else n for all_, n in zip(whole, self.near, strict=True)]
        near = torch.tensor(own, dtype=torch.int32, device=kept.device)
        split = (kept - near.repeat_interleave(heads)).clamp_(min=0)
        before = old if shift is None else old + shift[:, None]
        if self.split is not None:
            before = torch.where(old < self.split[:, None], 0 if gap.shared else old, before)
        ids = torch.where(places < split[:, None], 0 if gap.shared else places, before)
        distance = (before - ids).clamp_(min=0).to(torch.int32)
        moved = facts.key_rotary.move_back(keys[:, None], distance, bound, lengths[0])[:, 0]
        self.split = split
        return torch.where((distance == 0)[..., None], keys, moved)

    def reopen(self, kept: list[int], near: list[int | None], policy: Policy) -> None:
        """Settles the gap of the sequences that were compressed: near[b] tokens are near (None = it was not)."""
        for b, (tokens, rows) in enumerate(zip(near, by_sequence(kept, len(near)), strict=True)):
            if tokens is not None and policy.bounded:
                far = max(rows) - self.near[b]
                self.blank[b] = policy.blank(max(far, 0), self.near[b])
                self._blanks = None
