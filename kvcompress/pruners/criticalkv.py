"""CriticalKV: weigh attention by what a value does to the hidden state."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from .. import ops
from .asking import AskingPruner
from .base import Candidates, Pruner
from .snapkv import SnapKV

_NUMBERS = 1 << 24  # of projected values that are held at a time
NORMS = ("l1", "l2")


@dataclass(frozen=True)
class CriticalKV(AskingPruner):
    """Another pruner's scores, times the size of what the value adds to the hidden state.

    Half of the budget (first_stage) goes to the best scores as they are; the other half to the best of (score +
    epsilon) * norm, norm of the value through its heads' output projection, mean over the query heads of a KV head.
    pruner: whose scores, SnapKV's by default; those of ExpectedAttention with use_value_norm=False. norm: "l1" as in
    the paper, T*D*hidden products a query head, which is what the output projection costs (6 to 8% of a prefill); "l2"
    by the projection's Gram matrix, T*D*D (hidden/D times less), which ranks values almost alike.
    With AdaKV each head's first half is that of the mean over the heads.
    Source: CriticalKV (Feng et al. 2025, arXiv:2502.03805), algorithm 1; numbers as in kvpress's CriticalKVPress.
    """

    pruner: Pruner = field(default_factory=SnapKV)
    epsilon: float = 1e-4
    first_stage: float = 0.5
    norm: str = "l1"
    uses_values = True
    uses_keep = True
    uses_output = True

    def __post_init__(self) -> None:
        self._follow()
        if self.pruner.logarithms:
            name = type(self.pruner).__name__
            raise ValueError(f"pruner must not score by logarithms, as {name} does: CriticalKV multiplies scores")
        if isinstance(self.epsilon, bool) or not isinstance(self.epsilon, (int, float)) or not self.epsilon >= 0:
            raise ValueError(f"epsilon must be at least 0, got {self.epsilon!r}")
        share = self.first_stage
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
            raise ValueError(f"first_stage must be between 0 and 1, got {share!r}")
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {self.norm!r}")

    @property
    def at_once(self) -> int | None:  # type: ignore[override]
        """As many as the pruner asks for."""
        return self.pruner.at_once

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        if candidates.values is None or candidates.output is None:
            raise ValueError("candidates must have values and output for CriticalKV, got None")
        scores = self.pruner.scores(candidates, keep).float()
        places, held = candidates.places()
        scores = scores.masked_fill(places >= held, float("-inf"))
        first = min(int(Fraction(repr(float(self.first_stage))) * keep), scores.shape[1])
        best = ops.select_topk(scores.masked_fill(scores.isnan(), float("-inf")), first).long()
        norms = self._norms(candidates.values[0, :, : candidates.count], candidates.output)
        none = scores == float("-inf")
        weighed = ((scores + self.epsilon) * norms).masked_fill(none, float("-inf"))
        sure = scores.gather(1, best)
        kept = torch.where(sure > float("-inf"), torch.finfo(torch.float32).max, sure)  # NaN stays NaN
        return weighed.scatter(1, best, kept)

    def _norms(self, values: Tensor, weights: Tensor) -> Tensor:
        """float32 [Hkv, T] of values [Hkv, T, D], weights [Hq, Dv, hidden]."""
        (heads, T, _), (Hq, Dv, hidden) = values.shape, weights.shape
        values, weights = values[..., :Dv].float(), weights.float()
        groups = weights.unflatten(0, (heads, -1))  # [Hkv, G, Dv, hidden]
        if self.norm == "l2":
            grams = groups @ groups.mT
            turned = (values @ grams.transpose(1, 2).flatten(2)).unflatten(2, (-1, Dv))
            return (turned * values[:, :, None]).sum(-1).clamp_min(0).sqrt().mean(-1)
        norms = torch.zeros(heads, T, device=values.device)
        step = max(_NUMBERS // hidden, 1)
        for query_head in range(Hq):
            head = query_head * heads // Hq
            for start in range(0, T, step):
                part = slice(start, start + step)
                norms[head, part] += (values[head, part] @ weights[query_head]).abs().sum(-1)
        return norms / (Hq // heads)
