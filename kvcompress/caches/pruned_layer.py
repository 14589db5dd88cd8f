"""PrunedCache's layers: pages that are compressed after prompts and while decoding, in one or two segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..budgets import Uniform
from ..pruners import Candidates
from .base import Step
from .paged import PagedLayer
from .prompt import prompt_attention
from .queries import RecentQueries

if TYPE_CHECKING:
    from .pruned import PrunedCache

NEVER = 1 << 60  # tokens


class PrunedLayer(PagedLayer):
    """Pages that are compressed after a call of several tokens, and every so many decoded tokens.

    Near tokens stay rotated at their true positions. With positions="original" all others do too; with RemoteGap those
    that the last compression moved into the far segment, the first `split` slots of a row, stand at ids by rank: a
    query is rotated once for each segment, and the two results are merged.
    """

    cache: PrunedCache
    is_croppable = False

    def __init__(self, cache: PrunedCache, index: int, sliding_window: int | None) -> None:
        super().__init__(cache, index, sliding_window)
        self.split: Tensor | None = None  # int32 [R], slots of the far segment; None = there is none
        self.recent: RecentQueries | None = None
        self.received: Tensor | None = None  # float32 [R, capacity]: running scores of pruners that accumulate
        self.whole: list[bool] = []  # no token of a sequence was ever dropped
        self.near: list[int] = []  # tokens of a sequence outside the far segment
        self.blank: list[int] = []  # unused ids between the segments of each sequence ("constant": their distance)
        self.blank_rows: Tensor | None = None  # int32 [R], blank of each row, on the device
        self.scaling = 1.0

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        super().open_pool(rows, head_dim, like, rope_lengths)
        B, self.split = len(rope_lengths), None
        self.near, self.whole, self.blank, self.blank_rows = [0] * B, [True] * B, [0] * B, None

    # ---- attention ----

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        iteration, S, self.scaling = self.cache.step.iteration, queries.shape[2], scaling
        guide = 0 if iteration is None else iteration.guide_length
        if self.pool is None:
            return self._read_first(queries, keys, values, guide, scaling)
        one = S == 1 and iteration is None
        if not one and self.recent is not None:
            self._settle_held(slack=self._slack())  # a new prompt finds no more than the budget
        out = super().attend(queries, keys, values, scaling)
        self.near = [near + count for near, count in zip(self.near, self.cache.step.counts, strict=True)]
        self._note(queries, guide)
        if one:
            every = self.cache.every or NEVER
            if self.recent is not None and (self._due(every) or (self.cache.pruner.accumulates and self.recent.full)):
                self._settle_held(slack=every)
        else:
            self._settle_held(call=queries, guide=guide, slack=self._slack())
        return out

    def _slack(self) -> int:
        """Tokens over the budget from which a call of several tokens compresses."""
        return 1

    def _note(self, queries: Tensor, guide: int) -> None:
        """Keeps the queries of this call, without the guide's, for scoring while decoding."""
        if self.recent is not None and (S := queries.shape[2] - guide) > 0:
            self.recent.add(queries[:, :, :S], [max(count - guide, 0) for count in self.cache.step.counts])

    def _read_first(self, queries: Tensor, keys: Tensor, values: Tensor, guide: int, scaling: float) -> Tensor:
        """The first call: plain attention over itself; only what is chosen goes into pages."""
        rotary, counts = self.cache.rotary, self.cache.step.counts
        assert rotary is not None
        B, Hkv, S, D = keys.shape
        # frequencies that depend on length are those of the whole prompt, in whatever chunks it comes
        whole = self.cache.prompt_lengths if self.cache.step.iteration is not None else counts
        lengths = [max(count, 1) for count in whole]
        q = rotary.rotate(
            queries, self._positions(torch.zeros(B, 1, dtype=torch.int32, device=keys.device), S), S, lengths
        )
        if min(counts) < S:
            keys, values = keys.clone(), values.clone()
            for b, count in enumerate(counts):
                keys[b], values[b] = keys[b].roll(count - S, 1), values[b].roll(count - S, 1)
        k = rotary.rotate(keys, None, S, lengths)
        out = prompt_attention(q, k, values, list(counts), scaling)
        self.open_pool(B * Hkv, D, k, lengths)
        self.next = [max(count - guide, 0) for count in counts]
        self.near = list(self.next)
        self.recent = RecentQueries.of(self.cache.pruner, self.cache.every)
        self._note(queries, guide)
        held = [count for count in counts for _ in range(Hkv)]
        self._settle(
            k.flatten(0, 1), values.flatten(0, 1), held, queries, list(counts), guide, rotated=q, slack=self._slack()
        )
        return out

    def attend_held(self, queries: Tensor, rotated: Tensor, scaling: float) -> Tensor:
        if self.split is None or self.pool is None:
            return super().attend_held(queries, rotated, scaling)
        near = self._decode(rotated, self.pool.lengths, self.split, scaling, causal=True)
        far = self._decode(self._rotate_far(queries), self.split, None, scaling, causal=False)
        return ops.merge_states(near, far)[0]

    def _rotate_far(self, queries: Tensor) -> Tensor:
        """[B, Hq, S, D] at the ids that the last S tokens have as the far segment sees them."""
        assert self.pool is not None
        S = queries.shape[2]
        slots = (self.pool.lengths[:, None] - S + torch.arange(S, dtype=torch.int32, device=queries.device)).clamp_(
            min=0
        )
        return self._at_ids(queries, slots)

    def _at_ids(self, queries: Tensor, slots: Tensor) -> Tensor:
        """Queries of the tokens in these slots, int32 [R, S], as the far segment sees them."""
        rotary, gap = self.cache.rotary, self.cache.gap
        assert rotary is not None and self.pool is not None and gap is not None and self.split is not None
        B, Hq, S, D = queries.shape
        R = slots.shape[0]
        if self.blank_rows is None:
            self.blank_rows = torch.tensor(self.blank, dtype=torch.int32).to(slots.device).repeat_interleave(R // B)
        blank = self.blank_rows[:, None]
        if gap.reading == "constant":
            ids = blank.expand_as(slots).contiguous()
        else:
            ids = slots + blank + (1 - self.split[:, None] if gap.shared else 0)
        bound = max(self.pool.bounds) + max(self.blank) + 2
        rows = queries.reshape(R, B * Hq // R, S, D)
        lengths = [length for length in self.rope_lengths for _ in range(R // B)]
        return rotary.rotate(rows, ids.clamp_(min=0), bound, lengths).reshape(B, Hq, S, D)

    # ---- compression ----

    def _keep(self, b: int) -> int:
        """Tokens per head that sequence b keeps in this layer."""
        assert self.pool is not None
        slot = self.pool.store.page_nbytes() // self.pool.page_size
        return self.cache.tokens_of(self.next[b], self.index, len(self.pool.bounds), slot)

    def _due(self, slack: int) -> bool:
        heads = self.heads
        held = [sum(self.pool.bounds[b * heads : (b + 1) * heads]) // heads for b in range(len(self.next))]  # type: ignore[union-attr]
        return any(tokens > self._keep(b) + slack - 1 for b, tokens in enumerate(held))

    def _settle_held(self, *, call: Tensor | None = None, guide: int = 0, slack: int = 1) -> None:
        """Compresses what is held where it is over the budget. call: this call's queries; else the latest ones."""
        pool, pruner = self.pool, self.cache.pruner
        assert pool is not None
        if guide:  # of the sequences that had it
            guides = [guide if count else 0 for count in self.cache.step.counts]
            self.next = [place - length for place, length in zip(self.next, guides, strict=True)]
            self.near = [near - length for near, length in zip(self.near, guides, strict=True)]
        if not (guide or pruner.accumulates or self._due(slack)):
            return
        if call is not None:
            queries, valid = call, list(self.cache.step.counts)
        elif self.recent is not None and self.recent.held:
            queries, valid = self.recent.get()
        elif pruner.accumulates:  # all have voted
            B = len(self.next)
            queries, valid = pool.k_pages.new_zeros(B, self.heads, 0, pool.k_pages.shape[2]), [0] * B
        else:
            return
        k, v = pool.gather(max(pool.counts, default=0))
        self._settle(k, v, list(pool.counts), queries, valid, guide, slack=slack, held=True)

    def _settle(
        self, k: Tensor, v: Tensor, lengths: list[int], queries: Tensor, valid: list[int], guide_length: int,
        *, rotated: Tensor | None = None, slack: int = 1, held: bool = False,
    ) -> None:  # fmt: skip
        """Chooses among rows k, v [R, T, D] of these lengths, the guide's tokens last, and stores what stays.

        queries: [B, Hq, S, D] of the last tokens, valid[b] of them real; rotated: the same at true positions. held:
        the rows are what the pool holds already.
        """
        B, step = len(valid), self.cache.step
        one = step.columns == 1 and step.iteration is None
        heads = len(lengths) // B
        chosen: list[tuple[Tensor, list[int]]] = []
        near, compressed = list(self.near), [False] * B
        for b in range(B):
            rows = slice(b * heads, (b + 1) * heads)
            guide = guide_length if valid[b] else 0
            count = sum(lengths[rows]) // heads - guide
            keep = self._keep(b) if count > 0 else 0
            # a sequence that has no tokens in a call of several goes on as if there had been no call
            due = count > keep + slack - 1 and count > 0 and (one or step.counts[b] > 0)
            indices = torch.arange(max(max(lengths[rows]) - guide, 0), dtype=torch.int32, device=k.device).expand(
                heads, -1
            )
            kept = [max(length - guide, 0) for length in lengths[rows]]
            if count > 0 and (self.cache.pruner.accumulates or (due and valid[b] > 0)):
                offer = self._offer(b, k[rows], v[rows], lengths[rows], queries, valid[b], guide, rotated)
                if due:
                    indices, kept, recent = self._choose(offer, keep, sum(kept))
                    near[b] = min(recent, near[b]) if self.cache.gap is not None else near[b]
                    self.whole[b], compressed[b] = False, True
                    if self.recent is not None and not self.cache.pruner.one_frame:
                        self.recent.forget(b, recent)  # queries whose own keys may be gone
            chosen.append((indices, kept))
        longest = max(indices.shape[1] for indices, _ in chosen)
        every = torch.cat([torch.nn.functional.pad(indices, (0, longest - indices.shape[1])) for indices, _ in chosen])
        counts = [count for _, kept in chosen for count in kept]
        if held and counts == lengths:
            return  # nothing goes
        self._store(k, v, every.contiguous(), counts, near, compressed, held)

    def _offer(
        self, b: int, k: Tensor, v: Tensor, lengths: list[int], queries: Tensor, valid: int, guide: int,
        rotated: Tensor | None,
    ) -> Candidates:  # fmt: skip
        """What sequence b offers; updates its running scores."""
        rotary, pruner, position = self.cache.rotary, self.cache.pruner, self.next[b]
        assert rotary is not None
        T, heads, device = max(lengths), len(lengths), k.device
        ragged = torch.tensor(lengths, dtype=torch.int32).to(device) if min(lengths) < T else None
        last = queries[b : b + 1, :, queries.shape[2] - valid :]
        keys, q = k[None, :, :T], last
        if pruner.window and valid:
            if rotated is not None:
                q = rotated[b : b + 1, :, rotated.shape[2] - valid :]
            else:
                places = torch.arange(position + guide - valid, position + guide, dtype=torch.int32, device=device)
                q = rotary.rotate(last, places[None].contiguous(), position + guide, self.rope_lengths[b : b + 1])
            if self.split is not None:
                keys, q = self._both_segments(b, keys, last, q, lengths)
        offer = Candidates(
            queries=q, keys=keys, count=T - guide, chunk_length=valid - guide, guide_length=guide, scaling=self.scaling,
            values=v[None, :, :T], lengths=ragged, shortest=min(lengths), layer=self.index,
            whole=self.whole[b], unrotated=last, position=position, rotary=rotary,
        )  # fmt: skip
        if not pruner.accumulates:
            return offer
        sums = pruner.votes(offer) if valid else k.new_zeros(heads, T - guide, dtype=torch.float32)
        rows = slice(b * heads, (b + 1) * heads)
        if self.received is None or self.received.shape[1] < T:
            wider = sums.new_zeros(len(self.next) * heads, 2 * T)
            if self.received is not None:
                wider[:, : self.received.shape[1]] = self.received
            self.received = wider
        self.received[rows, : T - guide] += sums
        if self.recent is not None:
            self.recent.clear()
        return Candidates(**{**vars(offer), "received": self.received[rows, : T - guide]})

    def _both_segments(
        self, b: int, keys: Tensor, queries: Tensor, near: Tensor, lengths: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Keys and queries of twice the head dim, whose products are those of the segment that a key is in."""
        assert self.split is not None
        heads, T, S = keys.shape[1], keys.shape[2], queries.shape[2]
        split = self.split[b * heads : (b + 1) * heads, None]
        slots = torch.arange(T, dtype=torch.int32, device=keys.device)
        far = (slots < split)[None, ..., None]
        both = torch.cat([keys.masked_fill(~far, 0), keys.masked_fill(far, 0)], dim=-1)
        ends = torch.tensor(lengths, dtype=torch.int32).to(keys.device)[:, None]
        own = (ends - S + torch.arange(S, dtype=torch.int32, device=keys.device)).clamp_(min=0)
        every = self.split.new_zeros(len(self.rope_lengths) * heads, S)
        every[b * heads : (b + 1) * heads] = own
        wide = queries.expand(len(self.rope_lengths), -1, -1, -1)
        return both, torch.cat([self._at_ids(wide, every)[b : b + 1], near], dim=-1)

    def _choose(self, offer: Candidates, keep: int, allowed: int) -> tuple[Tensor, list[int], int]:
        """(indices [Hkv, K], how many of each row count, how many last tokens surely stayed)."""
        gap = self.cache.gap
        ranking = self.cache.pruner.rank(offer, keep, recent=0 if gap is None else gap.near_length or 0)
        indices, kept = self._divided(ranking.scores, ranking.keep, allowed - ranking.lost * offer.heads)
        counts = [indices.shape[1]] * offer.heads if kept is None else kept.tolist()
        return indices, counts, ranking.recent

    def _divided(self, ranks: Tensor, keep: int, allowed: int) -> tuple[Tensor, Tensor | None]:
        """The budget's choice, with an error of NaN scores that says where they are."""
        try:
            return self.cache.budget.divide(ranks, keep, allowed)
        except RuntimeError as error:
            if "NaN" not in str(error):
                raise
            raise RuntimeError(
                f"scores of {type(self.cache.pruner).__name__} in layer {self.index} hold NaN; that layer's keys or "
                "queries do, or its pruner's scores are wrong"
            ) from error

    def _store(
        self,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        kept: list[int],
        near: list[int],
        compressed: list[bool],
        held: bool,
    ) -> None:
        """Makes the chosen slots of rows k, v [R, T, D] what the pool holds."""
        pool, gap = self.pool, self.cache.gap
        assert pool is not None
        R, T, D = k.shape
        device, heads = k.device, R // len(self.next)
        counts = torch.tensor(kept, dtype=torch.int32).to(device)
        dropped = not all(self.whole)
        if self.received is not None:
            taken = self.received.gather(1, indices.long().clamp(max=self.received.shape[1] - 1))
            slots = torch.arange(indices.shape[1], device=device)
            self.received = taken.masked_fill_(slots >= counts[:, None], 0)
        places = torch.tensor([place for place in self.next for _ in range(heads)], dtype=torch.int32).to(device)
        if held and gap is None:
            pool.compact(indices, kept)
            self.shift = places - counts
            return
        longest = max(kept, default=0)
        # the pool takes right-aligned tokens
        right = (torch.arange(longest, device=device) - (longest - counts[:, None])).clamp_(min=0)
        old = indices.long().gather(1, right)
        flat = (torch.arange(R, device=device)[:, None] * T + old).flatten()
        k, v = (x.reshape(R * T, D)[flat].view(R, longest, D) for x in (k, v))
        if gap is not None and dropped:
            k, split = self._renumber(k, old, right, counts, near, compressed)
            self.split = split
            self.near = near
        if held:
            pool.rewrite([x.unflatten(0, (-1, heads)) for x in (k, v)], kept)
        else:
            pool.append([x.unflatten(0, (-1, heads)) for x in (k, v)], kept)
        self.shift = places - counts if dropped else None

    def _renumber(
        self, k: Tensor, old: Tensor, new: Tensor, counts: Tensor, near: list[int], compressed: list[bool]
    ) -> tuple[Tensor, Tensor]:
        """Moves the keys of the far segment to their ids. k: [R, K, D] from slots old to slots new, int64 [R, K]."""
        rotary, gap = self.cache.rotary, self.cache.gap
        assert rotary is not None and gap is not None
        rotary.check_one_table(max(*self.next, *self.rope_lengths))
        heads = len(counts) // len(near)
        whole = torch.tensor(self.whole, device=k.device).repeat_interleave(heads)
        near_counts = torch.tensor([n for n in near for _ in range(heads)], dtype=torch.int32).to(k.device)
        split = torch.where(whole, 0, (counts - near_counts).clamp(min=0))
        position = old if self.shift is None else old + self.shift[:, None]
        if self.split is not None:
            position = torch.where(old < self.split[:, None], 0 if gap.shared else old, position)
        ids = torch.where(new < split[:, None], 0 if gap.shared else new, position)
        distance = (position - ids).clamp_(min=0).to(torch.int32)
        moved = rotary.move_back(k[:, None], distance, max(self.next) + 1, self.rope_lengths[0])[:, 0]
        if self.cache.bounded:
            self.blank_rows = None
            for b, (far, here) in enumerate(zip(split.view(-1, heads).amax(1).tolist(), compressed, strict=True)):
                if here:
                    self.blank[b] = gap.blank(far, near[b], self.cache.growth, self.cache.trained_length)
        return torch.where((distance == 0)[..., None], k, moved), split.to(torch.int32)

    # ---- limits ----

    def check_step(self, step: Step) -> None:
        super().check_step(step)
        gap, trained = self.cache.gap, self.cache.trained_length
        if gap is None or (self.index and isinstance(self.cache.budget, Uniform)):  # then all layers are alike
            return
        if self.pool is None:
            if self.cache.bounded and max(step.counts) > trained:
                raise ValueError(
                    f"a prompt of {max(step.counts)} tokens in one pass has positions beyond the {trained} that the "
                    "model was trained for; give PrunedCache a chunk_size"
                )
            return
        if self.split is not None or self.cache.bounded:
            reach = max(self._reach(b, count) for b, count in enumerate(step.counts))
            if reach > trained and gap.on_overflow == "error":
                raise ValueError(
                    f"positions reach {reach}, but the model was trained for {trained}; compress more often (every), "
                    "or leave more headroom in RemoteGap"
                )
            if reach > trained:
                self.cache.warn_once(f"positions reach {reach}, but the model was trained for {trained}")

    def _reach(self, b: int, count: int) -> int:
        """Positions that sequence b uses once `count` tokens have been added."""
        gap, heads = self.cache.gap, self.heads
        assert self.pool is not None and gap is not None
        if self.whole[b]:
            return self.next[b] + count
        held, near = max(self.pool.bounds[b * heads : (b + 1) * heads]), self.near[b]
        if count > 1 and self.recent is not None and held > (keep := self._keep(b)):  # compresses before it starts
            held, near = keep, min(near, self.cache.near_of(keep))
        if gap.reading == "constant":
            return near + count
        return self.blank[b] + count + (1 + near if gap.shared else held)

    def keys_in_sight(self, step: Step) -> int:
        if self.split is None or self.pool is None:
            return super().keys_in_sight(step)
        return max(self.pool.bounds) + max(self.blank) + max(step.counts)

    # ---- state ----

    def select_batch(self, indices: list[int]) -> None:
        if self.pool is None:
            return
        heads = self.heads
        super().select_batch(indices)
        self.near, self.blank = ([numbers[b] for b in indices] for numbers in (self.near, self.blank))
        self.whole, self.blank_rows = [self.whole[b] for b in indices], None
        rows = torch.tensor([b * heads + h for b in indices for h in range(heads)])
        if self.split is not None:
            self.split = self.split[rows.to(self.split.device)]
        if self.received is not None:
            self.received = self.received[rows.to(self.received.device)]
        if self.recent is not None:
            self.recent.select_batch(indices)

    def _side_nbytes(self) -> int:
        tensors = [self.split, self.received, None if self.recent is None else self.recent.queries]
        return sum(x.nbytes for x in tensors if x is not None)

    def nbytes(self) -> int:
        return super().nbytes() + self._side_nbytes()

    def reserved_nbytes(self) -> int:
        return super().reserved_nbytes() + self._side_nbytes()
