"""Models with recurrent layers, whose code reads one state for each row of a batch: requests in passes apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.argument import CACHE
from .requests import Requests
from .served_pass import ServedPass


class Apart:
    """In a model's place, for one pass over packed tokens: those of requests that decode are a batch [n, 1], whose
    states are stacked in one cache, and each part of a prompt comes in a forward pass of its own."""

    def __init__(self, model: nn.Module, served: Requests, current: ServedPass) -> None:
        self.model, self.served, self.current = model, served, current

    def _supports_logits_to_keep(self) -> bool:
        """As transformers asks a model: logits are those of the tokens that it wants."""
        return True

    def __call__(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **other: Any) -> Any:
        """input_ids, position_ids: [1, T]. logits_to_keep: int [n] of them, each the last of its request here.
        Returns what has logits, [1, n, V]."""
        current, tokens = self.current, torch.stack([input_ids[0], position_ids[0]])
        given: dict[str, Any] = {"use_cache": True}
        if self.model._supports_logits_to_keep():  # type: ignore[operator]
            given["logits_to_keep"] = 1
        found, ends, end = [], list(range(current.decoding)), current.decoding
        turns = [] if current.together is None else [(-1, tokens[:, :end, None])]
        for i, (part, _) in enumerate(current.parts):
            turns.append((i, tokens[:, None, end : end + part.tokens]))
            end += part.tokens
            ends.append(end - 1)
        for (current.turn, (ids, places)), cache in zip(turns, self.served.turns(), strict=True):
            found.append(self.model(input_ids=ids, position_ids=places, **{CACHE: cache}, **given).logits[:, -1])
        wanted = torch.searchsorted(torch.tensor(ends, device=logits_to_keep.device), logits_to_keep)
        return SimpleNamespace(logits=torch.cat(found)[None, wanted])
