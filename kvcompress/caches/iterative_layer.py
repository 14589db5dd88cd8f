"""IterativeCache's layers: an unrotated memory and a chunk while a prompt is read, pages while decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..hf.facts import LayerFacts, OutputLayer
from ..ops.softmax import Softmax
from .attention import prompt_attention, ragged_attention
from .choose import Choice, Chooser, Offers
from .memory import Memory
from .paged import PagedLayer, step_positions
from .passes import CachePass, Iteration
from .policy import Policy
from .pool import PagePool
from .pruned_layer import PrunedLayer
from .queries import RecentQueries
from .repeating import RepeatingLayer
from .rows import BatchState, by_sequence, selected, spread
from .track import LayerReading


@dataclass(frozen=True)
class ReadingSettings:
    """append: chunks are compressed alone, memory is never rewritten. prune: "layer" or "forward". retention, track:
    what is noted of every iteration."""

    append: bool
    prune: str
    retention: bool
    track: bool


@dataclass
class _Pending:
    """One iteration of a layer, attended but not pruned yet: memory and chunk, and what stays of before[r] tokens of
    each row, the guide's aside."""

    joined: Memory
    choice: Choice
    before: list[int]


class IterativeLayer(RepeatingLayer):
    """While a prompt is read: the memory. Before, between and after prompts: pages, of a PrunedLayer where decoding
    compresses or is scored, else of a PagedLayer.

    retained[b]: tokens kept from memory, and all that were kept, by iteration. share[b]: memory that sequence b's last
    iteration gave this layer.
    """

    def __init__(self, index: int, number: int, policy: Policy, reading: ReadingSettings) -> None:
        super().__init__(index, number)
        self.policy, self.reading = policy, reading
        self.chooser = Chooser(policy.pruner, policy.budget, index, policy.every)
        self.pages: PagedLayer = self._new_pages()
        self.memory: Memory | None = None  # None = no prompt is being read
        self.retained: list[list[tuple[int, int]]] = []
        self.share: list[int] = []
        self.observed: list[tuple[Tensor, Tensor] | None] = []  # of this iteration, if tracked: attention, memory size
        self._pending: _Pending | None = None

    def _new_pages(self) -> PagedLayer:
        if self.policy.every or self.policy.pruner.accumulates:
            return PrunedLayer(self.index, self.number, self.policy, self.chooser)
        return PagedLayer(self.index, self.number, self.policy.pool)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.pages.is_croppable  # tokens that follow the prompt stay, and nothing needs their queries

    @property
    def pool(self) -> PagePool | None:
        return self.pages.pool

    def attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if step.iteration is not None:
            return self._read(step, step.iteration, queries, keys, values, softmax)
        return self.pages.attend(step, queries, keys, values, softmax)

    @property
    def repeats(self) -> bool:
        return self.pages.repeats

    def prepare_steps(self) -> None:
        self.pages.prepare_steps()

    def steps_ahead(self, facts: LayerFacts) -> int:
        return self.pages.steps_ahead(facts) if self.memory is None else 0

    def count_step(self) -> None:
        self.pages.count_step()

    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        return self.pages.held_tensors(facts)

    # ---- reading ----

    def _read(
        self, step: CachePass, iteration: Iteration, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attention of memory and chunk, positions from 0 in each iteration; then the memory is chosen anew."""
        facts, counts, (B, Hkv, S) = step.facts[self.index], step.counts, keys.shape[:3]
        memory = self.memory or Memory.empty(B, keys, values)
        self.chooser.begin(B)
        longest = memory.longest(B)
        totals = [held + count for held, count in zip(longest, counts, strict=True)]
        joined, before = memory.joined(keys, values, step), memory.held
        self.memory = memory = memory.without_tokens()  # a copy of them is the first part of the joined ones
        in_sight, T = [max(total, 1) for total in totals], joined.keys.shape[1]
        first = torch.tensor([[held] for held in longest], dtype=torch.int32, device=keys.device)
        positions, bound = step_positions(first, counts, S), max(T, S, *totals)
        k = joined.rotated(facts.key_rotary, in_sight, late=memory.late(B))
        even = joined.held == spread(totals, Hkv)

        def rotated(x: Tensor) -> Tensor:
            return facts.query_rotary.rotate(x, positions, bound, in_sight)

        def seen(q: Tensor, softmax: Softmax) -> Tensor:
            if even:
                rows = k.unflatten(0, (B, Hkv)), joined.values.unflatten(0, (B, Hkv))
                return prompt_attention(q, *rows, totals, softmax)
            return ragged_attention(q, k, joined.values, joined.held, softmax)

        q, entering = rotated(queries), step.entering
        out = seen(q, softmax)

        def after() -> None:
            guides = [iteration.guide_length if count else 0 for count in counts]
            if self.policy.every and not self.policy.pruner.accumulates:  # to compress by, once decoding has begun
                self.chooser.note(queries, entering, counts, iteration.guide_length)
            ends = [total - guide for total, guide in zip(totals, guides, strict=True)]
            offers = Offers(
                k, joined.values, joined.held, q, queries, list(counts), guides, ends, facts.query_rotary,
                facts.key_rotary, in_sight, softmax, entering=entering,
            )  # fmt: skip
            choice = self._choose(offers, before, iteration, step.facts.outputs.get(self.index))
            self._pending = _Pending(joined, choice, [n for b in range(B) for n in offers.counts(b)])
            if self.reading.prune == "layer":
                self.prune()

        step.lend_view(self.index, lambda x, softmax: seen(rotated(x), softmax), after)
        return out

    def _choose(self, offers: Offers, held: list[int], iteration: Iteration, output: OutputLayer | None) -> Choice:
        B, heads = len(offers.valid), offers.heads
        self.retained, self.share = self.retained or [[] for _ in range(B)], self.share or [0] * B
        keep: list[int | None] = [None] * B
        for b, valid in enumerate(offers.valid):
            if valid:  # a sequence without tokens starts in a later iteration
                self.share[b] = iteration.memory[b][self.number]
                candidates = sum(offers.counts(b)) // heads
                keep[b] = self.share[b] if self.share[b] < candidates else None
        choice = self.chooser.choose(
            offers, keep, number=self.number, fixed=held if self.reading.append else None, output=output
        )
        if self.reading.retention:
            stayed = choice.below(held).tolist()
            for b, valid in enumerate(offers.valid):
                if valid:
                    rows = offers.rows(b)
                    self.retained[b].append((sum(stayed[rows]), sum(choice.kept[rows])))
        if self.reading.track:
            self.observed = [self._observe(offers, b, held) if valid else None for b, valid in enumerate(offers.valid)]
        return choice

    def prune(self) -> None:
        """Makes what was chosen the memory."""
        if self._pending is not None:
            self.memory = self._pending.joined.keep(self._pending.choice, self._pending.before)
            self.chooser.follow(self._pending.choice)
            self._pending = None

    # ---- what is seen of it ----

    def _observe(self, offers: Offers, b: int, held: list[int]) -> tuple[Tensor, Tensor]:
        """float32 [Hkv] each, on the CPU: share of the chunk's attention that memory received, and memory's keys."""
        rows, ends = offers.rows(b), offers.counts(b)
        before, S = torch.tensor(held[rows], device="cpu"), offers.queries.shape[2]
        queries = offers.queries[b, :, S - offers.valid[b] : S - offers.guides[b]].unflatten(0, (len(ends), -1))
        G, received = queries.shape[1], []
        for h, end in enumerate(ends):  # heads have softmaxes of their own
            softmax = offers.softmax.of_heads(slice(h * G, (h + 1) * G))
            scores = ops.window_scores(
                queries[h : h + 1], offers.keys[rows][h : h + 1, None, :end], reduce="sum", kernel_size=1, skip_last=0,
                **softmax.options,
            )  # fmt: skip
            received.append(scores[0, 0, : held[rows][h]].sum())
        chunk = offers.valid[b] - offers.guides[b]
        return torch.stack(received).cpu() / (chunk * G), before.float()

    def layer_reading(self, b: int, start: int) -> LayerReading:
        """What was seen of sequence b in the iteration that ends, whose chunk began at place `start`."""
        memory, observed = self.memory, self.observed[b]
        assert memory is not None and observed is not None
        positions = tuple(x.clone() for x in memory.origins.rows(memory.held, len(self.observed))[b])
        old = torch.tensor([int((places < start).sum()) for places in positions], device="cpu")
        retention = old / torch.tensor([max(len(places), 1) for places in positions], device="cpu")
        return LayerReading(positions, retention, *observed)

    # ---- a prompt begins and ends ----

    def begin_prompt(self, facts: LayerFacts) -> None:
        """A prompt begins; in a conversation, what is held becomes unrotated memory again."""
        pages, pool = self.pages, self.pages.pool
        if pool is None:
            return
        split = None
        if isinstance(pages, PrunedLayer):
            pages.count_votes(facts)  # of the queries that came after the last prompt
            split = pages.far.split
        counts = pool.counts
        k, v = pool.gather(max(counts))
        slots = torch.arange(k.shape[1], dtype=torch.int32, device=k.device)
        places = slots.expand(len(k), -1) if pages.shift is None else slots + pages.shift[:, None]
        if split is not None:
            places = torch.where(slots < split[:, None], slots, places)
        bound, lengths = max(*pages.next, 0) + k.shape[1], spread(pages.rope_lengths, pages.heads)
        k = facts.key_rotary.unrotate(k[:, None], bound, lengths, places.contiguous())[:, 0]
        self.memory, self.pages = Memory(k, v, list(counts), pool.origins), self._new_pages()
        self.chooser.recent = RecentQueries.of(self.policy.pruner, self.policy.every)

    def end_prompt(self, facts: LayerFacts, read: list[int], lasting: list[bool]) -> None:
        """Memory moves into pages, rotated once for the positions that it keeps while decoding. lasting: sequences that
        keep in this layer what its last iteration gave it."""
        memory, pages, B = self.memory, self.pages, len(read)
        if memory is None:
            return
        kept, longest = memory.held, memory.longest(B)
        heads, T = len(kept) // B, max(kept)
        memory = Memory(memory.keys[:, :T], memory.values[:, :T], kept, memory.origins)
        late, lengths = memory.late(B), [max(held, 1) for held in longest]
        k, v = memory.rotated(facts.key_rotary, lengths, late=late), memory.values
        pages.open_pool(len(kept), k.shape[2], k, lengths)
        assert pages.pool is not None
        if min(kept) < T:  # the pool takes right-aligned tokens
            right = (torch.arange(T, device="cpu") - T + torch.tensor(kept, device="cpu")[:, None]).clamp_(min=0)
            right = right.to(k.device)[..., None]
            k, v = (torch.take_along_dim(x, right, 1) for x in (k, v))
        pages.pool.fill([x.unflatten(0, (B, heads)) for x in (k, v)], kept, memory.origins)
        pages.next = longest
        pages.offsets = [place - tokens for place, tokens in zip(longest, read, strict=True)]
        if isinstance(pages, PrunedLayer):
            pages.far.near = [min(held) for held in by_sequence(kept, B)]
            pages.limits = [share if last else None for share, last in zip(self.share or [0] * B, lasting, strict=True)]
        self.memory = None

    # ---- state ----

    def check_step(self, step: CachePass, facts: LayerFacts) -> None:
        self.pages.check_step(step, facts)

    def keys_in_sight(self, counts: tuple[int, ...]) -> int:
        """Most keys that a query of an iteration sees."""
        held = self.memory.longest(len(counts)) if self.memory is not None else [0] * len(counts)
        return max(have + count for have, count in zip(held, counts, strict=True))

    def mean_of(self, b: int, batch: int) -> int:
        """Tokens in memory of sequence b, mean over its rows."""
        if self.memory is None:
            return 0
        held = by_sequence(self.memory.held, batch)[b]
        return sum(held) // len(held)

    def drop_last(self, tokens: int) -> None:
        self.pages.drop_last(tokens)

    def select(self, indices: list[int], batch: int) -> None:
        if self.memory is not None:
            raise RuntimeError("the batch of this cache cannot change while a prompt is being read")
        self.pages.select(indices, batch)
        if not isinstance(self.pages, PrunedLayer):  # which takes it along
            self.chooser.select(indices, batch)
        self.retained, self.share = (selected(x, indices, batch) for x in (self.retained, self.share))

    def stored_lengths(self) -> list[list[int]]:
        if self.memory is None:
            return self.pages.stored_lengths()
        return by_sequence(self.memory.held, len(self.chooser.whole))

    def kept_positions(self) -> list[list[Tensor]]:
        memory = self.memory
        if memory is None:
            return self.pages.kept_positions()
        return memory.origins.rows(memory.held, len(self.chooser.whole))

    def _side_nbytes(self) -> int:
        parts: list[BatchState | None] = [self.memory, None if self._pending is None else self._pending.joined]
        if not isinstance(self.pages, PrunedLayer):
            parts.append(self.chooser)
        return sum(part.nbytes() for part in parts if part is not None)

    def nbytes(self) -> int:
        return self.pages.nbytes() + self._side_nbytes()

    def reserved_nbytes(self) -> int:
        return self.pages.reserved_nbytes() + self._side_nbytes()

    def trim(self) -> None:
        self.pages.trim()
