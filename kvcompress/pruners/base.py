"""What a pruner is."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import ops
from ..budgets import Budget
from ..hf.facts import LayerFacts
from ..ops.softmax import Softmax
from ..positions import RotaryTables
from ..support.checks import MOST_INT32, need_integer
from ..support.kvpress_names import refuse_theirs


@dataclass(frozen=True)
class Candidates:
    """What one sequence of one layer offers: the tokens held before, then those of this call, then the guide if any.

    queries: [1, Hq, S, D] rotated, of the last S tokens, the guide's included. keys: [1, Hkv, T, D] rotated, T = count
    + guide_length. count: candidates per head at most. chunk_length: how many of them have their query in queries.
    softmax: of the logits. values: [1, Hkv, T, D], None where the pruner uses none. lengths: int32 [Hkv], keys of each
    head with the guide's, where they differ; None = all T. shortest: the least of them; None = T. received: float32
    [Hkv, count], what pruners that accumulate have summed up so far. layer: number of the layer; number: its place
    among those that compress. whole: nothing was ever dropped, the first candidates are the first tokens. unrotated:
    the queries before rotation; position: that of the next token; rotary, key_rotary: tables of the queries and of the
    keys (None = the same); in_sight: keys in sight when their frequencies were settled, None = position. sums: float32
    [1, Hq, S], logarithm of the sum that each query's own causal softmax divides by; None = not known (see log_sums).
    notes: float32 [Hkv, D], what the pruner's votes write down of each head, zeros at first; None where it takes none.
    output: the weights of the output projection [Hq, D, hidden], None where the pruner asks for none. repeated: (back,
    length), the guide repeats so many candidates of each head, which begin `back` before the last one's end; None = it
    does not. keep: candidates of a head that stay, mean; None = all, as far as is known. entering: [1, 1, S, n], what
    entered the layer's attention for the tokens of queries; None where the pruner does not look at it.
    """

    queries: Tensor
    keys: Tensor
    count: int
    chunk_length: int
    guide_length: int
    softmax: Softmax
    values: Tensor | None = None
    lengths: Tensor | None = None
    received: Tensor | None = None
    shortest: int | None = None
    layer: int = 0
    whole: bool = True
    unrotated: Tensor | None = None
    position: int = 0
    rotary: RotaryTables | None = None
    key_rotary: RotaryTables | None = None
    in_sight: int | None = None
    sums: Tensor | None = None
    notes: Tensor | None = None
    output: Tensor | None = None
    repeated: tuple[int, int] | None = None
    keep: int | None = None
    number: int = 0
    entering: Tensor | None = None

    @property
    def heads(self) -> int:
        """Hkv."""
        return self.keys.shape[1]

    def attention(
        self,
        window: int,
        *,
        reduce: str = "sum",
        pooling: str = "avg",
        kernel_size: int = 1,
        skip_last: int = 0,
        mask_first: int = 0,
        mask_last: int = 0,
    ) -> Tensor:
        """float32 [Hkv, count]: attention from the last `window` queries, as ops.window_scores has it, per KV head.

        A window of more queries than there are (or than a head has keys) is all of them. skip_last, mask_first,
        mask_last count candidates, not the guide, which scores nothing.
        """
        window = min(window, self.queries.shape[2], self.keys.shape[2] if self.shortest is None else self.shortest)
        queries = self.queries[:, :, -window:]
        options: dict[str, Any] = {
            "reduce": reduce, "pooling": pooling, "kernel_size": kernel_size, "mask_first": mask_first,
            "mask_last": mask_last + self.guide_length if mask_last else 0, "skip_last": skip_last + self.guide_length,
        }  # fmt: skip
        if self.lengths is None:
            scores = ops.window_scores(queries, self.keys, **options, **self.softmax.options)[0]
        else:  # a head is a batch entry
            groups = queries[0].unflatten(0, (self.heads, -1))
            keys, ends, scores_of = self.keys[0][:, None], self.lengths, []
            each = self.heads if self.softmax.sink_logits is None else 1  # heads of one call: those of one softmax
            for first in range(0, self.heads, each):
                part = slice(first, first + each)
                softmax = self.softmax.of_heads(slice(first * groups.shape[1], (first + each) * groups.shape[1]))
                scores_of.append(
                    ops.window_scores(groups[part], keys[part], lengths=ends[part], **options, **softmax.options)[:, 0]
                )
            scores = torch.cat(scores_of)
        return torch.nn.functional.pad(scores, (0, skip_last)) if skip_last else scores

    def again(self, first: int, end: int, chunk: int) -> Tensor:
        """[1, Hq, end - first, D]: these of the call's queries, each `chunk` of them as it stands behind the last token
        (see distances)."""
        if self.unrotated is None or self.rotary is None:
            raise ValueError("candidates must have unrotated and rotary where queries are asked again, got None")
        queries = self.unrotated[:, :, first:end]
        return self.rotary.behind(queries, self.position, self.chunk_length, first, chunk, self.settled)

    def distances(self, first: int, end: int, chunk: int) -> Tensor:
        """int32 [1, end - first]: how far these of the call's tokens move where each `chunk` of them is to follow the
        last token; an image's keep their places to each other."""
        assert self.rotary is not None
        return self.rotary.distances(self.position, self.chunk_length, first, end, chunk, self.keys.device)

    @property
    def settled(self) -> int:
        """Keys in sight when the frequencies of keys and queries were settled."""
        return self.position if self.in_sight is None else self.in_sight

    @property
    def beside(self) -> int:
        """Coordinates in front of queries and keys that hold positions alone; values end with as many zeros."""
        return 0 if self.rotary is None else self.rotary.beside

    @property
    def own_queries(self) -> Tensor | None:
        """unrotated without those."""
        return None if self.unrotated is None else self.unrotated[..., self.beside :]

    @property
    def own_keys(self) -> Tensor:
        """keys without those."""
        return self.keys[..., self.beside :]

    @property
    def own_values(self) -> Tensor:
        """values, of as many numbers as a key's own."""
        assert self.values is not None
        return self.values[..., : self.values.shape[-1] - self.beside]

    def own_slots(self) -> Tensor:
        """int64 [Hkv, chunk_length]: where each head has the tokens that have their query."""
        last = torch.arange(-self.chunk_length, 0, device=self.keys.device)
        ends = self.count if self.lengths is None else (self.lengths.long() - self.guide_length)[:, None]
        return (last + ends).expand(self.heads, -1)

    def log_sums(self) -> Tensor:
        """sums; computed, by one attention of the queries, where nobody knows them."""
        if self.sums is not None:
            return self.sums
        if self.lengths is None:
            return ops.attention(self.queries, self.keys, self.keys, **self.softmax.options)[1]
        groups, keys, sums = self.queries[0].unflatten(0, (self.heads, -1)), self.keys[0][:, None], []
        G = groups.shape[1]
        for head in range(self.heads):
            options = self.softmax.of_heads(slice(head * G, (head + 1) * G)).options
            row, end = slice(head, head + 1), self.lengths[head : head + 1]
            sums.append(ops.attention(groups[row], keys[row], keys[row], lengths=end, **options)[1])
        return torch.cat(sums, 1)

    def places(self) -> tuple[Tensor, Tensor | int]:
        """(0..count-1, candidates of each head [Hkv, 1] or the number that they all have)."""
        places = torch.arange(self.count, device=self.keys.device)
        return places, self.count if self.lengths is None else (self.lengths - self.guide_length)[:, None]


def marked(
    scores: Tensor, counts: Tensor | int, lost: Tensor | int, sinks: Tensor | int, recent: Tensor | int
) -> Tensor:
    """scores [..., T] of `counts` candidates, with +inf for the first `sinks` and the last `recent` of them and -inf
    for the first `lost` and what follows the last. Tensors are [..., 1]."""
    places = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill((places < sinks) | (places >= counts - recent), float("inf"))
    return scores.masked_fill((places < lost) | (places >= counts), float("-inf"))


def given_as(x: object) -> str:
    """What was given where an instance of a pruner is wanted, in words."""
    if isinstance(x, type):
        return f"the class {x.__name__}, not an instance: {x.__name__}()" if issubclass(x, Pruner) else x.__name__
    return f"the text {x!r}" if isinstance(x, str) else type(x).__name__


class Sure(NamedTuple):
    """keep: how many candidates per head stay, mean. Of those in any case the first `sinks` and the last `recent`; the
    first `lost` go in any case."""

    keep: int
    lost: int
    sinks: int
    recent: int


class Ranking(NamedTuple):
    """scores: float32 [Hkv, count], +inf for what always stays, -inf for what cannot; keep of them stay per head, mean,
    among them the last `recent`; the first `lost` cannot."""

    scores: Tensor
    keep: int
    lost: int
    recent: int


class Reread(NamedTuple):
    """A reading that only scores: `tokens` [n] follow the text and are not stored; they repeat places first..end-1 of
    what was read last."""

    first: int
    end: int
    tokens: Tensor


class Pruner(ABC):
    """Chooses which candidates stay. Subclasses are dataclasses that give every candidate a score; args and fields are
    theirs.

    A pruner of your own:

        @dataclass(frozen=True)
        class MeanAttention(Pruner):
            window: int = 16  # queries that a cache keeps for it while decoding, and that `attention` may look at

            def scores(self, candidates, keep):
                return candidates.attention(self.window, reduce="mean")
    """

    def __new__(cls, *args: Any, **fields: Any) -> Pruner:
        """Says what kvpress's names are called here; all others __init__ takes, or refuses."""
        refuse_theirs(cls, fields)
        return super().__new__(cls)

    def __call__(self, *args: Any, **given: Any) -> NoReturn:
        """A press is called with a model; a pruner is not: raises TypeError, which says where it is given."""
        name = type(self).__name__
        raise TypeError(
            f"{name} must be given to a cache, not called with a model as a press is: kvcompress.attach(model), then "
            f"past_key_values=PrunedCache(model.config, {name}(), keep=0.25)"
        )

    num_sink_tokens: int = 0  # first tokens that always stay, counted inside the budget
    window: int = 0  # queries that scores looks at; 0 = none
    uses_guide = False
    logarithms = False  # scores are logarithms of what others give: may be below 0
    uses_keys = True  # scores looks at candidates.keys; without it nothing but their shape counts
    uses_values = False  # scores looks at candidates.values; without it they are None
    uses_entering = False  # votes looks at candidates.entering, not at queries; for pruners that accumulate
    accumulates = False  # scores are carried on from call to call; the cache keeps them (see votes)
    overlap = 0  # of the queries that have voted, how many vote once more with those that follow them
    uses_output = False  # scores looks at candidates.output
    uses_notes = False  # votes writes into candidates.notes, which the cache keeps
    uses_keep = False  # scores looks at keep: those for one budget mean nothing to another (PrunedCache.compress)
    uses_sums = False  # scores looks at candidates.log_sums(), which the prompt's own attention then notes
    by_head = False  # scores of a KV head look at no other: sequences alike are offered as one of more heads
    rereads = False  # what kvcompress.prefill has read is read once more, to be scored (see reread)
    # last tokens of a prompt that must come in one call for its scores to be those of the whole, where the parts before
    # came in others and nothing of them was dropped; None = all of it
    at_once: int | None = None
    lead_in: int = 0  # tokens before a call's own that reread looks at
    one_frame = False  # judges keys by where they stand: cannot choose among keys of two segments (RemoteGap)
    default_keep: int | None = None  # tokens per row where the user gives no keep

    @property
    def own_budget(self) -> Budget | None:
        """Of a pruner that says itself how many stay; None = the user's."""
        return None

    @property
    def observation_window(self) -> int | None:
        """Last tokens that look at the others and always stay, where the pruner has a number of such."""
        return None

    @abstractmethod
    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        """float32 [Hkv, count]: the higher, the sooner a candidate stays. keep: tokens that stay per head, mean."""

    def recent(self, keep: int, chunk_length: int) -> int:
        """Last candidates that always stay, of `keep`."""
        return 0

    def always(self, keep: int, length: int) -> int:
        """How many of a row's tokens, of so many, stay whatever their scores where `keep` do."""
        return self.recent(keep, length) + self.num_sink_tokens

    def _most_recent(self, last: int | None, most: int, keep: int) -> int:
        """What recent says of a field `last`, None = a quarter of what stays, at most `most`: of little, little."""
        wanted = min(most, max(keep // 4, 1)) if last is None else last
        return min(wanted, keep - min(self.num_sink_tokens, keep))

    def lost(self) -> int:
        """First tokens that the first compression drops in any case, but for those among the last that always stay."""
        return 0

    def votes(self, candidates: Candidates) -> Tensor:
        """float32 [Hkv, count]: what this call's queries add to candidates.received, where the pruner accumulates."""
        raise NotImplementedError(f"{type(self).__name__} does not accumulate")

    def carried(self, received: Tensor, votes: Tensor) -> Tensor:
        """What becomes of running scores, both float32 [Hkv, count]; those of new tokens begin at 0."""
        return received + votes

    def check_rows(self, heads: Sequence[int]) -> None:  # noqa: B027  (most are for any model)
        """Raises ValueError if it is not for a model whose layers that compress have so many KV heads."""

    def check_model(self, decoder: Any, layers: Sequence[LayerFacts]) -> None:  # noqa: B027
        """Raises ValueError if it is not for a model of these layers, those that compress."""

    def positions_behind(self, tokens: int) -> int:
        """How many positions behind a call of so many tokens its queries are asked at again."""
        return 0

    def reread(self, tokens: Tensor, before: Tensor, begins: bool) -> list[Reread]:
        """What is read once more of tokens [n] that were just read, where the pruner rereads. before: the last of
        those that were read before them in the same prompt; begins: they are a sequence's first."""
        raise NotImplementedError(f"{type(self).__name__} does not reread")

    def with_tokenizer(self, tokenizer: Any) -> Pruner:
        """The same pruner, with what it asks in words as this tokenizer's ids."""
        del tokenizer
        return self

    def with_sinks(self, tokens: int) -> Pruner:
        """The same pruner with so many num_sink_tokens."""
        other = copy.copy(self)
        object.__setattr__(other, "num_sink_tokens", tokens)  # past frozen dataclasses
        return other

    def sure(self, candidates: Candidates, keep: int, recent: int = 0) -> Sure:
        """What is decided before any score. keep: tokens per head that are wished for, mean, at least 1. recent: last
        candidates that stay in any case, besides the pruner's own wish."""
        sinks, count = min(self.num_sink_tokens, keep), candidates.count
        recent = min(max(self.recent(keep, candidates.chunk_length), recent), keep - sinks)
        lost = max(min(self.lost(), count - max(recent, 1)), 0) if candidates.whole else 0
        stay = max(min(keep, count - lost), 1)
        return Sure(stay, lost, sinks, min(recent, stay - min(sinks, stay)))

    def scored(self, candidates: Candidates, keep: int, sure: Sure, *, all_: bool = False) -> Tensor:
        """scores, checked; zeros where all that stay are sure to, unless all_ are wanted and some are not sure."""
        if sure.sinks + sure.recent < (candidates.count if all_ else sure.keep):
            return self._checked(self.scores(candidates, keep), candidates)
        return torch.zeros(candidates.heads, candidates.count, device=candidates.keys.device)

    def rank(self, candidates: Candidates, keep: int, *, recent: int = 0) -> Ranking:
        """The candidates' scores, and how many stay. keep, recent: as in sure."""
        sure = self.sure(candidates, keep, recent)
        scores = self.scored(candidates, keep, sure)
        marks = marked(scores, candidates.places()[1], sure.lost, sure.sinks, sure.recent)
        return Ranking(marks, sure.keep, sure.lost, sure.recent)

    def _checked(self, scores: Tensor, candidates: Candidates) -> Tensor:
        wanted = (candidates.heads, candidates.count)
        if not isinstance(scores, Tensor) or scores.shape != wanted or not scores.is_floating_point():
            got = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"scores of {type(self).__name__} must be float32 [Hkv, count] = {wanted}, got {got}")
        return scores.float()

    def select(self, candidates: Candidates, keep: int) -> Tensor:
        """Places of the `keep` candidates that stay: int32 [Hkv, keep], rising, below candidates.count.

        keep: 1..candidates.count - 1; less come back where the first tokens go in any case and few others are there.
        """
        ranking = self.rank(candidates, keep)
        return ops.select_topk(ranking.scores, ranking.keep)

    def _check(self, **least: int) -> None:
        """least: for each field that counts tokens its lower bound; they end where int32 does."""
        for name, bound in {**least, "num_sink_tokens": 0}.items():
            value = getattr(self, name)
            if value is not None or getattr(type(self), name, 0) is not None:
                need_integer(name, value, bound, MOST_INT32)
