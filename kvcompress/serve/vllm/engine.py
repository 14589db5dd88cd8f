"""The caches of one vLLM engine: what its scheduler asks before a step, and its layers in it. They share a process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...caches.formats import Format, keys_and_values, slot_nbytes
from ...caches.pruned import PrunedCache
from ...hf.config import cache_layers, decoder_config, recurs
from ...hf.hollow import facts_from
from ...hf.method import restored_method
from ...ops.softmax import Softmax
from ..admission import Answer
from ..bounds import LEAST, Bounds, is_read_whole, last_part, paged_layers, pages_beside, stored_dtype
from ..prefixes import check_prefixes
from ..requests import Requests
from ..served import cache_maker, check_served
from ..served_pass import Part, ServedPass
from ..slots import check_placeable, sizes_to_record
from .settings import Settings

if TYPE_CHECKING:
    from .states import States  # which needs vLLM

ENGINES: dict[str, Engine] = {}  # of this process, by vLLM's instance_id


class Row(NamedTuple):
    """A request in a step: the first of its tokens in the batch, and how many they are. block: its first one, by which
    it is known."""

    block: int
    first: int
    tokens: int


class Decoder(nn.Module):
    """In the place of a transformers decoder, for caches: its config and dtype."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(1, 1, dtype=dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


class Engine:
    """settings: what was asked. config: of the model. block_size: slots of a page. A block of vLLM is a page for each
    KV head of each layer; requests hold as many as their pages make, and pages are what is counted.

    known: the scheduler's requests, with num_tokens and num_prompt_tokens. failed: requests that cannot go on, and why.
    recorded_most: most requests that decode in one recorded step; 0 = none is.
    preempted: how often a request gave its pages up. peak_pages: most in use at once.
    Raises ValueError for what cannot be served.
    """

    def __init__(self, settings: Settings, config: Any, dtype: torch.dtype, block_size: int) -> None:
        self.settings, self.dtype, self.block_size = settings, dtype, block_size
        text = decoder_config(config)
        self.recurs = recurs(cache_layers(text))
        self.states: States | None = None  # of recurrent layers
        (self.facts, self.softmax), self.decoder = facts_from(config), Decoder(config, dtype)
        if "llama_4_scaling_beta" in (getattr(text, "rope_parameters", None) or {}):
            raise ValueError("llama_4_scaling_beta must be unset in the model's config: vLLM scales no queries by it")
        if getattr(text, "dual_chunk_attention_config", None) is not None:
            raise ValueError(
                "dual_chunk_attention_config must be unset in the model's config: its positions begin anew in every "
                "chunk, which no cache here follows"
            )
        self.facts.takes_positions, self.facts.asks_length = True, False  # vLLM tells its own models positions
        self.facts.reads_chunks = True  # its recurrent layers go on in every part
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
        if settings.cuda_graphs:
            check_placeable(empty, self.facts)
        self.whole = is_read_whole(empty)
        self.one_pass = last_part(empty) is None  # a prompt must come in one
        check_prefixes(settings.prefixes, self.one_pass)
        if self.recurs and (settings.prefixes or settings.swap_nbytes):
            what = {"prefixes": settings.prefixes, "swap": settings.swap}
            name = next(name for name in what if what[name])
            raise ValueError(
                f"{name} must be 0 or None for a model with recurrent layers, whose states vLLM does not keep, got "
                f"{what[name]!r}"
            )
        paged = paged_layers(empty)
        form = Format.of(stored_dtype(empty), dtype)
        size = max(self.facts[layer.index].size for layer in paged or empty.own)
        self.page_nbytes = block_size * slot_nbytes(keys_and_values(size, dtype, form))
        heads = [self.facts[layer.index].kv_heads for layer in paged]
        beside = pages_beside(empty, self.facts, dtype, self.page_nbytes)
        self.bounds = Bounds(empty, heads, block_size, self.page_nbytes, beside)
        if settings.ratio is not None:
            if not self.bounds.learned:
                raise ValueError(
                    f"ratio must not be given for {settings.cache!r}, got {settings.ratio:g}: how much stays is known"
                )
            self.bounds.share = np.full(self.bounds.rows, 1 / settings.ratio)
        self.heads = sum(facts.kv_heads for facts in self.facts.values() if facts.reads is None)
        # of layers whose tokens are counted; blocks stand for the others', which see a window, too
        counted = sum(self.facts[layer.index].kv_heads for layer in empty.compressing)
        self.counted = self.bounds.rows or counted or self.heads
        self.recorded_most = 0
        self.served: Requests | None = None
        self.known: Mapping[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.preempted, self.peak_pages = 0, 0
        self.waiting = False  # whether requests wait to be let in
        self._names: dict[int, str] = {}
        self._lengths: dict[str, tuple[int, int]] = {}  # of prompts that are read: tokens before it decodes, given ones
        self._left = False  # somebody has gone since pages were counted
        self._giving_up: set[str] = set()  # who is to give its pages up, and is not over
        self._forked: dict[str, int] = {}  # pages that a request has from the prefix it began with
        self._granted: dict[str, int] = {}  # pages of this step's parts of prompts
        self._held: dict[str, int] = {}
        self._stock = -1
        self._pass: ServedPass | None = None

    def open(self, memory: Tensor, blocks: int) -> None:
        """memory: uint8 [n], the whole KV cache. blocks: how many vLLM makes of it; one of them it never gives out."""
        pages = self.counted * (blocks - 1)  # what blocks stand for else is never written to
        self.served = Requests(
            self.decoder, self.facts, self.method, self.make, pages, self.dtype, memory.device, memory,
            *((0, 0) if self.recurs else (self.settings.prefixes, self.settings.swap_nbytes)), self.bounds,
            sizes_to_record(self.recorded_most) if self.recorded_most else (),
        )  # fmt: skip
        self.served.answer_of = self._answer

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
        served, taken, total = self.requests, 0, 0
        let_in: list[str] = []
        reading = [name for name in running if name not in served.decoding]
        if self.whole:
            name = None if running else next(iter(waiting), None)
            if name is None or served.make_free(served.part_pages(self._part(name, budget))):
                return None
            return 0  # with nobody beside it there will never be more pages than now
        budget -= len(served.decoding)
        for name in itertools.chain(reading, waiting):
            if total >= budget:
                break
            if self.awaits(name):
                break
            part = self._part(name, budget - total)
            whole = part.tokens
            least = min(whole, LEAST if running or total else 1)
            if not self._may_come(part, let_in) or not served.fit(part, least, taken, let_in):
                break
            let_in.append(name)
            taken, total = taken + served.part_pages(part), total + part.tokens
            if part.tokens < whole:
                break
        return total

    def has_room(self, name: str, before: int, tokens: int) -> bool:
        """Whether the pages are there for the next tokens of a request, before..tokens-1; see grant."""
        served = self.requests
        if self._left:
            self._settle()
        taken = sum(self._granted.values())
        if name in served.decoding:
            return served.make_free(taken)
        part = self._part(name, tokens - before)
        if self.awaits(name) or before != served.prompts.seen(name) or not self._may_come(part, self._granted):
            return False
        # a prefix that was cut to make room may serve it: it then comes in the next step
        return served.make_free(taken + served.part_pages(part), name) and before == served.prompts.seen(name)

    def _may_come(self, part: Part, let_in: Iterable[str]) -> bool:
        """Whether a waiting request may be let in beside those that are in this step: all will find their pages until
        they end."""
        served, name = self.requests, part.request
        new = [other for other in let_in if other not in served.reading]
        if name in served.reading or not (served.decoding or served.reading or new):
            return True
        return served.make_free(served.coming_pages({x: self._lengths[x][0] for x in (*new, name)}), name, new)

    # ---- prompts that begin alike: see Prompts.offer ----

    def awaits(self, name: str) -> bool:
        """Whether a waiting request should wait for what another is about to read."""
        return name not in self.requests.decoding and self._tell(self.requests.prompts.offer, name)

    def order(self, waiting: Sequence[str]) -> list[str]:
        """In which requests that wait, given as they came, are let in."""
        for name in waiting:
            self._tell(self.requests.prompts.note, name)
        return self.requests.prompts.ordered(waiting)

    def _tell(self, told: Callable[..., bool], name: str) -> bool:
        request = self.known[name]
        if request.skip_reading_prefix_cache or request.prompt_embeds is not None:
            return False
        salt = (request.cache_salt, None if request.lora_request is None else request.lora_request.lora_name)
        return told(name, request.all_token_ids, request.num_prompt_tokens, str(salt))

    def there(self, name: str) -> int:
        """Tokens of a waiting request that need not be read."""
        self.awaits(name)
        return self.requests.prompts.seen(name)

    def most_of(self, name: str, tokens: int) -> int:
        """How many of a request's next tokens a step may have."""
        if name in self.requests.decoding:
            return tokens
        return self._part(name, tokens).tokens

    def grant(self, name: str, tokens: int) -> None:
        """The request may read up to its first `tokens` tokens in this step: their pages are its own."""
        served = self.requests
        if name not in served.decoding and name not in served.reading:
            own = served.swap.pages(name)
            served.start(name, self._part(name, tokens).prompt)
            self._forked[name] = served.held()[name] - own
        if name not in served.decoding:
            self._granted[name] = served.part_pages(self._part(name, tokens - served.prompts.seen(name)))

    def blocks_of(self, name: str) -> int:
        """vLLM's blocks that a request's pages make, of those that were counted last."""
        served = self.requests
        if self._stock != served.store.stock:
            self._held, self._stock = served.held(), served.store.stock
        own = self._held.get(name, 0)
        if not self.whole:
            own -= self._forked.get(name, 0)
        elif name in served.reading:  # what waits to be pruned
            own = min(own, self.bounds.expected(served.reading[name].prompt))
        return max((own + self.bounds.beside) // self.counted, 1)

    def blocks_for(self, tokens: int) -> int:
        """Those of a prompt of so many tokens, as far as is known before it is read."""
        return max(-(-self._pages_of(tokens) // self.counted), 1)

    def fit(self, blocks: int, tokens: int) -> int:
        """How many such prompts fit at once in so many blocks."""
        return min(blocks * self.counted // max(self._pages_of(tokens), 1), blocks)

    def _pages_of(self, tokens: int) -> int:
        """Of such a prompt, with those that stand for what lies beside."""
        return self.bounds.expected(tokens) + self.bounds.beside

    def named(self, name: str, block: int) -> None:
        """A request is known by its first block from now on."""
        self._names[block] = name
        if self.states is not None:
            self.states.take(name)

    def name_of(self, block: int) -> str | None:
        """Of the request whose first block this is; None in a trial run of vLLM's."""
        return self._names.get(block)

    def give_up(self, name: str) -> None:
        """A request that is dropped next is not over."""
        self._giving_up.add(name)

    def drop(self, name: str, block: int | None) -> None:
        """A request is over, or gives its pages up."""
        if name in self._giving_up:
            self._giving_up.discard(name)
            self.requests.give_up(name)
        else:
            self.requests.drop(name)
        self._lengths.pop(name, None)
        self._held.pop(name, None)
        self._forked.pop(name, None)
        self._granted.pop(name, None)
        if block is not None:
            self._names.pop(block, None)
        if self.states is not None:
            self.states.drop(name)
        self._left = True

    def settle(self) -> None:
        """Nobody runs: pages come back now."""
        self._settle()

    def _settle(self) -> None:
        self.requests.settle()
        self._left = False

    def _answer(self, name: str) -> Answer:
        request = self.known[name]
        return Answer(request.num_output_tokens, request.max_tokens)

    def _part(self, name: str, tokens: int) -> Part:
        request = self.known[name]
        given = request.num_prompt_tokens
        if name not in self._lengths or name not in self.requests.reading:
            self._lengths[name] = (self.requests.prompt_of(name, given, request.num_tokens), given)
        prompt, given = self._lengths[name]
        return Part(name, self.requests.next_part(name, prompt, tokens), prompt, given)

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
        # as many tokens as were scheduled: who came later in the step may have asked for a border between
        reading = [(self._part(name, row.tokens), row) for name, row in found.items() if name not in served.decoding]
        parts = [replace(part, tokens=row.tokens) for part, row in reading]
        places = [found[name].first for name in served.decoding]
        if served.slots is not None and not parts and places != sorted(places):
            served.reorder(sorted(served.decoding, key=lambda name: found[name].first))
            places.sort()
        at = None
        if places != list(range(len(places))):
            at = torch.tensor(places, device=served.store.refs.device)
        starts = [found[part.request].first for part in parts]
        self._pass = served.begin(parts, waiting=self.waiting, at=at, starts=starts)
        return True

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor | None, values: Tensor | None, softmax: Softmax, out: Tensor
    ) -> None:
        """One layer of the step. queries: [T, Hq, head dim], keys: [T, Hkv, head dim], before rotation, values: [T,
        Hkv, value dim], as the family has them; None of a layer that reads another's. out: [T, Hq, value dim]."""
        assert self._pass is not None
        facts = self.facts[layer]
        if keys is None or values is None:  # nobody looks at them
            keys = values = queries[:, : facts.kv_heads]
        q, k, v, attended = (x.unsqueeze(2) for x in (queries, keys, values, out))
        q, k, v = facts.framed(q), facts.framed(k, keys=True), facts.padded(v)
        if facts.size == facts.value_dim:
            self._pass.attend_to(layer, q, k, v, softmax, attended)
        else:
            wide = torch.zeros_like(q)
            self._pass.attend_to(layer, q, k, v, softmax, wide)
            attended.copy_(wide[..., : facts.value_dim])
        if layer == max(self.facts):
            self.end()

    @property
    def recorded(self) -> ServedPass | None:
        """The pass of this step, where those who decode are alone in it and it is done by a recording."""
        return self._pass if self._pass is not None and self._pass.size is not None else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def end(self) -> None:
        """Every layer has attended, here or in a recording."""
        if self._pass is not None:
            self.failed |= self._pass.failed
            self.requests.end()
            self._pass = None
