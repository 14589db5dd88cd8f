"""What the prompts of requests begin with: who finds a prefix, who waits for one, and whose caches are kept as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..caches.base import CompressedCache
from .bounds import Bounds
from .order import Order
from .prefixes import Prefix, Prefixes
from .swap import Swap


@dataclass
class Reader:
    """A request whose prompt is being read. seen: tokens so far; begun: whether a pass read some of them; back: whether
    the prompt was read before, and the request, which gave its pages up, goes on behind it."""

    cache: CompressedCache
    prompt: int
    seen: int = 0
    begun: bool = False
    back: bool = False


@dataclass
class Offered:
    """The tokens of a request. root: what else its caches depend on. borders: their hashes. stops: tokens after which
    its cache is kept. interval: as of a Prefix."""

    tokens: Sequence[int]
    root: bytes
    borders: list[bytes]
    stops: set[int] = field(default_factory=set)
    interval: int = 0


class Prompts:
    """Of all requests that wait or are being read.

    reading, swap: those that are being read, and those that gave their pages up; their owner's. pages: there are. last:
    tokens of a prompt that come in one part and are served by no prefix; whole: whether all of it chooses what stays of
    it; see Requests. follows_length: whether a key depends on how long a prompt is. hits: tokens of prompts that were
    not read, since they were there.
    """

    def __init__(
        self, prefixes: Prefixes, reading: Mapping[str, Reader], swap: Swap, bounds: Bounds, pages: int, last: int,
        whole: bool, follows_length: bool,
    ) -> None:  # fmt: skip
        self.prefixes, self.reading, self.swap, self.bounds, self.pages = prefixes, reading, swap, bounds, pages
        self.last, self.whole, self.follows_length = last, whole, follows_length
        self.hits = 0
        self.clear()

    def clear(self) -> None:
        """There are no requests and no prefixes any more."""
        self.order = Order()
        self.offered: dict[str, Offered] = {}
        self._away: dict[str, Offered] = {}
        self._shared: dict[str, int] = {}
        while self.prefixes.drop_oldest():
            pass

    def leave(self, request: str, *, waits: bool = False) -> None:
        """The request is over, or gives its pages up and waits."""
        offered = self.offered.pop(request, None)
        self._away.pop(request, None)
        if waits and offered is not None:
            self._away[request] = offered
        self._shared.pop(request, None)
        self.order.leave(request)
        self.prefixes.leave(request)

    def note(self, request: str, tokens: Sequence[int], given: int, salt: str = "") -> bool:
        """As offer, but nobody reads otherwise for it. Whether a prefix may serve it."""
        if self.prefixes.most < 1 or request in self.reading or request in self.swap:
            return False
        if request not in self.offered:
            root = f"{given if self.follows_length else 0} {salt}".encode()
            read = tokens[:given] if self.whole else tokens  # as its scheduler has it
            borders = self.prefixes.borders(read[: max(len(read) - self.last + 1, 0)], root)
            self.offered[request] = Offered(read, root, borders)
        return True

    def offer(self, request: str, tokens: Sequence[int], given: int, salt: str = "") -> bool:
        """Tells what a waiting request is to read; from now on seen(request) counts what a prefix has of it already.
        True: it should wait, another is about to read what both begin with. tokens: all that are read before it
        decodes; given: those of them that are the user's. salt: what else its caches depend on."""
        if not self.note(request, tokens, given, salt):
            return False
        offered, seen, block = self.offered[request], self.seen(request), self.prefixes.block
        mine, prompt = offered.borders, len(offered.tokens)
        stops = {borders * block for borders in self.prefixes.stops(mine, seen)}
        offered.stops = {stop for stop in stops if self._may_stop(stop, prompt)}
        for name, reader in self.reading.items():
            theirs = self.offered[name].borders if name in self.offered else []
            common = sum(a == b for a, b in zip(mine, theirs, strict=False)) * block
            if common > max(seen, reader.seen) and self._may_stop(common, reader.prompt):
                self.offered[name].stops.add(common)
                return True
        return False

    def ordered(self, waiting: Sequence[str]) -> list[str]:
        """In which requests that wait, given as they came, are let in; what they find gives way in the opposite order,
        after what nobody waits for."""
        order = self.order.of({name: self.seen(name) for name in waiting})
        found = dict.fromkeys(self.found(name) for name in order)  # of those who find the same one, the first says
        self.prefixes.wanted = [prefix for prefix in found if prefix is not None]
        return order

    def found(self, request: str) -> Prefix | None:
        """By a request that has not been let in."""
        offered = self.offered.get(request)
        return None if offered is None else self.prefixes.longest(request, offered.borders, offered.tokens)

    def seen(self, request: str) -> int:
        """Tokens of a prompt that have been read, or need not be; see offer."""
        if request in self.reading:
            return self.reading[request].seen
        if request in self.swap:
            return self.swap.seen(request)
        prefix = self.found(request)
        return 0 if prefix is None else prefix.tokens

    def shared(self, request: str) -> int:
        """Tokens that it has of a prefix, in pages that are not its own."""
        return self._shared.get(request, 0)

    def coming(self, request: str, prompt: int) -> int:
        """Tokens of a prompt that a part may have: those that are left, or fewer where its cache is kept between."""
        seen, offered = self.seen(request), self.offered.get(request)
        stops = [] if offered is None else [stop for stop in offered.stops if stop > seen]
        return min([prompt, *stops]) - seen

    def leaves(self, request: str) -> int:
        """Tokens that come to a prefix when a request's prompt is read."""
        offered = self.offered.get(request)
        return 0 if offered is None else max(max(offered.stops, default=0) - self.seen(request), 0)

    def let_in(self, request: str) -> Prefix | None:
        """The prefix that the request goes on from."""
        self.order.let_in(request)
        if (offered := self.offered.get(request)) is None:
            return None
        offered.interval = self.prefixes.interval(offered.borders)
        if (prefix := self.prefixes.use(request, offered.borders, offered.tokens)) is not None:
            self.hits += prefix.tokens
            if not self.whole:
                self._shared[request] = prefix.tokens - len(prefix.tail)
            prefix.users.add(request)
        return prefix

    def goes_on(self, request: str, shared: int) -> None:
        """The request comes back to what it had read, so many tokens of it a prefix's."""
        self._shared[request] = shared
        if (offered := self._away.pop(request, None)) is not None:
            self.offered[request] = replace(offered, stops=set())  # who comes later goes on from its end alone

    def keep(self, request: str) -> bool:
        """Keeps the cache of a request that has come to a border where it is to be kept; whether it has."""
        reader, offered = self.reading[request], self.offered.get(request)
        if offered is None or reader.seen not in offered.stops:
            return False
        passed = offered.borders[: reader.seen // self.prefixes.block]
        prefix = Prefix(reader.cache.fork(), passed, reader.seen, interval=offered.interval)
        self.prefixes.leave(request)
        prefix.users.add(request)
        self.prefixes.add(prefix)
        return True

    def keep_ended(self, offered: Offered, tokens: Sequence[int], running: CompressedCache, row: int) -> None:
        """Keeps one sequence of a cache, of a request that has ended, if it has some token to follow a border. tokens:
        the whole of the request."""
        tokens = tokens[: running.seen_lengths()[row]]  # its last one was never read
        if not (borders := self.prefixes.borders(tokens, offered.root)):
            return
        cache = running.fork()
        cache.select_sequences([row])
        tail = tuple(tokens[len(borders) * self.prefixes.block :])
        self.prefixes.add(Prefix(cache, borders, len(tokens), tail, asked=False, interval=offered.interval))

    def _may_stop(self, tokens: int, prompt: int) -> bool:
        """Whether a cache can be kept after so many tokens of a prompt: what a pruner has not seen yet lies in pages
        whole, and must leave room for others."""
        whole = self.bounds.whole(tokens)
        return not self.whole or (2 * whole <= self.pages and whole + self.bounds.expected(prompt) <= self.pages)
