"""Column scores of a text that is read a second time. The definition of pruners.Replay."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import capped


def replay_scores(
    queries: Tensor,
    again: Tensor,
    keys: Tensor,
    *,
    chunk: int,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    reduce: str = "max",
) -> Tensor:
    """Most attention that each key would get if its text were read once more, behind itself, chunk by chunk.

    queries: [B, Hq, T, D] rotated where they stood; again: the same rotated where the second reading has them: query t
    at place t % chunk behind the text. keys: [B, Hkv, T, D] rotated where they stand.
    A query's softmax is over all T keys, as `again` meets them, and over the keys of its own chunk up to its own, as
    `queries` meet them: in the second reading those stand before it, copies of the ones far behind.
    Returns [B, Hkv, T] in the dtype of queries: the maximum (or the mean) over all T queries and the G query heads of a
    KV head of what the far keys get.
    """
    B, Hq, T, D = queries.shape
    Hkv = keys.shape[1]
    scale = D**-0.5 if scale is None else scale
    grouped = [x.reshape(B, Hkv, Hq // Hkv, T, D) for x in (queries, again)]
    near, far = (capped(scale * torch.einsum("bhgsd,bhtd->bhgst", x, keys), softcap) for x in grouped)
    t = torch.arange(T, device=keys.device)
    seen = (t <= t[:, None]) & (t // chunk == t[:, None] // chunk)
    logits = torch.cat([far, near.masked_fill(~seen, float("-inf"))], -1)
    if sink_logits is not None:
        column = sink_logits.to(logits.dtype).reshape(1, Hkv, -1, 1, 1).expand(*logits.shape[:4], 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., :T]
    return weights.mean((2, 3)) if reduce == "mean" else weights.amax((2, 3))
