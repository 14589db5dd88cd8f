"""One budget for all layers: what each of them holds competes with the others', layer by layer, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..budgets import raised, sure_tokens


@dataclass
class _Entry:
    """What a layer of so many rows holds of one sequence, token by token over its heads: scores float32 [n]; heads,
    slots and tokens int64 [n], a token being the slot that it had when the layer entered."""

    rows: int
    scores: Tensor
    heads: Tensor
    slots: Tensor
    tokens: Tensor

    def cut(self, stays: Tensor) -> tuple[Left, _Entry]:
        """(what stays of it, the entry with the slots that this then has). stays: bool [n]."""
        scores, heads, slots, tokens = (x[stays] for x in (self.scores, self.heads, self.slots, self.tokens))
        row, order = heads.sort(stable=True)
        kept = torch.bincount(row, minlength=self.rows)
        places = torch.arange(len(row), device=row.device) - (kept.cumsum(0) - kept)[row]
        counts = kept.tolist()
        left = torch.zeros(self.rows, max(counts), dtype=torch.int32, device=row.device)
        left[row, places] = slots[order].to(torch.int32)
        slots = torch.empty_like(places).scatter_(0, order, places)
        return Left(left, counts), _Entry(self.rows, scores, heads, slots, tokens)


@dataclass
class Left:
    """What is left of a sequence in a layer: slots int32 [Hkv, K], rising, of what it held; the first kept[h] count."""

    slots: Tensor
    kept: list[int]


class Contest:
    """The running top-k of one pass. After each layer what has entered is cut to each sequence's budget. Ties go to
    the first tokens, of all layers and heads alike, as in flat_topk.

    held[b]: tokens of all rows of sequence b before the pass. rows: of a sequence, over all layers that compress.
    floor: see GlobalTopK. trims: whether layers give back the pages that they lose, as they do in a first reading.
    """

    def __init__(self, held: list[int], rows: int, floor: float, *, trims: bool) -> None:
        self.held, self.rows, self.floor, self.trims = held, rows, floor, trims
        self._keep: dict[int, int | None] = {}
        self._entries: list[dict[int, _Entry]] = [{} for _ in held]  # of each sequence by layer
        self._lost: dict[int, dict[int, Left]] = {}  # by layer and sequence, since it was last asked

    def keep(self, b: int, mean: int, new: int, slack: int, *, called: bool) -> int | None:
        """Tokens per row, mean, that sequence b keeps of what it holds and so many new ones; None = all. It is decided
        once for all layers. mean: its budget. slack: tokens per row over the budget that are due. called: whether the
        pass is about it."""
        if b not in self._keep:
            due = called and self.held[b] + new * self.rows > (mean + slack - 1) * self.rows
            self._keep[b] = mean if due else None
        return self._keep[b]

    def enter(self, layer: int, b: int, ranks: Tensor) -> Left:
        """A layer's scores of sequence b, float32 [Hkv, T], no NaN, +inf what always stays, -inf what goes: what is
        left of them. The layers before it may lose theirs (see lost). Waits for the device."""
        keep = self._keep[b]
        assert keep is not None
        ranks = raised(ranks, min(sure_tokens(self.floor, keep), ranks.shape[1]))
        heads, flat = len(ranks), ranks.T.reshape(-1)
        places = (flat > float("-inf")).nonzero()[:, 0]
        entries = self._entries[b]
        tokens = places // heads
        entries[layer] = _Entry(heads, flat[places], places % heads, tokens, tokens)
        every = torch.cat([entry.scores for entry in entries.values()])
        stays = torch.ones_like(every, dtype=torch.bool)
        if len(every) > keep * self.rows:
            # token by token over layers and heads: select_topk gives ties to the lower place
            order = torch.cat([entry.tokens for entry in entries.values()]).argsort(stable=True)
            best = ops.select_topk(every[order][None], keep * self.rows)[0].long()
            stays.zero_()[order[best]] = True
        parts = dict(zip(entries, stays.split([len(entry.scores) for entry in entries.values()]), strict=True))
        counts = torch.stack([part.sum() for part in parts.values()]).tolist()
        lost = [n for n, count in zip(parts, counts, strict=True) if n != layer and count < len(parts[n])]
        for number in lost:
            self._lost.setdefault(number, {})[b], entries[number] = entries[number].cut(parts[number])
        left, entries[layer] = entries[layer].cut(parts[layer])
        return left

    def lost(self) -> dict[int, dict[int, Left]]:
        """By layer and sequence, what is left in layers that have lost some since the last time."""
        lost, self._lost = self._lost, {}
        return lost
