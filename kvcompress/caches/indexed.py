"""The index keys of a layer whose indexer chooses the tokens that a query sees: they lie beside its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..hf.indexing import Index, attend_chosen
from ..softmax import Softmax
from .rows import BatchState


class IndexKeys(BatchState):
    """keys[b]: [U, D] of sequence b, rotated to where its tokens stand; numbers[b]: int64 [U], rising, which tokens
    those are: all that any of its rows holds. No tensor here is ever written to."""

    def __init__(self, batch: int) -> None:
        self.keys: list[Tensor] = []
        self.numbers = [torch.zeros(0, dtype=torch.int64) for _ in range(batch)]

    def append(self, keys: Tensor, first: Sequence[int], counts: Sequence[int]) -> None:
        """keys: [B, S, D], of which the last counts[b] are those of tokens number first[b] on. What was there of such
        numbers has been taken back."""
        held = self.keys or [keys[0, :0]] * len(counts)
        left = [int(torch.searchsorted(numbers, n)) for numbers, n in zip(self.numbers, first, strict=True)]
        new = [torch.arange(n, n + count) for n, count in zip(first, counts, strict=True)]
        self.keys = [
            torch.cat([old[:n], own[len(own) - count :]])
            for old, n, own, count in zip(held, left, keys, counts, strict=True)
        ]
        self.numbers = [torch.cat([old[:n], own]) for old, n, own in zip(self.numbers, left, new, strict=True)]

    def keep(self, held: Sequence[Sequence[Tensor]]) -> None:
        """held[b]: the numbers that each row of a sequence holds; what none of them does goes."""
        for b, rows in enumerate(held):
            stays = torch.isin(self.numbers[b], torch.cat(list(rows)))
            self.keys[b], self.numbers[b] = self.keys[b][stays.to(self.keys[b].device)], self.numbers[b][stays]

    def attend(
        self, index: Index, queries: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, lengths: Sequence[int],
        counts: Sequence[int], softmax: Softmax,
    ) -> Tensor:  # fmt: skip
        """Attention of queries [B, Hq, S, D], of which the last counts[b] are sequence b's, to what they choose of its
        rows of keys and values [B, Hkv, T, D]. tokens: int64 [B * Hkv, T], the numbers of the first lengths[r] of them.
        """
        out, heads = torch.zeros_like(queries), keys.shape[1]
        for b, count in enumerate(counts):
            own, rows, last = self.numbers[b], slice(b * heads, (b + 1) * heads), queries.shape[2] - count
            same = min(lengths[rows]) == len(own)
            places = None if same else torch.searchsorted(own, tokens[rows]).clamp_(max=len(own) - 1).to(keys.device)
            longest = max(lengths[rows])
            asked = index.queries[b, :, last:], index.weights[b, last:], self.keys[b]
            out[b, :, last:] = attend_chosen(
                queries[b, :, last:], keys[b, :, :longest], values[b, :, :longest], lengths[rows], asked, index.top,
                softmax, None if places is None else places[:, :longest],
            )  # fmt: skip
        return out

    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.keys)  # numbers are on the host, as origins are

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexKeys:
        fork = IndexKeys(0)
        fork.keys, fork.numbers = list(self.keys), list(self.numbers)
        return fork
