"""Gate: what a token says as it comes decides whether it stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..hf.facts import LayerFacts
from .base import Candidates, Pruner
from .gates import HIDDEN, Gates, as_gates


@dataclass(frozen=True)
class Gate(Pruner):
    """Keeps the tokens of which their gates said, when they came, that they will be attended to.

    gates: Gates of the model, or the folder that `kvcompress fit gates` made, here or on the Hub ("owner/name"), or
    what others have published (Gates.load). A token is scored once, as it comes, by a map of its queries before
    rotation, or of what enters attention: no second reading, no attention, nothing that comes after it. A prefix of
    another prompt is scored as that is. Where tokens have been dropped before (chunks, decoding), those that follow
    have seen less, and what is looked at differs a little in all layers but the first.
    Logarithms compare over layers and heads: use it with GlobalTopK.
    last: most recent tokens that always stay; None = a quarter of what stays, at most 32.
    Source: KVzap (NVIDIA 2026) and Fast KVzip, whose gates look at hidden states; scores of KVzip, section 3.
    """

    gates: Gates
    last: int | None = None
    num_sink_tokens: int = 4
    accumulates = True
    by_head = True
    logarithms = True
    uses_keys = False
    at_once = 0

    def __post_init__(self) -> None:
        self._check(last=0)
        object.__setattr__(self, "gates", as_gates(self.gates))
        object.__setattr__(self, "uses_entering", self.gates.looks_at == HIDDEN)

    def check_rows(self, heads: Sequence[int]) -> None:
        self.gates.check_rows(heads)

    def check_model(self, decoder: Any, layers: Sequence[LayerFacts]) -> None:
        self.gates.check_model(decoder, layers)

    def recent(self, keep: int, chunk_length: int) -> int:
        return self._most_recent(self.last, 32, keep)

    def votes(self, candidates: Candidates) -> Tensor:
        S = candidates.chunk_length
        out = torch.zeros(candidates.heads, candidates.count, device=candidates.keys.device)
        if S == 0:
            return out
        seen = self.gates.seen(candidates.own_queries, candidates.entering)
        heads = self.gates.layers[candidates.number].heads
        seen = seen[0, :, :S].unflatten(0, (candidates.heads // heads, -1))  # by sequence
        said = self.gates.says(candidates.number, seen).flatten(0, 1)
        return out.scatter(1, candidates.own_slots(), said)

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        return self.votes(candidates) if candidates.received is None else candidates.received
