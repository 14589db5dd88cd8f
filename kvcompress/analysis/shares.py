"""How a model's layers and heads share a budget: measured over texts, as a profile."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..budgets import GlobalTopK
from ..caches.pruned import PrunedCache
from ..profiles import BudgetProfile
from ..pruners import Pruner, Replay
from ..reading.prefilling import prefill
from ..support.checks import renamed
from ..support.units import Keep, Size


@renamed(size="keep, the share that stays (0.25 was size=0.75), tokens or bytes,")
def measure_profile(
    model: nn.Module,
    texts: Iterable[Tensor],
    *,
    keep: Size = 0.25,
    pruner: Pruner | None = None,
    floor: float = 0.1,
) -> BudgetProfile:
    """Reads texts as prompts under GlobalTopK(floor=floor), and takes the mean of what each row then holds.

    model: attached. texts: token ids int64 [1, T] or [T] each, of the length that will be read; at least one that is
    longer than what is kept. keep: as PrunedCache takes it. pruner: whose scores divide it, default Replay(). Returns
    shares of the mean of all rows. Raises ValueError if no text is longer.
    """
    pruner = Replay() if pruner is None else pruner
    held: Tensor | None = None
    count = 0
    for j, text in enumerate(texts):
        if not isinstance(text, Tensor):
            kind = type(text).__name__
            raise TypeError(f"texts[{j}] must be token ids as a torch.Tensor [1, T] or [T], got a {kind}")
        ids = text[None] if text.ndim == 1 else text
        cache = PrunedCache(model.config, pruner, GlobalTopK(floor=floor), keep=keep, page_size=16)
        prefill(model, ids, cache)
        rows = [layer.stored_lengths()[0] for layer in cache.compressing]
        if rows and sum(map(sum, rows)) < (ids.shape[1] - 1) * sum(map(len, rows)):
            flat = torch.tensor([n for row in rows for n in row], dtype=torch.float64)
            held = flat / flat.mean() if held is None else held + flat / flat.mean()
            count, heads = count + 1, [len(row) for row in rows]
    if held is None:
        raise ValueError(f"texts must hold one that is longer than what is kept, keep = {keep!r} is all of them")
    shares = [tuple(part.tolist()) for part in (held / count).split(heads)]
    return BudgetProfile(tuple(shares), f"{type(model).__name__}, {count} texts, {pruner!r}, keep {Keep.of(keep)}")
