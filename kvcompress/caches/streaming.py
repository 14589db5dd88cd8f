"""StreamingCache: first tokens and a sliding window; runs without end (StreamingLLM, LM-Infinite)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import ops, planner
from ..hf.facts import Facts, LayerFacts
from ..ops.softmax import Softmax
from ..planner import Plan
from ..positions import RotaryTables
from ..support import units
from ..support.checks import MOST_INT32, need_integer, renamed
from ..support.units import Tokens, tokens_of
from .base import CompressedCache
from .formats import FORMATS, Dtypes, Format, coded, decoded, keys_and_values, named_scales, slot_nbytes
from .paged import StepTables
from .passes import CachePass, Iteration, View
from .repeating import RepeatingLayer
from .store import PoolSettings

_LEAST_BLOCK = 1024  # tokens of a prompt read at a time, or half a window if that is more: a call costs more than a key


class StreamingLayer(RepeatingLayer):
    """Rows of num_sink_tokens + window_size slots; the window is a ring.

    Token i of a sequence lies in slot i if i < sinks, else in slot sinks + (i - sinks) % window. Sinks are rotated at
    their index; ring keys at i - base, where base moves up now and then (one re-rotation of the ring) so that angles
    stay small. Some of the first sinks are far: the query, rotated to i - base for all else, has a rotation of its own
    for them, and attention is two segments merged by their LSE.
    sink_distance "slot": once a token is gone all sinks are far, and the query stands at sinks + window - 1. "window":
    sinks that have left the window are far; the query stands at `window`, and their keys are those of a copy at id 0.
    dtype: of FORMATS: what is held, and attended to, are codes. A key is rounded twice at most: what is in the ring
    when base moves has left it before it moves again.
    """

    joins = True
    places: Tensor  # int32 [B, 1] each, once there are rows: the device's copies of tokens and base
    bases: Tensor
    dtype: str | None = None  # here for files from before there were codes
    form: Format | None = None
    scales: tuple[Tensor, ...] = ()  # of keys and values, [R, sinks + window] each

    def __init__(
        self, index: int, number: int, sinks: int, window: int, sink_distance: str, dtype: str | None = None
    ) -> None:
        super().__init__(index, number)
        self.sinks, self.window, self.copies, self.dtype = sinks, window, sink_distance == "window", dtype
        self.keys: Tensor | None = None  # [R, sinks + window, D]
        self.values: Tensor | None = None
        self.far: tuple[Tensor, ...] | None = None  # for "window": keys at id 0 and values, [R, sinks, D] each
        self.tokens: list[int] = []  # tokens seen per sequence, padding not counted
        self.base: list[int] = []

    def attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        B, Hkv, S, D = keys.shape
        facts = step.facts[self.index]
        if self.keys is None:
            self.form = Format.of(self.dtype, keys.dtype)
            slots = keys_and_values(D, keys.dtype, self.form)
            self._check_memory(B * Hkv, D, slot_nbytes(slots), keys.device)

            def zeros(count: int) -> list[Tensor]:
                return [keys.new_zeros(B * Hkv, count, *size, dtype=kind) for size, kind in slots.values()]

            self.keys, self.values, *scales = zeros(self.sinks + self.window)
            self.scales = tuple(scales)
            if self.copies:
                self.far = tuple(zeros(self.sinks))
            self.tokens, self.base = [0] * B, [0] * B
            self.places, self.bases = (torch.zeros(B, 1, dtype=torch.int32, device=keys.device) for _ in range(2))
        if (found := self._step(step, queries, keys, values, softmax)) is not None:
            return found
        self.places += step.on(keys.device)
        if step.one:
            return step.answer(self.index, self._decode(facts, keys, values), queries, softmax)
        out, views = torch.zeros_like(queries), []
        for b, count in enumerate(step.counts):
            start = S - count
            while start < S:
                stop = min(S, start + self._block(b))
                part = (slice(b, b + 1), slice(None), slice(start, stop))
                view = self._read(facts, b, keys[part], values[part])
                out[part] = view(queries[part], softmax)
                if facts.readers:
                    views.append((part, view))
                start = stop

        def every(x: Tensor, softmax: Softmax) -> Tensor:
            out = torch.zeros_like(x)
            for part, view in views:
                out[part] = view(x[part], softmax)
            return out

        step.lend_view(self.index, every)
        return out

    @property
    def _held(self) -> tuple[Tensor, ...]:
        """Keys, values and, of codes, the scales of both."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values, *self.scales

    def _check_memory(self, rows: int, size: int, slot_bytes: int, device: torch.device) -> None:
        """Raises RuntimeError for a ring larger than all memory of its device: the system may promise it, and end the
        process once it is written to."""
        if device.type == "cuda":
            there = torch.cuda.get_device_properties(device).total_memory
        elif device.type == "cpu":
            there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        else:
            return
        slots = self.sinks + self.window
        tables = 2 * self._bound() * (size // 2) * 4  # cosines and sines
        if (needed := rows * slots * slot_bytes + tables) > there:
            raise RuntimeError(
                f"window_size = {self.window:,} is too large: {units.size(needed)} are needed in one layer, for "
                f"all {slots:,} slots from the first token on, and {device} has {units.size(there)}"
            )

    def _step(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor | None:
        """One token of every sequence in a single op; None, and nothing is stored, where that cannot be."""
        facts = step.facts[self.index]
        if not step.one or (tables := self._tables(facts)) is None:
            return None
        self._move_back(facts.key_rotary, 1)
        k_ring, v_ring = self._held[:2]
        k_far, v_far, *far_scales = self.far or (None, None)
        scales: dict[str, Any] = {}
        if self.form is not None:
            names = ("k_ring_scales", "v_ring_scales", "k_far_scales", "v_far_scales")
            scales = dict(zip(names, (*self.scales, *far_scales), strict=False))
        out = ops.ring_step_(
            queries, keys, values, k_ring, v_ring, self.places, window=self.window, sinks=self.sinks,
            k_far=k_far, v_far=v_far, base=self.bases, cos=tables[0], sin=tables[1], **scales, **softmax.options,
        )[0]  # fmt: skip
        self.tokens = [token + 1 for token in self.tokens]
        return out

    def _tables(self, facts: LayerFacts) -> StepTables | None:
        """By which an op rotates a step's tokens; None where it cannot do all of it."""
        if facts.readers or facts.query_rotary is not facts.key_rotary:
            return None
        return facts.key_rotary.step_tables(self._bound(), [self.sinks + self.window], self.places.device)

    # ---- steps that repeat ----

    @property
    def repeats(self) -> bool:
        return True

    def prepare_steps(self) -> None:
        """The ring is moved back by the step that finds it too far."""

    def steps_ahead(self, facts: LayerFacts) -> int:
        if self.keys is None or self._tables(facts) is None:
            return 0
        return self._bound() - max(tokens - base for tokens, base in zip(self.tokens, self.base, strict=True))

    def count_step(self) -> None:
        self.tokens = [token + 1 for token in self.tokens]

    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        held = (*self._held, *(self.far or ()), self.places, self.bases, *(self._tables(facts) or ()))
        return tuple(x for x in held if x is not None)

    def _rotate(self, rotary: RotaryTables, x: Tensor, positions: Tensor) -> Tensor:
        slots = self.sinks + self.window
        return rotary.rotate(x, positions, self._bound(), [slots] * x.shape[0])

    @property
    def _most_block(self) -> int:
        return max(_LEAST_BLOCK, self.window // 2)

    def _bound(self) -> int:
        """Positions stay below this: the ring is moved back before they reach it."""
        return 2 * (self.sinks + self.window) + self._most_block

    def _move_back(self, rotary: RotaryTables, new: int) -> None:
        """Raises base where the next `new` tokens would pass the bound, and rotates the ring back by as much."""
        most = self._bound() - new
        if all(tokens - base <= most for tokens, base in zip(self.tokens, self.base, strict=True)):
            return
        distance = [  # the oldest key of the ring then has position 0
            tokens - self.window - base if tokens - base > most else 0
            for tokens, base in zip(self.tokens, self.base, strict=True)
        ]
        every = self._held
        B, R = len(self.tokens), every[0].shape[0]
        held = [x[:, self.sinks :] for x in (every[0], *self.scales[:1])]
        # of codes what they stand for, exactly: they are rounded once more
        keys = held[0] if self.form is None else self.form.exact.decode("keys", *held)
        ring = keys.unflatten(0, (B, R // B))
        places = torch.tensor(distance, dtype=torch.int32, device=ring.device)[:, None]
        moved = rotary.move_back(
            ring, places.expand(B, self.window).contiguous(), max(distance) + 1, self.sinks + self.window
        ).flatten(0, 1)
        stored = (moved,) if self.form is None else ops.quantize(moved, FORMATS[self.form.name][0])
        for x, y in zip(held, stored, strict=True):
            x.copy_(y)
        self.base = [base + by for base, by in zip(self.base, distance, strict=True)]
        self.bases += places

    def _slot(self, token: int) -> int:
        return token if token < self.sinks else self.sinks + (token - self.sinks) % self.window

    def _far_sinks(self, tokens: int) -> int:
        """How many of the first sinks are far from the last of so many tokens."""
        if self.far is not None:
            return min(max(tokens - self.window, 0), self.sinks)
        return self.sinks if tokens > self.sinks + self.window else 0

    @property
    def _far_place(self) -> int:
        """Where a query stands as far sinks see it."""
        return self.window if self.far is not None else self.sinks + self.window - 1

    def _note_sinks(self, rotary: RotaryTables, b: int, keys: Tensor, values: Tensor) -> None:
        """Copies the next tokens of sequence b, [1, Hkv, n, D], if they are sinks."""
        if self.far is None or self.tokens[b] >= self.sinks:
            return
        first, heads, n = self.tokens[b], keys.shape[1], keys.shape[2]
        at_zero = self._rotate(rotary, keys, torch.zeros(1, n, dtype=torch.int32, device=keys.device))
        for held, new in zip(self.far, coded(self.form, (at_zero, values)), strict=True):
            held[b * heads : (b + 1) * heads, first : first + n] = new[0]

    def _decode(self, facts: LayerFacts, keys: Tensor, values: Tensor) -> View:
        """One token per sequence."""
        self._move_back(facts.key_rotary, 1)
        held, device, B = self._held, keys.device, len(self.tokens)
        R = held[0].shape[0]

        def per_sequence(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)[:, None]

        places = [
            token if token < self.sinks else token - base for token, base in zip(self.tokens, self.base, strict=True)
        ]
        ring_places = per_sequence([token - base for token, base in zip(self.tokens, self.base, strict=True)])
        slots = per_sequence([self._slot(token) for token in self.tokens]).expand(B, R // B).reshape(R).long()
        rows = torch.arange(R, device=device)
        rotated = self._rotate(facts.key_rotary, keys, per_sequence(places))
        for x, new in zip(held, coded(self.form, (rotated, values)), strict=True):
            x[rows, slots] = new.reshape(R, *x.shape[2:])
        for b in range(B):
            self._note_sinks(facts.key_rotary, b, keys[b : b + 1], values[b : b + 1])
        self.tokens = [token + 1 for token in self.tokens]

        def per_row(numbers: list[int]) -> Tensor:
            return per_sequence(numbers).expand(B, R // B).reshape(R).contiguous()

        filled = per_row([min(token, self.sinks + self.window) for token in self.tokens])
        far = [self._far_sinks(token) for token in self.tokens]

        def view(queries: Tensor, softmax: Softmax) -> Tensor:
            q = self._rotate(facts.query_rotary, queries, ring_places)
            if max(far) == 0:
                return _decode(q, held, filled, softmax)[0]
            ends = per_row(far)
            near = _decode(q, held, filled, softmax, ends)
            q = self._rotate(facts.query_rotary, queries, per_sequence([self._far_place] * B))
            return ops.merge_states(near, _decode(q, self.far or held, ends, softmax.rest))[0]

        return view

    def _block(self, b: int) -> int:
        """Tokens that one call of _read takes: sinks first, so that later blocks find all of them stored."""
        tokens, full = self.tokens[b], self.sinks + self.window
        if tokens < self.sinks:
            return self.sinks - tokens
        most = self._most_block
        return min(most, full - tokens) if self.far is not None and tokens < full else most

    def _read(self, facts: LayerFacts, b: int, keys: Tensor, values: Tensor) -> View:
        """A block of tokens of sequence b, [1, H, n, D]: each sees the sinks and the window tokens up to itself."""
        n, heads, device = keys.shape[2], keys.shape[1], keys.device
        self._move_back(facts.key_rotary, n)
        first, base = self.tokens[b], self.base[b]
        new = torch.arange(first, first + n, device=device)
        # nothing is gone yet, and all tokens before these lie in the slots of their numbers. With "window" sinks leave
        # the window one by one then, and the mask says which have
        early = first < self.sinks or (self.copies and first < self.sinks + self.window)
        old = torch.arange(0 if early else max(self.sinks, first - self.window + 1), first, device=device)
        old_slots = torch.where(old < self.sinks, old, self.sinks + (old - self.sinks) % self.window)

        def at(places: Tensor) -> Tensor:
            return places.to(torch.int32)[None].contiguous()

        row = slice(b * heads, (b + 1) * heads)
        held, stored = self._held, coded(self.form, (self._rotate(facts.key_rotary, keys, at(new - base)), values))
        both = [torch.cat([x[row, old_slots][None], y], dim=2) for x, y in zip(held, stored, strict=True)]
        k, v = decoded(self.form, both)  # as later tokens find them, so that blocks change nothing
        self._note_sinks(facts.key_rotary, b, keys, values)
        whole = early and not self._far_sinks(first + n)
        far = None if whole else self._far_view(row, k if early else None, v)
        place, window = self._far_place, self.window

        def view(queries: Tensor, softmax: Softmax) -> Tensor:
            q = self._rotate(facts.query_rotary, queries, at(new - base))
            if far is None:
                return ops.attention(q, k, v, **softmax.options)[0]
            near = ops.attention(q, k, v, window=window, **softmax.options)
            q = self._rotate(facts.query_rotary, queries, at(new.clamp(max=place)))
            return ops.merge_states(near, far(q, softmax.rest))[0]

        kept = new if early else new[-self.window :]
        slots = torch.where(kept < self.sinks, kept, self.sinks + (kept - self.sinks) % self.window)
        for x, y in zip(held, stored, strict=True):
            x[row, slots] = y[0, :, kept - first]
        self.tokens[b] += n
        return view

    def _far_view(
        self, row: slice, keys: Tensor | None, values: Tensor
    ) -> Callable[[Tensor, Softmax], tuple[Tensor, Tensor]]:
        """Attention of one sequence's rotated queries to far sinks. keys, values: of all tokens so far, if none is
        gone."""
        if keys is not None:
            assert self.far is not None
            copied = keys.clone()
            copied[:, :, : self.sinks] = decoded(self.form, [x[row, : keys.shape[2]] for x in self.far])[0]
            return lambda q, softmax: ops.attention(
                q, copied, values, window=self.window, complement=True, **softmax.options
            )
        far = [x[row, : self.sinks].contiguous() for x in self.far or self._held]
        ends = torch.full((len(far[0]),), self.sinks, dtype=torch.int32, device=values.device)
        return lambda q, softmax: _decode(q, far, ends, softmax)

    def most_beside(self, facts: LayerFacts, dtype: torch.dtype) -> int:
        slots = self.sinks + self.window + (self.sinks if self.copies else 0)
        form = Format.of(self.dtype, dtype)
        return facts.kv_heads * slots * slot_nbytes(keys_and_values(facts.size, dtype, form))

    def nbytes(self) -> int:
        return 0 if self.keys is None else sum(x.nbytes for x in (*self._held, *(self.far or ())))

    def stored_lengths(self) -> list[list[int]]:
        if self.keys is None:
            return []
        heads = self.keys.shape[0] // len(self.tokens)
        return [[min(token, self.sinks + self.window)] * heads for token in self.tokens]

    def kept_positions(self) -> list[list[Tensor]]:
        if self.keys is None:
            return []
        heads, kept = self.keys.shape[0] // len(self.tokens), []
        for token in self.tokens:
            sinks = torch.arange(min(token, self.sinks), device="cpu")
            near = torch.arange(max(token - self.window, len(sinks)), token, device="cpu")
            kept.append([torch.cat([sinks, near])] * heads)
        return kept


def _decode(
    queries: Tensor, arrays: Sequence[Tensor], end: Tensor, softmax: Softmax, begin: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) over slots [begin, end) of rows, keys and values of any format."""
    k, v = arrays[:2]
    return ops.decode(queries, k, v, end, begin=begin, **named_scales(arrays), **softmax.options)


class StreamingCache(CompressedCache):
    """First tokens and a sliding window of recent ones; generates without end in constant memory.

    config: the model's config. window_size: recent tokens kept, the current one included, at least 1 (1024, or "1k").
    num_sink_tokens: first tokens kept, at least 0. chunk_size: tokens per forward pass while a prompt is read (no
    influence on results). sink_distance: how far first token j is from query i. "slot" (StreamingLLM): positions are
    places in the cache, as if the tokens that are gone had never been. "window" (LM-Infinite): min(i - j, window_size).
    All distances in the window are the true ones, and every first token that has left it stands at window_size,
    whichever it is. A cache with "window" holds the first tokens twice. dtype: see PoolSettings; what is held, and
    attended to, are codes then.
    What has left the window is gone: a fact in the middle of a long prompt cannot be asked for.
    Raises ValueError for settings out of range. Source: StreamingLLM, section 3.2; LM-Infinite, section 4.
    """

    @renamed(keep="window_size")
    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        window_size: Tokens = 1020,
        num_sink_tokens: Tokens = 4,
        chunk_size: Tokens = 1024,
        sink_distance: str = "slot",
        dtype: Dtypes = None,
    ) -> None:
        window_size, chunk_size = tokens_of("window_size", window_size), tokens_of("chunk_size", chunk_size)
        num_sink_tokens = tokens_of("num_sink_tokens", num_sink_tokens, 0)
        need_integer("window_size + num_sink_tokens", window_size + num_sink_tokens, 1, MOST_INT32)
        if sink_distance not in ("slot", "window"):
            raise ValueError(f"sink_distance must be 'slot' or 'window', got {sink_distance!r}")
        self.window_size, self.num_sink_tokens, self.chunk_size = window_size, num_sink_tokens, chunk_size
        self.sink_distance, self.pool_settings = sink_distance, PoolSettings(dtype=dtype)
        super().__init__(config)

    def _new_layer(self, index: int, number: int) -> StreamingLayer:
        dtype = self.pool_settings.dtype_of(index)
        return StreamingLayer(index, number, self.num_sink_tokens, self.window_size, self.sink_distance, dtype)

    def open(
        self, facts: Facts, counts: Sequence[int], columns: int, iteration: Iteration | None = None, *,
        more: bool = False,
    ) -> CachePass:  # fmt: skip
        before = self.seen_lengths() or [0] * len(counts)
        self._check_moving(facts, max(n + count for n, count in zip(before, counts, strict=True)))
        return super().open(facts, counts, columns, iteration, more=more)

    def _check_moving(self, facts: Facts, tokens: int) -> None:
        """Raises ValueError where so many tokens do not fit, and those that stay cannot be moved."""
        slots = self.num_sink_tokens + self.window_size
        for layer in self.compressing if tokens > slots else ():
            facts[layer.index].check_relative(f"num_sink_tokens + window_size ({slots:,}) must hold all tokens")

    def check_indexer(self, top: int) -> str | None:
        slots = self.num_sink_tokens + self.window_size  # all of which an indexer then chooses
        return None if slots <= top else f"num_sink_tokens + window_size must be at most {top:,}, got {slots:,}"

    def plan_prompt(self, length: int) -> Plan:
        if self.facts is not None:  # before anything is read of a prompt that is too long
            self._check_moving(self.facts, max(self.seen_lengths(), default=0) + length)
        return planner.plan(
            length, chunk_size=self.chunk_size or 1, memory_size=self.window_size + self.num_sink_tokens
        )

    def reach(self) -> int:
        return self._most_held()

    def check_guide(self) -> None:
        raise ValueError("guide has no effect with StreamingCache, which keeps tokens by their place alone")
