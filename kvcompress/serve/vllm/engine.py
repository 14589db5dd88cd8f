"""The caches of one vLLM engine: what its scheduler asks before a step, and its layers in it. They share a process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...caches.formats import Format, keys_and_values, slot_nbytes
from ...caches.pruned import PrunedCache
from ...caches.streaming import StreamingCache
from ...hf.method import restored_method
from ...softmax import Softmax
from ..admission import Answer
from ..bounds import LEAST, Bounds, is_read_whole, paged_layers
from ..requests import Part, Requests, ServedPass
from ..served import cache_maker, check_served
from .facts import Decoder, facts_from
from .settings import Settings

ENGINES: dict[str, Engine] = {}  # of this process, by vLLM's instance_id


class Row(NamedTuple):
    """A request in a step: the first of its tokens in the batch, and how many they are. block: its first one, by which
    it is known."""

    block: int
    first: int
    tokens: int


class Engine:
    """settings: what was asked. config: of the model. block_size: slots of a page. A block of vLLM is a page for each
    KV head of each layer; requests hold as many as their pages make, and pages are what is counted.

    known: the scheduler's requests, with num_tokens and num_prompt_tokens. failed: requests that cannot go on, and why.
    preempted: how often a request gave its pages up. peak_pages: most in use at once.
    Raises ValueError for what cannot be served.
    """

    def __init__(self, settings: Settings, config: Any, dtype: torch.dtype, block_size: int) -> None:
        self.settings, self.dtype, self.block_size = settings, dtype, block_size
        self.facts, self.decoder = facts_from(config), Decoder(config, dtype)
        self.method = restored_method(self.decoder)
        if self.method is not None:
            self.method.check_facts(self.decoder, self.facts)
        self.make = cache_maker(settings.spec, config, block_size)
        empty = self.make()
        if isinstance(empty, PrunedCache) and empty.pruner.uses_output:
            raise ValueError(
                f"pruner must not ask for the output projections under vLLM, as {type(empty.pruner).__name__} does"
            )
        if empty.wants_entering:
            raise ValueError(
                "gates must look at queries under vLLM, whose attention knows no hidden states: kvcompress fit gates"
            )
        empty.adopt(self.decoder, self.facts)
        check_served(empty, self.facts, self.method)
        self.whole = is_read_whole(empty)
        paged = paged_layers(empty)
        form = Format.of(empty.pool_settings.dtype, dtype)
        self.page_nbytes = block_size * slot_nbytes(keys_and_values(self.facts[0].size, dtype, form))
        heads = [self.facts[layer.index].kv_heads for layer in paged]
        self.bounds = Bounds(empty, heads, block_size, self.page_nbytes)
        self.bounds.share = self.bounds.share / settings.ratio
        self.beside = 0  # blocks of a request that lies beside pages
        if isinstance(empty, StreamingCache):
            self.beside = -(-(empty.window_size + empty.num_sink_tokens) // block_size)
        self.served: Requests | None = None
        self.known: Mapping[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.preempted, self.peak_pages = 0, 0
        self.waiting = False  # whether requests wait to be let in
        self._names: dict[int, str] = {}
        self._lengths: dict[str, tuple[int, int]] = {}  # of prompts that are read: tokens before it decodes, given ones
        self._left = False  # somebody has gone since pages were counted
        self._needed = 0
        self._granted: dict[str, int] = {}  # pages of this step's parts of prompts
        self._held: dict[str, int] = {}
        self._stock = -1
        self._pass: ServedPass | None = None

    def open(self, memory: Tensor, blocks: int) -> None:
        """memory: uint8 [n], the whole KV cache. blocks: how many vLLM makes of it; one of them it never gives out."""
        pages = memory.numel() // self.page_nbytes * (blocks - 1) // blocks
        self.served = Requests(
            self.decoder, self.facts, self.method, self.make, pages, self.dtype, memory.device, memory
        )
        self.served.bounds, self.served.answer_of = self.bounds, self._answer

    @property
    def requests(self) -> Requests:
        if self.served is None:
            raise RuntimeError("the engine has no memory yet: vLLM gives it before its first step")
        return self.served

    @property
    def decoding(self) -> Sequence[str]:
        return self.requests.decoding

    # ---- before a step: the scheduler ----

    def start_step(self) -> None:
        """Learns what the last step has left."""
        self._granted = {}
        self._settle()
        self.peak_pages = max(self.peak_pages, self.requests.used)

    def most_read(self, running: Sequence[str], waiting: Iterable[str], budget: int) -> int | None:
        """How many tokens of prompts surely find their pages in a step of so many: of running requests first, then of
        waiting ones, each in their order. None where prompts are read whole, but for one that will never fit."""
        served, free, total = self.requests, self.requests.free - self._needed, 0
        reading = [name for name in running if name not in served.decoding]
        if self.whole:
            name = None if running else next(iter(waiting), None)
            if name is None or served.part_pages(self._part(name, budget)) <= free:
                return None
            return 0  # with nobody beside it there will never be more pages than now
        budget -= len(served.decoding)
        for name in itertools.chain(reading, waiting):
            if total >= budget:
                break
            part = self._part(name, budget - total)
            whole, part.tokens = part.tokens, served.most_tokens(part, free)
            if part.tokens < min(whole, LEAST if running or total else 1):
                break
            free, total = free - served.part_pages(part), total + part.tokens
            if part.tokens < whole:
                break
        return total

    def has_room(self, name: str, before: int, tokens: int) -> bool:
        """Whether the pages are there for the next tokens of a request, before..tokens-1; see grant."""
        served = self.requests
        if self._left:
            self._settle()
        free = served.free - self._needed - sum(self._granted.values())
        if name in served.decoding:
            return free >= 0
        part = self._part(name, tokens - before)
        pages = served.part_pages(part)
        if name not in served.reading and (served.decoding or served.reading or self._granted):
            let_in = [*(other for other in self._granted if other not in served.reading), name]
            prompts = {other: self._lengths[other][0] for other in let_in}
            if served.coming_pages(prompts) > served.free - self._needed:
                return False
        return pages <= free

    def grant(self, name: str, tokens: int) -> None:
        """The request may read up to its first `tokens` tokens in this step: their pages are its own."""
        served = self.requests
        if name not in served.decoding:
            self._granted[name] = served.part_pages(self._part(name, tokens - served.seen(name)))

    def blocks_of(self, name: str) -> int:
        """vLLM's blocks that a request's pages make, of those that were counted last."""
        served = self.requests
        if self._stock != served.store.stock:
            self._held, self._stock = served.held(), served.store.stock
        return max(self._held.get(name, 0) // max(self.bounds.rows, 1), self.beside, 1)

    def blocks_for(self, tokens: int) -> int:
        """Those of a prompt of so many tokens, as far as is known before it is read."""
        return max(-(-self.bounds.expected(tokens) // max(self.bounds.rows, 1)), self.beside, 1)

    def named(self, name: str, block: int) -> None:
        """A request is known by its first block from now on."""
        self._names[block] = name

    def drop(self, name: str, block: int | None) -> None:
        """A request is over, or gives its pages up."""
        self.requests.drop(name)
        self._lengths.pop(name, None)
        self._held.pop(name, None)
        self._granted.pop(name, None)
        if block is not None:
            self._names.pop(block, None)
        self._left = True

    def settle(self) -> None:
        """Nobody runs: pages come back now."""
        self._settle()

    def _settle(self) -> None:
        self.requests.settle()
        self._left, self._needed = False, self.requests.step_pages()

    def _answer(self, name: str) -> Answer:
        request = self.known[name]
        return Answer(request.num_output_tokens, request.max_tokens)

    def _part(self, name: str, tokens: int) -> Part:
        request = self.known[name]
        given = request.num_prompt_tokens
        if name not in self._lengths or name not in self.requests.reading:
            self._lengths[name] = (given if self.whole else request.num_tokens, given)
        prompt, given = self._lengths[name]
        return Part(name, min(tokens, prompt - self.requests.seen(name)), prompt, given)

    # ---- a step: the layers ----

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, rows: Sequence[Row]) -> bool:
        """The step of these requests; False where none of them is known (a trial run of vLLM's)."""
        served = self.requests
        found = {self._names[row.block]: row for row in rows if row.tokens and row.block in self._names}
        if not found:
            self._pass = None
            return False
        if missing := [name for name in served.decoding if name not in found or found[name].tokens != 1]:
            raise RuntimeError(f"request {missing[0]} decodes, and must have one token in every step")
        parts = [self._part(name, row.tokens) for name, row in found.items() if name not in served.decoding]
        places = [found[name].first for name in served.decoding]
        at = None
        if places != list(range(len(places))):
            at = torch.tensor(places, device=served.store.refs.device)
        starts = [found[part.request].first for part in parts]
        self._pass = served.begin(parts, waiting=self.waiting, at=at, starts=starts)
        return True

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax, out: Tensor) -> None:
        """One layer of the step. queries: [T, Hq, D], keys, values: [T, Hkv, D], before rotation. out: [T, Hq, D]."""
        assert self._pass is not None
        q, k, v, attended = (x.transpose(0, 1)[None] for x in (queries, keys, values, out))
        self._pass.attend_to(layer, q, k, v, softmax, attended)
        if layer == max(self.facts):
            with torch.inference_mode(False), torch.no_grad():
                self.failed |= self._pass.failed
                self.requests.end()
            self._pass = None
