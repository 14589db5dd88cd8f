"""Reading once more what a prompt's last reading brought, where a pruner scores by that (KVzip)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..caches.base import CompressedCache
from ..caches.passes import Iteration
from ..pruners import Pruner
from ..pruners.base import Reread

Run = Callable[[Tensor, list[int], list[int], Iteration], object]


def pruner_that_rereads(cache: CompressedCache) -> Pruner | None:
    """Of a cache; None if it has none. Raises ValueError where layers recur."""
    pruner = getattr(cache, "pruner", None)
    if pruner is None or not pruner.rereads or getattr(cache, "follows", False):  # what is kept whole needs no scores
        return None
    if cache.recurs:
        raise ValueError(
            f"pruner must not be {type(pruner).__name__} for a model with recurrent layers: what they have read they "
            "cannot take back"
        )
    return pruner


def reread(
    pruner: Pruner, run: Run, chunks: Sequence[Tensor], before: Sequence[Tensor], first: Sequence[int],
    whole: tuple[int, ...] | None,
) -> None:  # fmt: skip
    """Reads once more, part by part, what was just read; in the last part of all, the cache compresses.

    run(ids [B, n], tokens of each sequence, place of its first one, Iteration). chunks[b]: int64 [n] of each sequence,
    none of one that had no tokens; before[b]: those that came before it in the prompt. first[b]: tokens of a sequence
    before its chunk. whole: see Iteration.prompt.
    """
    parts: list[list[Reread]] = [
        pruner.reread(chunk, earlier, place == 0) if len(chunk) else []
        for chunk, earlier, place in zip(chunks, before, first, strict=True)
    ]
    rounds = max(map(len, parts))
    for number in range(rounds):  # sequences end together: one of fewer parts starts later
        now = [own[i] if (i := number - rounds + len(own)) >= 0 else None for own in parts]
        counts = [0 if part is None else len(part.tokens) for part in now]
        ids = chunks[0].new_zeros(len(now), max(counts))
        for b, part in enumerate(now):
            if part is not None:
                ids[b, ids.shape[1] - counts[b] :] = part.tokens
        places = [place + len(chunk) for place, chunk in zip(first, chunks, strict=True)]
        repeated = tuple(
            None if part is None else (len(chunk) - part.first, part.end - part.first)
            for part, chunk in zip(now, chunks, strict=True)
        )
        last = number == rounds - 1
        run(ids, counts, places, Iteration((), ids.shape[1], whole, compresses=last, repeated=repeated))


def latest(before: Sequence[Tensor], chunks: Sequence[Tensor], most: int) -> list[Tensor]:
    """The last tokens, at most so many, of what was read in a prompt so far."""
    joined = [torch.cat(pair) for pair in zip(before, chunks, strict=True)]
    return [tokens[max(len(tokens) - most, 0) :] for tokens in joined]
