"""Which tokens of their sequences rows hold."""

from __future__ import annotations

import torch
from torch import Tensor

from .choose import Choice
from .rows import SideState


class Origins(SideState):
    """places: int32 [R, K], tokens of their sequences that the first held[r] slots of a row hold, counted from 0; a
    later slot s holds token s + later[r]. All of it is on the host, beside what the cache counts as its bytes.
    """

    def __init__(self, rows: int) -> None:
        self.places = torch.zeros(rows, 0, dtype=torch.int32)
        self.held, self.later = [0] * rows, [0] * rows

    def of(self, counts: list[int]) -> Tensor:
        """int32 [R, T]: the tokens of each row's first counts[r] slots, T of the longest; what follows them is any."""
        slots = torch.arange(max(counts, default=0), dtype=torch.int32)
        tokens = slots + torch.tensor(self.later, dtype=torch.int32)[:, None]
        most = min(self.places.shape[1], len(slots))
        known = slots[:most] < torch.tensor(self.held)[:, None]
        tokens[:, :most] = torch.where(known, self.places[:, :most], tokens[:, :most])
        return tokens

    def rows(self, counts: list[int], batch: int) -> list[list[Tensor]]:
        """The same by sequence and KV head, int64 [counts[r]] each."""
        tokens, heads = self.of(counts).long(), len(counts) // batch
        return [[tokens[row, : counts[row]] for row in range(b * heads, (b + 1) * heads)] for b in range(batch)]

    def follow(self, choice: Choice, before: list[int]) -> None:
        """Of before[r] slots of each row those stay that were chosen. Waits for the device where some go."""
        if choice.kept == before:
            return
        tokens, slots = self.of(before), choice.slots.to("cpu", torch.int64)
        # what lies behind a row's end may name any slot
        self.places = tokens.gather(1, slots.clamp_(max=max(tokens.shape[1] - 1, 0)))
        self.later = [late + n - kept for late, n, kept in zip(self.later, before, choice.kept, strict=True)]
        self.held = list(choice.kept)

    def nbytes(self) -> int:
        return 0
