"""Choosing which tokens stay: what a sequence offers to a pruner, and which of it a budget keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..budgets import Budget
from ..hf.facts import OutputLayer
from ..ops.softmax import Softmax
from ..positions import RotaryTables
from ..pruners import Candidates, Pruner
from ..pruners.base import Sure, marked
from .contest import Contest, Left
from .queries import RecentQueries
from .rows import BatchState, by_sequence
from .scores import HeldScores


@dataclass
class Offers:
    """What a batch of sequences offers: tokens held before, then those of a call, then the guide if any.

    keys: [R, T, D], values: the same or None; rotated, a row for each sequence and KV head, of lengths[r] tokens.
    queries: [B, Hq, S, D] of the last S tokens as they meet those keys, unrotated: the same before rotation; valid[b]
    of them are sequence b's own. guides[b]: how many tokens are the guide's. positions[b]: that of the next token, the
    guide aside. rotary, key_rotary: of the queries and the keys; in_sight[b]: keys in sight when their frequencies were
    settled. sums: float32 [B, Hq, S], logarithms of the sums of the queries' own softmax; None = not known.
    repeated[b]: which candidates the guide repeats (see Candidates); None = it does not. entering: [B, 1, S, n], what
    entered the layer's attention for the same tokens; None where no pruner looks at it.
    """

    keys: Tensor
    values: Tensor | None
    lengths: list[int]
    queries: Tensor
    unrotated: Tensor
    valid: list[int]
    guides: list[int]
    positions: list[int]
    rotary: RotaryTables
    key_rotary: RotaryTables
    in_sight: list[int]
    softmax: Softmax
    sums: Tensor | None = None
    repeated: tuple[tuple[int, int] | None, ...] | None = None
    entering: Tensor | None = None

    @property
    def heads(self) -> int:
        return len(self.lengths) // len(self.valid)

    def rows(self, b: int) -> slice:
        return slice(b * self.heads, (b + 1) * self.heads)

    def counts(self, b: int) -> list[int]:
        """Candidates of each row of a sequence."""
        return [max(length - self.guides[b], 0) for length in self.lengths[self.rows(b)]]


@dataclass
class Choice:
    """slots: int32 [R, K], rising, of what stays; the first kept[r] count. recent[b]: how many last tokens of a
    sequence surely stay, None = it keeps all. scored: how many of them were chosen by scores that are held, None = all;
    the others are later tokens."""

    slots: Tensor
    kept: list[int]
    recent: list[int | None]
    scored: list[int] | None = None

    def below(self, slots: list[int]) -> Tensor:
        """int64 [R]: how many of a row's tokens were in its first slots[r]."""
        ends, kept = (torch.tensor(numbers, device=self.slots.device)[:, None] for numbers in (slots, self.kept))
        return ((self.slots < ends) & (torch.arange(self.slots.shape[1], device=ends.device) < kept)).sum(1)

    def left(self, left: dict[int, Left]) -> Choice:
        """The same where of some sequences less is left: slots among those that were chosen."""
        slots, kept = self.slots.clone(), list(self.kept)
        for b, own in left.items():
            heads, K = own.slots.shape
            rows = slice(b * heads, (b + 1) * heads)
            slots[rows, :K], kept[rows] = self.slots[rows].gather(1, own.slots.long()), own.kept
        return Choice(slots[:, : max(kept, default=0)], kept, self.recent)

    def with_later(self, offered: list[int], held: list[int]) -> Choice:
        """The same, of offered[r] slots of each row, with all that follow them up to held[r]."""
        if offered == held:
            return self
        device, recent, heads = self.slots.device, list(self.recent), len(held) // len(self.recent)
        kept = [count + n - m for count, n, m in zip(self.kept, held, offered, strict=True)]
        ends, firsts = (
            torch.tensor(numbers, dtype=torch.int32, device=device)[:, None] for numbers in (self.kept, offered)
        )
        places = torch.arange(max(kept), dtype=torch.int32, device=device)
        slots = torch.nn.functional.pad(self.slots, (0, max(kept)))[:, : max(kept)]
        slots = torch.where(places < ends, slots, places - ends + firsts)
        for b, sure in enumerate(recent):
            recent[b] = None if sure is None else sure + held[b * heads] - offered[b * heads]
        return Choice(slots, kept, recent, list(self.kept))


@dataclass
class _Ranked:
    """What a sequence is to choose: `keep` of its scores [Hkv, count] per head, mean, `allowed` for all heads. marks:
    (lost, sinks, recent), see pruners.base.marked. fixed: first tokens of each row that stay besides; None = none."""

    b: int
    scores: Tensor
    keep: int
    allowed: int
    marks: tuple[int, int, int]
    fixed: list[int] | None


def nan_error(pruner: Pruner, layer: int) -> RuntimeError:
    return RuntimeError(
        f"scores of {type(pruner).__name__} in layer {layer} hold NaN; that layer's keys or queries do, or its "
        "pruner's scores are wrong"
    )


def judges_by_head(pruner: Pruner) -> bool:
    return pruner.by_head and _of_its_own(pruner, "by_head")


def at_once(pruner: Pruner) -> int | None:
    """Last tokens of a prompt that must come in one call; None = all (see Pruner.at_once)."""
    return pruner.at_once if _of_its_own(pruner, "at_once") else None


def _of_its_own(pruner: Pruner, name: str) -> bool:
    """Whether it says so of its own scores and votes, not of those of a class that it changes."""
    classes = type(pruner).__mro__
    says, *others = (next(i for i, c in enumerate(classes) if x in vars(c)) for x in (name, "scores", "votes"))
    return says <= min(others)


class Chooser(BatchState):
    """Chooses for one layer, whose number is `layer`, and remembers what choosing needs.

    whole[b]: no token of a sequence was ever dropped. firsts[b]: first tokens of the prompt that are still its first
    ones, where pruners keep them. received: float32 [R, capacity], running scores of pruners that accumulate. notes:
    float32 [R, D], what they write down of each row. recent: the latest queries, None where nobody will ask for them.
    holds: whether scores are held for further choices; held: those.
    """

    def __init__(self, pruner: Pruner, budget: Budget, layer: int, every: int | None, *, holds: bool = False) -> None:
        self.pruner, self.budget, self.layer, self.holds = pruner, budget, layer, holds
        self.held: HeldScores | None = None
        self.whole: list[bool] = []
        self.firsts: list[int] = []
        self.received: Tensor | None = None
        self.notes: Tensor | None = None
        self.recent = RecentQueries.of(pruner, every)

    def begin(self, batch: int) -> None:
        """Of so many sequences, unless it has begun."""
        if not self.whole:
            self.whole, self.firsts = [True] * batch, [self.pruner.num_sink_tokens] * batch

    def note(self, queries: Tensor, entering: Tensor | None, counts: Sequence[int], guide: int) -> None:
        """Keeps queries [B, Hq, S, D], or what entered attention, of counts[b] tokens, the guide's last, for scoring
        while decoding."""
        if entering is not None and self.pruner.uses_entering:
            queries = entering
        if self.recent is None or (S := queries.shape[2] - guide) <= 0:
            return
        last = S if S == 1 or not self.pruner.accumulates else min(self.pruner.overlap, S)  # the others vote at once
        if last:
            queries = queries[:, :, S - last : S]
            self.recent.add(queries, [min(max(count - guide, 0), last) for count in counts])

    # ---- what stays ----

    def choose(
        self, offers: Offers, keep: Sequence[int | None], *, number: int = 0, near: int = 0,
        fixed: list[int] | None = None, votes: list[bool] | None = None,
        contest: Contest | None = None, output: OutputLayer | None = None, scores: bool = True,
    ) -> Choice:  # fmt: skip
        """keep[b]: tokens per head that stay of a sequence, mean; None = all. number: of the layer among those that
        compress. near: last tokens that stay in any case. fixed: first tokens of each row that stay in any case, of
        which the pruner has chosen before (append). votes[b]: whether its queries are counted in running scores, None =
        all are. contest: where layers share a budget, it says what stays. output: the layer's output projection, for
        pruners that ask for it. scores: whether the pruner can score in this pass; else all must stay.
        Raises RuntimeError for NaN scores, before anything is dropped.
        """
        ranked: list[_Ranked] = []
        recent: list[int | None] = [None if tokens is None else 0 for tokens in keep]
        kept = [count for b in range(len(keep)) for count in offers.counts(b)]
        votes = [True] * len(keep) if votes is None else votes
        for some in self._alike(offers, keep, fixed, votes):
            first, tokens = some[0], keep[some[0]]
            rows = slice(offers.rows(first).start, offers.rows(some[-1]).stop)
            held = None if fixed is None else fixed[offers.rows(first)]
            counts = any(kept[rows]) and self.pruner.accumulates and tokens != 0
            if self.holds and self.held is None:
                self.held = HeldScores(len(offers.lengths), len(keep))
            holds = self.holds and scores and any(kept[rows]) and offers.valid[first] > 0
            offer = self._offer(offers, some, output, tokens, number) if counts or tokens or holds else None
            if offer is not None and counts:
                offer = self._counted(offer, rows, offers, votes[first])
            if held is not None and tokens and tokens <= sum(held) // len(held):
                kept[rows] = held * len(some)  # memory is full
            elif tokens and offer is not None:
                ranked += self._ranked(offer, some, offers, tokens, near, held)
            elif tokens == 0:
                kept[rows] = [0] * len(kept[rows])
            elif offer is not None and holds:
                self._scored(offer, some, offers, self._pruner_of(first), offer.count, near)
        self.dropped(keep)
        for one in ranked:
            recent[one.b] = one.marks[2]
        ends = [offers.counts(b) for b in range(len(keep))]
        slots, kept = self._assembled(
            self._divided(ranked, ends, number, contest, self.budget), kept, offers.heads, offers.keys
        )
        if self.recent is not None and self.pruner.accumulates:  # they have voted
            self.recent.vote(votes, self.pruner.overlap)
        elif self.recent is not None and not self.pruner.one_frame:
            for b, stay in enumerate(recent):
                if stay is not None:
                    self.recent.forget(b, stay)  # queries whose own keys may be gone
        return Choice(slots, kept, recent)

    def choose_again(
        self, keep: Sequence[int | None], budget: Budget, *, number: int, near: int, contest: Contest | None
    ) -> Choice:
        """Chooses among the slots that have scores, by those, as choose does among what it is offered."""
        held = self.held
        assert held is not None and held.scores is not None
        heads = len(held.counts) // len(keep)
        ends = by_sequence(held.counts, len(keep))
        ranked, recent = [], list[int | None]([None] * len(keep))
        for b, tokens in enumerate(keep):
            if tokens is not None:
                scores = held.scores[b * heads : (b + 1) * heads, : max(ends[b])]
                offer = Candidates(
                    queries=scores[None, :, :0, None], keys=scores[None, ..., None], count=scores.shape[1],
                    chunk_length=held.asked[b], guide_length=0, softmax=Softmax(1.0), whole=self.whole[b],
                )  # fmt: skip
                sure = self._pruner_of(b).sure(offer, tokens, near)
                marks, recent[b] = (sure.lost, sure.sinks, sure.recent), sure.recent
                ranked.append(_Ranked(b, scores, sure.keep, sum(ends[b]) - heads * sure.lost, marks, None))
        divided = self._divided(ranked, ends, number, contest, budget)
        return Choice(*self._assembled(divided, list(held.counts), heads, held.scores), recent)

    def dropped(self, keep: Sequence[int | None]) -> None:
        """Sequences have been compressed to keep[b] tokens, None = not."""
        for b, tokens in enumerate(keep):
            if tokens is not None:
                self.whole[b], self.firsts[b] = False, min(self.firsts[b], tokens)

    def _assembled(
        self, chosen: list[tuple[list[int], Tensor, Tensor | None]], kept: list[int], heads: int, like: Tensor
    ) -> tuple[Tensor, list[int]]:
        """(slots int32 [R, K], how many of each row count): what was chosen, and the first `kept` of other rows."""
        parts = []
        for sequences, indices, counts in chosen:
            rows = [b * heads + head for b in sequences for head in range(heads)]
            stay = [indices.shape[2]] * len(rows) if counts is None else counts.flatten().tolist()
            for row, count in zip(rows, stay, strict=True):
                kept[row] = count
            parts.append((rows, indices.flatten(0, 1)))
        K = max(kept, default=0)
        if len(parts) == 1 and len(parts[0][0]) == len(kept):
            return parts[0][1][:, :K], kept
        slots = torch.arange(K, dtype=torch.int32, device=like.device).repeat(len(kept), 1)
        for rows, indices in parts:
            width = min(K, indices.shape[1])
            slots[torch.tensor(rows, device=slots.device), :width] = indices[:, :width]
        return slots, kept

    def _alike(
        self, offers: Offers, keep: Sequence[int | None], fixed: list[int] | None, votes: list[bool]
    ) -> list[list[int]]:
        """Sequences that a pruner takes as one of more heads: all, where it can and they are alike, else each alone."""
        pruner, alone = self.pruner, [[b] for b in range(len(keep))]
        if len(keep) == 1 or not judges_by_head(pruner):
            return alone
        facts = set()
        for b, tokens in enumerate(keep):
            lengths, held = offers.lengths[offers.rows(b)], None if fixed is None else tuple(fixed[offers.rows(b)])
            place = (offers.positions[b], offers.in_sight[b], id(offers.rotary.of(b))) if pruner.one_frame else ()
            seen = max(lengths), min(lengths), offers.valid[b], offers.guides[b], self.whole[b], self.firsts[b]
            repeated = None if offers.repeated is None else offers.repeated[b]
            facts.add((tokens, held, votes[b], repeated, *place, *seen))
        return [list(range(len(keep)))] if len(facts) == 1 else alone

    def _offer(
        self, offers: Offers, some: list[int], output: OutputLayer | None, keep: int | None, number: int
    ) -> Candidates:
        """What some sequences in a row offer, which are alike. keep: tokens per head that they keep, None = all."""
        b, part = some[0], slice(some[0], some[-1] + 1)
        rows, valid, guide = slice(b * offers.heads, part.stop * offers.heads), offers.valid[b], offers.guides[b]
        lengths, softmax = offers.lengths[rows], offers.softmax
        T, last = max(lengths), offers.queries.shape[2] - valid
        ragged = torch.tensor(lengths, dtype=torch.int32, device=offers.keys.device) if min(lengths) < T else None
        if softmax.sink_logits is not None:
            softmax = softmax._replace(sink_logits=softmax.sink_logits.repeat(len(some)))
        return Candidates(
            queries=offers.queries[part, :, last:].flatten(0, 1)[None], keys=offers.keys[None, rows, :T],
            count=T - guide, chunk_length=valid - guide, guide_length=guide, softmax=softmax,
            values=offers.values[None, rows, :T] if offers.values is not None and self.pruner.uses_values else None,
            lengths=ragged, shortest=min(lengths), layer=self.layer, whole=self.whole[b],
            unrotated=offers.unrotated[part, :, last:].flatten(0, 1)[None], position=offers.positions[b],
            rotary=offers.rotary.of(b), key_rotary=offers.key_rotary.of(b), in_sight=offers.in_sight[b],
            output=None if output is None else output.weights(),
            sums=None if offers.sums is None else offers.sums[part, :, last:].flatten(0, 1)[None],
            repeated=None if offers.repeated is None else offers.repeated[b], keep=keep, number=number,
            entering=None if offers.entering is None else offers.entering[part, :, last:].flatten(0, 1)[None],
        )  # fmt: skip

    def _counted(self, offer: Candidates, rows: slice, offers: Offers, votes: bool) -> Candidates:
        """The same with its running scores, to which its queries have added theirs where they vote."""
        if self.received is None or self.received.shape[1] < offer.count:
            wider = torch.zeros(len(offers.lengths), 2 * offer.count, device=offers.keys.device)
            if self.received is not None:
                wider[:, : self.received.shape[1]] = self.received
            self.received = wider
        if self.pruner.uses_notes and self.notes is None:
            self.notes = torch.zeros(len(offers.lengths), offers.keys.shape[2], device=offers.keys.device)
        received = self.received[rows, : offer.count]
        offer = replace(offer, received=received, notes=None if self.notes is None else self.notes[rows])
        if votes and offer.queries.shape[2]:
            received.copy_(self.pruner.carried(received, self.pruner.votes(offer)))
        return offer

    def _ranked(
        self, offer: Candidates, some: list[int], offers: Offers, keep: int, near: int, fixed: list[int] | None
    ) -> list[_Ranked]:
        pruner, wanted, new = self._pruner_of(some[0]), keep, keep
        if fixed is not None:
            new = keep - sum(fixed) // len(fixed)
            wanted = new + (pruner.num_sink_tokens if any(fixed) else 0)  # those that memory has take nothing from new
        sure, scores = self._scored(offer, some, offers, pruner, wanted, near)
        gone = [max(sure.lost - held, 0) for held in fixed or [0] * offers.heads]  # what memory has stays
        stay = min(keep, offer.count - max(gone)) if fixed is not None else sure.keep
        marks = (sure.lost, sure.sinks, min(sure.recent, new))
        return [
            _Ranked(b, scores[i], stay, sum(offers.counts(b)) - sum(gone), marks, fixed) for i, b in enumerate(some)
        ]

    def _pruner_of(self, b: int) -> Pruner:
        """Only the prompt's own first tokens are sinks."""
        pruner, firsts = self.pruner, self.firsts[b]
        return pruner.with_sinks(firsts) if firsts < pruner.num_sink_tokens else pruner

    def _scored(
        self, offer: Candidates, some: list[int], offers: Offers, pruner: Pruner, keep: int, near: int
    ) -> tuple[Sure, Tensor]:
        """(what is sure, scores [n, Hkv, count]) of some sequences; they are held where they will be asked for."""
        sure = pruner.sure(offer, keep, near)
        scores = pruner.scored(offer, keep, sure, all_=self.holds).unflatten(0, (len(some), -1))
        if self.held is not None:
            counts = [count for b in some for count in offers.counts(b)]
            self.held.note(some, scores, counts, offer.chunk_length, [offers.positions[b] for b in some])
        return sure, scores

    def _divided(
        self, ranked: list[_Ranked], every: list[list[int]], number: int, contest: Contest | None, budget: Budget
    ) -> list[tuple[list[int], Tensor, Tensor | None]]:
        """(sequences, indices int32 [n, Hkv, K] of what stays of them, how many count), of those alike at once.
        every[b]: candidates of each row of a sequence."""
        alike: dict[tuple[int, int], list[_Ranked]] = {}
        for one in ranked:
            alike.setdefault((one.keep, one.allowed), []).append(one)
        out = []
        for (keep, allowed), some in alike.items():
            T = max(one.scores.shape[1] for one in some)
            scores = torch.stack([torch.nn.functional.pad(one.scores, (0, T - one.scores.shape[1])) for one in some])
            ends = [[every[one.b]] for one in some]
            marks = [[[mark] * len(every[one.b]) for mark in one.marks] for one in some]
            numbers = torch.tensor([end + mark for end, mark in zip(ends, marks, strict=True)], device=scores.device)
            ranks = marked(scores, *numbers[..., None].unbind(1))
            if some[0].fixed is not None:
                fixed = torch.tensor([one.fixed for one in some], device=scores.device)[..., None]
                ranks = ranks.masked_fill(torch.arange(T, device=scores.device) < fixed, float("inf"))
            if bool(ranks.isnan().any()):  # first: a top-k may have too few to choose from
                raise nan_error(self.pruner, self.layer)
            if contest is None:
                out.append(([one.b for one in some], *budget.divide(number, ranks, keep, allowed)))
                continue
            for one, own in zip(some, ranks, strict=True):
                left = contest.enter(self.layer, one.b, own)
                out.append(([one.b], left.slots[None], torch.tensor([left.kept], device="cpu")))
        return out

    def follow(self, choice: Choice) -> None:
        """The chosen tokens move to the front of their rows, and with them what is remembered of each."""
        if self.held is not None:
            self.held.follow(choice.slots, choice.kept if choice.scored is None else choice.scored)
        if self.received is None:
            return
        slots = choice.slots.long().clamp(max=self.received.shape[1] - 1)
        ends = torch.tensor(choice.kept, device=slots.device)[:, None]
        gone = torch.arange(slots.shape[1], device=slots.device) >= ends
        self.received = self.received.gather(1, slots).masked_fill_(gone, 0)
