"""What gates are fitted to: the scores that a pruner gives the tokens of a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..caches.pruned import PrunedCache
from ..hf.attach import base_model
from ..pruners import Pruner
from ..reading.prefilling import prefill
from ..support.checks import need

_UNREAD = 1e30  # what counts more than any score was not scored


def check_teacher(pruner: Any) -> None:
    """Raises ValueError for what scores for one budget alone, or brings its own."""
    need(isinstance(pruner, Pruner), f"pruner must be a Pruner, got {type(pruner).__name__}")
    need(not pruner.uses_keep and pruner.own_budget is None,
         f"pruner must score alike for every budget, but {type(pruner).__name__} does not")  # fmt: skip


def log_scores(model: Any, ids: Tensor, pruner: Pruner) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer that compresses, in their order: logarithms float32 [T, Hkv] of a text's tokens [T], and which tokens
    have them in every head, bool [T].

    model: attached. The text is read in one pass, as pruner does it. Raises ValueError for scores of which half or more
    are not above 0.
    """
    cache = PrunedCache(model.config, pruner, keep=1.0, later="keep")
    read = torch.cat([ids, ids[-1:]])[None].to(base_model(model).device)  # all but the last
    with torch.no_grad():
        prefill(model, read, cache, attention_mask=torch.ones_like(read))
    found = {}
    for layer in cache.compressing:
        held = layer.chooser.held
        assert held is not None and held.scores is not None
        scores = held.scores[:, : min(len(ids), *held.counts)].T
        without = int((scores <= 0).any(1).sum())  # a logarithm
        need(2 * without <= len(scores), f"pruner must score tokens above 0, but {type(pruner).__name__} did not for "
             f"{without} of {len(scores)} in layer {layer.index}")  # fmt: skip
        good = ((scores > 0) & (scores < _UNREAD)).all(1)
        found[layer.index] = scores.clamp(1e-30, _UNREAD).log(), good
    return found
