"""How many pages requests take: exactly, at most, or by what was measured of the method's learned ratio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..budgets import GlobalTopK, Uniform
from ..caches.base import CompressedCache
from ..caches.choose import at_once
from ..caches.paged import PagedLayer
from ..caches.pruned import PrunedCache
from ..caches.pruned_layer import PrunedLayer
from ..gates.cache import GatedCache
from ..hf.facts import Facts

LEAST = 16  # tokens of a prompt that are worth a part of their own while others decode
MARGIN = 0.02  # share of all pages that is to stay free, where it is not known exactly what requests will take


class Bounds:
    """Of caches of one kind over pages of P slots. cache: an empty one. learned: whether the model itself decides how
    much stays, so that only what was measured says how many pages a prompt will take. in_phase: whether all rows of a
    request fill as many slots as each other, one more by each token.

    beside: pages' worth of what each request keeps beside pages in any case: windows of streaming, DMS and gates.

    share: float64 [rows], slots that a row keeps of each token, as measured; before anything was what a gated cache is
    asked to keep, else 1.
    """

    def __init__(
        self, cache: CompressedCache, kv_heads: Sequence[int], page_size: int, page_nbytes: int, beside: int
    ) -> None:
        """kv_heads: of the layers that have pages."""
        self.cache, self.P, self.page_nbytes, self.beside = cache, page_size, page_nbytes, beside
        self.heads = list(kv_heads)
        self.rows = sum(kv_heads)
        self.learned = any(not layer.steps_known for layer in paged_layers(cache))
        pruned = isinstance(cache, PrunedCache)
        self.in_phase = not self.learned and not (pruned and (cache.every or not isinstance(cache.budget, Uniform)))
        self.share = np.full(self.rows, cache.expected_share if isinstance(cache, GatedCache) else 1.0)
        self._weight = 0.0  # tokens that share was measured on

    def grown(self, cache: CompressedCache, tokens: int, prompt: int) -> int:
        """Pages that `tokens` more tokens of a request of one sequence take at most. prompt: its whole prompt."""
        layers = paged_layers(cache)
        if not layers or tokens == 0:
            return 0
        if isinstance(cache, PrunedCache) and (cache.parted or not cache.seen) and cache.seen + tokens >= prompt:
            return self._kept(cache, prompt)  # what it held of the prompt goes
        held = np.array([n for layer in layers for n in self._bounds_of(layer)])
        more = np.array([layer.most_slots((tokens,))[0] for layer in layers]).repeat(self.heads)
        copies = np.array([x for layer in layers for x in self._copies_of(layer)], dtype=bool)
        return int((-(-(held + more) // self.P) - -(-held // self.P) + (copies & (more > 0))).sum())

    def most_tokens(self, cache: CompressedCache, tokens: int, prompt: int, pages: int) -> int:
        """How many of `tokens` more tokens surely find their place in so many pages."""
        if self.grown(cache, tokens, prompt) <= pages:
            return tokens
        fits, too_many = 0, tokens
        while too_many - fits > 1:
            half = (fits + too_many) // 2
            fits, too_many = (half, too_many) if self.grown(cache, half, prompt) <= pages else (fits, half)
        return fits

    def whole(self, tokens: int) -> int:
        """Pages of so many tokens of which nothing is dropped."""
        return self.rows * -(-tokens // self.P)

    def expected(self, tokens: int) -> int:
        """Pages that a prompt of so many tokens takes when it is read."""
        if not self.rows:
            return 0
        if isinstance(self.cache, PrunedCache):
            return self._kept(self.cache, tokens)
        if not self.learned:
            return self.whole(tokens)
        return int(np.ceil(tokens * self.share / self.P).sum())

    def slots(self, tokens: int) -> float:
        """Slots of all rows that a prompt of so many tokens fills when it is read."""
        if isinstance(self.cache, PrunedCache):
            return float(sum(heads * keep for heads, keep in self._keeps(self.cache, tokens)))
        return float(self.share.sum()) * tokens

    def held(self, slots: np.ndarray, tokens: float) -> np.ndarray:
        """float64 [n]: pages of requests of so many slots (float64 [n]) when they have written so many tokens more."""
        if not self.rows:
            return np.zeros(len(slots))
        if isinstance(self.cache, PrunedCache) and self.cache.every:
            tokens = min(tokens, self.cache.every / 2)  # it is compressed again after so many
        slots = slots + self.share.sum() * tokens
        if self.in_phase:
            return self.rows * np.ceil(slots / self.rows / self.P)
        return slots / self.P + self.rows / 2  # of the last page of a row, a half is free

    def note(self, cache: CompressedCache, tokens: int) -> None:
        """A prompt of so many tokens has been read, and its lengths are known: the ratio of the next ones."""
        if not self.learned or tokens < self.P:
            return
        held = np.array([n for layer in paged_layers(cache) for n in self._bounds_of(layer)])
        self._weight = min(self._weight, 16.0 * tokens) + tokens  # what is old is forgotten by and by
        self.share = self.share + (held / tokens - self.share) * (tokens / self._weight)

    def _bounds_of(self, layer: PagedLayer) -> list[int]:
        return [0] * self.heads[layer.number] if layer.pool is None else layer.pool.bounds

    def _copies_of(self, layer: PagedLayer) -> Any:
        return [False] * self.heads[layer.number] if layer.pool is None else layer.pool.copies(layer.steps_known)

    def _keeps(self, cache: PrunedCache, prompt: int) -> list[tuple[int, int]]:
        """(KV heads, tokens that each keeps on average) of each layer, of a prompt that is pruned."""
        slot, layers = self.page_nbytes // self.P, cache.compressing
        return [
            (heads, min(cache.policy.tokens_of(prompt, layer.number, len(layers), heads, slot), prompt))
            for layer, heads in zip(layers, self.heads, strict=True)
        ]

    def _kept(self, cache: PrunedCache, prompt: int) -> int:
        """Pages of a prompt that is pruned: exact where every head has the same budget, else at most."""
        whole = -(-prompt // self.P)
        pages, total = 0, 0
        for heads, keep in self._keeps(cache, prompt):
            total += heads * keep
            each = -(-keep // self.P)
            pages += heads * (each if isinstance(cache.budget, Uniform) else whole)
            if not isinstance(cache.budget, (Uniform, GlobalTopK)):  # heads of a layer share
                pages += min(heads * keep // self.P + heads - heads * whole, 0)
        if isinstance(cache.budget, GlobalTopK):  # all rows share
            pages = min(pages, total // self.P + self.rows)
        return pages


def pages_beside(cache: CompressedCache, facts: Facts, dtype: torch.dtype, page_nbytes: int) -> int:
    """Bounds' beside, of a model whose layers' sizes are these."""
    return -(-sum(layer.most_beside(facts[layer.index], dtype) for layer in cache.own) // page_nbytes)


def paged_layers(cache: CompressedCache) -> list[Any]:
    """The layers whose tokens lie in pages, by number."""
    return [layer for layer in cache.own if isinstance(layer, PagedLayer)]


def stored_dtype(cache: CompressedCache) -> str | None:
    """How keys and values lie in the pages, or windows, of a cache's layers. Raises ValueError where they differ: pages
    are of one store."""
    found = {cache.pool_settings.dtype_of(layer.index) for layer in cache.compressing}
    if len(found) > 1:
        raise ValueError(f"dtype must be one for all layers of a cache that is served, got {cache.pool_settings.dtype}")
    return found.pop() if found else None


def is_read_whole(cache: CompressedCache) -> bool:
    """Whether a prompt comes in one pass where it can: what stays of it is chosen by all of it."""
    return any(isinstance(layer, PrunedLayer) for layer in cache.own)


def last_part(cache: CompressedCache) -> int | None:
    """Tokens that a prompt's last part must have; None = all of it, in one pass, and no prefix serves it."""
    if not isinstance(cache, PrunedCache):
        return 1  # for its logits
    least = at_once(cache.pruner)
    return None if least is None else max(least, LEAST)


def most_whole(batch_tokens: int, requests: int) -> int:
    """Tokens of a prompt that every pass has room for, beside a token of each other request."""
    return batch_tokens - requests + 1
