"""Leverage scores, and Compactor: keep the keys that the others do not span."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.native import MAX_HEAD_DIM
from ..support.checks import need_integer
from ..support.presets import preset_of
from .base import Candidates, Pruner

_PAPERS = 0.35  # blending


def _spread(scores: Tensor) -> Tensor:
    """In standard deviations from the mean of a layer."""
    return (scores - scores.mean()) / scores.std().clamp_min(1e-6)


@dataclass(frozen=True)
class LeverageScore(Pruner):
    """Keeps keys of high leverage: those that the other keys of the head cannot be combined to.

    Keys before rotation, less their mean over the call, X [S, D]: leverage is the diagonal of X (X^T X + jitter)^-1
    X^T, given in standard deviations from its mean over the heads of the layer. sketch: X is multiplied by a Gaussian
    [D, sketch] first, 1..512, which is drawn from `seed` and the layer; None = exact. No query is looked at.
    The tokens of a call are compared with each other, once: the cache keeps their scores, 4 bytes a key.
    Source: Compactor (Chari and Van Durme 2025, arXiv:2507.08143), section 3; sketch, jitter and normalisation as in
    kvpress's LeverageScorePress.
    """

    sketch: int | None = 48
    jitter: float = 1e-2
    seed: int = 0
    num_sink_tokens: int = 0
    accumulates = True
    one_frame = True

    def __post_init__(self) -> None:
        self._check()
        if self.sketch is not None:
            need_integer("sketch", self.sketch, 1, MAX_HEAD_DIM)
        need_integer("seed", self.seed, 0)
        if not self.jitter > 0:
            raise ValueError(f"jitter must be above 0, got {self.jitter}")

    def votes(self, candidates: Candidates) -> Tensor:
        out = torch.zeros(candidates.heads, candidates.count, device=candidates.keys.device)
        if candidates.chunk_length <= self._rank(candidates) + 1:
            return out  # few keys span each other as little: all are alike
        return out.scatter(1, candidates.own_slots(), _spread(self._leverage(candidates, 0, candidates.chunk_length)))

    def _rank(self, candidates: Candidates) -> int:
        """Dimensions that keys span."""
        D = candidates.keys.shape[3] - candidates.beside
        return D if self.sketch is None else min(self.sketch, D)

    def _leverage(self, candidates: Candidates, first: int, end: int) -> Tensor:
        """float32 [Hkv, end - first] of these of the call's tokens."""
        S, D, rotary = candidates.chunk_length, candidates.keys.shape[3], candidates.key_rotary or candidates.rotary
        if rotary is None:
            raise ValueError("candidates must have rotary where keys are taken before rotation, got None")
        slots = candidates.own_slots()[:, first:end]
        places = torch.arange(first, end, dtype=torch.int32, device=slots.device)[None] + candidates.position - S
        own = candidates.keys.gather(2, slots[None, ..., None].expand(-1, -1, -1, D))
        own = rotary.unrotate(own, candidates.position, [candidates.settled], places)[
            0, ..., candidates.beside :
        ].float()
        own = own - own.mean(1, keepdim=True)
        if self.sketch is not None:
            generator = torch.Generator().manual_seed(hash((self.seed, candidates.layer)) % (1 << 63))
            sketch = (
                torch.randn(candidates.heads, own.shape[-1], self.sketch, generator=generator, device="cpu")
                / self.sketch**0.5
            )
            own = own @ sketch.to(own.device)
        gram = own.mT @ own
        gram = gram + self.jitter * torch.eye(gram.shape[-1], device=own.device)
        return (own * torch.linalg.solve(gram, own.mT).mT).sum(-1).clamp_min(0)

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        return self.votes(replace(candidates, keep=keep)) if candidates.received is None else candidates.received


@dataclass(frozen=True)
class Compactor(LeverageScore):
    """Leverage, and what the tokens of a chunk attend to when each sees all of it.

    score = blending * leverage + attention, both in standard deviations. attention: softmax of each query over its
    chunk of `chunk` tokens, later ones included; summed over the queries, mean over the query heads of a KV head, times
    the value's norm, mean of 3 neighbours. The first num_sink_tokens and the last `last` stay and are left out of both.
    blending: how much leverage counts; None = as much as the share that goes of what there is when the tokens come,
    0.35 where all of it stays. scaled: False leaves the scale out of the logits.
    The paper's blending is 0.35; its author's CompactorPress in kvpress takes the share to remove, which recalls more
    where much goes (docs/results/pruning.md) and is the default here. preset("kvpress") is that press: its logits have
    no scale.
    Source: Compactor (Chari and Van Durme 2025, arXiv:2507.08143), section 3, in the form of kvpress.
    """

    num_sink_tokens: int = 8
    last: int = 4
    chunk: int = 256
    blending: float | None = None
    scaled: bool = True
    uses_values = True
    window = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(last=0, chunk=1)
        number = isinstance(self.blending, (int, float)) and not isinstance(self.blending, bool) and self.blending >= 0
        if self.blending is not None and not number:
            raise ValueError(f"blending must be a number of at least 0 or None, got {self.blending!r}")

    @property
    def uses_keep(self) -> bool:  # type: ignore[override]
        return self.blending is None

    def recent(self, keep: int, chunk_length: int) -> int:
        return min(self.last, keep - min(self.num_sink_tokens, keep))

    def votes(self, candidates: Candidates) -> Tensor:
        S = candidates.chunk_length
        first = max(min(self.num_sink_tokens - (candidates.position - S), S), 0)
        end = max(S - self.last, first) if candidates.position == S else S
        out = torch.zeros(candidates.heads, candidates.count, device=candidates.keys.device)
        if end - first < 2:
            return out
        scores = _spread(self._attention(candidates, first, end))
        if end - first > self._rank(candidates) + 1:
            scores = scores + self._blending(candidates) * _spread(self._leverage(candidates, first, end))
        return out.scatter(1, candidates.own_slots()[:, first:end], scores)

    def _blending(self, candidates: Candidates) -> float:
        if self.blending is not None:
            return self.blending
        goes = candidates.keep is not None and candidates.keep < candidates.count
        return 1 - candidates.keep / candidates.count if goes else _PAPERS  # type: ignore[operator]

    def _attention(self, candidates: Candidates, first: int, end: int) -> Tensor:
        """float32 [Hkv, end - first]."""
        if candidates.values is None:
            raise ValueError("candidates must have values for Compactor, got None")
        D, softmax = candidates.keys.shape[3], candidates.softmax
        slots = candidates.own_slots()[:, first:end, None].expand(-1, -1, D)
        keys, values = (x[0].gather(1, slots).float() for x in (candidates.keys, candidates.values))
        queries = candidates.queries[0].unflatten(0, (candidates.heads, -1))[:, :, first:end].float()
        parts = []
        for begin in range(0, end - first, self.chunk):
            own = slice(begin, begin + self.chunk)
            logits = (softmax.scale if self.scaled else 1.0) * (queries[:, :, own] @ keys[:, None, own].mT)
            if softmax.softcap is not None:
                logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
            parts.append(logits.softmax(-1).sum(2).mean(1))
        scores = torch.cat(parts, 1) * values.norm(dim=-1)
        return torch.nn.functional.avg_pool1d(scores, 3, 1, 1)

    @staticmethod
    def preset(name: str, **changes: Any) -> Compactor:
        """Compactor as an implementation sets it: kvpress. changes: other fields."""
        return preset_of(Compactor, {"kvpress": {"scaled": False}}, name, changes)
