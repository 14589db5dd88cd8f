"""What a cache keeps: how much of it, by whose choice, and where it then stands."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .. import pruners
from ..budgets import AdaKV, Budget, CacheShape, GlobalTopK, Uniform, check_budget
from ..hf.config import ranks_of
from ..hf.facts import Facts, LayerFacts
from ..hf.outputs import output_layers
from ..positions import RemoteGap
from ..pruners import Pruner
from ..pruners.base import given_as
from ..support.checks import MOST_INT32
from ..support.kvpress_names import class_of
from ..support.units import Keep, Size
from .choose import judges_by_head
from .passes import CachePass
from .store import PoolSettings

NEVER = 1 << 60  # tokens
LATER = ("compress", "keep")
_LITTLE, _OF = 50, 40  # tokens, and times as many: less than any paper reports of

_shape = functools.lru_cache(maxsize=256)(CacheShape)  # of every sequence in every layer and step


class Notices:
    """Warnings of one cache, each kind once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def give(self, kind: str, message: str) -> None:
        if kind not in self._given:
            self._given.add(kind)
            warnings.warn(message, stacklevel=4)


@dataclass(frozen=True)
class Policy:
    """pruner, keep, budget: what stays, how much of it, and how that is divided. every: tokens over that at which a
    decoded token compresses; None = none does. growth: tokens between two compressions at most. prompts: whether calls
    of several tokens compress (those of kvcompress.prefill aside, where an IterativeCache does). gap: where compressed
    tokens stand; None = where they were. bounded: no position may lie beyond trained_length. later: "keep" = what
    follows the first prompt is kept, and scores are held for further compressions of it."""

    pruner: Pruner
    keep: Keep
    budget: Budget
    pool: PoolSettings
    trained_length: int
    every: int | None = None
    growth: int = 0
    prompts: bool = True
    gap: RemoteGap | None = None
    bounded: bool = False
    later: str = "compress"
    notices: Notices = field(default_factory=Notices)

    @staticmethod
    def of(
        pruner: Any, keep: Size | None, budget: Budget | None, pool: PoolSettings, trained_length: int, *,
        every: int | None, chunk_size: int | None, positions: str | RemoteGap, prompts: bool = True,
        later: str = "compress",
    ) -> Policy:  # fmt: skip
        """From what users give. Raises ValueError for what is out of range or cannot fit."""
        _check_order(pruner, budget)
        name = type(pruner).__name__
        if (own := pruner.own_budget) is not None:
            for given, value in (("keep", keep), ("budget", budget)):
                if value is not None:
                    raise ValueError(f"{given} must be None with {name}, which brings its own, got {value!r}")
            keep, budget = 1.0, own  # it says how much itself
        budget = Uniform() if budget is None else budget
        check_budget("budget", budget)
        if keep is None and (keep := pruner.default_keep) is None:
            raise ValueError(f"keep must be given with {name}, got None: 0.25 (the share that stays), say, or 1024")
        if pruner.rereads and every is not None:
            raise ValueError(
                f"every must be None with {type(pruner).__name__}, whose scores come from a second reading of prompts, "
                f"got {every}"
            )
        if later not in LATER:
            raise ValueError(f"later must be one of {', '.join(LATER)}, got {later!r}")
        if later == "keep" and every is not None:
            raise ValueError(f"every must be None with later='keep', which keeps all decoded tokens; got {every}")
        gap = _gap_of(positions)
        if gap is not None and pruner.one_frame:
            raise ValueError(f"positions must be 'original' with {type(pruner).__name__}, got {positions!r}")
        policy = Policy(
            pruner, Keep.of(keep), budget, pool, trained_length, every=every, growth=max(every or 0, chunk_size or 0),
            prompts=prompts, gap=gap, bounded=isinstance(positions, RemoteGap), later=later,
        )  # fmt: skip
        return policy.keeping(policy.keep, budget)

    def keeping(self, keep: Keep, budget: Budget) -> Policy:
        """The same with so much, so divided. Raises ValueError for what is out of range or cannot fit."""
        check_budget("budget", budget)
        if keep.nbytes is not None and isinstance(self.pool.dtype, tuple) and budget.divides_layers:
            raise ValueError(
                f"keep must be tokens or a share with {type(budget).__name__} where each layer has a dtype, got {keep}"
            )
        pruner = self.pruner
        policy = replace(self, keep=keep, budget=budget.beside(type(pruner).__name__, pruner.observation_window))
        if policy.gap is not None and isinstance(budget, GlobalTopK):
            raise ValueError("positions must be 'original' with GlobalTopK, got others")
        if policy.bounded and keep.tokens is not None and not isinstance(policy.budget, AdaKV):
            near = policy.near_of(keep.tokens)
            policy.blank(keep.tokens - near, near)  # refuses what cannot fit
        return policy

    @property
    def holds_scores(self) -> bool:
        return self.later == "keep" and not self.pruner.uses_keep

    def tokens_of(self, length: int, layer: int, layers: int, rows: int, slot_nbytes: int) -> int:
        """Tokens per head that one of so many layers keeps of a sequence of `length` tokens."""
        slot_nbytes += 4 * (self.pruner.accumulates + self.holds_scores)  # a float of each beside the pages
        shape = _shape(layers, rows, slot_nbytes, self.pool.page_size, self.every or 0)
        return self.budget.tokens_of(self.keep, length, layer, shape)

    def compresses(self, step: CachePass) -> bool:
        """Whether a call of several tokens may compress: one that the pruner can score."""
        if step.iteration is None:
            return not (self.pruner.rereads or step.more)
        return step.iteration.compresses

    def warn_of_little(self, length: int) -> None:
        """Of so many tokens: that far fewer stay than anyone asks for, or none that are chosen."""
        keep = self.keep.tokens
        if keep is None or keep >= length:
            return
        chooses = self.pruner.always(MOST_INT32, MOST_INT32) < MOST_INT32  # of some text
        if chooses and self.pruner.always(keep, length) >= keep:
            why = f", which are those that {type(self.pruner).__name__} always keeps: it chooses none"
        elif keep <= _LITTLE and keep * _OF < length:
            why = ""
        else:
            return
        percent = f'; {keep} percent are keep="{keep}%"' if keep <= 100 else ""
        self.notices.give("little", f"keep={keep} keeps {keep} of a row's {length} tokens{why}{percent}")

    def near_of(self, keep: int) -> int:
        """Near tokens of a compression to `keep` tokens."""
        assert self.gap is not None
        near = max(self.pruner.recent(keep, keep), self.gap.near_length or 0)
        return min(near, keep - min(self.pruner.num_sink_tokens, keep))

    def blank(self, compressed: int, near: int) -> int:
        """Unused ids between so many compressed and near tokens (see RemoteGap.blank)."""
        assert self.gap is not None
        return self.gap.blank(
            compressed, near, self.growth, self.trained_length, warn=lambda text: self.notices.give("gap", text)
        )

    def check_behind(self, end: int, tokens: int, layers: Iterable[LayerFacts]) -> None:
        """Raises ValueError where the pruner asks the queries of a call of so many tokens, which ends at position end,
        behind it, and the model does not know those positions. layers: those that compress."""
        behind = self.pruner.positions_behind(tokens)
        limited = any(facts.rotates and not facts.query_rotary.follows_length for facts in layers)
        if behind and limited and end + behind > self.trained_length:
            name = type(self.pruner).__name__
            memory = "" if self.pruner.rereads else "read through a memory (IterativeCache), "
            raise ValueError(
                f"{name} asks queries again at {behind} positions behind the {end:,} that are in sight, but the model "
                f"was trained for {self.trained_length:,}: it takes {self.trained_length - behind:,} at most; read "
                f"shorter prompts, {memory}or take a pruner that asks nothing behind"
            )

    def check_model(self, decoder: Any, facts: Facts, own: list[int], cache: str, fixed: str) -> None:
        """Raises ValueError if the budget is not for a model of these layers, those that compress, or positions (wish:
        fixed) cannot be given anew. Warns once where there are none, and where what judges several heads together sees
        some of them alone."""
        layers = [facts[index] for index in own]
        for layer in layers if self.gap is not None else ():
            layer.check_relative(fixed)
        for part in (self.budget, self.pruner):
            part.check_rows([layer.kv_heads for layer in layers])
        self.pruner.check_model(decoder, layers)
        if not layers:
            self.notices.give(
                "no layers",
                f"{cache} prunes nothing of {type(decoder).__name__}: every layer of it that attends sees a window or "
                "a chunk alone, and keeps no more than that",
            )
        if (ranks := ranks_of(decoder.config)) > 1 and (joint := self._joint()) is not None:
            self.notices.give(
                "ranks",
                f"{joint}, and the heads of this model are cut over {ranks} ranks: each sees its own alone, so that "
                "other tokens may stay than on one device",
            )
        if self.pruner.uses_output and not facts.outputs:
            facts.outputs = output_layers(decoder, facts, own)

    def _joint(self) -> str | None:
        """What judges several heads together."""
        if self.keep.nbytes is not None:
            return f"keep in bytes ({self.keep}) is of all heads, here of those of a rank"
        if self.budget.divides_heads:
            return f"{type(self.budget).__name__} divides a budget over heads"
        return None if judges_by_head(self.pruner) else f"{type(self.pruner).__name__} may judge heads together"

    def check_guide(self) -> None:
        if not self.pruner.uses_guide:
            raise ValueError(
                f"guide has no effect with the pruner {type(self.pruner).__name__}: SnapKV(), say, looks at one"
            )


def _check_order(pruner: Any, budget: Any) -> None:
    """Raises ValueError for what is no pruner, or stands where the budget belongs."""
    if isinstance(pruner, (int, float)) and not isinstance(budget, Pruner):
        raise ValueError(f"pruner must be an instance of kvcompress.pruners.Pruner, got {pruner!r}; how many stay is "
                         f"keep={pruner!r}, where a share is the one that stays")  # fmt: skip
    if isinstance(budget, Pruner) or isinstance(pruner, (Budget, int, float)):
        raise ValueError(
            "the pruner must come before the budget, as in PrunedCache(config, SnapKV(), keep=1024), got pruner = "
            f"{pruner!r} and budget = {budget!r}"
        )
    if pruner is None or isinstance(pruner, Pruner):
        return
    named = getattr(pruner, "__name__", pruner if isinstance(pruner, str) else type(pruner).__name__)
    ours = {name.lower(): name for name in pruners.__all__}.get(class_of(named).lower())
    hint = "" if ours is None or isinstance(pruner, type) else f": give kvcompress.pruners.{ours}()"
    if isinstance(pruner, str):
        hint += "; a cache that is all text is CacheSpec.parse('pruned,pruner=snapkv,keep=1024').make(config)"
    elif named.endswith("Press"):
        hint += "; a press's compression_ratio is the share that goes, the cache's keep the one that stays"
    raise ValueError(f"pruner must be an instance of kvcompress.pruners.Pruner, got {given_as(pruner)}{hint}")


def _gap_of(positions: str | RemoteGap) -> RemoteGap | None:
    if isinstance(positions, RemoteGap):
        return positions
    if positions == "contiguous":
        return RemoteGap(gap=0, on_overflow="warn")  # warns as IterativeCache does, refuses nothing
    if positions == "original":
        return None
    raise ValueError(f"positions must be 'original', 'contiguous' or a RemoteGap, got {positions!r}")
