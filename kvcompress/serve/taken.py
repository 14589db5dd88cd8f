"""What requests take of pages, and will: what those who schedule them ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ..caches.base import CompressedCache
from ..caches.pool import PagePool
from ..caches.store import PageStore
from .admission import Answer, Lengths, most_pages
from .bounds import MARGIN, Bounds, paged_layers
from .prefixes import Prefixes
from .prompts import Prompts, Reader
from .served_pass import Part
from .swap import Swap


class Taken:
    """Of Requests.

    pages: that anybody may have. whole: whether prompts come in one pass where they can; last: tokens of a prompt's
    last part, at least, None = all; most: tokens of prompts that a pass has room for in any case. needed: pages of the
    next token of all decoding requests, of the free ones.
    """

    store: PageStore
    bounds: Bounds
    prefixes: Prefixes
    prompts: Prompts
    swap: Swap
    lengths: Lengths
    answer_of: Callable[[str], Answer]
    reading: dict[str, Reader]
    decoding: list[str]
    pages: int
    whole: bool
    last: int | None
    most: int
    needed: int
    _running: CompressedCache | None
    _changed: bool
    _surplus: int

    def step_pages(self) -> int:
        """Pages that the next token of all decoding requests takes at most, of the free ones."""
        if not self._changed:
            return 0  # they have been set aside
        P, pools = self.store.settings.page_size, [] if self._running is None else self._pools_of(self._running)
        full = sum(bound % P == 0 for pool, _ in pools for bound in pool.bounds)
        return full + sum(int((pool.copies(known) & (np.array(pool.bounds) % P > 0)).sum()) for pool, known in pools)

    def part_pages(self, part: Part) -> int:
        """Pages that a part takes at most, with those that its request comes back to, and has beside."""
        grown = self.bounds.grown(self._cache_of(part.request), part.tokens, part.prompt)
        return grown + self._comes_with(part.request)

    def most_tokens(self, part: Part, pages: int) -> int:
        """How many of a part's tokens surely find their place in so many pages: all or none where prompts are read
        whole."""
        pages -= self._comes_with(part.request)
        fits = self.bounds.most_tokens(self._cache_of(part.request), part.tokens, part.prompt, pages)
        return fits if not self.whole or fits == part.tokens else 0

    def refusal(self, prompt: int) -> str | None:
        """Why a prompt of so many tokens can never be read; None where it may be."""
        needed = self.bounds.expected(prompt) + self.bounds.beside
        if prompt < 1:
            return "has no token in its prompt"
        if not self.bounds.learned and needed > self.pages:
            return f"needs {needed} pages for its prompt of {prompt} tokens, but there are {self.pages}"
        if self.whole and prompt > self.most:
            if self.last is None or self.last > self.most:
                return f"has a prompt of {prompt} tokens, which is read whole: at most {self.most} can be"
            needed += self.bounds.whole(prompt)
            if needed > self.pages:
                return (
                    f"needs {needed} pages for its prompt of {prompt} tokens, which no pass of {self.most} can read "
                    f"whole, but there are {self.pages}"
                )
        return None

    def coming_pages(self, prompts: Mapping[str, int]) -> int:
        """Pages that all requests take at once until they end, if these come in, beside those that are held, claimed
        or needed for the next tokens: the one admission policy. prompts: the tokens of each one's prompt."""
        bounds, here = self.bounds, self._slots()
        pruned = {name: x for name, x in self.reading.items() if self.whole and not x.back}  # when they are read
        # what is held of a prompt, mostly a prefix's, goes then
        here |= {name: np.zeros_like(here[name]) for name, x in pruned.items() if x.prompt <= self.most}
        slots = {name: float(rows.sum()) for name, rows in here.items()}
        for name, reader in self.reading.items():
            if name in pruned:
                slots[name] = self._will_fill(reader.prompt)
            else:
                slots[name] += bounds.slots(reader.prompt) - bounds.slots(reader.seen)
        for name, tokens in prompts.items():
            if name in self.swap:
                slots[name] = self.swap.slots(name) + bounds.slots(tokens - self.swap.seen(name))
            else:
                slots[name] = self._will_fill(tokens) if self.whole else bounds.slots(tokens - self.prompts.seen(name))
        # what comes back when it ends is what it does not share
        shared = np.array([bounds.expected(tokens) if (tokens := self.prompts.shared(name)) else 0 for name in slots])
        left = np.array([self._to_write(name) for name in slots])
        filled = np.array(list(slots.values()))
        most = most_pages(lambda tokens: bounds.held(filled, tokens) + bounds.beside - shared, left)
        held = sum((-(-rows // bounds.P)).sum() for rows in here.values()) - shared[: len(here)].sum()
        held += bounds.beside * self._begun
        margin = 0 if bounds.in_phase else MARGIN * self.pages
        if self.whole:
            margin += sum(bounds.whole(self.prompts.leaves(name)) for name in (*self.reading, *prompts))
        return math.ceil(most - held - self.store.claimed() - self.needed + margin)

    def _will_fill(self, prompt: int) -> float:
        """Slots of a prompt that is pruned when it has been read, or before, where it is read in parts."""
        return self.bounds.rows * float(prompt) if prompt > self.most else self.bounds.slots(prompt)

    def _to_write(self, request: str) -> float:
        """Tokens that follow a request's prompt, those included that it wrote before it gave its pages up."""
        answer = self.answer_of(request)
        goes_on = (
            request in self.decoding or request in self.swap or (request in self.reading and self.reading[request].back)
        )
        again = answer.written if self.whole and not goes_on else 0
        return self.lengths.left(answer) + again

    def pages_in_use(self) -> int:
        """Pages that requests hold; those that prefixes alone hold are not among them. Waits for the device."""
        free = self._left_of(self.store.count_free())
        kept = int(((self.store.refs == self.prefixes.held) & (self.prefixes.held > 0)).sum())
        return self.pages - free - kept - self.bounds.beside * len(self.prefixes)

    def held(self) -> dict[str, int]:
        """Pages of each request, as far as the host knows."""
        return {name: int((-(-rows // self.bounds.P)).sum()) for name, rows in self._slots().items()}

    def _slots(self) -> dict[str, np.ndarray]:
        """int64 [rows], the slots of each request's rows, as far as the host knows."""
        found: dict[str, np.ndarray] = {}
        if self._running is not None:
            n = len(self.decoding)
            rows = [np.array(pool.bounds, dtype=np.int64).reshape(n, -1) for pool, _ in self._pools_of(self._running)]
            found = dict(zip(self.decoding, np.concatenate([np.zeros((n, 0), np.int64), *rows], 1), strict=True))
        for name, reader in self.reading.items():
            bounds = [bound for pool, _ in self._pools_of(reader.cache) for bound in pool.bounds]
            found[name] = np.array(bounds, dtype=np.int64)
        return found

    # ---- within ----

    @property
    def _begun(self) -> int:
        """Requests that have what they keep beside pages."""
        return len(self.decoding) + sum(reader.begun for reader in self.reading.values())

    def _left_of(self, free: int) -> int:
        """Pages that anybody may have, of the store's free ones: what lies beside them counts as taken."""
        return free - self._surplus - self.bounds.beside * (self._begun + len(self.prefixes))

    def _comes_with(self, request: str) -> int:
        """Pages that a request takes besides those of its next tokens: it comes back to them, or has them beside."""
        here = request in self.decoding or (request in self.reading and self.reading[request].begun)
        return self.swap.pages(request) + (0 if here else self.bounds.beside)

    def _cache_of(self, request: str) -> CompressedCache:
        if request in self.reading:
            return self.reading[request].cache
        if request in self.swap:
            return self.swap.cache(request)
        prefix = self.prompts.found(request)
        return self.bounds.cache if prefix is None else prefix.cache

    @staticmethod
    def _pools_of(cache: CompressedCache) -> list[tuple[PagePool, bool]]:
        return [(layer.pool, layer.steps_known) for layer in paged_layers(cache) if layer.pool is not None]
