"""What prompts begin with alike: caches as they were at some borders, to be forked by whoever comes next."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
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
    requests that have and have not ended: they hold most of its pages, or their next turn is to begin with it.
    interval: requests that come between two that ask for it, as far as is known. asked_at: how many had come when it
    was asked for last."""

    cache: CompressedCache
    borders: Sequence[bytes]
    tokens: int
    tail: tuple[int, ...] = ()
    asked: bool = True
    users: set[str] = field(default_factory=set)
    interval: int = 0
    asked_at: int = 0

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
    Where they have no room, the one gives way that will be asked for last, by when it was and how often; of those that
    are asked for about as often, the longest: of conversations that take turns each keeps a part, where dropping the
    oldest would drop what is asked for next. wanted: those that waiting requests find, in their order: these go last,
    but for those of requests that have not ended.

    A border is behind every `block` tokens, and known by a hash of all that comes before it. A KV head has rows of its
    own, and may merge tokens: what was read up to a border is had by a fork that was made there, not page by page.
    held: int32 [pages], how often prefixes name a page: where that is as often as anybody does, dropping them frees it.
    """

    def __init__(self, most: int, block: int, pages: int, device: torch.device) -> None:
        self.most, self.block = most, block
        self.held = torch.zeros(pages, dtype=torch.int32, device=device)
        self._kept: OrderedDict[Prefix, None] = OrderedDict()
        self._found: dict[str, Prefix | None] = {}  # by requests, since one came or went
        self.wanted: list[Prefix] = []
        self._came = 0  # requests
        self._behind: dict[bytes, list[Prefix]] = {}  # by their last borders
        # borders of earlier prompts: what followed, another, b"" the end, None several; and how many had come by then
        self._begun: OrderedDict[bytes, tuple[bytes | None, int]] = OrderedDict()

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

    def longest(self, request: str, borders: Sequence[bytes], tokens: Sequence[int]) -> Prefix | None:
        """Of those that a request's prompt begins with."""
        if request not in self._found:
            self._found[request] = self._longest(borders, tokens)
        return self._found[request]

    def _longest(self, borders: Sequence[bytes], tokens: Sequence[int]) -> Prefix | None:
        known = [i for i, key in enumerate(borders, 1) if key in self._behind]
        for i in reversed(known):
            start = i * self.block
            found = [
                prefix for prefix in self._behind[borders[i - 1]]
                if prefix.tokens < len(tokens) and prefix.tail == tuple(tokens[start : prefix.tokens])
            ]  # fmt: skip
            if found:
                return max(found, key=lambda prefix: prefix.tokens)
        return None

    def interval(self, borders: Sequence[bytes]) -> int:
        """Requests since the one that began like this for the longest; 0 where none did."""
        then = next((self._begun[key][1] for key in reversed(borders) if key in self._begun), self._came)
        return self._came - then

    def use(self, request: str, borders: Sequence[bytes], tokens: Sequence[int]) -> Prefix | None:
        """The same, for a request that comes in. The prompt is remembered."""
        found = self.longest(request, borders, tokens)
        self._came += 1
        if found is not None:
            found.asked = True
            found.interval, found.asked_at = self._came - found.asked_at, self._came
            self._kept.move_to_end(found)
        for key, then in _followed(borders):
            earlier = self._begun.get(key, (then, 0))[0]
            self._begun[key] = then if earlier == then else None, self._came
            self._begun.move_to_end(key)
        while len(self._begun) > _REMEMBERED:
            self._begun.popitem(last=False)
        return found

    def stops(self, borders: Sequence[bytes], seen: int) -> set[int]:
        """Behind how many of its borders a prompt's cache is to be kept: the last one where earlier ones part from it
        or from each other; and the last one where one ended, or its own last one where it is the first to go on from
        there, as conversations do whose answers are not known. 0 = nowhere. A prompt that begins as none did is not
        cut: a part of its own costs a step. seen: tokens that need not be read."""
        parted = ended = 0
        for i, (key, then) in enumerate(_followed(borders), 1):
            if key not in self._begun:
                break
            if self._begun[key][0] == b"":
                ended = i
            elif self._begun[key][0] != then:
                parted = i
        goes_on = ended and parted <= ended and seen <= ended * self.block
        return {parted, len(borders) if goes_on else ended}

    def add(self, prefix: Prefix) -> None:
        """Keeps it; if there is one of the same tokens, that, for the users of both."""
        prefix.asked_at = self._came
        if (same := self._same(prefix)) is not None:
            same.users |= prefix.users
            return
        while len(self._kept) >= self.most:
            self.drop_oldest([prefix for prefix in self._kept if prefix.asked]) or self.drop_oldest()
        for pool in prefix.pools:
            _ = pool.counts  # lengths are known from now on
        self._keep(prefix)

    def used(self, requests: Collection[str]) -> list[Prefix]:
        """Those that requests have forked."""
        return [prefix for prefix in self._kept if not prefix.users.isdisjoint(requests)]

    def leave(self, request: str) -> None:
        """The request holds nothing of any more, and its name may be another's."""
        self._found.pop(request, None)
        for prefix in self._kept:
            prefix.users.discard(request)

    def drop_oldest(self, but: Sequence[Prefix | None] = ()) -> bool:
        """Drops the one that was asked for longest ago; False where there is none."""
        oldest = next((prefix for prefix in self._kept if prefix not in but), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def give_way(self, pages: int, but: Sequence[Prefix | None] = ()) -> bool:
        """Drops the end of one that holds pages alone, so many of them if it can, or all of it where its end cannot go;
        False where there is none. Waits for the device."""
        free = [prefix for prefix in self._kept if prefix not in but]
        free.sort(key=self._lasting, reverse=True)
        unwanted = [prefix for prefix in free if not prefix.users and prefix not in self.wanted]
        wanted = [prefix for prefix in reversed(self.wanted) if not prefix.users and prefix in free]
        for prefix in [*unwanted, *wanted, *(prefix for prefix in free if prefix.users)]:
            alone = self._alone(prefix)
            most = int(alone[0])
            if most == 0:
                continue
            self._drop(prefix)
            blocks = int((alone >= min(pages, most)).sum()) - 1 if prefix.shrinks else 0
            if blocks:
                prefix.cache.take_back(prefix.tokens - blocks * self.block)
                prefix.borders, prefix.tokens, prefix.tail = prefix.borders[:blocks], blocks * self.block, ()
                if (same := self._same(prefix)) is not None:
                    same.users |= prefix.users
                else:
                    self._keep(prefix)
                    self._kept.move_to_end(prefix, last=False)
            return True
        return self.drop_oldest(but)

    def _lasting(self, prefix: Prefix) -> tuple[int, int]:
        """Until it is asked for again, as a power of two; and its length."""
        return max(self._came - prefix.asked_at, prefix.interval).bit_length(), prefix.tokens

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

    def _alone(self, prefix: Prefix) -> Tensor:
        """int64 [blocks + 1]: pages that nobody else holds, of each of its blocks and those behind it."""
        alone = torch.zeros(len(prefix.borders) + 1, dtype=torch.int64)
        for pool in prefix.pools:
            store, table = pool.store, pool.block_table
            named = store.named(pool._rows)
            here = (named & (store.refs[torch.where(named, table, 0)] == 1)).sum(0)[: len(alone)]
            alone[: len(here)] += here.cpu()
        return alone.flip(0).cumsum(0).flip(0)

    def _same(self, prefix: Prefix) -> Prefix | None:
        """The one that is kept of the same tokens."""
        return next((other for other in self._behind.get(prefix.border, ()) if other.tail == prefix.tail), None)

    def _keep(self, prefix: Prefix) -> None:
        self._kept[prefix] = None
        self._behind.setdefault(prefix.border, []).append(prefix)
        self._note(prefix, 1)

    def _drop(self, prefix: Prefix) -> None:
        self.wanted = [other for other in self.wanted if other is not prefix]
        del self._kept[prefix]
        self._behind[prefix.border].remove(prefix)
        if not self._behind[prefix.border]:
            del self._behind[prefix.border]
        self._note(prefix, -1)

    def _note(self, prefix: Prefix, times: int) -> None:
        self._found = {}
        for pages in prefix.named():
            self.held.index_add_(0, pages.long(), torch.full_like(pages, times))


def _followed(borders: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Each border with the next one, the last with b""."""
    return zip(borders, [*borders, b""][1:], strict=True)
