"""Requests that share one store of pages: they are read in parts, decode together, and leave. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..caches.base import CompressedCache
from ..caches.formats import Format, keys_and_values, slot_nbytes
from ..caches.pool import PagePool
from ..caches.pruned import PrunedCache
from ..caches.store import PageStore, PoolSettings
from ..hf.facts import Facts
from ..hf.method import Method
from .admission import Answer, Lengths
from .bounds import LEAST, Bounds, is_read_whole, last_part, paged_layers, pages_beside, stored_dtype
from .prefixes import MOST, Prefixes, check_prefixes
from .prompts import Offered, Prompts, Reader
from .served import check_served
from .served_pass import Part, ServedPass
from .slots import Slots
from .swap import SHARE, Swap
from .taken import Taken

WAITING_STEPS = 8  # for so many steps at most pages are set aside while others wait for pages


class Requests(Taken):
    """All requests of one model over `pages` pages, or as many as that says for the bytes of one (0: there are none).

    decoder, facts: of the model, as kvcompress.attach has learned them. method: a converted model's, None of others.
    make: makes an empty cache for one request. dtype, device: of keys and values. memory: uint8 [n] of an engine, in
    which pages are to lie; None = of its own. prefixes: most that are kept for prompts that begin alike, None = MOST,
    or none where a prompt must come in one pass; see Prompts.offer. swap: bytes of the host's memory for what requests
    hold that give their pages up, None = an eighth of the pages' bytes. bounds: of an engine, None = of its own.
    recorded: sizes of batches whose steps can be recorded, () = none; they take a page for their padding (see Slots).
    In turn: settle(), which lets go who has left and learns how many pages are free; begin(parts), which gives the pass
    of a forward pass over one token of every request in `decoding`, in this order, and the parts; end().
    Raises ValueError for what cannot be served.
    """

    def __init__(
        self, decoder: Any, facts: Facts, method: Method | None, make: Callable[[], CompressedCache],
        pages: int | Callable[[int], int], dtype: torch.dtype, device: torch.device, memory: Tensor | None = None,
        prefixes: int | None = 0, swap: int | None = None, bounds: Bounds | None = None, recorded: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.decoder, self.facts, self.make = decoder, facts, make
        empty = self.new_cache()
        check_served(empty, facts, method)
        self.wants_entering, self.recurs = empty.wants_entering, empty.recurs
        paged, P, stored = paged_layers(empty), empty.pool_settings.page_size, stored_dtype(empty)
        size = max(facts[layer.index].size for layer in paged or empty.own)
        form = Format.of(stored, dtype)
        slots = keys_and_values(size, dtype, form)
        page_nbytes = P * slot_nbytes(slots)
        if callable(pages):
            pages = pages(page_nbytes)
        if isinstance(pages, bool) or not isinstance(pages, int) or pages < 1:
            raise ValueError(f"pages must be an integer of at least 1, got {pages!r}")
        self.pages = pages
        settings = PoolSettings(P, pages if paged else 1, "error", stored)  # else they are windows' alone
        with torch.inference_mode(False):
            self.store = PageStore(slots, device, settings, memory, form)
        self._surplus = self.store.pages - pages  # pages that nobody may have, as others stand for them
        self.slots: Slots | None = None
        heads = [facts[layer.index].kv_heads for layer in paged]
        beside = pages_beside(empty, facts, dtype, page_nbytes)
        self.bounds = bounds or Bounds(empty, heads, settings.page_size, page_nbytes, beside)
        self.whole = is_read_whole(empty) or not facts.reads_chunks
        self.last = last_part(empty) if facts.reads_chunks else None  # tokens of a prompt's last part, at least
        self.most = 1 << 60  # tokens of prompts that a pass has room for in any case; its scheduler says
        check_prefixes(prefixes, self.last is None)
        most = (0 if self.last is None else MOST) if prefixes is None else prefixes
        self.prefixes = Prefixes(most, P, self.store.pages, device)
        # whether a cache serves whoever goes on when its request has ended, and costs pages alone
        self._outlives = most > 0 and not self.whole and not self.recurs and len(paged) == len(empty.own)
        self._ended: dict[str, tuple[Offered, Sequence[int]]] = {}  # and all tokens of those who have
        self.kept = 0  # pages that prefixes alone held when they were counted last
        follows_length = any(own.key_rotary.asks_host for own in facts.values())
        self.reading: dict[str, Reader] = {}
        # little is shared of what is chosen by all of a prompt, and who goes on may need what others would hold
        self.swap = Swap(pages * self.bounds.page_nbytes // SHARE if swap is None else swap, every=self.whole)
        self.prompts = Prompts(
            self.prefixes, self.reading, self.swap, self.bounds, pages, self.last or 0, self.whole, follows_length
        )
        self.lengths = Lengths()
        self.answer_of: Callable[[str], Answer] = lambda request: Answer(0, 1)  # its scheduler says
        self.free = pages  # pages, as far as settle() knows
        self.used = 0  # pages that requests held when they were counted last
        self.needed = 0  # pages of the next token of all decoding requests, of the free ones
        self.decoding: list[str] = []
        self._running: CompressedCache | None = None
        self._gone: set[str] = set()
        self._giving_up: dict[str, int] = {}  # of those: tokens that each has of a prefix
        self._changed = True  # since pages were set aside
        self._pass: ServedPass | None = None
        if recorded:
            self.slots = Slots(self.store, self.new_cache, decoder, facts, dtype, recorded)
            self.pages, self._surplus = pages - 1, 0  # padding has its page

    # ---- between passes ----

    def settle(self) -> None:
        """Lets go of those who left, adds those whose prompts are read to those who decode, and counts free pages."""
        if self._gone:
            if self.slots is not None and (self._ended or self._giving_up):
                self.slots.let_go()  # a fork would copy the place of all that may come
            for request in self._gone & self._ended.keys():
                assert self._running is not None
                self.prompts.keep_ended(*self._ended[request], self._running, self.decoding.index(request))
            given_up = {name: self._alone(name) for name in self.decoding if name in self._giving_up}
            stay = [i for i, request in enumerate(self.decoding) if request not in self._gone]
            self.decoding = [self.decoding[i] for i in stay]
            if not stay:
                self._stop()
            elif self._running is not None:
                self._running.select_sequences(stay)
            for request in list(given_up):
                self._swap_out(request, given_up.pop(request), self._giving_up[request])
            self._gone, self._giving_up, self._ended, self._changed = set(), {}, {}, True
        if self._changed or not self._has_room():
            held = self.prefixes.held if len(self.prefixes) else None
            free, kept = PagePool.learn(self.store, [pool for pool, _ in self._pools()], held)
            self.free, self.kept = self._left_of(free), kept + self.bounds.beside * len(self.prefixes)
            self.used, self._changed = self.pages - self.free - self.kept, True
        for request in [name for name, reader in self.reading.items() if reader.seen == reader.prompt]:
            reader = self.reading.pop(request)
            self.bounds.note(reader.cache, reader.prompt)
            if self._running is None:
                self._running = reader.cache
            else:
                self._running.join(reader.cache)
            self.decoding.append(request)
        self.needed = self.step_pages()

    def reorder(self, decoding: Sequence[str]) -> None:
        """Those who decode, in another order."""
        assert self._running is not None
        self._running.select_sequences([self.decoding.index(request) for request in decoding])
        self.decoding, self._changed = list(decoding), True
        self.settle()

    def ends(self, request: str, tokens: Sequence[int]) -> None:
        """The request has written all that it will, and is to be dropped. tokens: the whole of it: who begins with them
        goes on from its cache."""
        offered = self.prompts.offered.get(request)
        if self._outlives and request in self.decoding and offered is not None:
            self._ended[request] = offered, tokens

    def give_up(self, request: str) -> None:
        """The request gives its pages up. It waits, and goes on where it was if memory for swap allows (then it is in
        `swap` after settle()), else it is to be read again."""
        shared = self.prompts.shared(request)
        if request in self.decoding:
            self._giving_up[request] = shared
        reader = self.reading.get(request)
        self._drop(request, waits=True)
        if reader is not None and reader.begun:
            self._swap_out(request, reader.cache, shared)

    def drop(self, request: str) -> None:
        """The request is over; one that is not there is no error."""
        self._drop(request, waits=False)

    def _drop(self, request: str, waits: bool) -> None:
        self.prompts.leave(request, waits=waits)
        self._changed |= request in self.swap  # pages that it shared with a prefix may be free now
        self.swap.drop(request)
        if self.reading.pop(request, None) is not None:
            self._changed = True
        elif request in self.decoding:
            self._gone.add(request)

    def drop_all(self) -> None:
        """All requests are over, and no prefix is kept."""
        self.reading.clear()
        self.prompts.clear()
        self.swap.clear()
        self._stop()
        self.decoding, self._gone, self._ended, self._giving_up = [], set(), {}, {}
        self._changed, self._pass = True, None

    # ---- what comes in ----

    def start(self, request: str, prompt: int) -> int:
        """The request is let in; its prompt has so many tokens. Returns those that are there already."""
        if request in self.swap:
            self.free -= self.swap.pages(request)
            seen = self.swap.seen(request)
            cache, shared = self.swap.take(request)
            cache.adopt(self.decoder, self.facts)
            self.prompts.goes_on(request, shared)
            self.reading[request] = Reader(cache, prompt, seen, back=not getattr(cache, "parted", False))
            return seen
        reader = Reader(self.new_cache(), prompt)
        if (prefix := self.prompts.let_in(request)) is not None:
            reader.cache, reader.seen = prefix.cache.fork(), prefix.tokens
            reader.cache.adopt(self.decoder, self.facts)
        self.reading[request] = reader
        return reader.seen

    def prompt_of(self, request: str, given: int, tokens: int) -> int:
        """Of a request's tokens those that are read as its prompt. given: those that are the user's. What it had
        written before it gave its pages up follows one by one where prompts are read whole, as it did then."""
        if request in self.reading:
            return self.reading[request].prompt
        if not self.whole:
            return tokens
        return max(given, self.swap.seen(request) + 1) if request in self.swap else given

    def next_part(self, request: str, prompt: int, budget: int) -> int:
        """Those that it may have in a pass of so many tokens. Where all of a prompt chooses what stays of it, it waits
        for a pass that has room for all; if none has, what comes before its last part lies in pages whole till then."""
        left = self.prompts.coming(request, prompt)
        if left <= budget or not self.whole:
            return min(left, budget)
        if left <= self.most or self.last is None:
            return 0
        before = max(left - self.last, 0)
        tokens = min(budget, before)
        return tokens if tokens >= min(LEAST, self.most, before) else 0

    def make_free(self, pages: int, request: str | None = None, beside: Sequence[str] = ()) -> bool:
        """Whether so many pages are free beside those of the next tokens. Where they are not, prefixes give way, but
        only if that is enough. Those that requests have forked stay, and those of `request` and of who is to come in
        `beside` it, unless one request is alone: nobody else would give its pages back."""
        if self._make_free(pages, [*beside, *([] if request is None else [request])]):
            return True
        if len(self.decoding) + len(self.reading) != 1 or (request is not None and request not in self.reading):
            return False
        if pages > self.free + self.kept and self.swap.holds_pages:
            self.swap.drop_holders()
            self._changed = True
            self.settle()
        enough = pages <= self.free + self.kept  # the next token takes no copy of what nobody shares any more
        return enough and self.drop_prefixes() and pages + self.needed <= self.free

    def _make_free(self, pages: int, requests: Sequence[str]) -> bool:
        if (missing := pages + self.needed - self.free) <= 0:
            return True
        if missing > self.kept:
            return False
        comes = bool(requests) and requests[-1] not in self.reading
        if self.whole and self.reading and comes:
            return False  # what is held of prompts comes back when they are pruned: nobody gives way for another one
        theirs = {self.prompts.found(request) for request in requests}
        # what a pruned prompt began with is kept for its next turn, which others wait for
        users = [*self.reading, *self.decoding] if comes or not self.whole else self.reading
        used = self.prefixes.used(users) if self.bounds.rows else []  # of windows nobody holds what was another's
        stay = [prefix for prefix in {*used, *theirs} if prefix is not None]
        if missing > self.kept - self.prefixes.alone(stay) - self.bounds.beside * len(stay):
            return False
        while (missing := pages + self.needed - self.free) > 0:
            if not self.prefixes.give_way(max(missing, self.pages // 32), stay):  # few at a time would take long
                return False
            self._changed = True
            self.settle()
        return True

    def fit(self, part: Part, least: int, taken: int, beside: Sequence[str] = ()) -> bool:
        """Cuts a part to as many of its tokens as surely find their pages beside `taken` ones; prefixes give way, but
        those of who is to come in `beside` it. False where not even `least` do."""
        whole = part.tokens
        for tokens in (whole, least):
            part.tokens = tokens
            if self.make_free(taken + self.part_pages(part), part.request, beside):
                # a prefix that was cut may serve it
                part.tokens = min(tokens, self.prompts.coming(part.request, part.prompt))
                return True
            part.tokens = whole
            part.tokens = min(
                self.most_tokens(part, self.free - self.needed - taken), self.prompts.coming(part.request, part.prompt)
            )
            if part.tokens >= least:
                return True
        return False

    def drop_prefixes(self) -> bool:
        """Drops all of them; whether there was one. Requests that still hold pages of theirs are to be read again."""
        some = len(self.prefixes) > 0 or self.swap.holds_pages
        self.swap.drop_holders()
        while self.prefixes.drop_oldest():
            self._changed = True
        self.settle()
        return some

    # ---- a pass ----

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(
        self, parts: Sequence[Part], *, waiting: bool = False, at: Tensor | None = None,
        starts: Sequence[int] | None = None,
    ) -> ServedPass:  # fmt: skip
        """The pass over one token of each decoding request and these parts. waiting: whether others wait for pages.
        at, starts: as ServedPass takes them.

        Raises RuntimeError where pages do not suffice; nothing has begun then.
        """
        if self._changed and self._running is not None:
            self._set_aside(sum(self.part_pages(part) for part in parts), waiting)
        self._changed = bool(parts)
        together, size = None, None
        if self.slots is not None and self._running is not None and not parts and at is None:
            size = self.slots.size_for(len(self.decoding))
        if self._running is not None and size is None:
            together = self._running.open(self.facts, [1] * len(self.decoding), 1)
        guarded = isinstance(self._running, PrunedCache) and self._running.every is not None
        self._pass = current = ServedPass(self.facts, together, tuple(self.decoding), guarded, at, starts)
        if self.slots is not None and self._running is not None and size is not None:
            current.size, current.place = size, self.slots.place(self._running)
            self._running.count_step()  # the device takes it, by a recording or op by op
        current.wants_entering = self.wants_entering
        for part in parts:
            step, reader = None, self.reading.get(part.request)
            if reader is None:
                self.start(part.request, part.prompt)
                reader = self.reading[part.request]
            reader.begun = True
            try:
                more = reader.seen + part.tokens < reader.prompt
                step = reader.cache.open(self.facts, [part.tokens], part.tokens, more=more)
                step.prompts = (part.given,)
                reader.seen += part.tokens
            except (ValueError, RuntimeError) as error:
                current.failed[part.request] = str(error)
            current.parts.append((part, step))
        return current

    def turns(self) -> list[CompressedCache]:
        """The caches of the pass that has begun, as they take turns where layers recur: that of those who decode, and
        each part's."""
        assert self._pass is not None
        running = [] if self._running is None else [self._running]
        return running + [self.reading[part.request].cache for part, _ in self._pass.parts]

    def end(self) -> None:
        """The pass is over: every layer has attended."""
        assert self._pass is not None
        self._pass.fail_broken()
        if self._pass.together is not None and self._pass.size is None:
            assert self._running is not None
            self._running.end(self._pass.together, None)
        for request in set(self.decoding) & set(self._pass.failed):
            self.drop(request)
        for part, step in self._pass.parts:
            if step is None or part.request in self._pass.failed:
                self.drop(part.request)
            else:
                reader = self.reading[part.request]
                reader.cache.end(step, None)
                self._changed |= self.prompts.keep(part.request)
        self._pass = None

    # ---- within ----

    def _stop(self) -> None:
        """Nobody decodes."""
        if self.slots is not None:
            self.slots.let_go()
        self._running = None

    def new_cache(self) -> CompressedCache:
        cache = self.make()
        cache.adopt(self.decoder, self.facts)
        for layer in paged_layers(cache):
            layer.store = getattr(self, "store", None)
        return cache

    def _pools(self) -> list[tuple[PagePool, bool]]:
        caches = [reader.cache for reader in self.reading.values()]
        caches += [] if self._running is None else [self._running]
        return [pool for cache in caches for pool in self._pools_of(cache)]

    def _alone(self, request: str) -> CompressedCache:
        """A cache of one that decodes."""
        assert self._running is not None
        cache = self._running.fork()
        cache.select_sequences([self.decoding.index(request)])
        return cache

    def _swap_out(self, request: str, cache: CompressedCache, shared: int) -> None:
        self.store.count_free()  # pages of caches that are gone are nobody's from now on
        self.swap.keep(request, cache, shared)

    def _has_room(self) -> bool:
        return self._running is None or all(pool.has_room for pool, _ in self._pools_of(self._running))

    def _set_aside(self, spare: int, waiting: bool) -> None:
        assert self._running is not None
        pools = self._pools_of(self._running)
        most = WAITING_STEPS if waiting else self.store.settings.page_size
        spare += self.store.free_at_least - self._left_of(self.store.free_at_least)
        if pools and not PagePool.set_aside(self.store, pools, spare, most):
            raise RuntimeError(
                f"pages = {self.pages} are too few for the coming tokens of {len(self.decoding)} requests: some must "
                "leave first"
            )
        self.free = self._left_of(self.store.free_at_least)
