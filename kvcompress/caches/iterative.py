"""IterativeCache: reads a prompt of any length chunk by chunk into a small memory, then decodes over it (IMDC)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import ops, planner
from ..planner import Plan
from ..pruners import Candidates, Pruner, SnapKV
from .base import CompressedCache, decoder_config
from .paged import PagedLayer
from .prompt import prompt_attention
from .store import PoolSettings


class IterativeLayer(PagedLayer):
    """While a prompt is read: a buffer of unrotated keys, memory first, then the chunk. Afterwards: pages."""

    cache: IterativeCache

    def __init__(self, cache: IterativeCache, sliding_window: int | None) -> None:
        super().__init__(cache, sliding_window)
        self.k_memory: Tensor | None = None  # [B, Hkv, capacity, D], zeros past each sequence's tokens
        self.v_memory: Tensor | None = None
        self.held: list[int] = []  # memory of each sequence

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        if self.cache.step.iteration is None:
            return super().attend(queries, keys, values, scaling)
        return self._read(queries, keys, values, scaling)

    def _read(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of memory and chunk, positions from 0 in each iteration; then the memory is chosen anew."""
        rotary, step = self.cache.rotary, self.cache.step
        iteration = step.iteration
        assert rotary is not None and iteration is not None
        B, Hkv, S, D = keys.shape
        if not self.held:
            self.held = [0] * B
        totals = [held + count for held, count in zip(self.held, step.counts, strict=True)]
        T = max(totals)
        k_all, v_all = self._room(keys, T)
        for b, (start, count) in enumerate(zip(self.held, step.counts, strict=True)):
            k_all[b, :, start : start + count] = keys[b, :, S - count :]
            v_all[b, :, start : start + count] = values[b, :, S - count :]
        k_seen, v_seen = k_all[:, :, :T], v_all[:, :, :T]

        lengths = [max(total, 1) for total in totals]
        first = torch.tensor([[total - S] for total in totals], dtype=torch.int32).to(keys.device)
        positions = (first + torch.arange(S, dtype=torch.int32, device=keys.device)).clamp_(min=0)
        bound = max(T, S)
        q = rotary.rotate(queries, positions, bound, lengths)
        k = rotary.rotate(k_seen, None, bound, lengths)
        out = prompt_attention(q, k, v_seen, totals, scaling)

        for b, (total, count) in enumerate(zip(totals, step.counts, strict=True)):
            if count == 0:
                continue
            candidates = total - iteration.guide_length
            keep = min(iteration.memory[b], candidates)
            if keep < candidates:
                offer = Candidates(
                    queries=q[b : b + 1, :, S - count :],
                    keys=k[b : b + 1, :, :total],
                    count=candidates,
                    chunk_length=count - iteration.guide_length,
                    guide_length=iteration.guide_length,
                    scaling=scaling,
                )
                chosen = self.cache.pruner.select(offer, keep)
                ops.compact_rows_(k_all[b, :, :candidates], chosen)
                ops.compact_rows_(v_all[b, :, :candidates], chosen)
            k_all[b, :, keep:total] = 0
            v_all[b, :, keep:total] = 0
            self.held[b] = keep
        return out

    def _room(self, like: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        B, Hkv, _, D = like.shape
        old = self.k_memory.shape[2] if self.k_memory is not None else 0
        if self.k_memory is None or old < tokens:
            capacity = max(tokens, self.cache.largest_context)
            for name in ("k_memory", "v_memory"):
                bigger = like.new_zeros(B, Hkv, capacity, D)
                held = getattr(self, name)
                if held is not None:
                    bigger[:, :, :old] = held
                setattr(self, name, bigger)
        assert self.k_memory is not None and self.v_memory is not None
        return self.k_memory, self.v_memory

    def begin_prompt(self) -> None:
        """A further prompt of a conversation: what is held becomes unrotated memory again."""
        if self.pool is None or self.cache.rotary is None:
            return
        batch = len(self.rope_lengths)
        counts = [row[0] for row in self.stored_lengths()]
        heads = len(self.pool.bounds) // batch
        k, v = (x.unflatten(0, (batch, heads)) for x in self.pool.gather(max(*counts, self.cache.largest_context)))
        self.k_memory = self.cache.rotary.unrotate(k, k.shape[2], self.rope_lengths)
        self.v_memory, self.held, self.pool = v, counts, None

    def end_prompt(self) -> None:
        """Memory moves into pages, rotated once for the positions 0.. that it keeps while decoding."""
        if self.k_memory is None or self.v_memory is None:
            return
        rotary, longest = self.cache.rotary, max(self.held)
        assert rotary is not None
        B, Hkv, _, D = self.k_memory.shape
        self.open_pool(B * Hkv, D, self.k_memory, [max(held, 1) for held in self.held])
        assert self.pool is not None
        k = rotary.rotate(self.k_memory[:, :, :longest], None, max(longest, 1), self.rope_lengths)
        v = self.v_memory[:, :, :longest]
        if len(set(self.held)) > 1:  # the pool takes right-aligned tokens
            k, v = k.clone(), v.clone()
            for b, held in enumerate(self.held):
                k[b], v[b] = k[b].roll(longest - held, 1), v[b].roll(longest - held, 1)
        self.pool.append((k, v), self._per_row(self.held))
        self.k_memory = self.v_memory = None
        self.held = []

    def select_batch(self, indices: list[int]) -> None:
        if self.k_memory is not None:
            raise RuntimeError("the batch of this cache cannot change while a prompt is being read")
        super().select_batch(indices)

    def nbytes(self) -> int:
        return super().nbytes() + self._buffer_nbytes()

    def reserved_nbytes(self) -> int:
        return super().reserved_nbytes() + self._buffer_nbytes()

    def _buffer_nbytes(self) -> int:
        buffers = [x for x in (self.k_memory, self.v_memory) if x is not None]
        return sum(x.numel() * x.element_size() for x in buffers)

    def stored_lengths(self) -> list[list[int]]:
        if self.k_memory is not None:
            return [[held] * self.k_memory.shape[1] for held in self.held]
        return super().stored_lengths()


class IterativeCache(CompressedCache):
    """Reads a prompt of any length through a memory of fixed size; `kvcompress.prefill` or `generate` do the reading.

    config: the model's config. memory_size: tokens kept per layer and KV head (per sequence). chunk_size: tokens read
    per iteration. pruner: chooses the memory among the old memory and the chunk (default SnapKV()). schedule: "fixed".
    page_size, max_pages, grow: how a layer's storage grows, see PoolSettings.
    A prompt that fits into memory_size is kept whole: the model then sees what it would see with a dense cache.
    Tokens after the prompt are appended uncompressed; the next prompt of a conversation continues the iteration.
    Raises ValueError for sizes below 1, RuntimeError where a layer needs more than max_pages. Source: IMDC; imdc.md.
    """

    layers: list[IterativeLayer]
    smaller = "use a smaller memory_size and chunk_size, or generate fewer tokens"

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        memory_size: int = 1024,
        chunk_size: int = 1024,
        pruner: Pruner | None = None,
        schedule: str = "fixed",
        page_size: int = 64,
        max_pages: int | None = None,
        grow: str = "double",
    ) -> None:
        self.pruner: Pruner = SnapKV() if pruner is None else pruner
        if not isinstance(self.pruner, Pruner):
            raise ValueError(f"pruner must be one of kvcompress.pruners, got {type(pruner).__name__}")
        self.memory_size, self.chunk_size, self.schedule = memory_size, chunk_size, schedule
        self.pool_settings = PoolSettings(page_size, max_pages, grow)
        self.kv_heads: int = decoder_config(config).num_key_value_heads
        self.largest_context = 0
        planner.plan(0, chunk_size=chunk_size, memory_size=memory_size, schedule=schedule)  # refuses wrong sizes
        super().__init__(config)

    def _new_layer(self, sliding_window: int | None) -> IterativeLayer:
        return IterativeLayer(self, sliding_window)

    def plan_prompt(self, length: int) -> Plan:
        return planner.plan(length, chunk_size=self.chunk_size, memory_size=self.memory_size, schedule=self.schedule)

    def check_guide(self) -> None:
        if not self.pruner.uses_guide:
            raise ValueError(f"guide has no effect with the pruner {type(self.pruner).__name__}, which scores nothing")

    def begin_prompt(self, plans: list[Plan], guide_length: int) -> None:
        stored = self.layers[0].stored_lengths() or [[0]] * len(plans)
        contexts, pages = [0], 0
        for row, plan in zip(stored, plans, strict=True):
            held = row[0] if row else 0
            for chunk, memory in zip(plan.chunks, plan.memory, strict=True):
                contexts.append(held + chunk + guide_length)
                held = min(memory, held + chunk)
            pages += self.kv_heads * self.pool_settings.blocks(held)
        self.pool_settings.check(pages)
        self.largest_context = max(contexts)
        if self.largest_context > self.trained_length:
            warnings.warn(
                f"reading puts {self.largest_context} keys in sight, more than the {self.trained_length} positions "
                "that the model was trained for; smaller chunk_size or memory_size avoids this",
                stacklevel=3,
            )
        for layer in self.layers:
            layer.begin_prompt()

    def end_prompt(self, columns: int) -> None:
        super().end_prompt(columns)
        for layer in self.layers:
            layer.end_prompt()
