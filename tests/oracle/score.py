"""Column scores of a window of queries. SnapKV, section 4; IntelLLM, Algorithm 1."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import capped


def window_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float | None = None,
    reduce: str = "mean",
    pooling: str = "avg",
    kernel_size: int = 5,
    lengths: Tensor | None = None,
    skip_last: int | None = None,
    mask_first: int = 0,
    mask_last: int = 0,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """As ops.window_scores, in the dtype of queries."""
    B, Hq, W, D = queries.shape
    Hkv, T = keys.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    skip_last = W if skip_last is None else skip_last
    out = queries.new_zeros(B, Hkv, T - skip_last)
    for b in range(B):
        length = T if lengths is None else int(lengths[b])
        if length == skip_last or Hq == 0:
            continue
        q = queries[b].reshape(Hkv, Hq // Hkv, W, D)
        logits = capped(scale * torch.einsum("hgwd,htd->hgwt", q, keys[b, :, :length]), softcap)
        hidden = torch.ones(W, length, dtype=torch.bool, device=q.device).triu(length - W + 1)
        hidden[:, :mask_first] = True
        hidden[:, max(length - mask_last, 0) :] = True
        logits = logits.masked_fill(hidden, float("-inf"))
        if sink_logits is not None:  # one more key
            column = sink_logits.to(logits.dtype).reshape(Hkv, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, column], -1)
        attention = logits.softmax(-1)[..., :length].masked_fill(hidden, 0)
        votes = attention[..., : length - skip_last].flatten(1, 2)  # [Hkv, G*W, T-skip_last]
        score = {"mean": votes.mean(1), "sum": votes.sum(1), "max": votes.amax(1)}[reduce]
        pool = torch.nn.functional.avg_pool1d if pooling == "avg" else torch.nn.functional.max_pool1d
        out[b, :, : length - skip_last] = pool(score, kernel_size, stride=1, padding=kernel_size // 2)
    return out
