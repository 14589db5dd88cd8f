"""The memory of a prompt that is being read: unrotated keys and values in rows of any length."""

from __future__ import annotations

import torch
from torch import Tensor

from ..positions import RotaryTables
from .choose import Choice
from .origins import Origins
from .passes import CachePass
from .rows import BatchState, by_sequence, spread


class Memory(BatchState):
    """keys, values: [R, M, D]; held[r] of a row's tokens count, what lies past them is never read. origins: which of
    their sequence's tokens they are.

    Rows end where the longest of their sequence does: the tokens of a chunk stand at the same positions in all heads,
    and a shorter row begins later.
    """

    def __init__(self, keys: Tensor, values: Tensor, held: list[int], origins: Origins) -> None:
        self.keys, self.values, self.held, self.origins = keys, values, held, origins

    @staticmethod
    def empty(batch: int, keys: Tensor, values: Tensor) -> Memory:
        """keys, values: those of a chunk, [B, Hkv, S, D]."""
        R = batch * keys.shape[1]
        return Memory(keys.new_zeros(R, 0, keys.shape[3]), values.new_zeros(R, 0, values.shape[3]), [0] * R, Origins(R))

    def without_tokens(self) -> Memory:
        """Its lengths alone."""
        return Memory(self.keys[:, :0].clone(), self.values[:, :0].clone(), self.held, self.origins)

    def longest(self, batch: int) -> list[int]:
        """Tokens of each sequence's longest row."""
        return [max(held) for held in by_sequence(self.held, batch)]

    def late(self, batch: int) -> list[int]:
        """Position at which each row begins."""
        ends = spread(self.longest(batch), len(self.held) // batch)
        return [end - held for end, held in zip(ends, self.held, strict=True)]

    def joined(self, keys: Tensor, values: Tensor, step: CachePass) -> Memory:
        """The memory followed by the last counts[b] tokens of a chunk [B, Hkv, S, D]."""
        heads = keys.shape[1]
        lengths = [held + count for held, count in zip(self.held, spread(step.counts, heads), strict=True)]
        pairs = (self.keys, keys.flatten(0, 1)), (self.values, values.flatten(0, 1))
        k, v = (self._joined(old, new, lengths) for old, new in pairs)
        return Memory(k, v, lengths, self.origins)

    def _joined(self, old: Tensor, new: Tensor, lengths: list[int]) -> Tensor:
        """[R, T, D], row r filled up to lengths[r]."""
        S, most = new.shape[1], max(self.held)
        if min(self.held) == most and min(lengths) == most + S:
            return new if most == 0 else torch.cat([old[:, :most], new], 1)
        both = torch.cat([old[:, :most], new], 1)
        held, ends = (torch.tensor(numbers, device=new.device)[:, None] for numbers in (self.held, lengths))
        t = torch.arange(max(lengths), device=new.device)
        index = torch.where(t < held, t, most + S - ends + t).clamp_(max=most + S - 1)
        return both.gather(1, index[..., None].expand(-1, -1, new.shape[2]))

    def rotated(self, rotary: RotaryTables, in_sight: list[int], *, late: list[int]) -> Tensor:
        """keys [R, T, D] at their positions, the first of row r at late[r]. in_sight: keys of each sequence."""
        R, T, _ = self.keys.shape
        heads = R // len(in_sight)
        if not any(late):
            return rotary.rotate(self.keys.unflatten(0, (-1, heads)), None, T, in_sight).flatten(0, 1)
        first = torch.tensor(late, dtype=torch.int32, device=self.keys.device)[:, None]
        places = first + torch.arange(T, dtype=torch.int32, device=self.keys.device)
        return rotary.rotate(self.keys[:, None], places, T + max(late), spread(in_sight, heads))[:, 0]

    def keep(self, choice: Choice, before: list[int]) -> Memory:
        """What was chosen of before[r] tokens of each row, and all that belongs to them."""
        R, T, _ = self.keys.shape
        slots = choice.slots
        rows = (torch.arange(R, device=slots.device)[:, None] * T + slots).flatten()

        def of(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, rows).view(R, slots.shape[1], *x.shape[2:])

        origins = self.origins.follow(slots, choice.kept, before)
        return Memory(of(self.keys), of(self.values), choice.kept, origins)
