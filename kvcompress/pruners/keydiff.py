"""KeyDiff: keep the keys that are unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..support.presets import preset_of
from .base import Candidates, Pruner


@dataclass(frozen=True)
class KeyDiff(Pruner):
    """Keeps the keys that differ most from the mean of their head's keys: what is distinctive gets attention.

    A key's score is minus the cosine between it and the mean of the head's normalised keys. No query is looked at.
    rotated: True takes keys as they stand in the cache, as the paper does, and scores all that is held at each
    compression. False, the default, takes them before rotation: the same token at two places is then the same key, and
    position, which rotation mixes in, makes nothing distinctive. Each key is then scored once, when it comes, against
    the mean of all keys of its head that have come so far; cache keeps the scores, 4 bytes a key, and the sums.
    last: most recent tokens that always stay; None = a quarter of what stays, at most 32.
    preset("paper") gives the paper's: rotated, no token sure to stay (kvpress's KeyDiffPress is the same).
    Source: KeyDiff, section 3 (Park et al. 2025, arXiv:2504.15364), and its efficient form with a mean as the anchor.
    """

    rotated: bool = False
    last: int | None = None
    num_sink_tokens: int = 0
    by_head = True

    def __post_init__(self) -> None:
        self._check(last=0)

    @staticmethod
    def preset(name: str, **changes: Any) -> KeyDiff:
        """KeyDiff as the paper has it: "paper". changes: other fields."""
        return preset_of(KeyDiff, {"paper": {"rotated": True, "last": 0}}, name, changes)

    @property
    def accumulates(self) -> bool:  # type: ignore[override]
        return not self.rotated

    @property
    def one_frame(self) -> bool:  # type: ignore[override]
        return not self.rotated

    @property
    def uses_notes(self) -> bool:  # type: ignore[override]
        return not self.rotated

    def recent(self, keep: int, chunk_length: int) -> int:
        return self._most_recent(self.last, 32, keep)

    def votes(self, candidates: Candidates) -> Tensor:
        S, D, rotary = candidates.chunk_length, candidates.keys.shape[3], candidates.key_rotary or candidates.rotary
        out = torch.zeros(candidates.heads, candidates.count, device=candidates.keys.device)
        if S == 0:
            return out
        if rotary is None:
            raise ValueError("candidates must have rotary where keys are taken before rotation, got None")
        slots = candidates.own_slots()
        places = torch.arange(S, dtype=torch.int32, device=out.device)[None] + candidates.position - S
        own = candidates.keys[:, :].gather(2, slots[None, ..., None].expand(-1, -1, -1, D))
        own = rotary.unrotate(own, candidates.position, [candidates.settled], places)[
            0, ..., candidates.beside :
        ].float()
        total = torch.nn.functional.normalize(own, dim=-1).sum(1)
        if candidates.notes is not None:
            total = candidates.notes[:, candidates.beside :].add_(total)
        return out.scatter(1, slots, _difference(own, total))

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        if not self.rotated:
            return self.votes(candidates) if candidates.received is None else candidates.received
        keys = candidates.own_keys[0, :, : candidates.count].float()
        places, held = candidates.places()
        normed = torch.nn.functional.normalize(keys, dim=-1).masked_fill((places >= held)[..., None], 0)
        return _difference(keys, normed.sum(1))


def _difference(keys: Tensor, anchor: Tensor) -> Tensor:
    """float32 [Hkv, T]: minus the cosines of keys [Hkv, T, D] and anchors [Hkv, D]."""
    return -torch.nn.functional.cosine_similarity(keys, anchor[:, None], dim=-1)
