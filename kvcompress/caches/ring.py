"""The last tokens of every sequence, in a ring: token t lies in slot t % size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rows import BatchState

EVER = 1 << 30  # steps


class Ring(BatchState):
    """arrays: one [R, capacity, ...] for each of what a token has, R = B*H rows; capacity grows up to size.

    Which tokens are there follows from `places`, int32 [B, 1], how many each sequence has had, which the owner keeps.
    """

    def __init__(self, size: int, like: Sequence[Tensor]) -> None:
        """like: new tokens [B, H, S, ...] of each kind."""
        self.size, self.heads = size, like[0].shape[1]
        self.arrays = tuple(x.new_zeros(x.shape[0] * x.shape[1], 0, *x.shape[3:]) for x in like)

    @torch.inference_mode(False)  # what is stored must be usable outside of it
    def make_room(self, tokens: int) -> None:
        """For so many tokens of the longest sequence."""
        held = self.arrays[0].shape[1]
        if (wanted := min(tokens, self.size)) > held:
            more = min(self.size, max(wanted, 2 * held)) - held
            self.arrays = tuple(torch.cat([x, x.new_zeros(x.shape[0], more, *x.shape[2:])], 1) for x in self.arrays)

    def steps_ahead(self, tokens: int) -> int:
        """How many tokens more find their slots here, where the longest sequence has had so many."""
        capacity = self.arrays[0].shape[1]
        return EVER if capacity == self.size else capacity - tokens

    def slots(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, slots), int64 [R] each, of the next token of every row."""
        rows = torch.arange(self.arrays[0].shape[0], device=places.device)
        return rows, (places % self.size).expand(-1, self.heads).reshape(-1).long()

    def put(self, new: Sequence[Tensor], rows: Tensor, slots: Tensor) -> None:
        """One more token of every sequence, [B, H, 1, ...] of each kind."""
        for held, x in zip(self.arrays, new, strict=True):
            held[rows, slots] = x.reshape(held.shape[0], *held.shape[2:])

    def joined(
        self, new: Sequence[Tensor], places: Tensor, counts: Tensor, most: int, held: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """The ring's tokens, oldest first, and the last counts[b] of S new ones [B, H, S, ...], left-aligned.

        places, counts: int32 [B, 1]. most: tokens of the longest sequence in the ring. held: int32 [B, 1], how many of
        the ring's last tokens are wanted; None = all. Returns [B, H, most + S, ...] of each kind, and how many tokens
        each sequence has there, int32 [B, 1].
        """
        B, H, S = new[0].shape[:3]
        held = places.clamp(max=self.size) if held is None else held
        capacity = self.arrays[0].shape[1]
        t = torch.arange(most + S, device=places.device)
        ring = (places - held + t) % self.size
        index = (
            torch.where(t < held, ring, capacity + (t - held + S - counts)).clamp_(min=0, max=capacity + S - 1).long()
        )
        out = []
        for old, x in zip(self.arrays, new, strict=True):
            both = torch.cat([old.view(B, H, *old.shape[1:]), x], 2)
            out.append(both.gather(2, _like(index[:, None], both, most + S)))
        return out, held + counts

    def keep(self, tokens: Sequence[Tensor], lengths: Tensor, total: Tensor, most: int) -> None:
        """Makes the newest of tokens [B, H, T, ...] of each kind, lengths[b] of them and the last one number total[b]
        - 1 of its sequence, what the ring holds. int32 [B, 1] both; most: the largest total."""
        self.make_room(most)
        if not (capacity := self.arrays[0].shape[1]):
            return
        slots = torch.arange(capacity, device=total.device)
        newest = total - 1 - (total - 1 - slots) % self.size  # the token that slot s holds now; below 0: none
        index = (newest - total + lengths).clamp_(min=0, max=tokens[0].shape[2] - 1).long()[:, None]
        self.arrays = tuple(x.gather(2, _like(index, x, capacity)).flatten(0, 1) for x in tokens)

    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)


def _like(index: Tensor, x: Tensor, tokens: int) -> Tensor:
    """int64 [B, 1, tokens] as an index of x [B, H, T, ...] along T."""
    B, H, *rest = x.shape
    wide = index.view(B, 1, tokens, *[1] * (len(rest) - 1))
    return wide.expand(B, H, tokens, *rest[1:])
