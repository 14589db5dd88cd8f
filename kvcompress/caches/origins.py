"""Which tokens of their sequences rows hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rows import BatchState


class Origins(BatchState):
    """places: int32 [R, K], tokens of their sequences that the first held[r] slots of a row hold, counted from 0; a
    later slot s holds token s + later[r]. All of it is on the host, beside what the cache counts as its bytes.
    """

    def __init__(self, rows: int) -> None:
        self.places = torch.zeros(rows, 0, dtype=torch.int32, device="cpu")
        self.held, self.later = [0] * rows, [0] * rows

    def of(self, counts: list[int]) -> Tensor:
        """int32 [R, T]: the tokens of each row's first counts[r] slots, T of the longest; what follows them is any."""
        slots = torch.arange(max(counts, default=0), dtype=torch.int32, device="cpu")
        tokens = slots + torch.tensor(self.later, dtype=torch.int32, device="cpu")[:, None]
        most = min(self.places.shape[1], len(slots))
        known = slots[:most] < torch.tensor(self.held, device="cpu")[:, None]
        tokens[:, :most] = torch.where(known, self.places[:, :most], tokens[:, :most])
        return tokens

    def rows(self, counts: list[int], batch: int) -> list[list[Tensor]]:
        """The same by sequence and KV head, int64 [counts[r]] each."""
        tokens, heads = self.of(counts).long(), len(counts) // batch
        return [[tokens[row, : counts[row]] for row in range(b * heads, (b + 1) * heads)] for b in range(batch)]

    @property
    def chosen(self) -> list[int]:
        """First slots of each row that stayed when others went; 0 where none went."""
        return [held if later else 0 for held, later in zip(self.held, self.later, strict=True)]

    def follow(self, slots: Tensor, kept: Sequence[int], before: list[int]) -> Origins:
        """Of before[r] slots of each row those stay that were chosen, int32 [R, K], the first kept[r] of them; negative
        = all. Waits for the device where some go. Returns itself."""
        left = [n if count < 0 else count for count, n in zip(kept, before, strict=True)]
        if left == before:
            return self
        tokens, width = self.of(before), max(left)
        # what lies behind a row's end may name any slot
        index = slots.to("cpu", torch.int64).clamp(max=max(tokens.shape[1] - 1, 0))
        places = tokens.new_zeros(len(left), width)
        places[:, : index.shape[1]] = tokens.gather(1, index)[:, :width]
        if whole := [row for row, count in enumerate(kept) if count < 0]:
            places[whole] = tokens[whole, :width]
        self.places, self.held = places, left
        self.later = [late + n - count for late, n, count in zip(self.later, before, left, strict=True)]
        return self

    def drop(self, first: int, counts: Sequence[int]) -> None:
        """counts[r] slots of each row go, from its number `first` on; what follows moves up by as many."""
        if not any(counts):
            return
        ends = [max(held, first + n) if n else held for held, n in zip(self.held, counts, strict=True)]
        tokens, width = self.of(ends), max(end - n for end, n in zip(ends, counts, strict=True))
        slots = torch.arange(width, device="cpu")
        gone = torch.tensor(counts, device="cpu")[:, None]
        index = (slots + torch.where(slots < first, 0, gone)).clamp_(max=max(tokens.shape[1] - 1, 0))
        self.places = tokens.gather(1, index)
        self.held = [end - n for end, n in zip(ends, counts, strict=True)]
        self.later = [late + n for late, n in zip(self.later, counts, strict=True)]

    def end(self, counts: Sequence[int]) -> None:
        """Rows end at counts[r]: nothing is known of slots behind that."""
        self.held = [min(held, count) for held, count in zip(self.held, counts, strict=True)]

    def pass_over(self, first: int, later: Sequence[int]) -> None:
        """Tokens that a row was never given lie between its first slots, which hold the first tokens, and those from
        its number `first` on, which hold token s + later[r]; 0 = none do, or this is known."""
        rows = [row for row, number in enumerate(later) if number and number != self.later[row]]
        if not rows:
            return
        places = torch.nn.functional.pad(self.places, (0, max(first - self.places.shape[1], 0)))
        places[rows, :first] = torch.arange(first, dtype=torch.int32, device="cpu")
        self.places, self.held, self.later = places, list(self.held), list(self.later)
        for row in rows:
            self.held[row], self.later[row] = first, later[row]

    def nbytes(self) -> int:
        return 0
