"""PrunedCache's layers: pages that are compressed after prompts and while decoding, in one or two segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..budgets import GlobalTopK
from ..hf.facts import LayerFacts
from ..ops.softmax import Softmax
from .attention import prompt_attention, prompt_state
from .choose import Choice, Chooser, Offers
from .contest import Contest, Left
from .far import FarSegment, Ranks
from .origins import Origins
from .paged import Alone, PagedLayer, step_positions
from .passes import CachePass
from .policy import NEVER, Policy
from .rows import by_sequence


class PrunedLayer(PagedLayer):
    """Pages that are compressed after a call of several tokens, and every so many decoded tokens.

    Near tokens stay rotated at their true positions. With positions="original" all others do too; with RemoteGap those
    that the last compression moved into the far segment stand at ids by rank: a query is rotated once for each segment,
    and the two results are merged.
    limits: tokens per head that a sequence keeps where the budget does not say; None = it does.
    """

    def __init__(self, index: int, number: int, policy: Policy, chooser: Chooser | None = None) -> None:
        super().__init__(index, number, policy.pool)
        self.policy = policy
        self.chooser = chooser or Chooser(policy.pruner, policy.budget, index, policy.every, holds=policy.holds_scores)
        self.far = FarSegment(0)
        self.limits: list[int | None] = []
        self.softmax = Softmax(1.0)  # of the last call

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        super().open_pool(rows, head_dim, like, rope_lengths)
        batch = len(rope_lengths)
        self.far, self.limits = FarSegment(batch), [None] * batch
        self.chooser.begin(batch)

    # ---- attention ----

    def attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        self.softmax = softmax
        if self.pool is None or (step.continues and not step.more):
            return self._read_prompt(step, queries, keys, values, softmax)
        if step.later:
            found = super().attend(step, queries, keys, values, softmax)
            self._count(step.counts)
            return found
        recent, facts, policy = self.chooser.recent, step.facts[self.index], self.policy
        one = step.columns == 1 and step.iteration is None
        if not one and recent is not None and (step.contest is not None or step.continues):
            self.count_votes(facts, [count > 0 for count in step.counts])
        elif not one and recent is not None:  # a new prompt finds no more than the budget
            self._compress(step, facts, slack=self._slack(step))
        self.note_index(step)
        out = self.attend_one(step, queries, keys, values, softmax)
        view = None if out is not None else self.append(step, keys, values)
        self._count(step.counts)
        entering = step.entering
        self.chooser.note(queries, entering, step.counts, step.guide_length)

        def after() -> None:
            if not one:
                self._compress(step, facts, call=queries, entering=entering, slack=self._slack(step))
            elif recent is not None:
                every = policy.every or NEVER
                if self._due(every, step) or (policy.pruner.accumulates and recent.full):
                    self._compress(step, facts, slack=every)

        if view is not None and step.ends_unheard(self.index):
            after()
            return torch.zeros_like(queries)
        if view is not None:
            return step.answer(self.index, view, queries, softmax, after)
        after()
        assert out is not None
        return out

    def attend_one(
        self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor | None:
        split = self.far.split
        near = self._step(step, queries, keys, values, softmax, split)
        if near is None or split is None:
            return None if near is None else near[0]
        turned = self.far.turned(queries, self._ranks(queries), self.policy, step.facts[self.index].query_rotary)
        return ops.merge_states(near, self._decode(turned, split, None, softmax.rest, causal=False))[0]

    def _count(self, counts: Sequence[int]) -> None:
        self.far.near = [near + count for near, count in zip(self.far.near, counts, strict=True)]

    def _read_prompt(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """The first call, or the last part of a prompt: plain attention over itself and the parts before; only what is
        chosen goes into pages."""
        self.note_index(step)
        facts, counts, lengths = step.facts[self.index], step.counts, step.whole
        B, Hkv, S, D = keys.shape
        before = 0 if self.pool is None else max(self.pool.counts)  # one sequence's: no row lacks any
        end = before + S
        positions = step_positions(torch.full((B, 1), before, dtype=torch.int32, device=keys.device), counts, S)
        if step.padded:
            last = torch.arange(S, device=keys.device) - step.on(keys.device)  # columns of tokens, left-aligned
            index = last.remainder(S)[:, None, :, None].expand_as(keys)
            keys, values = keys.gather(2, index), values.gather(2, index)
        k = facts.key_rotary.rotate(keys, positions if before else None, end, lengths)
        if before:
            held = (x.unflatten(0, (B, Hkv)) for x in self.opened.gather(before))
            k, values = (torch.cat(both, 2) for both in zip(held, (k, values), strict=True))
        seen = [before + count for count in counts]

        def rotated(x: Tensor) -> Tensor:
            return facts.query_rotary.rotate(x, positions, end, lengths)

        def attention(rotated: Tensor, softmax: Softmax) -> Tensor:
            if (index := self.choosing(step, end)) is not None:
                return index.attend(step, rotated, k, values, self._per_row(seen), softmax)
            return prompt_attention(rotated, k, values, seen, softmax)

        def view(x: Tensor, softmax: Softmax) -> Tensor:
            return attention(rotated(x), softmax)

        if self.pool is None:
            self.open_pool(B * Hkv, D, k, lengths)
        self.next = list(seen)
        self._count(counts)
        self.chooser.note(queries, step.entering, counts, step.guide_length)
        q, entering = rotated(queries), step.entering
        sums = None
        if self.policy.pruner.uses_sums and self.choosing(step, end) is None:
            out, sums = prompt_state(q, k, values, seen, softmax)
        else:
            out = attention(q, softmax)

        def after() -> None:
            guides = self._without_guide(step)
            offers = Offers(
                k.flatten(0, 1), values.flatten(0, 1), self._per_row(seen), q, queries, list(counts), guides,
                list(self.next), facts.query_rotary, facts.key_rotary, lengths, softmax, sums, entering=entering,
            )  # fmt: skip
            self.settle(offers, step, facts, held=False)

        step.lend_view(self.index, view, after)
        return out

    def attend_held(self, step: CachePass, queries: Tensor, rotated: Tensor, softmax: Softmax, alone: Alone) -> Tensor:
        pool, split = self.pool, self.far.split
        if split is None or pool is None:
            return super().attend_held(step, queries, rotated, softmax, alone)
        near = self._decode(rotated, pool.lengths, split, softmax, causal=True)
        turned = self.far.turned(queries, self._ranks(queries), self.policy, step.facts[self.index].query_rotary)
        return ops.merge_states(near, self._decode(turned, split, None, softmax.rest, causal=False))[0]

    def _ranks(self, queries: Tensor) -> Ranks:
        """Of queries [B, Hq, S, D] of the last S tokens held."""
        S = queries.shape[2]
        slots = self.opened.lengths[:, None] - S + torch.arange(S, dtype=torch.int32, device=queries.device)
        return Ranks(slots.clamp_(min=0), max(self.opened.bounds), self.rope_lengths)

    @property
    def repeats(self) -> bool:
        policy, recent = self.policy, self.chooser.recent
        return (
            super().repeats
            and policy.gap is None
            and (recent is None or (policy.every is None and policy.pruner.accumulates))
        )

    def prepare_steps(self) -> None:
        super().prepare_steps()
        if self.chooser.recent is not None:
            self.chooser.recent.prepare_step()

    def steps_ahead(self, facts: LayerFacts) -> int:
        recent, ahead = self.chooser.recent, super().steps_ahead(facts)
        return ahead if recent is None else min(ahead, recent.steps_ahead)  # a full ring's queries vote, on the host

    def count_step(self) -> None:
        super().count_step()
        self._count([1] * len(self.next))
        if self.chooser.recent is not None:
            self.chooser.recent.count_step()

    @property
    def placeable(self) -> bool:
        return self.repeats and self.chooser.recent is None

    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        recent, held = self.chooser.recent, super().held_tensors(facts)
        return held if recent is None else (*held, *recent.held_tensors())

    # ---- compression ----

    def keep_of(self, b: int, layers: int) -> int:
        """Tokens per head that sequence b keeps in this one of so many layers."""
        if (limit := self.limits[b]) is not None:
            return limit
        pool = self.opened
        slot = pool.store.page_nbytes() // pool.page_size
        tokens = self.next[b] - self.offsets[b]  # so far
        return self.policy.tokens_of(tokens, self.number, layers, len(pool.bounds), slot)

    def _due(self, slack: int, step: CachePass) -> list[int]:
        """The sequences that are."""
        if slack == NEVER:
            return []
        if step.contest is not None:
            return [b for b in range(len(self.next)) if self._contested(step, b, slack) is not None]
        return self._which_over(self.opened.bounds, step, slack)

    def _which_over(self, held: list[int], step: CachePass, slack: int) -> list[int]:
        """Sequences whose rows hold more than what their budgets say."""
        rows = by_sequence(held, len(self.next))
        return [b for b, row in enumerate(rows) if self._over(row, self.keep_of(b, step.compressing), slack)]

    def _over(self, held: list[int], keep: int, slack: int) -> bool:
        """Whether the rows of one sequence are so many tokens over what they are to keep, mean."""
        return self.policy.budget.over(self.number, held, keep, slack)

    def _contested(self, step: CachePass, b: int, slack: int) -> int | None:
        """Tokens per head that sequence b keeps where layers share a budget, mean over all; None = all that it has."""
        assert step.contest is not None
        keep = self.keep_of(b, step.compressing)
        return step.contest.keep(b, keep, step.kept[b], slack, called=step.counts[b] > 0)

    def _keeps(self, offers: Offers, step: CachePass, slack: int) -> list[int | None]:
        """What each sequence is to keep; None = all that it has."""
        keeps: list[int | None] = []
        one = step.columns == 1 and step.iteration is None
        for b, valid in enumerate(offers.valid):
            if step.contest is not None:
                due_to = self._contested(step, b, slack) if slack != NEVER else None
                keeps.append(due_to if valid > 0 or self.policy.pruner.accumulates else None)
                continue
            counts = offers.counts(b)
            # a sequence that has no tokens in a call of several goes on as if there had been no call
            asked = sum(counts) >= offers.heads and slack != NEVER and (one or step.counts[b] > 0)
            keep = self.keep_of(b, step.compressing) if asked else 0
            due = asked and self._over(counts, keep, slack)
            keeps.append(keep if due and (valid > 0 or self.policy.pruner.accumulates) else None)
        return keeps

    def _without_guide(self, step: CachePass) -> list[int]:
        """Tokens of the guide in each sequence, which are counted no more."""
        guides = step.guides
        if step.guide_length:
            self._count([-length for length in guides])
            self.next = [place - length for place, length in zip(self.next, guides, strict=True)]
        return guides

    def count_votes(self, facts: LayerFacts, votes: list[bool] | None = None) -> None:
        """The queries that have come since the last vote, where the pruner accumulates; votes: of which sequences."""
        recent = self.chooser.recent
        if self.policy.pruner.accumulates and recent is not None and recent.held:
            offers = self._offers(facts, *recent.get(), [0] * len(self.next))
            self.chooser.choose(offers, [None] * len(self.next), number=self.number, votes=votes)

    def _compress(
        self, step: CachePass, facts: LayerFacts, *, call: Tensor | None = None, entering: Tensor | None = None,
        slack: int,
    ) -> None:  # fmt: skip
        """Compresses what is held where it is over the budget. call: this call's queries; else the latest ones.
        entering: see Offers."""
        pool, recent, accumulates = self.opened, self.chooser.recent, self.policy.pruner.accumulates
        guides = [0] * len(self.next) if call is None else self._without_guide(step)
        # the scores of all of a prompt are held, whether some of it goes yet or not
        holds = call is not None and self.chooser.holds and self.policy.compresses(step)
        everyone = any(guides) or accumulates or holds
        if not (everyone or (due := self._due(slack, step))):
            return
        if call is not None:
            queries, valid = call, list(step.counts)
        elif recent is not None and recent.held:
            queries, valid = recent.get()
        elif accumulates:  # all have voted
            D = pool.k_pages.shape[2]
            queries, valid = pool.zeros(len(self.next), self.heads, 0, D), [0] * len(self.next)
        else:
            return
        offers = self._offers(facts, queries, valid, guides, entering, None if everyone else due)
        offers.repeated = None if step.iteration is None else step.iteration.repeated
        self.settle(offers, step, facts, slack=slack)

    def settle(
        self, offers: Offers, step: CachePass, facts: LayerFacts, *, slack: int | None = None, held: bool = True
    ) -> None:
        """Chooses, and stores what stays. slack: tokens over the budget that are due, None = as after a call of several
        tokens. held: what is offered are the pool's slots."""
        slack, gap = self._slack(step) if slack is None else slack, self.policy.gap
        near = 0 if gap is None else gap.near_length or 0
        keeps = self._keeps(offers, step, slack)
        if step.columns == 1 and step.iteration is None:  # when a sequence votes, others have no say in
            recent = self.chooser.recent
            full = [recent is not None and held >= recent.capacity for held in offers.valid]
            votes = [keep is not None or own for keep, own in zip(keeps, full, strict=True)]
        else:
            votes = [count > 0 for count in step.counts]
        choice = self.chooser.choose(
            offers,
            keeps,
            near=near,
            number=self.number,
            votes=votes,
            contest=step.contest,
            output=step.facts.outputs.get(self.index),
            scores=self.policy.compresses(step),
        )
        before = [count for b in range(len(offers.valid)) for count in offers.counts(b)]  # the guide's aside
        pool = self.opened
        if step.contest is not None:  # what others lose is free first: they may have their pages of one store
            for index, left in step.contest.lost().items():
                step.layers[index].lose(left, trim=step.contest.trims)
        if not held:
            assert offers.values is not None
            origins = Origins(len(before)).follow(choice.slots, choice.kept, before)
            pool.drop_last(pool.counts)
            pool.fill(self._gathered(choice, offers.keys, offers.values, facts), choice.kept, origins)
            self.follow(choice)
        else:
            pool.drop_last([length - count for length, count in zip(pool.counts, before, strict=True)])
            if choice.kept != before:
                self.keep_chosen(choice, facts)

    def lose(self, left: dict[int, Left], *, trim: bool) -> None:
        """Keeps what other layers of the same pass have left of it, of some sequences. trim: gives free pages back."""
        pool = self.opened
        held = pool.counts
        slots = torch.arange(max(held), dtype=torch.int32, device=pool.lengths.device).repeat(len(held), 1)
        self.keep(Choice(slots, held, [None] * len(self.next)).left(left))
        if trim:
            pool.trim()

    def choose_again(self, policy: Policy, layers: int, contest: Contest | None) -> tuple[Choice, list[int | None]]:
        """What a budget of so many layers that compress keeps of the tokens that have scores, and how many per head;
        nothing is changed. contest: where layers share it."""
        pool, held, chooser = self.opened, self.chooser.held, self.chooser
        assert held is not None
        slot = pool.store.page_nbytes() // pool.page_size
        keep: list[int | None] = []
        for b, tokens in enumerate(held.tokens):
            wanted = policy.tokens_of(tokens, self.number, layers, len(pool.bounds), slot)
            here = held.counts[b * self.heads : (b + 1) * self.heads]
            if contest is not None:
                keep.append(contest.keep(b, wanted, 1, 1, called=True))
            else:
                keep.append(wanted if policy.budget.over(self.number, here, wanted, 1) else None)
        near = 0 if policy.gap is None else policy.gap.near_length or 0
        return chooser.choose_again(keep, policy.budget, number=self.number, near=near, contest=contest), keep

    def keep_again(self, choice: Choice, keep: list[int | None], policy: Policy, facts: LayerFacts | None) -> None:
        """Keeps that, and all tokens that have no scores. facts: not needed where tokens stay at their positions."""
        pool, held = self.opened, self.chooser.held
        assert held is not None
        self.policy, self.chooser.budget = policy, policy.budget
        self.chooser.dropped(keep)
        choice = choice.with_later(held.counts, pool.counts)
        if choice.kept != pool.counts:
            self.keep_chosen(choice, facts)

    def make_room(self, choice: Choice) -> None:
        """Takes the pages that keeping it needs beside those that forks share. Raises RuntimeError for too few."""
        pool, held = self.opened, self.chooser.held
        assert held is not None
        choice = choice.with_later(held.counts, pool.counts)
        if choice.kept != pool.counts:
            pool.make_room(choice.slots if self.policy.gap is None else None, choice.kept)

    def _slack(self, step: CachePass) -> int:
        """Tokens over the budget from which a call of several tokens compresses."""
        return 1 if self.policy.prompts and self.policy.compresses(step) else NEVER

    def _offers(
        self, facts: LayerFacts, queries: Tensor, valid: list[int], guides: list[int], entering: Tensor | None = None,
        alone: list[int] | None = None,
    ) -> Offers:  # fmt: skip
        """What the pages hold. queries: or what there is of recent tokens in their place (RecentQueries). alone: of
        these sequences, None = all."""
        pool, pruner = self.opened, self.policy.pruner
        if pruner.uses_entering and entering is None:
            queries, entering = queries[..., :0], queries
        D = pool.k_pages.shape[2]
        names = ("keys", "values") if pruner.uses_values else ("keys",)
        if pruner.uses_keys:
            rows = None
            if alone is not None and len(alone) < len(self.next):
                rows = [b * self.heads + head for b in alone for head in range(self.heads)]
            keys, *values = pool.gather(max(pool.counts, default=0), names, rows)
        else:
            keys, values = pool.zeros(1).expand(len(pool.counts), max(pool.counts, default=0), D), []
        seen = queries
        if pruner.window and queries.shape[2]:
            ends = [place + guide for place, guide in zip(self.next, guides, strict=True)]
            first = torch.tensor(ends, dtype=torch.int32, device=queries.device)[:, None] - queries.shape[2]
            positions = step_positions(first, [queries.shape[2]], queries.shape[2])
            seen = facts.query_rotary.rotate(queries, positions, max(ends), self.rope_lengths)
            if self.far.split is not None:
                ranks = self._ranks(queries)
                keys, seen = self.far.both(keys, queries, seen, ranks, self.policy, facts.query_rotary)
        return Offers(
            keys, values[0] if values else None, list(pool.counts), seen, queries, valid, guides, list(self.next),
            facts.query_rotary, facts.key_rotary, self.rope_lengths, self.softmax, entering=entering,
        )  # fmt: skip

    def keep_chosen(self, choice: Choice, facts: LayerFacts | None) -> None:
        """keep, where tokens of a far segment get new ids besides. facts: None where tokens stay at their positions."""
        pool = self.opened
        if self.policy.gap is None:
            self.keep(choice)
            return
        keys, values = pool.gather(max(pool.counts), exact=True)  # what does not move keeps its codes
        anew = self._gathered(choice, keys, values, facts)
        self.keep(choice, anew)

    def follow(self, choice: Choice) -> None:
        super().follow(choice)
        self.chooser.follow(choice)

    def _gathered(self, choice: Choice, keys: Tensor, values: Tensor, facts: LayerFacts | None) -> list[Tensor]:
        """Of keys and values [R, T, D] those that were chosen, [B, Hkv, K, D], right-aligned as the pool takes them;
        those of a far segment at its ids."""
        pool, policy, kept = self.opened, self.policy, choice.kept
        device, heads, whole = pool.lengths.device, self.heads, self.chooser.whole
        counts = torch.tensor(kept, dtype=torch.int32, device=device)
        K, (_, T, D) = max(kept, default=0), keys.shape
        places = (torch.arange(K, device=device) - (K - counts[:, None])).clamp_(min=0)
        old = choice.slots.long().gather(1, places)
        flat = (torch.arange(len(kept), device=device)[:, None] * T + old).flatten()
        keys, values = (x.reshape(-1, D)[flat].view(-1, K, D) for x in (keys, values))
        if policy.gap is not None and not all(whole):
            assert facts is not None
            pairs = zip(self.far.near, choice.recent, strict=True)
            self.far.near = [near if recent is None else min(recent, near) for near, recent in pairs]
            self.far.reopen(kept, choice.recent, policy)
            lengths, bound = self.rope_lengths, max(self.next) + 1
            keys = self.far.renumber(keys, old, counts, places, self.shift, whole, policy, facts, bound, lengths)
        return [x.unflatten(0, (-1, heads)) for x in (keys, values)]

    # ---- limits ----

    def reach(self, b: int, count: int, layers: int) -> int:
        """Positions that sequence b uses once `count` tokens have been added."""
        gap = self.policy.gap
        assert gap is not None
        if self.chooser.whole[b]:
            return self.next[b] + count
        held, near = max(by_sequence(self.opened.bounds, len(self.next))[b]), self.far.near[b]
        compresses = count > 1 and self.chooser.recent is not None and self.policy.later != "keep"
        if compresses and held > (keep := self.keep_of(b, layers)):
            held, near = keep, min(near, self.policy.near_of(keep))  # compresses before it starts
        if gap.reading == "constant":
            return near + count
        return self.far.blank[b] + count + (1 + near if gap.shared else held)

    def check_step(self, step: CachePass, facts: LayerFacts) -> None:
        pool = self.pool
        if step.continues and not step.more:
            return  # what it holds of the prompt makes room
        if pool is not None and step.iteration is None and self.pool_settings.max_pages is not None:
            step.claim(pool, self._per_row(step.counts), self._pages_beside(step))

    def _pages_beside(self, step: CachePass) -> int:
        """Most pages that a compression in a call takes beside those of its tokens: what rows share is copied."""
        pool = self.opened
        if self.policy.later == "keep" or step.more or not pool.shares:  # what comes is kept whole
            return 0
        grown = [bound + count for bound, count in zip(pool.bounds, self._per_row(step.counts), strict=True)]
        twice = 0
        if step.columns > 1:
            if self.chooser.recent is None and self._slack(step) == NEVER:
                return 0
            twice = len(grown)  # what is compressed before the tokens come may end amid a page, where more follows
        elif self.chooser.recent is None or not self._will_be_due(grown, step):
            return 0
        return twice + (pool.shared_pages() if self.policy.gap is None else pool.pages_anew(grown))

    def _will_be_due(self, grown: list[int], step: CachePass) -> bool:
        """Whether a decoded token may find a sequence over its budget that has grown to so many slots per row."""
        every = self.policy.every or NEVER
        if every == NEVER or isinstance(self.policy.budget, GlobalTopK):  # what other layers hold, nobody knows yet
            return every != NEVER
        return bool(self._which_over(grown, step, every))

    # ---- state ----

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.policy.later == "keep"  # what follows the prompt stays, and nothing needs its queries

    def drop_last(self, tokens: int) -> None:
        super().drop_last(tokens)
        self._count([-tokens] * len(self.next))

    def beside_nbytes(self) -> int:
        return super().beside_nbytes() + self.chooser.nbytes() + self.far.nbytes()
