"""PrunedCache: reads a prompt in one pass, keeps what a pruner chooses within a budget, and goes on so in decoding."""

from __future__ import annotations

import warnings

from transformers import PreTrainedConfig

from .. import planner
from ..budgets import AdaKV, Budget, CacheShape, Size, as_budget
from ..planner import Plan
from ..positions import RemoteGap
from ..pruners import Pruner, SnapKV
from .base import CompressedCache
from .pruned_layer import PrunedLayer
from .store import PoolSettings


class PrunedCache(CompressedCache):
    """Reads a prompt in one pass, then keeps the tokens that a pruner chooses within a budget; memory is really freed.

    config: the model's config. pruner: any of kvcompress.pruners (default SnapKV()). budget: how many tokens each row
    (a KV head of a layer) keeps: tokens (int), the share to remove (float), bytes of all pages and their tables
    ("512MiB"; what a pruner keeps besides, the latest queries or running scores, comes on top and counts in nbytes), or
    a Budget that divides them over layers and heads (PyramidKV, AdaKV); None = the pruner's own.
    every: None compresses after calls of several tokens alone (prompts, further turns); k also while decoding, when a
    row has grown by k tokens over its budget. positions: "original" (kept tokens stay where they were), "contiguous"
    (numbered anew without holes) or a RemoteGap. chunk_size: tokens that `prefill` reads at a time, each chunk followed
    by a compression; None = the whole prompt. page_size, max_pages, grow: see PoolSettings.
    A prompt within the budget is kept whole: the model then sees what it would see with a dense cache. Each sequence of
    a batch has a budget of its own. One layer at a time holds the whole prompt, never the cache. A budget holds when
    the cache has compressed; tokens that follow come on top until it compresses again (every). With model.generate
    alone a prompt is one call, whatever chunk_size says, and its last token is pruned with it; kvcompress.generate
    reads that one after the pruning.
    Raises ValueError for settings out of range. Source: SnapKV, H2O, TOVA, IntelLLM.
    """

    layers: list[PrunedLayer]
    smaller = "use a smaller budget with positions='contiguous' or a RemoteGap, and a chunk_size for long prompts"

    def __init__(
        self,
        config: PreTrainedConfig,
        pruner: Pruner | None = None,
        budget: Size | Budget | None = None,
        *,
        every: int | None = None,
        positions: str | RemoteGap = "original",
        chunk_size: int | None = None,
        page_size: int = 64,
        max_pages: int | None = None,
        grow: str = "double",
    ) -> None:
        self.pruner: Pruner = SnapKV() if pruner is None else pruner
        if not isinstance(self.pruner, Pruner):
            raise ValueError(
                f"pruner must be one of kvcompress.pruners or a subclass of kvcompress.pruners.Pruner, got "
                f"{type(pruner).__name__}"
            )
        if budget is None and (budget := self.pruner.default_budget) is None:
            raise ValueError(f"budget must be given with {type(self.pruner).__name__}, got None")
        self.budget = as_budget(budget)
        for name, value in (("every", every), ("chunk_size", chunk_size)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1 or None, got {value!r}")
        self.every, self.chunk_size = every or 0, chunk_size
        self.growth = max(self.every, chunk_size or 0)  # tokens between two compressions at most
        self.gap = self._gap_of(positions)
        self.bounded = isinstance(positions, RemoteGap)  # no position beyond the trained length
        if self.gap is not None and self.pruner.one_frame:
            raise ValueError(f"positions must be 'original' with {type(self.pruner).__name__}, got {positions!r}")
        self.pool_settings = PoolSettings(page_size, max_pages, grow)
        self._warned: set[str] = set()
        self.prompt_lengths: list[int] = []  # of the prompt that is being read
        super().__init__(config)
        if (
            self.gap is not None
            and self.bounded
            and (keep := self.budget.tokens) is not None
            and not isinstance(self.budget, AdaKV)
        ):
            near = self.near_of(keep)
            self.gap.blank(keep - near, near, self.growth, self.trained_length)  # refuses what cannot fit

    def _gap_of(self, positions: str | RemoteGap) -> RemoteGap | None:
        if isinstance(positions, RemoteGap):
            gap = positions
        elif positions == "contiguous":
            gap = RemoteGap(gap=0, on_overflow="warn")  # warns as IterativeCache does, refuses nothing
        elif positions == "original":
            return None
        else:
            raise ValueError(f"positions must be 'original', 'contiguous' or a RemoteGap, got {positions!r}")
        return gap

    def near_of(self, keep: int) -> int:
        """Near tokens of a compression to `keep` tokens."""
        assert self.gap is not None
        near = max(self.pruner.recent(keep, keep), self.gap.near_length or 0)
        return min(near, keep - min(self.pruner.num_sink_tokens, keep))

    def _new_layer(self, index: int, sliding_window: int | None) -> PrunedLayer:
        return PrunedLayer(self, index, sliding_window)

    def tokens_of(self, length: int, layer: int, rows: int, slot_nbytes: int) -> int:
        """Tokens per head that a layer keeps of a sequence of `length` tokens."""
        shape = CacheShape(len(self.layers), rows, slot_nbytes, self.pool_settings.page_size, self.every)
        return self.budget.layer_tokens(length, layer, shape)

    def plan_prompt(self, length: int) -> Plan:
        return planner.plan(length, chunk_size=self.chunk_size or max(length, 1), memory_size=1)

    def begin_prompt(self, plans: list[Plan], guide_length: int) -> None:
        self.prompt_lengths = [sum(plan.chunks) for plan in plans]

    def end_prompt(self, columns: int) -> None:
        super().end_prompt(columns)
        if self.chunk_size is not None or any(layer.whole and not all(layer.whole) for layer in self.layers):
            self.trim()  # pages that held a chunk before it was pruned

    def check_guide(self) -> None:
        if not self.pruner.uses_guide:
            raise ValueError(f"guide has no effect with the pruner {type(self.pruner).__name__}")

    def warn_once(self, message: str) -> None:
        if message.split(",")[0][:16] not in self._warned:
            self._warned.add(message.split(",")[0][:16])
            warnings.warn(message, stacklevel=3)
