"""IterativeCache: reads a prompt of any length chunk by chunk into a small memory, then decodes over it (IMDC)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import ops, planner
from ..budgets import Budget, Uniform
from ..planner import Adaptive, Plan
from ..pruners import Pruner
from .base import decoder_config
from .iterative_layer import IterativeLayer
from .pruned import PrunedCache
from .pruned_layer import NEVER
from .track import Reading, Track

PRUNE = ("layer", "forward")
_UNIT = 1 << 30  # weights of layers are counted in parts of this


class IterativeCache(PrunedCache):
    """Reads a prompt of any length through a small memory; `kvcompress.prefill` or `generate` do the reading.

    config: the model's config. memory_size: tokens kept per layer and KV head (per sequence) when the prompt is read,
    or PyramidKV or AdaKV of a number of tokens, which divide them over layers or heads. chunk_size: tokens read per
    iteration, mean. pruner: chooses the memory among the old memory and the chunk (default SnapKV()).
    schedule: how memory grows from initial_memory (default memory_size divided by the number of iterations) to
    memory_size: "fixed" (full size from the start), "linear", "square", "sqrt", "square-sqrt" (lower layers square,
    higher ones sqrt) or "adaptive" (= Adaptive(): layers that retain more get more). The default initial_memory is a
    token or two for long prompts: give it room for what must not be lost early (a fact and its words). dynamic: chunks
    shrink as memory grows, so that a chunk and the memory before it are one constant. Both need the prompt's length; a
    later prompt of a conversation continues the iteration with the full memory.
    append: True compresses each chunk alone and appends it; memory is never rewritten (a baseline, IMDC, B.4).
    prune: "layer" drops tokens after each layer's attention, "forward" after the forward pass: the same tokens in
    more memory, as the paper measures it. dense_below: prompts up to this length are read without any pruning.
    every: None keeps all tokens that follow the prompt; k compresses while decoding too, when a row has grown by k
    tokens over its memory. track: True notes in cache.track what each iteration keeps and attends to (see Track).
    page_size, max_pages, grow: how a layer's storage grows, see PoolSettings.
    With "fixed", a prompt that fits into memory_size is kept whole: the model then sees what it would see with a dense
    cache. Raises ValueError for sizes below 1, RuntimeError where a layer needs more than max_pages. Source: IMDC.
    """

    layers: list[IterativeLayer]
    smaller = "use a smaller memory_size and chunk_size, or generate fewer tokens"

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        memory_size: int | Budget = 1024,
        chunk_size: int = 1024,
        pruner: Pruner | None = None,
        schedule: str | Adaptive = "fixed",
        dynamic: bool = False,
        initial_memory: int | None = None,
        append: bool = False,
        prune: str = "layer",
        dense_below: int = 0,
        every: int | None = None,
        track: bool = False,
        page_size: int = 64,
        max_pages: int | None = None,
        grow: str = "double",
    ) -> None:
        tokens = memory_size.tokens if isinstance(memory_size, Budget) else memory_size
        if tokens is None:
            raise ValueError(f"memory_size must be a number of tokens, got {memory_size}")
        self.adaptive = Adaptive() if schedule == "adaptive" else schedule if isinstance(schedule, Adaptive) else None
        self.memory_size, self.schedule = tokens, "adaptive" if isinstance(schedule, Adaptive) else schedule
        self.dynamic, self.initial_memory, self.append, self.prune = dynamic, initial_memory, append, prune
        self.dense_below = dense_below
        self.kv_heads: int = decoder_config(config).num_key_value_heads
        self.largest_context = 0
        if initial_memory is not None and self.schedule == "fixed":
            raise ValueError(f"initial_memory must be None with schedule='fixed', got {initial_memory}")
        # refuses wrong sizes and schedules
        planner.plan(
            0, chunk_size=chunk_size, memory_size=tokens, schedule=self.schedule, dynamic=dynamic,
            initial_memory=initial_memory,
        )  # fmt: skip
        if prune not in PRUNE:
            raise ValueError(f"prune must be one of {', '.join(PRUNE)}, got {prune!r}")
        if not isinstance(dense_below, int) or dense_below < 0:
            raise ValueError(f"dense_below must be an integer of at least 0, got {dense_below!r}")
        divided = isinstance(memory_size, Budget) and memory_size.divides_layers
        if divided and self.schedule in ("square-sqrt", "adaptive"):
            raise ValueError(
                f"schedule {self.schedule!r} divides memory over layers itself: memory_size must not be {memory_size}"
            )
        if every and pruner is not None and getattr(pruner, "one_frame", False):
            raise ValueError(
                f"every must be None with {type(pruner).__name__}, which judges keys by where they stand; got {every}"
            )
        if track and every:
            raise ValueError(f"track follows prompts only: every must be None with it, got {every}")
        super().__init__(
            config, pruner, memory_size, every=every, positions="contiguous" if every else "original",
            chunk_size=chunk_size, page_size=page_size, max_pages=max_pages, grow=grow,
        )  # fmt: skip
        self.track = Track() if track else None

    def _new_layer(self, index: int, sliding_window: int | None) -> IterativeLayer:
        return IterativeLayer(self, index, sliding_window)

    # ---- how much memory ----

    def plan_prompt(self, length: int) -> Plan:
        later = self.read_before > 0
        return planner.plan(
            length, chunk_size=self.chunk_size or 1, memory_size=self.memory_size,
            schedule="fixed" if later else self.schedule, dynamic=self.dynamic,
            initial_memory=None if later else self.initial_memory, layers=len(self.layers),
        )  # fmt: skip

    def stream_plan(self) -> Plan:
        if self.dense_below:
            raise ValueError(f"input_ids of unknown length need dense_below = 0, got {self.dense_below}")
        if self.schedule != "fixed" or self.dynamic:
            raise ValueError(
                f"input_ids of unknown length can be read with schedule='fixed' and dynamic=False alone, got "
                f"{self.schedule!r} and {self.dynamic}: the others divide the length"
            )
        return self.plan_prompt(self.memory_size + 2 * (self.chunk_size or 1))

    @property
    def read_before(self) -> int:
        """Tokens of the longest sequence so far."""
        return max(self.layers[0].read, default=0)

    def memory_sizes(self, b: int, plan: Plan, i: int) -> tuple[int, ...]:
        L, chunk = len(self.layers), plan.chunks[i]
        read = self.layers[0].read[b] if self.layers[0].read else 0
        if read + sum(plan.chunks[i:]) <= self.dense_below:
            return (NEVER,) * L
        if self.adaptive is not None:
            return self._adaptive_sizes(self.adaptive, b, plan, i)
        if self.schedule == "square-sqrt":
            return tuple(memory[i] for memory in plan.layer_memory)
        return tuple(self.budget.layer_share(plan.memory[i], read + chunk, j, L) for j in range(L))

    def _adaptive_sizes(self, adaptive: Adaptive, b: int, plan: Plan, i: int) -> tuple[int, ...]:
        """IMDC, eq 3: in the third iteration and later, by how much of its memory each layer retained."""
        L, mean = len(self.layers), plan.memory[i]
        history = [layer.retained[b] if layer.retained else [] for layer in self.layers]
        if len(history[0]) < 2:
            return (mean,) * L
        if adaptive.ratio == "last" and adaptive.normalise == "sum":
            kept, stored = [past[-1][0] for past in history], [past[-1][1] for past in history]
        else:
            weights = adaptive.weights(history)
            kept, stored = [round(weight * _UNIT) for weight in weights], [_UNIT] * L
        most = [layer.mean_of(b) + plan.chunks[i] for layer in self.layers]
        if i + 1 < len(plan) and (room := self.trained_length - plan.chunks[i + 1]) >= mean:
            most = [min(count, room) for count in most]  # positions stay where the model was trained
        least = max(1, self.pruner.num_sink_tokens + self.pruner.window)
        lowest = [min(mean, count, least) for count in most]
        return tuple(ops.divide_memory(L * mean, kept, stored, lowest=lowest, highest=most).tolist())

    def final_memory(self, b: int, read: int, layer: int) -> int:
        """Tokens per head of one layer while decoding, where `read` tokens have been read."""
        if self.adaptive is not None:
            shares = [each.share[b] for each in self.layers if each.share]
            if sum(shares) == len(self.layers) * self.memory_size:
                return shares[layer]
        return self.budget.layer_share(self.memory_size, read, layer, len(self.layers))

    @property
    def measures_retention(self) -> bool:
        return self.adaptive is not None

    # ---- reading ----

    def begin_prompt(self, plans: list[Plan], guide_length: int) -> None:
        stored = self.layers[0].stored_lengths() or [[0]] * len(plans)
        contexts, pages = [0], 0
        for b, (row, plan) in enumerate(zip(stored, plans, strict=True)):
            held, before = max(row, default=0), self.layers[0].read[b] if self.layers[0].read else 0
            dense = before + sum(plan.chunks) <= self.dense_below
            largest = map(max, zip(*plan.layer_memory, strict=True))
            for chunk, memory in zip(plan.chunks, largest, strict=True):
                contexts.append(held + chunk + guide_length)
                held = held + chunk if dense else min(memory, held + chunk)
            pages += self.kv_heads * self.pool_settings.blocks(held)
        if isinstance(self.budget, Uniform) and self.adaptive is None:
            self.pool_settings.check(pages)
        self.largest_context = 0
        self.note_context(max(contexts))
        for layer in self.layers:
            layer.begin_prompt()

    def note_context(self, keys: int) -> None:
        """Warns, once for a prompt, where more keys are in sight than the model was trained for."""
        if keys > self.trained_length >= self.largest_context:
            warnings.warn(
                f"reading puts {keys} keys in sight, more than the {self.trained_length} positions that the model was "
                "trained for; smaller chunk_size or memory_size avoids this",
                stacklevel=4,
            )
        self.largest_context = max(self.largest_context, keys)

    def begin_forward(self, decoder: Any, name: str, tokens: Tensor, attention_mask: Tensor | None) -> None:
        if self.step.iteration is None and not self.every and tokens.shape[1] > self.memory_size:
            self.warn_once(
                f"a prompt of {tokens.shape[1]} tokens came without kvcompress.prefill or kvcompress.generate, which "
                "read through the memory: all of it is kept"
            )
        super().begin_forward(decoder, name, tokens, attention_mask)

    def end_forward(self) -> None:
        if self.step.iteration is not None:
            for layer in self.layers:
                layer.prune()
            if self.track is not None:
                self._note_reading(self.track)
        super().end_forward()

    def _note_reading(self, track: Track) -> None:
        step = self.step
        assert step.iteration is not None
        while len(track.readings) < len(step.counts):
            track.readings.append([])
        for b, count in enumerate(step.counts):
            if count:
                chunk = count - step.iteration.guide_length
                layers = tuple(layer.layer_reading(b) for layer in self.layers)
                track.readings[b].append(Reading(self.layers[0].read[b] - chunk, chunk, layers))

    def end_prompt(self, columns: int) -> None:
        super().end_prompt(columns)
        for layer in self.layers:
            layer.end_prompt()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_readings(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = self._batch
        super().batch_repeat_interleave(repeats)
        self._select_readings(torch.arange(batch).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select_readings(beam_idx)

    def _select_readings(self, indices: Tensor) -> None:
        if self.track is not None and self.track.readings:
            self.track.readings = [list(self.track.readings[b]) for b in indices.tolist()]

    def reset(self) -> None:
        super().reset()
        self.track = Track() if self.track is not None else None
