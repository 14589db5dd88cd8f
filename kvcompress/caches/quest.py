"""QuestCache: keeps every token and lets a decoded query read only the pages that may matter to it (Quest)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import ops
from ..hf.facts import LayerFacts
from ..hf.method import Call
from ..ops.softmax import Softmax
from ..planner import Plan
from ..support.checks import MOST_INT32, need_integer, renamed
from ..support.units import Tokens, tokens_of
from .attention import prompt_attention
from .base import CompressedCache
from .choose import Choice
from .formats import Dtypes
from .paged import Alone, PagedLayer, StepTables, StepTurn
from .passes import CachePass, View
from .store import PoolSettings

_LEAST_PAGES = 3
_LONG = 64  # tokens of a call from which one dense copy of the layer's keys and values pays


class QuestLayer(PagedLayer):
    """Pages of the whole context, and for each of them the elementwise range of its keys.

    ranges: [R, capacity, 2D], a place for each column of the pool's table: the maximum M of a page's rotated keys, then
    that of the negated ones, -m; of codes, of what these stand for. As sum_d max(q_d m_d, q_d M_d) = relu(q).M +
    relu(-q).(-m), a page's score is one product. None in dense layers.
    """

    joins = False  # ranges have columns of a pool's own table

    def __init__(
        self, index: int, number: int, pool_settings: PoolSettings, pages_read: int, *, is_dense: bool
    ) -> None:
        super().__init__(index, number, pool_settings)
        self.pages_read, self.is_dense, self.shifts = pages_read, is_dense, is_dense
        self.ranges: Tensor | None = None

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        super().open_pool(rows, head_dim, like, rope_lengths)
        self.ranges = None if self.is_dense else like.new_zeros(rows, 0, 2 * head_dim)

    # ---- attention ----

    def append(self, step: CachePass, keys: Tensor, values: Tensor) -> View:
        view = super().append(step, keys, values)
        if not self.is_dense:
            self._note_keys(self._per_row(step.counts))
        return view

    def attend_held(self, step: CachePass, queries: Tensor, rotated: Tensor, softmax: Softmax, alone: Alone) -> Tensor:
        pool, S = self.opened, rotated.shape[2]
        if not self.is_dense and S == 1 and step.iteration is None:
            return pool.read(lambda table: self._read(table, rotated, None, None, (None, None), softmax))[0]
        if S < _LONG:
            return super().attend_held(step, queries, rotated, softmax, alone)
        k, v = (x.unflatten(0, (-1, self.heads)) for x in pool.gather(max(S, *pool.counts)))
        return prompt_attention(rotated, k, v, pool.counts[:: self.heads], softmax)

    def write_step(
        self, table: ops.PageTable, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax,
        turn: StepTurn, begin: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if self.is_dense:
            return super().write_step(table, queries, keys, values, softmax, turn, begin)
        return self._read(table, queries, keys, values, turn.tables, softmax)

    def _read(
        self, table: ops.PageTable, queries: Tensor, keys: Tensor | None, values: Tensor | None,
        tables: StepTables, softmax: Softmax,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out, lse) of one query per sequence over the pages that may matter to it; keys None: see quest_step_."""
        pool = self.opened
        assert self.ranges is not None
        self._make_room(table.block_table.shape[1])
        out, lse, _ = ops.quest_step_(
            queries, keys, values, pool.k_pages, pool.v_pages, self.ranges, table, pages_read=self.pages_read,
            cos=tables[0], sin=tables[1], scale=softmax.scale, softcap=softmax.softcap, sink_logits=softmax.sink_logits,
            **pool.scales,
        )  # fmt: skip
        return out, lse

    def prepare_steps(self) -> None:
        super().prepare_steps()
        if self.pool is not None and self.ranges is not None:
            self._make_room(self.pool.block_table.shape[1])

    def steps_ahead(self, facts: LayerFacts) -> int:
        if self.pool is not None and self.ranges is not None and self.ranges.shape[1] < self.pool.block_table.shape[1]:
            return 0  # the next step widens them
        return super().steps_ahead(facts)

    @property
    def placeable(self) -> bool:
        return False  # ranges and chosen blocks are of one batch

    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        held = super().held_tensors(facts)
        return held if self.ranges is None else (*held, self.ranges)

    # ---- ranges ----

    def _note_keys(self, new: list[int]) -> None:
        """Ranges of the pages that hold the last new[r] slots of each row r, read anew."""
        pool, P = self.opened, self.pool_settings.page_size
        assert self.ranges is not None
        if max(new) == 0:
            return
        begins = [(count - n) // P for count, n in zip(pool.counts, new, strict=True)]
        ends = [self.pool_settings.blocks(count) for count in pool.counts]
        span = max(end - begin for begin, end in zip(begins, ends, strict=True))
        device = self.ranges.device
        self._make_room(max(max(begins) + span, pool.block_table.shape[1]))
        if min(new) == max(new):
            first = (pool.lengths - new[0]) // P
        else:
            first = torch.tensor(begins, dtype=torch.int32, device=device)
        places = first[:, None] + torch.arange(span, dtype=torch.int32, device=device)
        held = places * P < pool.lengths[:, None]
        arrays, table, _, scales = pool.snapshot()
        pages = torch.where(held, table.gather(1, places.clamp(max=table.shape[1] - 1).long()), 0)
        keys = arrays["keys"][pages]
        if (form := pool.store.form) is not None:
            keys = form.decode("keys", keys, scales["key_scales"][pages])
        # what lies behind a row's end may be any number
        slots = places[..., None] * P + torch.arange(P, dtype=torch.int32, device=device)
        keys = torch.where((slots < pool.lengths[:, None, None])[..., None], keys, keys[:, :, :1])
        both = torch.cat([keys.amax(2), keys.amin(2).neg_()], dim=-1)
        self.ranges[torch.arange(len(new), device=device)[:, None], places.long()] = both

    @torch.inference_mode(False)
    def _make_room(self, blocks: int) -> None:
        assert self.ranges is not None
        held = self.ranges.shape[1]
        if blocks > held:
            bigger = self.ranges.new_zeros(self.ranges.shape[0], blocks, self.ranges.shape[2])
            bigger[:, :held] = self.ranges
            self.ranges = bigger

    def keep(self, choice: Choice, anew: Sequence[Tensor] | None = None) -> None:
        raise NotImplementedError(f"slots of {type(self).__name__} cannot be chosen: it keeps every token")

    # ---- state ----

    def drop_last(self, tokens: int) -> None:
        super().drop_last(tokens)
        if self.pool is not None and self.ranges is not None:
            self._note_keys([min(count, 1) for count in self.pool.counts])

    def check_step(self, step: CachePass, facts: LayerFacts) -> None:
        super().check_step(step, facts)
        if self.pool is None and step.iteration is None:
            self.check_pages(step.counts, facts)

    def check_pages(self, counts: Sequence[int], facts: LayerFacts) -> None:
        """Raises RuntimeError if an empty layer may not take so many tokens per sequence."""
        self.pool_settings.check(facts.kv_heads * sum(self.pool_settings.blocks(count) for count in counts))

    def nbytes(self) -> int:
        used = 0
        if self.pool is not None and self.ranges is not None:
            blocks = sum(self.pool_settings.blocks(count) for count in self.pool.counts)
            used = blocks * self.ranges.shape[2] * self.ranges.element_size()
        return super().nbytes() + used

    @torch.inference_mode(False)
    def trim(self) -> None:
        super().trim()
        if self.pool is not None and self.ranges is not None:
            blocks = self.pool_settings.blocks(max(self.pool.counts, default=0))
            if blocks < self.ranges.shape[1]:
                self.ranges = self.ranges[:, :blocks].clone()

    def reserved_nbytes(self) -> int:
        return super().reserved_nbytes() + (0 if self.ranges is None else self.ranges.nbytes)


class QuestCache(CompressedCache):
    """Keeps every token; a decoded token reads only the pages of it that may matter. Saves bandwidth, not memory.

    The keys of every page_size tokens are a page, with the elementwise minimum m and maximum M of its rotated keys. No
    key of a page can have a product with the query q above sum_d max(q_d m_d, q_d M_d): that bound is the page's score,
    for a KV head the largest of its query heads'. Each KV head of each layer reads the max(3, token_budget //
    page_size) pages of highest score, the newest page always among them, and skips all others for this query alone: the
    next one chooses anew, so nothing is ever lost. A step reads 2 vectors per page and 2 * token_budget vectors of the
    2 * T that dense decoding reads.
    Calls of several tokens attend to everything: prompts, further turns, and the drafts of assisted decoding, whose
    tokens may for that reason differ from plain decoding's where the context is longer than the budget. The last token
    of a prompt that kvcompress.generate reads is a decoded one.

    config: the model's config. token_budget: tokens that a query reads, at least 1 (1024, or "1k"); a context within it
    is read whole, as by the dense model. page_size: tokens per page, a power of two. dense_layers: so many of the first
    layers that see all tokens read everything. chunk_size: tokens that `prefill` reads at a time (no influence on
    results), None = the whole prompt. max_pages, grow, dtype: see PoolSettings; with dtype all that is attended to,
    prompts too, is what codes stand for, whose ranges are the model's numbers. Memory: that of the dense cache
    (QuantizedCache with dtype), and 1/page_size of DynamicCache's for layers that are not dense.
    Raises ValueError for settings out of range, RuntimeError where a layer needs more than max_pages.
    Source: Quest, section 3; the newest page and the defaults are its published code's.
    """

    @renamed(keep="token_budget")
    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        token_budget: Tokens = 1024,
        page_size: int = 16,
        dense_layers: int = 2,
        chunk_size: Tokens | None = None,
        max_pages: int | None = None,
        grow: str = "double",
        dtype: Dtypes = None,
    ) -> None:
        token_budget = tokens_of("token_budget", token_budget)
        need_integer("dense_layers", dense_layers, 0, MOST_INT32)
        if chunk_size is not None:
            chunk_size = tokens_of("chunk_size", chunk_size)
        self.pool_settings = PoolSettings(page_size, max_pages, grow, dtype)
        self.token_budget, self.dense_layers, self.chunk_size = token_budget, dense_layers, chunk_size
        self.pages_read = max(_LEAST_PAGES, token_budget // page_size)
        self._prompt_lengths: list[int] = []  # tokens of each sequence of the prompt that is being read
        super().__init__(config)

    def _new_layer(self, index: int, number: int) -> QuestLayer:
        return QuestLayer(index, number, self.pool_settings, self.pages_read, is_dense=number < self.dense_layers)

    @property
    def steps_differ(self) -> bool:
        return True

    def check_images(self, call: Call) -> None:
        pass

    def check_guide(self) -> None:
        raise ValueError("guide has no effect with QuestCache, which keeps every token")

    def begin_prompt(self, plans: list[Plan], guide_length: int) -> None:
        self._prompt_lengths = [sum(plan.chunks) for plan in plans]
        assert self.facts is not None
        for layer in self.compressing:
            if layer.pool is None:
                layer.check_pages(self._prompt_lengths, self.facts[layer.index])
            else:
                layer.pool.reserve(layer._per_row(self._prompt_lengths))

    def end_prompt(self, columns: int) -> None:
        self.seen += columns
        if len(set(self._prompt_lengths)) > 1:  # sequences grew unequally: crop would not know by how much
            self.fixed = self.seen
        self._prompt_lengths = []
