"""IterativeCache's layers: an unrotated memory and a chunk while a prompt is read, pages while decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..pruners import Candidates
from .base import CompressedLayer, Step
from .paged import PagedLayer
from .prompt import prompt_attention
from .pruned_layer import NEVER, PrunedLayer
from .queries import RecentQueries
from .track import LayerReading

if TYPE_CHECKING:
    from .iterative import IterativeCache


@dataclass
class _Choice:
    """One iteration of a layer, attended but not pruned yet.

    keys (unrotated), values: [R, T, D], memory first, then the chunk and the guide. slots: int64 [R, K] of what stays,
    the first kept[row] of them count. origins: int32 [R, T, 1], place of each token in the prompt, if tracked.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    kept: list[int]
    origins: Tensor | None


class IterativeLayer(PrunedLayer):
    """While a prompt is read: unrotated keys and values of the memory. Afterwards: pages.

    Rows may hold different numbers of tokens. Each ends where the longest does: the tokens of a chunk stand at the same
    positions in all heads, and a shorter row begins later.
    """

    cache: IterativeCache

    def __init__(self, cache: IterativeCache, index: int, sliding_window: int | None) -> None:
        super().__init__(cache, index, sliding_window)
        self.is_croppable = not cache.every and not cache.pruner.accumulates
        self.memory: tuple[Tensor, Tensor] | None = None  # [R, M, D] each; what lies past a row's tokens is never read
        self.held: list[int] = []  # tokens of each row
        self.read: list[int] = []  # tokens of each sequence so far
        self.retained: list[list[tuple[int, int]]] = []  # of each sequence, by iteration: kept from memory, and kept
        self.share: list[int] = []  # memory that each sequence's last iteration gave this layer
        self.origins: Tensor | None = None  # int32 [R, M, 1], place in the prompt, if tracked
        self.held_at_end: list[int] = []  # tokens of each row when the last prompt had been read
        self.observed: list[tuple[Tensor, Tensor] | None] = []  # of this iteration, if tracked: attention, memory size
        self._choice: _Choice | None = None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        if self.cache.step.iteration is not None:
            return self._read(queries, keys, values, scaling)
        counts = self.cache.step.counts
        self.read = [read + count for read, count in zip(self.read or [0] * len(counts), counts, strict=True)]
        if self.is_croppable:  # tokens that follow the prompt stay, and nothing needs their queries
            return PagedLayer.attend(self, queries, keys, values, scaling)
        return super().attend(queries, keys, values, scaling)

    # ---- reading ----

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
        k_memory, v_memory = self.memory or (None, None)
        k_all, v_all = self._joined(k_memory, keys, lengths), self._joined(v_memory, values, lengths)
        del k_memory, v_memory
        self.memory = None  # a copy of it is the first part of these

        in_sight = [max(total, 1) for total in totals]
        first = torch.tensor([[held] for held in longest], dtype=torch.int32).to(device)
        q = rotary.rotate(queries, self._positions(first, S), max(T, S, *totals), in_sight)
        k = self._rotated(k_all, longest, in_sight)
        if all(length == totals[row // Hkv] for row, length in enumerate(lengths)):
            out = prompt_attention(q, k.unflatten(0, (B, Hkv)), v_all.unflatten(0, (B, Hkv)), totals, scaling)
        else:  # a row is a batch entry of one KV head
            rows = q.reshape(R, -1, S, D)
            out = prompt_attention(rows, k[:, None], v_all[:, None], lengths, scaling).reshape(queries.shape)

        self.next = [total - guide for total in totals]
        if self.cache.every and not self.cache.pruner.accumulates:  # to compress by, once decoding has begun
            self.recent = self.recent or RecentQueries.of(self.cache.pruner, self.cache.every)
            self._note(queries, guide)
        self.observed = []
        slots, kept = self._choose_all(k, v_all, lengths, queries, q)
        origins = self._joined(self.origins, self._places_read(S, Hkv, device), lengths) if self.cache.track else None
        self.read = [read + max(count - guide, 0) for read, count in zip(self.read, counts, strict=True)]
        self._choice = _Choice(k_all, v_all, slots, kept, origins)
        if self.cache.prune == "layer":
            self.prune()
        return out

    def _joined(self, old: Tensor | None, new: Tensor, lengths: list[int]) -> Tensor:
        """Memory [R, M, D] followed by the chunk's tokens [B, Hkv, S, D]: [R, T, D], row r filled up to lengths[r]."""
        R, T, S = len(lengths), max(lengths), new.shape[2]
        if min(self.held) == max(self.held) and min(lengths) == T == self.held[0] + S:
            rows = new.flatten(0, 1)
            return rows if old is None or self.held[0] == 0 else torch.cat([old[:, : self.held[0]], rows], dim=1)
        out = new.new_zeros(R, T, new.shape[3])
        for row, (held, length) in enumerate(zip(self.held, lengths, strict=True)):
            if old is not None:
                out[row, :held] = old[row, :held]
            out[row, held:length] = new[row // new.shape[1], row % new.shape[1], S - (length - held) :]
        return out

    def _choose_all(
        self, k: Tensor, v: Tensor, lengths: list[int], queries: Tensor, rotated: Tensor
    ) -> tuple[Tensor, list[int]]:
        """(slots int64 [R, K] of what stays of rows k (rotated), v [R, T, D], how many of each row count)."""
        step = self.cache.step
        iteration, counts = step.iteration, step.counts
        assert iteration is not None
        guide, heads = iteration.guide_length, len(lengths) // len(counts)
        chosen: list[Tensor] = []
        kept: list[int] = []
        self.retained = self.retained or [[] for _ in counts]
        self.share = self.share or [0] * len(counts)
        for b, count in enumerate(counts):
            rows = slice(b * heads, (b + 1) * heads)
            if count == 0:  # this sequence starts in a later iteration
                chosen.append(torch.arange(max(self.held[rows]), dtype=torch.int32, device=k.device).expand(heads, -1))
                kept += self.held[rows]
                if self.cache.track:
                    self.observed.append(None)
                continue
            here = [length - guide for length in lengths[rows]]
            candidates = sum(here) // heads
            self.share[b] = iteration.memory[b][self.index]
            keep = min(self.share[b], candidates)
            slots = torch.arange(max(here), dtype=torch.int32, device=k.device).expand(heads, -1)
            if keep == 0:
                slots, here, self.whole[b] = slots[:, :0], [0] * heads, False
            elif keep < candidates or self.cache.pruner.accumulates:
                offer = self._offer(b, k[rows], v[rows], lengths[rows], queries, count, guide, rotated)
                if keep < candidates:
                    slots, here, stayed = self._choose_memory(offer, b, keep, here)
                    self.whole[b] = False
                    if self.recent is not None:  # queries whose own keys may be gone
                        self.recent.forget(b, stayed)
            if self.cache.measures_retention:
                self.retained[b].append((int(self._from_memory(b, slots, here).sum()), sum(here)))
            if self.cache.track:
                self.observed.append(self._observe(b, k[rows], rotated, lengths[rows]))
            chosen.append(slots)
            kept += here
        longest = max(slots.shape[1] for slots in chosen)
        every = [torch.nn.functional.pad(slots, (0, longest - slots.shape[1])) for slots in chosen]
        return torch.cat(every).long(), kept

    def _choose_memory(
        self, offer: Candidates, b: int, keep: int, here: list[int]
    ) -> tuple[Tensor, list[int], int]:  # slots, how many of each row count, how many last ones surely stayed
        if not self.cache.append:
            return self._choose(offer, keep, sum(here))
        held = self.held[b * offer.heads : (b + 1) * offer.heads]
        new = keep - sum(held) // offer.heads
        if new <= 0:
            slots = torch.arange(max(held), dtype=torch.int32, device=offer.keys.device)
            return slots.expand(offer.heads, -1), list(held), 0
        ends = torch.tensor(held).to(offer.keys.device)[:, None]
        pruner, sinks = self.cache.pruner, self.cache.pruner.num_sink_tokens
        if any(held) and min(held) < sinks:  # the prompt's first tokens, not a chunk's
            sinks = min(held)
            pruner = replace(pruner, num_sink_tokens=sinks)  # type: ignore[type-var]
        wanted = new + (sinks if any(held) else 0)  # sinks that memory has take nothing from the chunk
        ranking = pruner.rank(offer, wanted)
        ranks = ranking.scores.masked_fill(offer.places()[0] < ends, float("inf"))
        lost = [max(ranking.lost - n, 0) for n in held]  # what memory has stays
        slots, kept = self._divided(ranks, min(keep, offer.count - max(lost)), sum(here) - sum(lost))
        counts = [slots.shape[1]] * offer.heads if kept is None else kept.tolist()
        return slots, counts, min(ranking.recent, new)

    def _from_memory(self, b: int, slots: Tensor, kept: list[int]) -> Tensor:
        """int64 [Hkv]: how many of the kept slots were memory."""
        heads = len(kept)
        held = torch.tensor(self.held[b * heads : (b + 1) * heads]).to(slots.device)[:, None]
        counts = torch.tensor(kept).to(slots.device)[:, None]
        return ((slots < held) & (torch.arange(slots.shape[1], device=slots.device) < counts)).sum(1)

    def prune(self) -> None:
        """Makes what was chosen the memory."""
        choice, self._choice = self._choice, None
        if choice is None:
            return
        R, T, D = choice.keys.shape
        slots, K = choice.slots, choice.slots.shape[1]
        rows = (torch.arange(R, device=slots.device)[:, None] * T + slots).flatten()

        def taken(x: Tensor) -> Tensor:
            return x.reshape(R * T, x.shape[2]).index_select(0, rows).view(R, K, x.shape[2])

        self.memory, self.held = (taken(choice.keys), taken(choice.values)), choice.kept
        if self.received is not None:
            counts = torch.tensor(choice.kept).to(slots.device)[:, None]
            gone = torch.arange(K, device=slots.device) >= counts
            self.received = self.received.gather(1, slots.clamp(max=self.received.shape[1] - 1)).masked_fill_(gone, 0)
        if choice.origins is not None:
            self.origins = taken(choice.origins)

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

    def mean_of(self, b: int) -> int:
        """Tokens in memory of sequence b, mean over its rows."""
        heads = self.cache.kv_heads
        return sum(self.held[b * heads : (b + 1) * heads]) // heads

    def _longest(self, batch: int) -> list[int]:
        heads = len(self.held) // batch
        return [max(self.held[b * heads : (b + 1) * heads]) for b in range(batch)]

    # ---- what is seen of it ----

    def _places_read(self, columns: int, heads: int, device: torch.device) -> Tensor:
        """int32 [B, Hkv, columns, 1]: place in the prompt of this call's tokens."""
        counts = self.cache.step.counts
        first = torch.tensor([read - (columns - n) for read, n in zip(self.read, counts, strict=True)])
        places = first[:, None] + torch.arange(columns)
        return places.to(torch.int32).to(device)[:, None, :, None].expand(-1, heads, -1, -1)

    def _observe(self, b: int, k: Tensor, rotated: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """float32 [Hkv] each, on the CPU: share of the chunk's attention that memory received, and memory's keys."""
        step = self.cache.step
        assert step.iteration is not None
        guide, count, heads = step.iteration.guide_length, step.counts[b], len(lengths)
        chunk, T = count - guide, max(lengths) - guide
        held = torch.tensor(self.held[b * heads : (b + 1) * heads])
        queries = rotated[b, :, rotated.shape[2] - count : rotated.shape[2] - guide].unflatten(0, (heads, -1))
        ends = torch.tensor(lengths, dtype=torch.int32) - guide
        received = ops.window_scores(
            queries, k[:, None, :T].contiguous(), scale=self.scaling, reduce="sum", kernel_size=1, skip_last=0,
            lengths=None if min(lengths) == max(lengths) else ends.to(k.device),
        )[:, 0].cpu()  # fmt: skip
        in_memory = torch.arange(T) < held[:, None]
        return (received * in_memory).sum(1) / (chunk * queries.shape[1]), held.float()

    def layer_reading(self, b: int) -> LayerReading:
        """What was seen of sequence b in the iteration that ends."""
        heads = len(self.held) // len(self.next)
        rows, seen = range(b * heads, (b + 1) * heads), self.observed[b]
        assert self.origins is not None and seen is not None
        start = self.read[b] - self.cache.step.counts[b]
        assert self.cache.step.iteration is not None
        start += self.cache.step.iteration.guide_length
        positions = tuple(self.origins[row, : self.held[row], 0].cpu() for row in rows)
        old = torch.tensor([int((places < start).sum()) for places in positions])
        retention = old / torch.tensor([max(len(places), 1) for places in positions])
        return LayerReading(positions, retention, seen[0], seen[1])

    # ---- a prompt begins and ends ----

    def _slack(self) -> int:
        return 1 if self.cache.every else NEVER

    def _keep(self, b: int) -> int:
        return self.cache.final_memory(b, self.read[b], self.index)

    def begin_prompt(self) -> None:
        """A prompt begins; in a conversation, what is held becomes unrotated memory again."""
        pool, rotary = self.pool, self.cache.rotary
        if pool is None or rotary is None:
            return
        if self.cache.pruner.accumulates and self.recent is not None and self.recent.held:
            self._settle_held(slack=NEVER)  # the queries that came after the last prompt vote
        heads, counts = self.heads, pool.counts
        k, v = pool.gather(max(counts))
        slots = torch.arange(k.shape[1], dtype=torch.int32, device=k.device)
        places = slots.expand(len(k), -1) if self.shift is None else slots + self.shift[:, None]
        if self.split is not None:
            places = torch.where(slots < self.split[:, None], slots, places)
        bound = max(*self.next, 0) + k.shape[1]
        lengths = self._spread(self.rope_lengths, heads)
        if self.cache.track is not None:  # tokens since the last prompt follow those of its memory
            self.held_at_end = self.held_at_end or [0] * len(counts)
            since = [self.read[row // heads] - count for row, count in enumerate(counts)]
            later = torch.tensor(since, dtype=torch.int32).to(k.device)[:, None] + slots
            before = later[:, :0] if self.origins is None else self.origins[..., 0]
            known = torch.nn.functional.pad(before, (0, len(slots)))[:, : len(slots)]
            ends = torch.tensor(self.held_at_end).to(k.device)[:, None]
            self.origins = torch.where(slots < ends, known, later)[..., None]
        self.memory = rotary.unrotate(k[:, None], bound, lengths, places.contiguous())[:, 0], v
        self.held, self.pool = list(counts), None
        self.shift = self.split = self.recent = None

    def end_prompt(self) -> None:
        """Memory moves into pages, rotated once for the positions that it keeps while decoding."""
        if self.memory is None:
            return
        k, v = self.memory
        B, heads, D = len(self.next), len(self.held) // len(self.next), k.shape[2]
        T, longest = max(self.held), self._longest(B)
        k = self._rotated(k[:, :T], longest, [max(held, 1) for held in longest])
        v = v[:, :T]
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
        self.memory, self.held, self.held_at_end = None, [], kept

    # ---- state ----

    def drop_last(self, tokens: int) -> None:
        super().drop_last(tokens)
        self.read = [read - tokens for read in self.read]

    def select_batch(self, indices: list[int]) -> None:
        if self.memory is not None:
            raise RuntimeError("the batch of this cache cannot change while a prompt is being read")
        if self.pool is not None:
            rows = [b * self.heads + h for b in indices for h in range(self.heads)]
            self.held_at_end = [self.held_at_end[row] for row in rows] if self.held_at_end else []
            if self.origins is not None:
                self.origins = self.origins[torch.tensor(rows).to(self.origins.device)]
        super().select_batch(indices)
        self.read = [self.read[b] for b in indices] if self.read else []
        self.retained = [list(self.retained[b]) for b in indices] if self.retained else []
        self.share = [self.share[b] for b in indices] if self.share else []

    def check_step(self, step: Step) -> None:
        if step.iteration is None:
            super().check_step(step)
            return
        CompressedLayer.check_step(self, step)
        self.cache.note_context(self.keys_in_sight(step))

    def keys_in_sight(self, step: Step) -> int:
        if step.iteration is None:
            return super().keys_in_sight(step)
        held = self._longest(len(step.counts)) if self.held else [0] * len(step.counts)
        return max(have + count for have, count in zip(held, step.counts, strict=True))

    def _side_nbytes(self) -> int:
        choice = self._choice
        tensors = [*(self.memory or ()), self.origins, *((choice.keys, choice.values) if choice is not None else ())]
        return super()._side_nbytes() + sum(x.nbytes for x in tensors if x is not None)

    def stored_lengths(self) -> list[list[int]]:
        if self.held:
            heads = len(self.held) // len(self.next)
            return [self.held[b * heads : (b + 1) * heads] for b in range(len(self.next))]
        return super().stored_lengths()
