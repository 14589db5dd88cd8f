"""R-KV: keep what is attended to and not said twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Candidates, Pruner

_ROWS = 1 << 22  # cosines that are held at a time


@dataclass(frozen=True)
class RKV(Pruner):
    """Keeps keys that the latest queries attend to and that are unlike others: for long chains of thought, with every.

    importance: attention of the last `window` queries to all keys before them, whose logits are the maximum over the
    query heads of a KV head; mean over the queries, the maximum of kernel_size neighbours. redundancy: of a key, the
    mean over all keys of their cosine with it, softmax over the row; each key leaves out itself and the last of those
    whose cosine with it is above `threshold`, so that the newest of several alike does not count as redundant for it.
    score = mix * importance - (1 - mix) * redundancy. The last `window` tokens always stay.
    Cost: T x T cosines a head, in blocks.
    Source: R-KV (Cai et al. 2025, arXiv:2505.24133), section 3, and the authors' code, whose numbers the defaults are.
    """

    window: int = 8
    kernel_size: int = 7
    mix: float = 0.07
    threshold: float = 0.5
    num_sink_tokens: int = 0
    by_head = True
    one_frame = True

    def __post_init__(self) -> None:
        self._check(window=1, kernel_size=1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {self.kernel_size}")
        for name in ("mix", "threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {value!r}")

    @property
    def observation_window(self) -> int | None:
        return self.window

    @property
    def at_once(self) -> int:  # type: ignore[override]
        """Those that look at the others."""
        return self.window

    def recent(self, keep: int, chunk_length: int) -> int:
        return min(self.window, chunk_length, keep - min(self.num_sink_tokens, keep))

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        window, lengths = self.recent(keep, candidates.chunk_length), [candidates.count] * candidates.heads
        if candidates.lengths is not None:
            lengths = (candidates.lengths - candidates.guide_length).tolist()
        queries = candidates.queries[0].unflatten(0, (candidates.heads, -1))[:, :, candidates.chunk_length - window :]
        scores = torch.zeros(candidates.heads, candidates.count, device=queries.device)
        for head, length in enumerate(lengths):
            keys = candidates.keys[0, head, :length].float()
            own = queries[head, :, :window].float()
            before = max(length - window, 0)
            redundancy = self._redundancy(keys[:, candidates.beside :])
            scores[head, :length] -= (1 - self.mix) * redundancy
            if before and window:
                softmax = candidates.softmax
                logits = softmax.scale * (own @ keys[:before].T)
                if softmax.softcap is not None:
                    logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
                importance = logits.amax(0).softmax(-1).mean(0)[None]
                size = min(self.kernel_size, 2 * before + 1)  # that reaches all of them from each
                pooled = torch.nn.functional.max_pool1d(importance, size, 1, size // 2)
                scores[head, :before] += self.mix * pooled[0]
        return scores

    def _redundancy(self, keys: Tensor) -> Tensor:
        """float32 [T] of keys [T, D]."""
        T = len(keys)
        normed = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        total, places = torch.zeros(T, device=keys.device), torch.arange(T, device=keys.device)
        step = max(_ROWS // max(T, 1), 1)
        for first in range(0, T, step):
            rows = places[first : first + step, None]
            cosines = (normed[first : first + step] @ normed.T).scatter_(1, rows, 0.0)
            last = torch.where(cosines > self.threshold, places, -1).amax(1, keepdim=True)
            cosines.masked_fill_(places == last, 0.0)
            total += cosines.sum(0)
        return (total / T).softmax(0)
