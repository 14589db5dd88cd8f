"""IterativeCache: reads a prompt of any length chunk by chunk into a small memory, then decodes over it (IMDC)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import ops, planner
from ..budgets import Budget, Uniform
from ..planner import Plan
from ..pruners import Pruner
from .base import CompressedLayer, Step, decoder_config
from .paged import PagedLayer
from .prompt import prompt_attention
from .pruned import NEVER, PrunedCache, PrunedLayer
from .queries import RecentQueries


class IterativeLayer(PrunedLayer):
    """While a prompt is read: a buffer of unrotated keys, memory first, then the chunk. Afterwards: pages.

    Rows may hold different numbers of tokens. Each ends where the longest does: the tokens of a chunk stand at the same
    positions in all heads, and a shorter row begins later.
    """

    cache: IterativeCache

    def __init__(self, cache: IterativeCache, index: int, sliding_window: int | None) -> None:
        super().__init__(cache, index, sliding_window)
        self.is_croppable = not cache.every and not cache.pruner.accumulates
        self.k_memory: Tensor | None = None  # [R, capacity, D]; what lies past a row's tokens is never read
        self.v_memory: Tensor | None = None
        self.held: list[int] = []  # tokens of each row
        self.read: list[int] = []  # tokens of each sequence so far

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        if self.cache.step.iteration is not None:
            return self._read(queries, keys, values, scaling)
        counts = self.cache.step.counts
        self.read = [read + count for read, count in zip(self.read or [0] * len(counts), counts, strict=True)]
        if self.is_croppable:  # tokens that follow the prompt stay, and nothing needs their queries
            return PagedLayer.attend(self, queries, keys, values, scaling)
        return super().attend(queries, keys, values, scaling)

    def _read(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of memory and chunk, positions from 0 in each iteration; then the memory is chosen anew."""
        rotary, step = self.cache.rotary, self.cache.step
        iteration, counts = step.iteration, step.counts
        assert rotary is not None and iteration is not None
        B, Hkv, S, D = keys.shape
        R, guide, device, self.scaling = B * Hkv, iteration.guide_length, keys.device, scaling
        if not self.held:
            self.held, self.whole, self.next = [0] * R, [True] * B, [0] * B
        self.read = self.read or [0] * B
        longest = self._longest(B)
        totals = [held + count for held, count in zip(longest, counts, strict=True)]
        lengths = [held + counts[row // Hkv] for row, held in enumerate(self.held)]
        T = max(lengths)
        k_all, v_all = self._room(keys, R, T)
        for buffer, new in ((k_all, keys), (v_all, values)):
            for row, (start, stop) in enumerate(zip(self.held, lengths, strict=True)):
                buffer[row, start:stop] = new[row // Hkv, row % Hkv, S - (stop - start) :]

        in_sight = [max(total, 1) for total in totals]
        first = torch.tensor([[held] for held in longest], dtype=torch.int32).to(device)
        q = rotary.rotate(queries, self._positions(first, S), max(T, S, *totals), in_sight)
        k = self._rotated(k_all[:, :T], longest, in_sight)
        v = v_all[:, :T]
        if all(length == totals[row // Hkv] for row, length in enumerate(lengths)):
            out = prompt_attention(q, k.unflatten(0, (B, Hkv)), v.unflatten(0, (B, Hkv)), totals, scaling)
        else:  # a row is a batch entry of one KV head
            rows = q.reshape(R, -1, S, D)
            out = prompt_attention(rows, k[:, None], v[:, None], lengths, scaling).reshape(queries.shape)

        self.next = [total - guide for total in totals]
        if self.cache.every and not self.cache.pruner.accumulates:  # to compress by, once decoding has begun
            self.recent = self.recent or RecentQueries.of(self.cache.pruner, self.cache.every)
            self._note(queries, guide)
        for b, count in enumerate(counts):
            if count == 0:
                continue
            rows_of = slice(b * Hkv, (b + 1) * Hkv)
            kept = [length - guide for length in lengths[rows_of]]
            candidates = sum(kept) // Hkv
            self.read[b] += count - guide
            keep = min(self.cache.layer_memory(iteration.memory[b], self.read[b], self.index), candidates)
            if keep < candidates or self.cache.pruner.accumulates:
                offer = self._offer(b, k[rows_of], v[rows_of], lengths[rows_of], queries, count, guide, q)
                if keep < candidates:
                    indices, kept, stayed = self._choose(offer, keep, sum(kept))
                    if self.recent is not None:  # queries whose own keys may be gone
                        self.recent.forget(b, stayed)
                    self._compact(b, indices, kept, max(lengths[rows_of]))
            self.held[rows_of] = kept
        return out

    def _rotated(self, k: Tensor, longest: list[int], in_sight: list[int]) -> Tensor:
        """Rows [R, T, D] rotated so that memory ends at its sequence's longest row."""
        rotary = self.cache.rotary
        assert rotary is not None
        R, T, _ = k.shape
        heads = R // len(longest)
        late = [longest[row // heads] - held for row, held in enumerate(self.held)]
        if not any(late):
            return rotary.rotate(k.unflatten(0, (-1, heads)), None, T, in_sight).flatten(0, 1)
        return rotary.rotate(k[:, None], self._places(late, T, k), T + max(late), self._spread(in_sight, heads))[:, 0]

    @staticmethod
    def _places(late: list[int], tokens: int, like: Tensor) -> Tensor:
        first = torch.tensor(late, dtype=torch.int32).to(like.device)[:, None]
        return first + torch.arange(tokens, dtype=torch.int32, device=like.device)

    @staticmethod
    def _spread(numbers: list[int], heads: int) -> list[int]:
        return [number for number in numbers for _ in range(heads)]

    def _longest(self, batch: int) -> list[int]:
        heads = len(self.held) // batch
        return [max(self.held[b * heads : (b + 1) * heads]) for b in range(batch)]

    def _compact(self, b: int, indices: Tensor, kept: list[int], length: int) -> None:
        """Keeps the chosen slots of sequence b's rows in the buffers."""
        assert self.k_memory is not None and self.v_memory is not None
        heads, K = indices.shape
        rows = slice(b * heads, (b + 1) * heads)
        self.whole[b] = False
        for buffer in (self.k_memory, self.v_memory):
            if min(kept) == K:
                ops.compact_rows_(buffer[rows, :length], indices)
            else:
                buffer[rows, :K] = torch.take_along_dim(buffer[rows], indices[..., None].long(), 1)
        if self.received is not None:
            taken = self.received[rows].gather(1, indices.long())
            held = torch.arange(K, device=taken.device) < torch.tensor(kept).to(taken.device)[:, None]
            self.received[rows] = 0
            self.received[rows, :K] = taken * held

    def _room(self, like: Tensor, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        old = self.k_memory.shape[1] if self.k_memory is not None else 0
        if self.k_memory is None or old < tokens:
            capacity = max(tokens, self.cache.largest_context)
            for name in ("k_memory", "v_memory"):
                bigger = like.new_zeros(rows, capacity, like.shape[3])
                held = getattr(self, name)
                if held is not None:
                    bigger[:, :old] = held
                setattr(self, name, bigger)
        assert self.k_memory is not None and self.v_memory is not None
        return self.k_memory, self.v_memory

    def _slack(self) -> int:
        return 1 if self.cache.every else NEVER

    def _keep(self, b: int) -> int:
        return self.cache.layer_memory(self.cache.memory_size, self.read[b], self.index)

    def begin_prompt(self) -> None:
        """A prompt begins; in a conversation, what is held becomes unrotated memory again."""
        pool, rotary = self.pool, self.cache.rotary
        if pool is None or rotary is None:
            return
        if self.cache.pruner.accumulates and self.recent is not None and self.recent.held:
            self._settle_held(slack=NEVER)  # the queries that came after the last prompt vote
        heads, counts = self.heads, pool.counts
        k, v = pool.gather(max(*counts, self.cache.largest_context))
        slots = torch.arange(k.shape[1], dtype=torch.int32, device=k.device)
        places = slots.expand(len(k), -1) if self.shift is None else slots + self.shift[:, None]
        if self.split is not None:
            places = torch.where(slots < self.split[:, None], slots, places)
        bound = max(*self.next, 0) + k.shape[1]
        lengths = self._spread(self.rope_lengths, heads)
        self.k_memory = rotary.unrotate(k[:, None], bound, lengths, places.contiguous())[:, 0]
        self.v_memory, self.held, self.pool = v, list(counts), None
        self.shift = self.split = self.recent = None

    def end_prompt(self) -> None:
        """Memory moves into pages, rotated once for the positions that it keeps while decoding."""
        if self.k_memory is None or self.v_memory is None:
            return
        B, D = len(self.next), self.k_memory.shape[2]
        heads, T = len(self.held) // B, max(self.held)
        longest = self._longest(B)
        k = self._rotated(self.k_memory[:, :T], longest, [max(held, 1) for held in longest])
        v = self.v_memory[:, :T]
        kept, whole = self.held, self.whole
        self.open_pool(len(kept), D, k, [max(held, 1) for held in longest])
        assert self.pool is not None
        if min(kept) < T:  # the pool takes right-aligned tokens
            right = (torch.arange(T) - T + torch.tensor(kept)[:, None]).clamp_(min=0).to(k.device)[..., None]
            k, v = (torch.take_along_dim(x, right, 1) for x in (k, v))
        self.pool.append([x.unflatten(0, (B, heads)) for x in (k, v)], kept)
        self.whole = whole
        self.next, self.near = longest, [min(kept[b * heads : (b + 1) * heads]) for b in range(B)]
        late = [longest[row // heads] - held for row, held in enumerate(kept)]
        self.shift = torch.tensor(late, dtype=torch.int32).to(k.device) if any(late) else None
        self.recent = self.recent or RecentQueries.of(self.cache.pruner, self.cache.every)
        self.k_memory = self.v_memory = None
        self.held = []

    def select_batch(self, indices: list[int]) -> None:
        if self.k_memory is not None:
            raise RuntimeError("the batch of this cache cannot change while a prompt is being read")
        super().select_batch(indices)
        self.read = [self.read[b] for b in indices] if self.read else []

    def check_step(self, step: Step) -> None:
        if step.iteration is None:
            super().check_step(step)
        else:
            CompressedLayer.check_step(self, step)

    def keys_in_sight(self, step: Step) -> int:
        if step.iteration is None:
            return super().keys_in_sight(step)
        held = self._longest(len(step.counts)) if self.held else [0] * len(step.counts)
        return max(have + count for have, count in zip(held, step.counts, strict=True))

    def _side_nbytes(self) -> int:
        buffers = [x for x in (self.k_memory, self.v_memory) if x is not None]
        return super()._side_nbytes() + sum(x.nbytes for x in buffers)

    def stored_lengths(self) -> list[list[int]]:
        if self.k_memory is not None:
            heads = len(self.held) // len(self.next)
            return [self.held[b * heads : (b + 1) * heads] for b in range(len(self.next))]
        return super().stored_lengths()


class IterativeCache(PrunedCache):
    """Reads a prompt of any length through a memory of fixed size; `kvcompress.prefill` or `generate` do the reading.

    config: the model's config. memory_size: tokens kept per layer and KV head (per sequence), or PyramidKV or AdaKV of
    a number of tokens, which divide them over layers or heads. chunk_size: tokens read per iteration. pruner: chooses
    the memory among the old memory and the chunk (default SnapKV()). schedule: "fixed". every: None keeps all tokens
    that follow the prompt; k compresses while decoding too, when a row has grown by k tokens over its memory.
    page_size, max_pages, grow: how a layer's storage grows, see PoolSettings.
    A prompt that fits into memory_size is kept whole: the model then sees what it would see with a dense cache.
    The next prompt of a conversation continues the iteration.
    Raises ValueError for sizes below 1, RuntimeError where a layer needs more than max_pages. Source: IMDC.
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
        schedule: str = "fixed",
        every: int | None = None,
        page_size: int = 64,
        max_pages: int | None = None,
        grow: str = "double",
    ) -> None:
        tokens = memory_size.tokens if isinstance(memory_size, Budget) else memory_size
        if tokens is None:
            raise ValueError(f"memory_size must be a number of tokens, got {memory_size}")
        planner.plan(0, chunk_size=chunk_size, memory_size=tokens, schedule=schedule)  # refuses wrong sizes
        self.memory_size, self.schedule = tokens, schedule
        self.kv_heads: int = decoder_config(config).num_key_value_heads
        self.largest_context = 0
        super().__init__(
            config, pruner, memory_size, every=every, positions="contiguous" if every else "original",
            chunk_size=chunk_size, page_size=page_size, max_pages=max_pages, grow=grow,
        )  # fmt: skip

    def _new_layer(self, index: int, sliding_window: int | None) -> IterativeLayer:
        return IterativeLayer(self, index, sliding_window)

    def layer_memory(self, mean: int, length: int, layer: int) -> int:
        """Tokens per head of one layer, where the plan says `mean` and `length` tokens have been read."""
        return self.budget.layer_share(mean, length, layer, len(self.layers))

    def plan_prompt(self, length: int) -> Plan:
        return planner.plan(
            length, chunk_size=self.chunk_size or 1, memory_size=self.memory_size, schedule=self.schedule
        )

    def begin_prompt(self, plans: list[Plan], guide_length: int) -> None:
        stored = self.layers[0].stored_lengths() or [[0]] * len(plans)
        contexts, pages = [0], 0
        for row, plan in zip(stored, plans, strict=True):
            held = max(row, default=0)
            for chunk, memory in zip(plan.chunks, plan.memory, strict=True):
                contexts.append(held + chunk + guide_length)
                held = min(memory, held + chunk)
            pages += self.kv_heads * self.pool_settings.blocks(held)
        if isinstance(self.budget, Uniform):
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
