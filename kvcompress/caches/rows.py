"""What layers keep besides pages: numbers and tensors that follow their sequences."""

from __future__ import annotations

import copy

import torch
from torch import Tensor


class SideState:
    """An attribute that is a list or a tensor has an entry for each sequence, or as many entries for each as there are
    KV heads; or is None, or empty. Attributes that are SideState follow too."""

    def select(self, indices: list[int], batch: int) -> None:
        """Keeps copies of the given sequences, of which there are `batch`, in this order."""
        for name, held in vars(self).items():
            if isinstance(held, SideState):
                held.select(indices, batch)
            elif isinstance(held, (list, Tensor)) and len(held):
                each = len(held) // batch
                rows = [b * each + row for b in indices for row in range(each)]
                setattr(self, name, held[rows] if isinstance(held, Tensor) else [copy.copy(held[row]) for row in rows])

    def join(self, other: SideState, batch: int, more: int) -> None:
        """Adds the sequences of another one, of which there are `more`, behind these `batch`."""
        for name, held in vars(self).items():
            new = vars(other)[name]
            if isinstance(held, SideState):
                held.join(new, batch, more)
            elif isinstance(held, list):
                setattr(self, name, held + new)
            elif isinstance(held, Tensor) or isinstance(new, Tensor):
                setattr(self, name, joined_rows(held, new, batch, more))

    def nbytes(self) -> int:
        held = vars(self).values()
        return sum(
            x.nbytes if isinstance(x, Tensor) else x.nbytes() for x in held if isinstance(x, (Tensor, SideState))
        )


def joined_rows(held: Tensor | None, new: Tensor | None, batch: int, more: int) -> Tensor | None:
    """Rows of `batch` sequences and, behind them, of `more` others; None is rows of zeros, narrow ones are filled up
    with zeros. None where both are."""
    some = new if held is None else held
    if some is None:
        return None
    each = len(some) // (more if held is None else batch)
    parts = [
        some.new_zeros(each * n, *some.shape[1:]) if part is None else part for part, n in ((held, batch), (new, more))
    ]
    if some.ndim > 1:
        width = max(part.shape[1] for part in parts)
        parts = [
            part
            if part.shape[1] == width
            else torch.cat([part, part.new_zeros(part.shape[0], width - part.shape[1], *part.shape[2:])], 1)
            for part in parts
        ]
    return torch.cat(parts)
