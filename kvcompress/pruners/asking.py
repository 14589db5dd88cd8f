"""Pruners that weigh the scores of another one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..hf.facts import LayerFacts
from .base import Candidates, Pruner, Reread, given_as

Self = TypeVar("Self", bound="AskingPruner")
_SEES = ("window", "uses_guide", "uses_values", "uses_entering", "uses_output", "uses_sums", "uses_notes", "uses_keep",
         "accumulates", "overlap", "rereads", "logarithms", "lead_in", "one_frame", "default_keep",
         "num_sink_tokens")  # fmt: skip


class AskingPruner(Pruner):
    """A dataclass with a field `pruner`, whose votes, positions and rules are its own; subclasses change the scores."""

    pruner: Pruner

    def _follow(self) -> None:
        """Sees what the other pruner sees, and what the subclass says besides. For __post_init__.

        Raises ValueError for what is no pruner, or one of the same class.
        """
        if not isinstance(self.pruner, Pruner) or isinstance(self.pruner, type(self)):
            raise ValueError(f"pruner must be one of kvcompress.pruners, got {given_as(self.pruner)}")
        for name in _SEES:
            if not (name.startswith("uses_") and getattr(type(self), name)):
                object.__setattr__(self, name, getattr(self.pruner, name))

    def with_sinks(self: Self, tokens: int) -> Self:
        other = copy.copy(self)
        object.__setattr__(other, "pruner", self.pruner.with_sinks(tokens))
        object.__setattr__(other, "num_sink_tokens", tokens)
        return other

    @property
    def observation_window(self) -> int | None:
        return self.pruner.observation_window

    def recent(self, keep: int, chunk_length: int) -> int:
        return self.pruner.recent(keep, chunk_length)

    def always(self, keep: int, length: int) -> int:
        return self.pruner.always(keep, length)

    def lost(self) -> int:
        return self.pruner.lost()

    def check_rows(self, heads: Sequence[int]) -> None:
        self.pruner.check_rows(heads)

    def check_model(self, decoder: Any, layers: Sequence[LayerFacts]) -> None:
        self.pruner.check_model(decoder, layers)

    def positions_behind(self, tokens: int) -> int:
        return self.pruner.positions_behind(tokens)

    def reread(self, tokens: Tensor, before: Tensor, begins: bool) -> list[Reread]:
        return self.pruner.reread(tokens, before, begins)

    def with_tokenizer(self: Self, tokenizer: Any) -> Self:
        other = copy.copy(self)
        object.__setattr__(other, "pruner", self.pruner.with_tokenizer(tokenizer))
        return other

    def votes(self, candidates: Candidates) -> Tensor:
        return self.pruner.votes(candidates)

    def carried(self, received: Tensor, votes: Tensor) -> Tensor:
        return self.pruner.carried(received, votes)
