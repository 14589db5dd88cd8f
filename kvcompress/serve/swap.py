"""Requests that gave their pages up: what they hold lies in the host's memory until they go on."""

from __future__ import annotations

from typing import NamedTuple

from ..caches.base import CompressedCache
from ..caches.pool import PagePool
from ..caches.swapping import Swapped, own_pages, swap_in, swap_out
from .bounds import paged_layers

SHARE = 8  # of the pages' bytes: a part of one in so many, where nobody says more


class _Kept(NamedTuple):
    cache: CompressedCache
    seen: int  # tokens that it has read
    shared: int  # those of a prefix, whose pages stay where they are
    pools: list[Swapped]
    nbytes: int


class Swap:
    """At most `most` bytes of them. every: of all pages that they hold; else those that others hold too stay where they
    are. used: bytes now; peak: most at once; count: how often a request was kept."""

    def __init__(self, most: int, every: bool) -> None:
        self.most, self.every, self.used, self.peak, self.count = most, every, 0, 0, 0
        self._kept: dict[str, _Kept] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._kept

    def keep(self, request: str, cache: CompressedCache, shared: int) -> bool:
        """Takes a cache of one sequence over, and frees the pages that nobody else holds; False where it finds no room:
        it is left as it is. Waits for the device."""
        pools = _pools_of(cache)
        pages = sum(int(own_pages(pool, self.every).sum()) for pool in pools)
        each = pools[0].store.page_nbytes() if pools else 0
        named = sum(pool.pages_in_use() for pool in pools)
        nbytes = cache.nbytes() - (named - pages) * each
        if self.used + nbytes > self.most:
            return False
        out = [swap_out(pool, self.every) for pool in pools]
        self._kept[request] = _Kept(cache, cache.seen_lengths()[0], shared, out, nbytes)
        self.used, self.count = self.used + nbytes, self.count + 1
        self.peak = max(self.peak, self.used)
        return True

    def seen(self, request: str) -> int:
        """Tokens that it has read."""
        return self._kept[request].seen

    def cache(self, request: str) -> CompressedCache:
        """Whose pages are away."""
        return self._kept[request].cache

    def pages(self, request: str) -> int:
        """Those that it takes when it comes back; 0 of one that is not here."""
        return sum(out.pages for out in self._kept[request].pools) if request in self._kept else 0

    def slots(self, request: str) -> int:
        """Those that it fills in these pages."""
        return sum(int((out.lengths - out.there).sum()) for out in self._kept[request].pools)

    def take(self, request: str) -> tuple[CompressedCache, int]:
        """Its cache, over free pages, and the tokens that it has of a prefix. Raises RuntimeError where these do not
        suffice."""
        kept = self._kept[request]
        for pool, out in zip(_pools_of(kept.cache), kept.pools, strict=True):
            swap_in(pool, out)
        self.drop(request)
        return kept.cache, kept.shared

    def drop(self, request: str) -> None:
        """The request is over; one that is not here is no error."""
        if (kept := self._kept.pop(request, None)) is not None:
            self.used -= kept.nbytes

    @property
    def holds_pages(self) -> bool:
        """Whether somebody has pages that others hold, too."""
        return any(self._holds_pages(request) for request in self._kept)

    def drop_holders(self) -> None:
        """Drops those: they are to be read again."""
        for request in list(self._kept):
            if self._holds_pages(request):
                self.drop(request)

    def _holds_pages(self, request: str) -> bool:
        return any(bool(out.there.any()) for out in self._kept[request].pools)

    def clear(self) -> None:
        for request in list(self._kept):
            self.drop(request)


def _pools_of(cache: CompressedCache) -> list[PagePool]:
    return [layer.pool for layer in paged_layers(cache) if layer.pool is not None]
