"""PrunedCache: reads a prompt in one pass, keeps what a pruner chooses within a budget, and goes on so in decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..budgets import Budget, GlobalTopK
from ..hf.attach import facts_of
from ..hf.facts import Facts
from ..hf.method import Call, Pass
from ..positions import RemoteGap
from ..pruners import Pruner, Replay
from ..support.kvpress_names import no_ratio
from ..support.units import Keep, Size, Tokens, plain, tokens_of
from .base import CompressedCache, trained_length_of
from .choose import Choice
from .contest import Contest
from .formats import Dtypes
from .passes import CachePass, Iteration
from .policy import Policy
from .pruned_layer import PrunedLayer
from .rows import by_sequence
from .store import PoolSettings

_WAITS = 1 / 8  # of the budget, while a prompt is read first


class PrunedCache(CompressedCache):
    """Reads a prompt in one pass, then keeps the tokens that a pruner chooses within a budget; memory is really freed.

    config: the model's config. pruner: what chooses them; not given, Replay(), which needs no question.
    keep: how many stay: tokens of each row, which is a KV head of a layer, mean over layers and heads (1024, "1k" =
    1,024); the share of a sequence's tokens (0.25, "25%", "1/4": of T tokens that many, rounded up, the share taken as
    it is written); or bytes ("512MiB") of all pages, their tables and what is remembered of each token (running scores,
    those of later="keep"); a pruner's latest queries come on top and count in nbytes. A whole number is tokens, one
    with a point a share: 1.0 keeps all. None = the pruner's own.
    budget: how they are divided over layers and heads (PyramidKV(), AdaKV(), GlobalTopK(), Profiled(profile)); None =
    evenly (Uniform), or without a pruner by GlobalTopK, where a layer may need pages for a whole prompt (max_pages).
    every: None compresses after calls of several tokens alone (prompts, further turns); k also while decoding, when a
    row has grown by k tokens over its budget. positions: "original" (kept tokens stay where they were), "contiguous"
    (numbered anew without holes) or a RemoteGap. chunk_size: tokens that `prefill` reads at a time, each chunk followed
    by a compression; None = the whole prompt. page_size, max_pages, grow, dtype: see PoolSettings.
    later: what becomes of tokens that follow the first prompt (what prefill reads first, or the first call).
    "compress": further calls of several tokens compress again, old and new together. "keep": all that follows is kept
    whole, on top of the budget; only what the prompt left is ever compressed again, and by compress() alone. The scores
    of its tokens are held for that, 4 bytes for each that is kept.
    A prompt within the budget is kept whole: the model then sees what it would see with a dense cache. Each sequence of
    a batch has a budget of its own. One layer at a time holds the whole prompt, never the cache. A budget holds when
    the cache has compressed; tokens that follow come on top until it compresses again (every). With model.generate
    alone a prompt is one call, whatever chunk_size says, and its last token is pruned with it; kvcompress.generate
    reads that one after the pruning.
    Raises ValueError for settings out of range. Source: SnapKV, H2O, TOVA, IntelLLM.
    """

    answers = ("compress",)

    @no_ratio()
    def __init__(
        self,
        config: PreTrainedConfig,
        pruner: Pruner | None = None,
        budget: Budget | None = None,
        *,
        keep: Size | None = None,
        every: Tokens | None = None,
        positions: str | RemoteGap = "original",
        chunk_size: Tokens | None = None,
        later: str = "compress",
        page_size: int = 16,
        max_pages: int | None = None,
        grow: str = "double",
        dtype: Dtypes = None,
    ) -> None:
        self.pool_settings, keep = PoolSettings(page_size, max_pages, grow, dtype), plain(keep)
        if pruner is None and not isinstance(budget, Pruner):
            if positions != "original":
                raise ValueError(
                    f"positions must be 'original' where no pruner is given, got {positions!r}: SnapKV(), say, takes "
                    "others"
                )
            pruner = Replay()
            budget = GlobalTopK() if budget is None else budget
        if every is not None:
            every = tokens_of("every", every)
        if chunk_size is not None:
            chunk_size = tokens_of("chunk_size", chunk_size)
        self.policy = Policy.of(
            pruner, keep, budget, self.pool_settings, trained_length_of(config), every=every, chunk_size=chunk_size,
            positions=positions, later=later,
        )  # fmt: skip
        self.later = later
        self.pruner, self.budget, self.every = self.policy.pruner, self.policy.budget, self.policy.every
        self.wants_entering = self.pruner.uses_entering
        self.keep, self.chunk_size = keep, chunk_size
        super().__init__(config)

    def _new_layer(self, index: int, number: int) -> PrunedLayer:
        return PrunedLayer(index, number, self.policy)

    def end(self, current: Pass, hidden: Any) -> None:
        super().end(current, hidden)
        if isinstance(current, CachePass) and not current.later:
            self.fixed = self.seen  # what the prompt lost cannot come back

    def end_prompt(self, columns: int) -> None:
        follows = self.follows
        super().end_prompt(columns)
        if follows:
            return
        if self.chunk_size is not None or not all(all(layer.chooser.whole) for layer in self.compressing):
            self.trim()  # pages that held a chunk before it was pruned

    def check_layers(self, decoder: Any, facts: Facts) -> None:
        own = [layer.index for layer in self.compressing]
        self.policy.check_model(decoder, facts, own, type(self).__name__, "positions must be 'original'")

    def check_indexer(self, top: int) -> str | None:
        return None if self.policy.gap is None else f"positions must be 'original', got {self.policy.gap!r}"

    def check_images(self, call: Call) -> None:
        if self.policy.gap is not None:
            call.need_text("PrunedCache leaves tokens where they stand with positions='original' alone")

    @property
    def steps_differ(self) -> bool:
        return self.every is not None

    @property
    def follows(self) -> bool:
        """Whether coming tokens follow the prompt and are kept whole."""
        return self.later == "keep" and self.seen > 0

    def reach(self) -> int:
        return super().reach() if self.policy.gap is None else self._most_held()

    def check_guide(self) -> None:
        if self.follows:
            raise ValueError("guide has no effect on what follows the prompt with later='keep', which keeps all of it")
        self.policy.check_guide()

    # ---- what users ask ----

    @torch.inference_mode(False)
    @torch.no_grad()
    def compress(self, budget: Budget | None = None, *, keep: Size | None = None) -> None:
        """Compresses what is left of the prompt again, to keep less of it; from then on the cache is one that keeps so
        much. keep, budget: as PrunedCache takes them; None = what it has, of one of them.

        So one reading serves several sizes: read with a large one, or with 1.0, which keeps everything; fork(), and
        compress each fork. The pruner's scores of the prompt's tokens are held (later="keep") and decide. The same
        tokens stay as after reading so, where the prompt was read in one pass (in chunks a small size leaves later
        chunks less to see) and all of those are left: always after 1.0, and after a larger size of the same budget.
        Else the best of what is left stay. Tokens that follow the prompt stay, on top. To keep more than is left
        changes nothing.

        Raises ValueError without later="keep", for a pruner whose scores depend on the budget (uses_keep), for what
        is out of range, and before a prompt was read; RuntimeError for NaN scores, for copies of pages that forks
        share where max_pages leaves no room for them, and where positions change (positions other than "original") for
        a model that is gone; nothing is dropped then.
        """
        self.check_complete()
        keep = plain(keep)
        if self.later != "keep":
            raise ValueError(
                f"later must be 'keep' for compress(), got {self.later!r}: PrunedCache(..., later='keep') holds the "
                "scores that it goes by"
            )
        if self.pruner.own_budget is not None:
            raise ValueError(
                f"pruner must not bring a budget of its own for compress(), as {type(self.pruner).__name__} does"
            )
        if self.pruner.uses_keep:
            raise ValueError(
                f"pruner must score alike for every budget for compress(), but {type(self.pruner).__name__} scores for "
                "the budget that it is given: read the prompt again with the other one"
            )
        if keep is None and budget is None:
            raise ValueError("keep must be given, or another budget, got neither")
        policy = self.policy.keeping(
            self.policy.keep if keep is None else Keep.of(keep), self.budget if budget is None else budget
        )
        layers = self.compressing
        if any(layer.pool is None for layer in layers):
            raise ValueError("compress() needs a cache that has read a prompt, got an empty one")
        policy.budget.check_rows([layer.heads for layer in layers])
        facts = self.facts  # a fork's are not known before it is used
        if facts is None and policy.gap is not None:
            if self.decoder is None:
                raise RuntimeError("compress() turns keys where positions change, and needs the model, which is gone")
            facts = facts_of(self.decoder)
        contest = self._contest_again(policy.budget) if isinstance(policy.budget, GlobalTopK) else None
        chosen: dict[int, tuple[Choice, list[int | None]]] = {}
        for layer in layers:
            chosen[layer.index] = layer.choose_again(policy, len(layers), contest)
            for index, left in ({} if contest is None else contest.lost()).items():
                choice, mean = chosen[index]
                chosen[index] = choice.left(left), mean
        for layer in layers:
            layer.make_room(chosen[layer.index][0])
        self.mark_incomplete()
        for layer in layers:
            layer.keep_again(*chosen[layer.index], policy, None if facts is None else facts[layer.index])
        self.mark_incomplete(False)
        self.keep = self.keep if keep is None else keep
        self.policy, self.budget = policy, policy.budget
        self.trim()

    def _contest_again(self, budget: GlobalTopK) -> Contest:
        layers = self.compressing
        rows, counts = sum(x.heads for x in layers), [by_sequence(x.chooser.held.counts, self._batch) for x in layers]
        held = [sum(sum(n[b]) for n in counts) for b in range(self._batch)]
        return Contest([n - rows for n in held], rows, budget.floor, trims=False, waits=math.inf)

    # ---- one forward pass ----

    def open(
        self, facts: Facts, counts: Sequence[int], columns: int, iteration: Iteration | None = None, *,
        more: bool = False,
    ) -> CachePass:  # fmt: skip
        if self.policy.gap is not None:
            layers = self.compressing
            # with the same number of tokens everywhere all layers are alike
            differ = self.budget.divides_layers or self.budget.divides_heads
            for layer in layers if differ else layers[:1]:
                self._check_positions(layer, counts)
        if self.pruner.rereads and iteration is None and columns > 1 and not self.seen:
            raise ValueError(
                f"a prompt must be read by kvcompress.prefill or generate with {type(self.pruner).__name__}, which "
                "scores by a second reading, got a call of the model"
            )
        scores = iteration is not None and iteration.repeated is not None
        later = self.follows
        asks = not (scores or later or more) and (iteration is not None or not self.pruner.rereads)
        if columns > 1 and asks and (layers := self.compressing):
            places = layers[0].next or [0] * len(counts)
            behind = self.shifts() or [0] * len(counts)  # an image's or video's
            end = max(a + n + max(more, 0) for a, n, more in zip(places, counts, behind, strict=True))
            self.policy.check_behind(end, max(counts), (facts[layer.index] for layer in layers))
            guide = 0 if iteration is None else iteration.guide_length
            self.policy.warn_of_little(max(a + n for a, n in zip(places, counts, strict=True)) - guide)
        step = super().open(facts, counts, columns, iteration, more=more)
        step.later = later
        compresses = not later and (self.every is not None or columns > 1 or iteration is not None)
        compresses = compresses and self.policy.compresses(step)
        if isinstance(self.budget, GlobalTopK) and compresses and self.compressing:
            step.contest = self._contest(self.budget, facts, len(counts), adds=not scores)
        return step

    def _contest(self, budget: GlobalTopK, facts: Facts, batch: int, *, adds: bool) -> Contest:
        """adds: whether the pass stores tokens, which may need the pages that layers lose. In one store for all layers,
        whose pages are counted before a prompt is let in, nothing waits."""
        layers, held = self.compressing, [0] * batch
        for layer in layers:
            if layer.pool is not None:
                held = [n + sum(row) for n, row in zip(held, by_sequence(layer.pool.bounds, batch), strict=True)]
        rows = sum(facts[layer.index].kv_heads for layer in layers)
        first = layers[0].pool is None
        waits = math.inf if not adds else _WAITS if first and layers[0].store is None else 0.0
        return Contest(held, rows, budget.floor, trims=first, waits=waits)

    def _check_positions(self, layer: PrunedLayer, counts: Sequence[int]) -> None:
        """Refuses, or warns of, positions beyond the trained length, before any layer has changed."""
        policy, trained = self.policy, self.trained_length
        if layer.pool is None:
            if policy.bounded and max(counts) > trained:
                raise ValueError(
                    f"a prompt of {max(counts)} tokens in one pass has positions beyond the {trained} that the model "
                    "was trained for; give PrunedCache a chunk_size"
                )
        elif layer.far.split is not None or policy.bounded:
            reach = max(layer.reach(b, count, len(self.compressing)) for b, count in enumerate(counts))
            if reach <= trained:
                return
            assert policy.gap is not None
            message = f"positions reach {reach}, but the model was trained for {trained}"
            if policy.gap.on_overflow == "error":
                raise ValueError(f"{message}; compress more often (every), or leave more headroom in RemoteGap")
            policy.notices.give("positions", message)
