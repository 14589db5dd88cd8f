"""One budget for all layers: what each of them holds competes with the others', layer by layer, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..budgets import raised, sure_tokens


@dataclass
class Left:
    """What is left of a sequence in a layer: slots int32 [Hkv, K], rising, of what it held; the first kept[h] count."""

    slots: Tensor
    kept: list[int]


@dataclass
class _Held:
    """What the layers that have entered hold of one sequence, layer by layer, token by token over the heads: scores
    float32 [n]; rows, slots and tokens int64 [n], a token being the slot that it had when its layer entered. Rows are
    numbered over the layers. kept: how many slots each row has, those that it is to give up among them."""

    layers: list[tuple[int, int]]  # number of a layer, and of its rows
    kept: list[int]
    scores: Tensor
    rows: Tensor
    slots: Tensor
    tokens: Tensor

    @classmethod
    def nothing(cls, device: torch.device) -> _Held:
        numbers = torch.zeros(0, dtype=torch.int64, device=device)
        return cls([], [], torch.zeros(0, device=device), numbers, numbers, numbers)

    def enter(self, layer: int, ranks: Tensor) -> None:
        """ranks: float32 [heads, T]; what has -inf does not enter."""
        heads, flat = len(ranks), ranks.T.reshape(-1)
        places = (flat > float("-inf")).nonzero()[:, 0]
        tokens = places // heads
        for name, new in (
            ("scores", flat[places]), ("rows", places % heads + len(self.kept)), ("slots", tokens), ("tokens", tokens),
        ):  # fmt: skip
            setattr(self, name, torch.cat([getattr(self, name), new]))
        self.layers.append((layer, heads))
        self.kept += [ranks.shape[1]] * heads

    def cut(self, most: int) -> list[int]:
        """To the `most` best; how many each row has then. Waits for the device."""
        if len(self.scores) > most:
            # token by token over layers and heads: select_topk gives ties to the lower place
            order = self.tokens.argsort(stable=True)
            stays = order[ops.select_topk(self.scores[order][None], most)[0].long()].sort().values
            for name in ("scores", "rows", "slots", "tokens"):
                setattr(self, name, getattr(self, name)[stays])
        return torch.bincount(self.rows, minlength=len(self.kept)).tolist()

    def settle(self, first: int, counts: list[int]) -> Tensor:
        """Rows from `first` on give up what was cut: int32 [rows, K], rising, slots that they keep of those that they
        had, the first counts[first + r] of row r. What stays has new slots, in its order."""
        before = len(self.rows) - sum(counts[first:])
        row, order = (self.rows[before:] - first).sort(stable=True)
        kept = torch.bincount(row, minlength=len(counts) - first)
        places = torch.arange(len(row), device=row.device) - (kept.cumsum(0) - kept)[row]
        left = torch.zeros(len(kept), max(counts[first:]), dtype=torch.int32, device=row.device)
        left[row, places] = self.slots[before:][order].to(torch.int32)
        self.slots = torch.cat([self.slots[:before], torch.empty_like(places).scatter_(0, order, places)])
        self.kept[first:] = counts[first:]
        return left


class Contest:
    """The running top-k of one pass. After each layer what has entered is cut to each sequence's budget. Ties go to
    the first tokens, of all layers and heads alike, as in flat_topk.

    held[b]: tokens of all rows of sequence b before the pass. rows: of a sequence, over all layers that compress.
    floor: see GlobalTopK. trims: whether layers give back the pages that they lose, as they do in a first reading.
    waits: share of the budget that layers may still hold of what they are to lose: giving it up has a cost per layer.
    After the last layer nothing waits.
    """

    def __init__(self, held: list[int], rows: int, floor: float, *, trims: bool, waits: float) -> None:
        self.held, self.rows, self.floor, self.trims, self.waits = held, rows, floor, trims, waits
        self._keep: dict[int, int | None] = {}
        self._entries: list[_Held | None] = [None] * len(held)
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
        entries = self._entries[b] = self._entries[b] or _Held.nothing(ranks.device)
        own = len(entries.kept)
        entries.enter(layer, ranks)
        counts, held = entries.cut(keep * self.rows), list(entries.kept)
        due = sum(held[:own]) - sum(counts[:own])
        last = len(held) == self.rows
        first = 0 if last or due > self.waits * keep * self.rows else own
        left, row = entries.settle(first, counts), 0
        for number, heads in entries.layers:
            rows, row = slice(row, row + heads), row + heads
            if rows.start >= first and (number == layer or counts[rows] != held[rows]):
                kept = counts[rows]
                found = Left(left[rows.start - first : rows.stop - first, : max(kept)], kept)
                if number != layer:
                    self._lost.setdefault(number, {})[b] = found
        return found

    def lost(self) -> dict[int, dict[int, Left]]:
        """By layer and sequence, what is left in layers that have lost some since the last time."""
        lost, self._lost = self._lost, {}
        return lost
