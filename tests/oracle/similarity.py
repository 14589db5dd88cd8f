"""How differently the layers of a model attend. PoD, section 2.2."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import capped


def divergence_bits(p: Tensor, r: Tensor) -> Tensor:
    """Jensen-Shannon divergence of probabilities [..., T], base 2: [...], 0..1."""
    mean = (p + r) / 2

    def entropy(x: Tensor) -> Tensor:
        return -torch.special.xlogy(x, x).sum(-1) / torch.log(x.new_tensor(2.0))

    return entropy(mean) - (entropy(p) + entropy(r)) / 2


def layer_similarity(
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float | None = None,
    sinks: int = 0,
    recent: int = 0,
    softcap: float | None = None,
) -> tuple[Tensor, int]:
    """As ops.layer_similarity, in the dtype of queries: all probabilities at once."""
    L, Hq, S, D = queries.shape
    T, G = keys.shape[2], Hq // keys.shape[1]
    logits = capped(queries @ keys.repeat_interleave(G, 1).mT * (D**-0.5 if scale is None else scale), softcap)
    position = torch.arange(T - S, T, device=keys.device)[:, None]
    key = torch.arange(T, device=keys.device)
    seen = (key >= sinks) & (key <= position - recent)
    counts = seen.any(-1)
    rows = logits[:, :, counts].masked_fill(~seen[counts], float("-inf")).softmax(-1)  # [L, Hq, queries that count, T]
    sums = queries.new_zeros(Hq, L, L)
    for a in range(L):
        for b in range(a):
            sums[:, a, b] = sums[:, b, a] = divergence_bits(rows[a], rows[b]).sum(-1)
    return sums, int(counts.sum())
