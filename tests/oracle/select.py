"""Top-k as sorted indices, and compaction of rows to them."""

from __future__ import annotations

import torch
from torch import Tensor


def select_topk(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> Tensor:
    """As ops.select_topk: a stable descending sort, so that ties go to the lower index."""
    R, T = scores.shape
    out = torch.full((R, k), -1, dtype=torch.int32, device=scores.device)
    for r in range(R):
        row = scores[r, : T if lengths is None else int(lengths[r])]
        allowed = torch.nonzero(~row.isnan()).flatten()
        if len(allowed) < k:
            raise RuntimeError(f"row {r} of scores has {len(allowed)} candidates for {k} places")
        order = torch.sort(row[allowed], descending=True, stable=True).indices[:k]
        out[r] = allowed[order].sort().values.to(torch.int32)
    return out
