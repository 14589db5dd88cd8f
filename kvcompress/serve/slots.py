"""Fixed memory for the rows of those who decode: steps of any of some sizes can be recorded, whoever comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..caches.base import CompressedCache
from ..caches.passes import CachePass
from ..caches.pool import PagePool
from ..caches.repeating import RepeatingLayer
from ..caches.store import PageStore
from ..hf.facts import Facts
from ..ops.softmax import Softmax
from .bounds import paged_layers

_ADVANCING = {"lengths": 1, "places": 0}  # what a step adds 1 to; what padding has of it before every step
_MOST = 2**31 - 1


def sizes_to_record(most: int) -> list[int]:
    """Of batches of up to so many sequences: few of them wait for padding."""
    sizes = {1, 2, 4, *range(8, most, 8), most}
    return sorted(size for size in sizes if size <= most)


def _width(every: Sequence[dict[str, Tensor]]) -> int:
    """Of the widest table of pages."""
    return max((rows["block_table"].shape[1] for rows in every if "block_table" in rows), default=0)


def check_placeable(cache: CompressedCache, facts: Facts) -> None:
    """Raises NotImplementedError for a cache whose requests have no Slots, or a model; empty ones are known, too."""
    for own in facts.values():
        if own.query_rotary.asks_host:
            raise NotImplementedError(
                f"layer {own.index} rotates by frequencies that follow the length (dynamic, longrope): passes of many "
                "requests cannot be recorded"
            )
    if cache.wants_entering:
        raise NotImplementedError("a cache that looks at hidden states has no passes that can be recorded")
    if cache.recurs:
        raise NotImplementedError("a model with recurrent layers has no passes of many requests that can be recorded")
    for layer in cache.own:
        if not (isinstance(layer, RepeatingLayer) and layer.placeable and layer.index in facts):
            raise NotImplementedError(
                f"layer {layer.index} of {type(cache).__name__} ({type(layer).__name__}) keeps more of a request than "
                "pages and the model's windows, or compresses while decoding: passes of many requests cannot be "
                "recorded"
            )
    if not paged_layers(cache):
        raise NotImplementedError("a model all of whose layers see windows has no passes that can be recorded")


class Slots:
    """A batch of at most sizes[-1] sequences, whose rows stay where they are: place() puts those of a cache there, and
    from then on they are the cache's own. step(size) is a pass of one token of each of the first `size` of them; those
    behind the last one are padding, which writes to a page of its own.

    caches: of steps, by size. moved: how often the memory was replaced; what was recorded before is of no use then.
    Raises NotImplementedError for caches and models whose steps need the host.
    """

    def __init__(
        self, store: PageStore, new_cache: Callable[[], CompressedCache], decoder: Any, facts: Facts,
        dtype: torch.dtype, sizes: Sequence[int],
    ) -> None:  # fmt: skip
        """new_cache: makes an empty cache with its pages in the store. dtype: of keys and values as they come."""
        self.store, self.decoder, self.facts, self.sizes, self.moved = store, decoder, facts, sorted(sizes), 0
        self.cache = self._learned(new_cache(), dtype)  # of one sequence, which holds nothing
        self.caches: dict[int, CompressedCache] = {}
        self._placed: CompressedCache | None = None
        self._rows: list[dict[str, Tensor]] = []  # of the placed cache, by layer
        self._memory: list[dict[str, Tensor]] = []
        slots = {name: (tuple(x.shape[2:]), x.dtype) for name, x in store.arrays.items()}
        self.padding = PagePool(1, slots, store.refs.device, store=store, form=store.form)
        token = self.padding.zeros(1, 1, 1, facts[paged_layers(self.cache)[0].index].size)
        self.padding.append([token, token])
        self._make(1)

    def size_for(self, sequences: int) -> int | None:
        """The smallest that has room for so many; None where none has."""
        return next((size for size in self.sizes if size >= sequences), None)

    # ---- what is placed ----

    @torch.inference_mode(False)
    @torch.no_grad()
    def place(self, cache: CompressedCache) -> int:
        """The rows of a cache of at most sizes[-1] sequences lie here from now on. Returns the position of the token
        that comes last of all."""
        layers, n = cache.own, cache.batch_size
        last = max(max(layer.next) for layer in layers)
        if self._placed is not cache:
            self.let_go()
        elif all(rows[name] is x for layer, rows in zip(layers, self._rows, strict=True)
                 for name, x in layer.step_rows().items()):  # fmt: skip
            return last
        found = [layer.step_rows() for layer in layers]
        if (width := _width(found)) > _width(self._memory):
            self._make(width)
        self._rows = []
        for layer, rows, memory in zip(layers, found, self._memory, strict=True):
            placed = {}
            for name, x in rows.items():
                here = memory[name][: len(x)]
                if name == "block_table":
                    here[:, : x.shape[1]] = x
                else:
                    here.copy_(x)
                placed[name] = here
            layer.place_rows(placed)
            self._rows.append(placed)
        self._placed = cache
        self._pad(n)
        return last

    @torch.inference_mode(False)
    def let_go(self) -> None:
        """What is placed goes on elsewhere: it may outlive its place."""
        if self._placed is not None:
            for layer in self._placed.own:
                layer.place_rows({name: x.clone() for name, x in layer.step_rows().items()})
        self._placed, self._rows = None, []

    # ---- steps ----

    @torch.inference_mode(False)
    def step(self, size: int, place: int) -> tuple[CachePass, int, list[Tensor]]:
        """A pass of one token of each of so many sequences, which stand at most at `place`; below which position it may
        be done again, whoever they are; and all tensors that it works on. settle_padding() comes before its first
        layer."""
        cache = self.caches.get(size)
        if cache is None:
            cache = self.caches[size] = self.cache.fork()
            cache.adopt(self.decoder, self.facts)
            cache.select_sequences([0] * size)
        for layer, memory in zip(cache.own, self._memory, strict=True):
            rows = {name: x[: size * (len(x) // self.sizes[-1])] for name, x in memory.items()}
            layer.place_rows(rows, borrowed=place)
        ahead = cache.steps_ahead()
        current = cache.open(self.facts, [1] * size, 1)
        current.unclaim()
        cache.mark_incomplete(False)
        return current, place + ahead, [*cache.held_tensors(), self._advanced, self._most]

    def settle_padding(self) -> None:
        """Padding is where it was before the last step: on the device alone."""
        torch.minimum(self._advanced, self._most, out=self._advanced)

    # ---- within ----

    @torch.inference_mode(False)
    @torch.no_grad()
    def _learned(self, cache: CompressedCache, dtype: torch.dtype) -> CompressedCache:
        """An empty cache, once it has stepped and dropped that again."""
        check_placeable(cache, self.facts)
        step = cache.open(self.facts, [1], 1)
        for index, facts in self.facts.items():
            q, k, v = (
                torch.zeros(1, heads, 1, facts.size, dtype=dtype, device=self.store.refs.device)
                for heads in (facts.query_heads, facts.kv_heads, facts.kv_heads)
            )
            step.attend(index, q, k, v, Softmax(1.0))
        cache.end(step, None)
        cache.prepare_steps()
        if cache.steps_ahead() < 1:
            raise NotImplementedError(
                f"steps of {type(cache).__name__} take several ops a layer in this model: passes of many requests "
                "cannot be recorded"
            )
        for layer in paged_layers(cache):
            layer.opened.drop_last(layer.opened.counts)
        return cache

    @torch.inference_mode(False)
    def _make(self, width: int) -> None:
        """Memory for tables that are twice as wide as those that are there, at least."""
        self.let_go()
        most, layers = self.sizes[-1], self.cache.own
        width = max(width, 2 * _width(self._memory))
        found = [layer.step_rows() for layer in layers]
        counts = [len(rows[name]) for rows in found for name in _ADVANCING if name in rows]
        self._advanced = torch.zeros(sum(counts) * most, dtype=torch.int32, device=self.padding.lengths.device)
        self._most = torch.full_like(self._advanced, _MOST)
        advanced, ends = (list(x.split([n * most for n in counts])) for x in (self._advanced, self._most))
        self._memory, self._ends = [], []
        for rows in found:
            memory = {
                name: x.new_zeros(len(x) * most, *((width,) if name == "block_table" else x.shape[1:]))
                for name, x in rows.items() if name not in _ADVANCING
            }  # fmt: skip
            self._ends.append({name: ends.pop(0) for name in _ADVANCING if name in rows})
            memory |= {name: advanced.pop(0).view(-1, *rows[name].shape[1:]) for name in self._ends[-1]}
            self._memory.append(memory)
        self.moved += 1
        self._pad(0)

    def _pad(self, n: int) -> None:
        """Sequences from n on are padding."""
        most = self.sizes[-1]
        self._most.fill_(_MOST)
        for memory, ends in zip(self._memory, self._ends, strict=True):
            for name, x in memory.items():
                if x.dtype == torch.int32:  # keys and such may be any
                    x[n * (len(x) // most) :] = _ADVANCING.get(name, 0)
            if (table := memory.get("block_table")) is not None:
                table[n * (len(table) // most) :, :1] = self.padding.block_table
            for name, end in ends.items():
                end[n * (len(end) // most) :] = _ADVANCING[name]
