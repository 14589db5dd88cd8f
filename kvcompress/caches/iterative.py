"""IterativeCache: reads a prompt of any length chunk by chunk into a small memory, then decodes over it (IMDC)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from .. import ops, planner
from ..budgets import Budget, GlobalTopK
from ..hf.facts import Facts
from ..hf.method import Call, Pass
from ..planner import Adaptive, Plan
from ..pruners import Pruner, SnapKV
from ..support.checks import renamed
from ..support.kvpress_names import no_ratio
from ..support.units import Tokens, tokens_of
from .base import CompressedCache, trained_length_of
from .formats import Dtypes
from .iterative_layer import IterativeLayer, ReadingSettings
from .passes import CachePass, Iteration
from .policy import NEVER, Policy
from .store import PoolSettings
from .track import ChunkReading, Track

PRUNE = ("layer", "forward")
ROOM = 32  # tokens that the default memory has for what a pruner chooses, besides sinks and window
_UNIT = 1 << 30  # weights of layers are counted in parts of this


class IterativeCache(CompressedCache):
    """Reads a prompt of any length through a small memory; `kvcompress.prefill` or `generate` do the reading.

    config: the model's config. memory_size: tokens kept per layer and KV head (per sequence) when the prompt is read
    (1024, or "1k", as all that counts tokens). budget: divides them over layers or heads before they are read
    (PyramidKV, AdaKV, Profiled); None = evenly. chunk_size: tokens read per iteration, mean. pruner: chooses the memory
    among the old memory and the chunk (default SnapKV()).
    schedule: how memory grows from initial_memory to memory_size: "fixed" (full size from the start), "linear",
    "square", "sqrt", "square-sqrt" (lower layers square, higher ones sqrt) or "adaptive" (= Adaptive(): layers that
    retain more get more). initial_memory: None = memory_size divided by the number of iterations, as IMDC has it, but
    where that is less, the pruner's sinks and window and 32 tokens for what it chooses, 64 at least: a smaller memory
    loses what stands early. Give the paper's number for the paper's plan. dynamic: chunks
    shrink as memory grows, so that a chunk and the memory before it are one constant. Both need the prompt's length; a
    later prompt of a conversation continues the iteration with the full memory.
    append: True compresses each chunk alone and appends it; memory is never rewritten (a baseline, IMDC, B.4).
    prune: "layer" drops tokens after each layer's attention, "forward" after the forward pass: the same tokens in
    more memory, as the paper measures it. dense_below: prompts up to this length are read without any pruning.
    every: None keeps all tokens that follow the prompt; k compresses while decoding too, when a row has grown by k
    tokens over its memory. track: True notes in cache.track what each iteration keeps and attends to (see Track).
    page_size, max_pages, grow, dtype: how a layer stores and grows, see PoolSettings.
    With "fixed", a prompt that fits into memory_size is kept whole: the model then sees what it would see with a dense
    cache. Raises ValueError for sizes below 1, RuntimeError where a layer needs more than max_pages. Source: IMDC.
    """

    @renamed(keep="memory_size")
    @no_ratio(
        "the share that goes: IterativeCache takes memory_size, tokens that stay (1024), PrunedCache keep, a share"
    )
    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        memory_size: Tokens = 1024,
        budget: Budget | None = None,
        chunk_size: Tokens = 1024,
        pruner: Pruner | None = None,
        schedule: str | Adaptive = "fixed",
        dynamic: bool = False,
        initial_memory: Tokens | None = None,
        append: bool = False,
        prune: str = "layer",
        dense_below: Tokens = 0,
        every: Tokens | None = None,
        track: bool = False,
        page_size: int = 16,
        max_pages: int | None = None,
        grow: str = "double",
        dtype: Dtypes = None,
    ) -> None:
        if isinstance(memory_size, Budget):
            raise ValueError(f"memory_size must be a number of tokens (budget= divides them), got {memory_size}")
        memory_size, chunk_size = tokens_of("memory_size", memory_size), tokens_of("chunk_size", chunk_size)
        dense_below = tokens_of("dense_below", dense_below, 0)
        if initial_memory is not None:
            initial_memory = tokens_of("initial_memory", initial_memory, 0)
        if every is not None:
            every = tokens_of("every", every)
        if isinstance(budget, GlobalTopK):
            raise ValueError(
                "budget must divide memory over layers before they are read, got GlobalTopK; measure its shares as a "
                "profile (kvcompress.analysis.measure_profile), and give Profiled"
            )
        self.adaptive = Adaptive() if schedule == "adaptive" else schedule if isinstance(schedule, Adaptive) else None
        self.memory_size, self.schedule = memory_size, "adaptive" if isinstance(schedule, Adaptive) else schedule
        self.dynamic, self.initial_memory, self.dense_below = dynamic, initial_memory, dense_below
        if initial_memory is not None and self.schedule == "fixed":
            raise ValueError(f"initial_memory must be None with schedule='fixed', got {initial_memory}")
        # refuses wrong schedules, and sizes that do not go together
        planner.plan(
            0, chunk_size=chunk_size, memory_size=memory_size, schedule=self.schedule, dynamic=dynamic,
            initial_memory=initial_memory,
        )  # fmt: skip
        if prune not in PRUNE:
            raise ValueError(f"prune must be one of {', '.join(PRUNE)}, got {prune!r}")
        divided = isinstance(budget, Budget) and budget.divides_layers
        if divided and self.schedule in ("square-sqrt", "adaptive"):
            raise ValueError(
                f"budget must be None with schedule {self.schedule!r}, which divides memory over layers itself, "
                f"got {budget}"
            )
        if every and pruner is not None and getattr(pruner, "one_frame", False):
            raise ValueError(
                f"every must be None with {type(pruner).__name__}, which judges keys by where they stand; got {every}"
            )
        if track and every:
            raise ValueError(f"track follows prompts only: every must be None with it, got {every}")
        if isinstance(pruner, Pruner) and pruner.rereads:
            raise ValueError(
                f"pruner must not be {type(pruner).__name__}, whose second reading needs the keys where they stand: "
                "read with PrunedCache, in chunks by its chunk_size"
            )
        if isinstance(pruner, Pruner) and pruner.own_budget is not None:
            raise ValueError(
                f"pruner must not be {type(pruner).__name__}, which brings its own budget: take PrunedCache"
            )
        self.pool_settings = PoolSettings(page_size, max_pages, grow, dtype)
        pruner = SnapKV() if pruner is None else pruner
        self.policy = Policy.of(
            pruner, memory_size, budget, self.pool_settings, trained_length_of(config), every=every,
            chunk_size=chunk_size, positions="contiguous" if every else "original", prompts=every is not None,
        )  # fmt: skip
        self.pruner, self.budget, self.every = self.policy.pruner, self.policy.budget, self.policy.every
        self.wants_entering = self.pruner.uses_entering
        self.chunk_size: int = chunk_size
        self.reading = ReadingSettings(append, prune, retention=self.adaptive is not None, track=track)
        self.track = Track() if track else None
        self.largest_context = 0
        super().__init__(config)

    def _new_layer(self, index: int, number: int) -> IterativeLayer:
        return IterativeLayer(index, number, self.policy, self.reading)

    # ---- how much memory ----

    def plan_prompt(self, length: int) -> Plan:
        settings: dict[str, Any] = {
            "chunk_size": self.chunk_size, "memory_size": self.memory_size, "dynamic": self.dynamic,
            "layers": max(len(self.compressing), 1),
        }  # fmt: skip
        if max(self._lengths, default=0) > 0:  # a later prompt continues with the full memory
            return planner.plan(length, schedule="fixed", **settings)
        least = max(planner.LEAST, self.pruner.num_sink_tokens + self.pruner.window + ROOM)
        return planner.plan(
            length, schedule=self.schedule, initial_memory=self.initial_memory, least_memory=least, **settings
        )

    def stream_plan(self) -> Plan:
        if self.dense_below:
            raise ValueError(f"input_ids of unknown length need dense_below = 0, got {self.dense_below}")
        if self.schedule != "fixed" or self.dynamic:
            raise ValueError(
                f"input_ids of unknown length can be read with schedule='fixed' and dynamic=False alone, got "
                f"{self.schedule!r} and {self.dynamic}: the others divide the length"
            )
        return self.plan_prompt(self.memory_size + 2 * self.chunk_size)

    def _is_dense(self, b: int, plan: Plan, i: int = 0) -> bool:
        """Whether sequence b is read without any pruning; iteration i is to come."""
        return self._read(b) + sum(plan.chunks[i:]) <= self.dense_below

    def _read(self, b: int) -> int:
        """Tokens of a sequence so far."""
        return self._lengths[b] if self._lengths else 0

    def memory_sizes(self, b: int, plan: Plan, i: int) -> tuple[int, ...]:
        L, read = len(self.compressing), self._read(b) + plan.chunks[i]
        if self._is_dense(b, plan, i):
            return (NEVER,) * L
        if self.adaptive is not None and L:
            return self._adaptive_sizes(self.adaptive, b, plan, i)
        if self.schedule == "square-sqrt":
            return tuple(memory[i] for memory in plan.layer_memory)[:L]
        return tuple(self.budget.checked_tokens(plan.memory[i], read, j, L) for j in range(L))

    def _adaptive_sizes(self, adaptive: Adaptive, b: int, plan: Plan, i: int) -> tuple[int, ...]:
        """IMDC, eq 3: in the third iteration and later, by how much of its memory each layer retained."""
        layers, mean = self.compressing, plan.memory[i]
        history = [layer.retained[b] if layer.retained else [] for layer in layers]
        if len(history[0]) < 2:
            return (mean,) * len(layers)
        if adaptive.ratio == "last" and adaptive.normalise == "sum":
            kept, stored = [past[-1][0] for past in history], [past[-1][1] for past in history]
        else:
            weights = adaptive.weights(history)
            kept, stored = [round(weight * _UNIT) for weight in weights], [_UNIT] * len(layers)
        most = [layer.mean_of(b, self._batch) + plan.chunks[i] for layer in layers]
        if i + 1 < len(plan) and (room := self.trained_length - plan.chunks[i + 1]) >= mean:
            most = [min(count, room) for count in most]  # positions stay where the model was trained
        least = max(1, self.pruner.num_sink_tokens + self.pruner.window)
        lowest = [min(mean, count, least) for count in most]
        return tuple(ops.divide_memory(len(layers) * mean, kept, stored, lowest=lowest, highest=most).tolist())

    # ---- reading ----

    def check_layers(self, decoder: Any, facts: Facts) -> None:
        own = [layer.index for layer in self.compressing]
        self.policy.check_model(decoder, facts, own, type(self).__name__, "every must be None")

    @property
    def steps_differ(self) -> bool:
        return self.every is not None

    def reach(self) -> int:
        return self._most_held()

    def check_guide(self) -> None:
        self.policy.check_guide()

    def begin_prompt(self, plans: list[Plan], guide_length: int) -> None:
        layers, facts = self.compressing, self.facts
        assert facts is not None
        self.largest_context = 0
        if not layers:
            return
        contexts, pages = [0], 0
        stored, heads = layers[0].stored_lengths() or [[0]] * len(plans), max(facts[x.index].kv_heads for x in layers)
        for b, (row, plan) in enumerate(zip(stored, plans, strict=True)):
            held, dense = max(row, default=0), self._is_dense(b, plan)
            largest = map(max, zip(*plan.layer_memory, strict=True))
            for chunk, memory in zip(plan.chunks, largest, strict=True):
                contexts.append(held + chunk + guide_length)
                held = held + chunk if dense else min(memory, held + chunk)
            pages += heads * self.pool_settings.blocks(held)
        if not (self.budget.divides_layers or self.budget.divides_heads) and self.adaptive is None:
            self.pool_settings.check(pages)
        longest = max((chunk for plan in plans for chunk in plan.chunks), default=0)
        self.policy.check_behind(max(contexts), longest, (facts[layer.index] for layer in layers))
        self._note_context(max(contexts))
        for layer in layers:
            layer.begin_prompt(facts[layer.index])

    def _note_context(self, keys: int) -> None:
        """Warns, once for a prompt, where more keys are in sight than the model was trained for."""
        if keys > self.trained_length >= self.largest_context:
            warnings.warn(
                f"reading puts {keys} keys in sight, more than the {self.trained_length} positions that the model was "
                "trained for; smaller chunk_size or memory_size avoids this",
                stacklevel=4,
            )
        self.largest_context = max(self.largest_context, keys)

    @torch.inference_mode(False)
    def begin(self, call: Call) -> CachePass:
        step = super().begin(call)
        if self.compressing and not self.every and step.columns > self.memory_size:
            self.policy.notices.give(
                "whole prompt",
                f"a prompt of {step.columns} tokens came without kvcompress.prefill or kvcompress.generate, which read "
                "through the memory: all of it is kept",
            )
        return step

    def open(
        self, facts: Facts, counts: Sequence[int], columns: int, iteration: Iteration | None = None, *,
        more: bool = False,
    ) -> CachePass:  # fmt: skip
        if iteration is not None:
            for layer in self.compressing:
                self._note_context(layer.keys_in_sight(tuple(counts)))
        return super().open(facts, counts, columns, iteration, more=more)

    def end(self, current: Pass, hidden: Any) -> None:
        assert isinstance(current, CachePass)
        if current.iteration is not None:
            for layer in self.compressing:
                layer.prune()
            if self.track is not None:
                self._note_reading(self.track, current)
        super().end(current, hidden)

    def _note_reading(self, track: Track, step: CachePass) -> None:
        while len(track.readings) < len(step.counts):
            track.readings.append([])
        for b, chunk in enumerate(step.kept):
            if chunk:
                layers = tuple(layer.layer_reading(b, self._read(b)) for layer in self.compressing)
                track.readings[b].append(ChunkReading(self._read(b), chunk, layers))

    def end_prompt(self, columns: int) -> None:
        super().end_prompt(columns)
        assert self.facts is not None
        layers = self.compressing
        # memory that was divided by retention stays so while decoding, where it is all of it
        total = len(layers) * self.memory_size
        lasting = [
            self.adaptive is not None and sum(layer.share[b] for layer in layers if layer.share) == total
            for b in range(self._batch)
        ]
        for layer in layers:
            layer.end_prompt(self.facts[layer.index], self._lengths, lasting)

    @torch.inference_mode(False)
    def select_sequences(self, indices: list[int]) -> None:
        super().select_sequences(indices)
        if self.track is not None and self.track.readings:
            self.track.readings = [list(self.track.readings[b]) for b in indices]

    def reset(self) -> None:
        super().reset()
        self.track = Track() if self.track is not None else None
