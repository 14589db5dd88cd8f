"""The index keys of a layer whose indexer chooses the tokens that a query sees: they lie beside its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..hf.indexing import attend_chosen
from ..ops.softmax import Softmax
from .passes import CachePass
from .rows import BatchState


class IndexKeys(BatchState):
    """keys[b]: [U, D] of sequence b, rotated to where its tokens stand. numbers[b]: int64 [U], rising, which tokens
    those are, all that any of its rows holds; on the host, as origins are. places: int32 [R, K], which of them the
    first held[r] slots of a row hold, and what follows those is the same in all rows; None = all of it is. No tensor
    here is ever written to."""

    def __init__(self, batch: int) -> None:
        self.keys: list[Tensor] = []
        self.numbers = [torch.zeros(0, dtype=torch.int64, device="cpu") for _ in range(batch)]
        self.places: Tensor | None = None
        self.held: list[int] = []

    def append(self, keys: Tensor, first: Sequence[int], counts: Sequence[int]) -> None:
        """keys: [B, S, D], of which the last counts[b] are those of tokens number first[b] on. What was there of such
        numbers has been taken back."""
        held = self.keys or [keys[0, :0]] * len(counts)
        left = [int(torch.searchsorted(numbers, n)) for numbers, n in zip(self.numbers, first, strict=True)]
        new = [torch.arange(n, n + count, device="cpu") for n, count in zip(first, counts, strict=True)]
        self.keys = [
            torch.cat([old[:n], own[len(own) - count :]])
            for old, n, own, count in zip(held, left, keys, counts, strict=True)
        ]
        self.numbers = [torch.cat([old[:n], own]) for old, n, own in zip(self.numbers, left, new, strict=True)]

    def keep(self, held: Sequence[Sequence[Tensor]]) -> None:
        """held[b]: the numbers of the tokens that each row of a sequence holds; what none of them does goes."""
        places = []
        for b, rows in enumerate(held):
            stays = torch.isin(self.numbers[b], torch.cat(list(rows)))
            self.keys[b], self.numbers[b] = self.keys[b][stays.to(self.keys[b].device)], self.numbers[b][stays]
            places += [torch.searchsorted(self.numbers[b], row, out_int32=True) for row in rows]
        self.places = torch.nn.utils.rnn.pad_sequence(places, batch_first=True).to(self.keys[0].device)
        self.held = [len(row) for row in places]

    def attend(
        self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int], softmax: Softmax
    ) -> Tensor:
        """Attention of the pass's queries [B, Hq, S, D] to what they choose of rows of keys and values [B, Hkv, T, D],
        which hold lengths[r] tokens, those of the pass included."""
        index = step.index
        assert index is not None
        out, heads, S = torch.zeros_like(queries), keys.shape[1], queries.shape[2]
        for b, count in enumerate(step.counts):
            rows = slice(b * heads, (b + 1) * heads)
            T = max(lengths[rows])
            if count:
                out[b, :, S - count :] = attend_chosen(
                    queries[b, :, S - count :], keys[b, :, :T], values[b, :, :T], lengths[rows],
                    (index.queries[b, :, S - count :], index.weights[b, S - count :], self.keys[b]), index.indexer.top,
                    softmax, self._places(b, rows, T, lengths[rows]),
                )  # fmt: skip
        return out

    def _places(self, b: int, rows: slice, T: int, lengths: Sequence[int]) -> Tensor | None:
        """int64 [Hkv, T]: which of a sequence's index keys its rows' slots hold; None = slot i holds key i."""
        if self.places is None:
            return None
        device, U = self.places.device, len(self.keys[b])
        held, later = (
            torch.tensor(n, device=device)[:, None] for n in (self.held[rows], [U - length for length in lengths])
        )
        slots, known = torch.arange(T, device=device), self.places[rows, :T].long()
        known = torch.nn.functional.pad(known, (0, T - known.shape[1]))
        return torch.where(slots < held, known, (slots + later).clamp_(max=U - 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexKeys:
        fork = IndexKeys(0)
        fork.keys, fork.numbers, fork.places, fork.held = list(self.keys), list(self.numbers), self.places, self.held
        return fork

    def nbytes(self) -> int:
        return super().nbytes() + sum(x.nbytes for x in self.keys)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, numbers=[x.to("cpu") for x in state["numbers"]])
