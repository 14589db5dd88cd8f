"""What a cache keeps of a batch: numbers and tensors that follow their sequences."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class BatchState:
    """An attribute that is a list or a tensor has an entry for each sequence, or as many entries for each as there are
    KV heads; or is None, or empty. A tuple of tensors holds several such. Attributes that are BatchState follow too."""

    def select(self, indices: list[int], batch: int) -> None:
        """Keeps copies of the given sequences, of which there are `batch`, in this order."""
        for name, held in vars(self).items():
            if isinstance(held, BatchState):
                held.select(indices, batch)
            else:
                setattr(self, name, selected(held, indices, batch))

    def join(self, other: BatchState, batch: int, more: int) -> None:
        """Adds the sequences of another one, of which there are `more`, behind these `batch`; the other is of no use
        then."""
        for name, held in vars(self).items():
            new = vars(other)[name]
            if isinstance(held, BatchState) or isinstance(new, BatchState):
                held.join(new, batch, more)
            elif isinstance(held, list):
                setattr(self, name, held + new)
            elif _of_tensors(held):
                setattr(self, name, _like(held, [joined_rows(*x, batch, more) for x in zip(held, new, strict=True)]))
            elif isinstance(held, Tensor) or isinstance(new, Tensor):
                setattr(self, name, joined_rows(held, new, batch, more))

    def nbytes(self) -> int:
        held = vars(self).values()
        return sum(
            x.nbytes if isinstance(x, Tensor) else x.nbytes() for x in held if isinstance(x, (Tensor, BatchState))
        )


def _of_tensors(held: Any) -> bool:
    return isinstance(held, tuple) and all(isinstance(x, Tensor) for x in held)


def _like(held: Any, parts: list[Any]) -> Any:
    """A tuple, named as that one."""
    return getattr(held, "_make", tuple)(parts)


def spread(numbers: Sequence[Any], heads: int) -> list[Any]:
    """Of each sequence for each of its rows."""
    return [number for number in numbers for _ in range(heads)]


def by_sequence(numbers: list[Any], batch: int) -> list[list[Any]]:
    """Of each row, those of a sequence together."""
    heads = len(numbers) // batch
    return [numbers[b * heads : (b + 1) * heads] for b in range(batch)]


def selected(held: Any, indices: list[int], batch: int) -> Any:
    """What an attribute becomes where these sequences are kept, of which there are `batch`."""
    if _of_tensors(held):
        return _like(held, [selected(x, indices, batch) for x in held])
    if not isinstance(held, (list, Tensor)) or not len(held):
        return held
    each = len(held) // batch
    rows = [b * each + row for b in indices for row in range(each)]
    if isinstance(held, list):
        return [copy.copy(held[row]) for row in rows]
    return held[torch.tensor(rows, dtype=torch.long, device=held.device)]


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
