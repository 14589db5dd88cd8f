"""Expected attention: keep what future queries are expected to attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..support.checks import need_integer
from .base import Candidates, Pruner

MOST_FUTURE = 1 << 16  # positions, for each of which a [D, D] rotation is made


@dataclass(frozen=True)
class ExpectedAttention(Pruner):
    """Keeps keys by the attention that Gaussian queries at future positions would pay to them, times the value's norm.

    mu, Sigma: mean and covariance of a query head's queries before rotation (the first num_sink_tokens left out), then
    rotated by the mean rotation of the next future_positions positions. A key's score is the softmax over the keys of
    scale*mu.k + scale^2 k.Sigma.k/2, mean over the query heads of a KV head, plus epsilon, times |v|.
    use_covariance, use_value_norm: leave either out. Needs the queries of the whole call: with few of them (decoding)
    the statistics are theirs alone.
    Source: Devoto et al., Expected Attention, sections 3.2 to 3.4, in the form of kvpress (statistics over the prompt).
    """

    future_positions: int = 512
    num_sink_tokens: int = 4
    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0
    window = 256  # queries that a cache keeps for it while decoding
    uses_values = True
    by_head = True
    one_frame = True

    def __post_init__(self) -> None:
        self._check()
        need_integer("future_positions", self.future_positions, 1, MOST_FUTURE)
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must be at least 0, got {self.epsilon}")

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        queries, rotary, count = candidates.unrotated, candidates.rotary, candidates.count
        if queries is None or rotary is None or candidates.values is None:
            raise ValueError("candidates must have unrotated, rotary and values for ExpectedAttention, got None")
        queries = queries[0].float()
        skipped = max(min(self.num_sink_tokens - (candidates.position - queries.shape[1]), queries.shape[1] - 1), 0)
        queries = queries[:, skipped:]  # [Hq, S, D]
        mean = queries.mean(1, keepdim=True)
        future = torch.arange(self.future_positions, dtype=torch.int32, device=mean.device) + candidates.position
        # the mean rotation is linear: rotate a basis to every future position, and take the mean
        basis = torch.eye(queries.shape[2], device=mean.device)
        turned = rotary.rotate(
            basis[None, :, None].expand(1, -1, len(future), -1), future[None],
            candidates.position + len(future), [candidates.settled],
        )[0].mean(1)  # [D, D]: row i is where axis i goes, with the factor that yarn's keys carry too  # fmt: skip
        heads, group = candidates.heads, queries.shape[0] // candidates.heads
        keys = candidates.keys[0, :, :count].float()  # [Hkv, T, D]
        mu = (mean @ turned).view(heads, group, -1)
        logits = candidates.softmax.scale * keys @ mu.transpose(1, 2)  # [Hkv, T, G]
        if self.use_covariance:
            spread = (queries - mean) @ turned
            spread = (spread.transpose(1, 2) @ spread / queries.shape[1]).unflatten(0, (heads, group))
            for g in range(group):
                logits[:, :, g] += candidates.softmax.scale**2 / 2 * ((keys @ spread[:, g]) * keys).sum(-1)
        places, held = candidates.places()
        logits = logits.masked_fill(((places < self.num_sink_tokens) | (places >= held))[..., None], float("-inf"))
        scores = logits.softmax(1).nan_to_num(0.0).mean(-1) + self.epsilon
        if self.use_value_norm:
            scores = scores * torch.linalg.vector_norm(candidates.values[0, :, :count].float(), dim=-1)
        return scores
