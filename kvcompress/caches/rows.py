"""What layers keep besides pages: numbers and tensors that follow their sequences."""

from __future__ import annotations

import copy

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

    def nbytes(self) -> int:
        held = vars(self).values()
        return sum(
            x.nbytes if isinstance(x, Tensor) else x.nbytes() for x in held if isinstance(x, (Tensor, SideState))
        )
