"""What prompts begin with alike: caches as they were at some borders, to be forked by whoever comes next."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from ..caches.base import CompressedCache
from ..caches.pool import PagePool
from ..caches.pruned import PrunedCache
from .bounds import paged_layers

MOST = 16  # prefixes that are kept at once, where nobody says how many
_REMEMBERED = 1 << 16  # borders of earlier prompts, by which a later one learns what both begin with


def check_prefixes(prefixes: int | None, whole: bool = False) -> None:
    """Raises ValueError for what cannot be. whole: whether a prompt must come in one pass."""
    if prefixes is not None and (isinstance(prefixes, bool) or not isinstance(prefixes, int) or prefixes < 0):
        raise ValueError(f"prefixes must be an integer of at least 0, got {prefixes!r}")
    if whole and prefixes:
        raise ValueError(
            f"prefixes must be 0 where a prompt must come in one pass, got {prefixes}: what stays of it is chosen by "
            "all of its queries, or the model's layers begin anew in every call"
        )


@dataclass(eq=False)
class Prefix:
    """A request's cache after its first `tokens` tokens. borders: those that it has passed; tail: the tokens behind the
    last one. Nobody writes to it: whoever goes on from there forks it. asked: whether anybody is known to. users:
    requests that have, and hold most of its pages in any case."""

    cache: CompressedCache
    borders: Sequence[bytes]
    tokens: int
    tail: tuple[int, ...] = ()
    asked: bool = True
    users: set[str] = field(default_factory=set)

    @property
    def border(self) -> bytes:
        return self.borders[-1]

    @property
    def shrinks(self) -> bool:
        """Whether its last tokens can go alone: nothing else is known of them."""
        cache = self.cache
        if isinstance(cache, PrunedCache):
            paged = len(paged_layers(cache)) == len(cache.own)
            return cache.parted and paged and not cache.recurs and not cache.pruner.accumulates
        return cache.is_croppable

    @property
    def pools(self) -> list[PagePool]:
        return [layer.pool for layer in paged_layers(self.cache) if layer.pool is not None]

    def named(self) -> list[Tensor]:
        """int32 [n] of each layer: the pages of its rows, one by one."""
        return [pool.block_table[pool.store.named(pool._rows)] for pool in self.pools]

    def beside_nbytes(self) -> int:
        """Bytes of what it holds beside its pages."""
        return self.cache.nbytes() - sum(
            len(pages) * pool.store.page_nbytes() for pages, pool in zip(self.named(), self.pools, strict=True)
        )


class Prefixes:
    """At most `most` of them; the one that was asked for longest ago goes first, before it those that nobody asked for.

    A border is behind every `block` tokens, and known by a hash of all that comes before it. A KV head has rows of its
    own, and may merge tokens: what was read up to a border is had by a fork that was made there, not page by page.
    held: int32 [pages], how often prefixes name a page: where that is as often as anybody does, dropping them frees it.
    """

    def __init__(self, most: int, block: int, pages: int, device: torch.device) -> None:
        self.most, self.block = most, block
        self.held = torch.zeros(pages, dtype=torch.int32, device=device)
        self._kept: OrderedDict[Prefix, None] = OrderedDict()
        self.changes = 0  # how often one came or went
        self._behind: dict[bytes, list[Prefix]] = {}  # by their last borders
        # borders of earlier prompts, and what followed: another, b"" the end, None several
        self._begun: OrderedDict[bytes, bytes | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def borders(self, tokens: Sequence[int], root: bytes) -> list[bytes]:
        """The hashes of a prompt's borders; none behind its last token, which is read in any case, for its logits.
        root: what else caches depend on."""
        found, last = [], root
        for start in range(0, len(tokens) - self.block, self.block):
            block = array("q", tokens[start : start + self.block]).tobytes()
            last = blake2b(last + block, digest_size=16).digest()
            found.append(last)
        return found

    def longest(self, borders: Sequence[bytes], tokens: Sequence[int]) -> Prefix | None:
        """Of those that a prompt begins with."""
        for i, key in reversed(list(enumerate(borders, 1))):
            start, behind = i * self.block, self._behind.get(key, ())
            found = [
                prefix for prefix in behind
                if prefix.tokens < len(tokens) and prefix.tail == tuple(tokens[start : prefix.tokens])
            ]  # fmt: skip
            if found:
                return max(found, key=lambda prefix: prefix.tokens)
        return None

    def ask(self, prefix: Prefix | None) -> None:
        """It is not the next to go, then."""
        if prefix is not None:
            prefix.asked = True
            self._kept.move_to_end(prefix)

    def use(self, borders: Sequence[bytes], tokens: Sequence[int]) -> Prefix | None:
        """The same, for a request that comes in. The prompt is remembered."""
        found = self.longest(borders, tokens)
        self.ask(found)
        for key, then in _followed(borders):
            self._begun[key] = then if self._begun.get(key, then) == then else None
            self._begun.move_to_end(key)
        while len(self._begun) > _REMEMBERED:
            self._begun.popitem(last=False)
        return found

    def stops(self, borders: Sequence[bytes], seen: int) -> set[int]:
        """Behind how many of its borders a prompt's cache is to be kept: the last one where earlier ones part from it
        or from each other, the last one where one ended, and its own last one where it is the first to go on where
        one ended, as conversations do whose answers are not known. 0 = nowhere. A prompt that begins as none did is not
        cut: a part of its own costs a step. seen: tokens that need not be read."""
        parted = ended = 0
        for i, (key, then) in enumerate(_followed(borders), 1):
            if key not in self._begun:
                break
            if self._begun[key] == b"":
                ended = i
            elif self._begun[key] != then:
                parted = i
        goes_on = ended and parted <= ended and seen <= ended * self.block
        return {parted, ended, len(borders) if goes_on else 0}

    def add(self, prefix: Prefix) -> None:
        """Keeps it, if there is none of the same tokens."""
        if any(other.tail == prefix.tail for other in self._behind.get(prefix.border, ())):
            return
        while len(self._kept) >= self.most:
            self.drop_oldest([prefix for prefix in self._kept if prefix.asked]) or self.drop_oldest()
        for pool in prefix.pools:
            _ = pool.counts  # lengths are known from now on
        self._kept[prefix] = None
        self._behind.setdefault(prefix.border, []).append(prefix)
        self._note(prefix, 1)

    def used(self) -> list[Prefix]:
        """Those that requests have forked."""
        return [prefix for prefix in self._kept if prefix.users]

    def leave(self, request: str) -> None:
        """The request holds nothing of any more."""
        for prefix in self._kept:
            prefix.users.discard(request)

    def drop_oldest(self, but: Sequence[Prefix | None] = ()) -> bool:
        """Drops the one that was asked for longest ago; False where there is none."""
        oldest = next((prefix for prefix in self._kept if prefix not in but), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def shrink_oldest(self, pages: int, but: Sequence[Prefix | None] = ()) -> bool:
        """Of the same only its end, where that frees so many pages. Waits for the device."""
        oldest = next((prefix for prefix in self._kept if prefix not in but), None)
        if oldest is None:
            return False
        self._drop(oldest)
        blocks = self._left(oldest, pages) if oldest.shrinks else 0
        if blocks:
            oldest.cache.take_back(oldest.tokens - blocks * self.block)
            oldest.borders, oldest.tokens, oldest.tail = oldest.borders[:blocks], blocks * self.block, ()
            self.add(oldest)
            if oldest in self._kept:
                self._kept.move_to_end(oldest, last=False)
        return True

    def alone(self, prefixes: Sequence[Prefix]) -> int:
        """Pages of prefixes that no request holds. Waits for the device."""
        pages = [pages.long() for prefix in prefixes for pages in prefix.named()]
        if not pages:
            return 0
        unique = torch.cat(pages).unique()
        return int((self.held[unique] == prefixes[0].pools[0].store.refs[unique]).sum())

    def nbytes_beside(self) -> int:
        """Bytes of what prefixes hold beside pages."""
        return sum(prefix.beside_nbytes() for prefix in list(self._kept))

    def _left(self, prefix: Prefix, pages: int) -> int:
        """Of how many blocks of a prefix the end frees so many pages."""
        free = torch.zeros(len(prefix.borders) + 1, dtype=torch.int64)
        for pool in prefix.pools:
            store, table = pool.store, pool.block_table
            named = store.named(pool._rows)
            alone = (named & (store.refs[torch.where(named, table, 0)] == 1)).sum(0)[: len(free)]
            free[: len(alone)] += alone.cpu()
        return int((free.flip(0).cumsum(0).flip(0) >= pages).sum()) - 1 if int(free.sum()) >= pages else 0

    def _drop(self, prefix: Prefix) -> None:
        del self._kept[prefix]
        self._behind[prefix.border].remove(prefix)
        if not self._behind[prefix.border]:
            del self._behind[prefix.border]
        self._note(prefix, -1)

    def _note(self, prefix: Prefix, times: int) -> None:
        self.changes += 1
        for pages in prefix.named():
            self.held.index_add_(0, pages.long(), torch.full_like(pages, times))


def _followed(borders: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Each border with the next one, the last with b""."""
    return zip(borders, [*borders, b""][1:], strict=True)
