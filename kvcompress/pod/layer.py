"""A layer of PoDCache: which keys and values it holds, and how it attends to them and to those of its lead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..ops.decode_shared import gate_threshold
from .base import CompressedLayer, Step
from .near import Chunk, NearRows
from .paged import step_positions
from .queries import RecentQueries

if TYPE_CHECKING:
    from .pod import PoDCache

State = tuple[Tensor, Tensor]  # out, lse


@dataclass
class Lead:
    """What a layer lends to its followers in a forward pass. queries: [B, Hq, S, D]; keys: [B, Hkv, T, D], the near
    ones of the chunk (see Chunk), None in a step of one token; both rotated. probabilities: float32 [B, Hq', columns]
    of the distant tokens of a step of one token, and their lse [B, Hq', 1], of the query heads of KV heads `heads`;
    None where followers compute them anew."""

    queries: Tensor
    keys: Tensor | None
    probabilities: State | None = None
    heads: list[int] | None = None

    def shared(self, heads: list[int]) -> State:
        """Probabilities and lse of the query heads of some of those KV heads."""
        assert self.probabilities is not None and self.heads is not None
        if heads == self.heads:
            return self.probabilities
        G = self.probabilities[0].shape[1] // len(self.heads)
        places = [self.heads.index(head) for head in heads]
        if places == list(range(places[0], places[-1] + 1)):
            some: slice | list[int] = slice(places[0] * G, (places[-1] + 1) * G)
        else:
            some = [place * G + g for place in places for g in range(G)]
        return self.probabilities[0][:, some], self.probabilities[1][:, some]


class PoDLayer(CompressedLayer):
    """Keys and values of a layer, each in rows of their own: a head that leads itself keeps all, one that follows keeps
    all values and near keys (PoD) or nothing (CLA); with window attention every head keeps what is near."""

    cache: PoDCache
    is_croppable = True

    def __init__(self, cache: PoDCache, index: int, sliding_window: int | None) -> None:
        super().__init__(cache, index, sliding_window)
        self.keys: NearRows | None = None
        self.values: NearRows | None = None
        self.rope_lengths: list[int] = []
        self.next: list[int] = []  # tokens seen of each sequence
        self.places: Tensor | None = None  # int32 [B, 1], the same on the device
        self.parts: dict[int, _Heads] = {}  # by lead
        config = cache.pod
        self.lends = config.mode == "pod" and config.last_follower(index) > index
        self.reuses = False  # whether followers take over its probabilities
        self.recent: RecentQueries | None = None  # of a prompt that is being read, for the pruner
        self.scaling = 1.0
        self.groups = [(-1, list(range(len(config.lead[index]))))] if config.mode == "window" else config.led_by(index)

    def _open(self, keys: Tensor, counts: tuple[int, ...]) -> None:
        cache, config, batch = self.cache, self.cache.pod, len(counts)
        of_mode = {"pod": ("near", "all"), "window": ("near", "near"), "cla": ("none", "none")}[config.mode]
        own = [config.mode != "window" and a == self.index for a in config.lead[self.index]]
        self.keys, self.values = (
            NearRows(
                name, batch, ["all" if leads else keep for leads in own], config.sinks, config.recent, keys,
                cache.pool_settings,
            )
            for name, keep in zip(("keys", "values"), of_mode, strict=True)
        )  # fmt: skip
        if self.lends:
            self.reuses = cache.reuses(self.index, keys)
        # frequencies that depend on length are settled for the whole prompt, not for its first chunk
        whole = cache.prompt_lengths or [1] * batch
        self.rope_lengths = [max(n, m, 1) for n, m in zip(counts, whole, strict=True)]
        self.next = [0] * batch
        self.places = torch.zeros(batch, 1, dtype=torch.int32, device=keys.device)

    @property
    def held(self) -> list[int]:
        """Values of each sequence, which are those of all its tokens until a pruner chose (not with window)."""
        assert self.values is not None
        return self.values.pool.bounds[:: self.values.heads]

    # ---- attention ----

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        rotary, counts, S = self.cache.rotary, self.cache.step.counts, keys.shape[2]
        assert rotary is not None
        if self.keys is None:
            self._open(keys, counts)
        assert self.keys is not None and self.values is not None and self.places is not None
        positions, bound = step_positions(self.places, counts, S), max(self.next) + S
        one, config = S == 1 and min(counts) == 1, self.cache.pod
        with torch.inference_mode(one):
            q = rotary.rotate(queries, positions, bound, self.rope_lengths)
            k = rotary.rotate(keys, positions, bound, self.rope_lengths)
        self._note(queries, scaling)
        chunk, near_keys, near_values = None, None, None
        follows = any(lead != self.index for lead, _ in self.groups)
        if not one and config.mode != "cla" and (follows or self.lends):
            chunk = Chunk.of(self.next, counts, S, config.sinks, config.recent, k.device)
            near_keys = chunk.sequence(self.keys, k)
            near_values = chunk.sequence(self.values, values) if follows else None
        if self.lends:
            self.cache.leads[self.index] = Lead(q, near_keys)
        self.keys.append(k, counts)
        self.values.append(values, counts)
        self.next = list(self.values.tokens)
        self.places = self.places + (1 if one else torch.tensor(counts, dtype=torch.int32).to(k.device)[:, None])
        out = torch.zeros_like(q) if len(self.groups) > 1 else q
        for lead, heads in self.groups:
            if lead not in self.parts:
                self.parts[lead] = _Heads(heads, self.keys.heads, q)
            part = self.parts[lead]
            if lead == self.index and self.reuses and one and max(self.next) > config.window:
                found = self._lend(part, q, scaling)
            elif lead == self.index or config.mode == "cla":
                found = self._whole(self.cache.layers[lead], part, q, scaling)
                if config.mode == "pod":
                    self.cache.count(self.held, len(part.query_heads), None)
            elif chunk is None:
                found = self._decode(lead, part, q, scaling)
            else:
                assert near_keys is not None and near_values is not None
                found = self._read(lead, part, q, near_keys, near_values, chunk, scaling)
            if len(self.groups) == 1:
                return found
            out[:, part.query_heads] = found
        return out

    def _note(self, queries: Tensor, scaling: float) -> None:
        """Keeps the latest queries of a prompt where a pruner will look at them."""
        pruner, step = self.cache.pruner, self.cache.step
        if pruner is None or self.index not in self.cache.pod.lead[self.index]:
            return
        if step.columns > 1 or step.iteration is not None:
            self.recent = self.recent or RecentQueries(pruner.window or 1)
            self.recent.add(queries, step.counts)
            self.scaling = scaling

    def _whole(self, layer: PoDLayer, part: _Heads, q: Tensor, scaling: float) -> Tensor:
        """Causal attention to all that a layer holds."""
        assert layer.keys is not None and layer.values is not None
        return ops.decode(
            part.queries(q), layer.keys.pages, layer.values.pages, part.rows_of(layer.keys.pool.lengths),
            block_table=part.table(layer.keys), value_table=part.table(layer.values), scale=scaling, causal=True,
        )[0]  # fmt: skip

    def _decode(self, lead: int, part: _Heads, q: Tensor, scaling: float) -> Tensor:
        """One token of every sequence, already held: near keys, and the lead's distant ones."""
        keys, values, cache, config = self.keys, self.values, self.cache, self.cache.pod
        assert keys is not None and values is not None
        if config.mode == "window" or max(self.next) <= config.window:
            cache.count(self.held, len(part.query_heads), None)  # nothing is distant
            return self._near(part, q, scaling)[0]
        with torch.inference_mode():
            near, (begin, end) = self._near(part, q, scaling), self._far(part)
        lent = cache.leads[lead]
        if lent.probabilities is None:
            cache.count(self.held, len(part.query_heads), None)
            return ops.merge_states(near, self._distant(lead, part, begin, end, scaling))[0]
        out, skipped = ops.decode_shared(
            near, *lent.shared(part.heads), values.pages, begin, end, block_table=part.table(values),
            tau=cache.tau if cache.skipping else None,
        )  # fmt: skip
        cache.count(self.held, len(part.query_heads), skipped)
        return out

    def _lend(self, part: _Heads, q: Tensor, scaling: float) -> Tensor:
        """One token of every sequence, of heads that lead: plain attention, whose distant part followers reuse."""
        keys, cache, config = self.keys, self.cache, self.cache.pod
        assert keys is not None
        queries = part.queries(q)
        columns = max(self.held) - config.window
        probabilities = torch.empty(*queries.shape[:2], columns, dtype=torch.float32, device=q.device)
        with torch.inference_mode():
            near, (begin, end) = self._near(part, q, scaling), self._far(part)
        far = self._distant(self.index, part, begin, end, scaling, probabilities)
        lent = cache.leads[self.index]
        lent.probabilities, lent.heads = (probabilities, far[1]), part.heads
        cache.count(self.held, len(part.query_heads), None)
        return ops.merge_states(near, far)[0]

    def _far(self, part: _Heads) -> tuple[Tensor, Tensor]:
        """Where the distant tokens of one more query lie in rows that hold all: begin, end, int32 [rows]."""
        assert self.values is not None
        total = part.rows_of(self.values.pool.lengths)
        begin = total.clamp(max=self.cache.pod.sinks)
        return begin, torch.maximum(total - self.cache.pod.recent, begin)

    def _near(self, part: _Heads, q: Tensor, scaling: float) -> State:
        """Attention of one token to the first and the recent ones, by own keys and values."""
        keys, values, config = self.keys, self.values, self.cache.pod
        assert keys is not None and values is not None
        end = part.rows_of(keys.pool.lengths)
        own = part.table(values) if config.mode == "window" else values.table_as(keys, part.index)
        return ops.decode(
            part.queries(q), keys.pages, values.pages, end, begin=(end - config.recent).clamp(min=0),
            sinks=config.sinks, scale=scaling, block_table=part.table(keys), value_table=own,
        )  # fmt: skip

    def _distant(
        self, lead: int, part: _Heads, begin: Tensor, end: Tensor, scaling: float, probabilities: Tensor | None = None
    ) -> State:
        """Attention to a range of tokens by the lead's queries and keys, and the layer's own values."""
        keys, values = self.cache.layers[lead].keys, self.values
        assert keys is not None and values is not None
        return ops.decode(
            part.queries(self.cache.leads[lead].queries), keys.pages, values.pages, end, begin=begin, scale=scaling,
            block_table=part.table(keys), value_table=part.table(values), probabilities=probabilities,
        )  # fmt: skip

    def _read(
        self, lead: int, part: _Heads, q: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, scaling: float
    ) -> Tensor:
        """Some tokens of each sequence, with the near keys and values of the chunk."""
        config, states = self.cache.pod, []
        assert self.values is not None
        sets: dict[str, Any] = {
            "window": config.recent, "sinks": config.sinks, "lengths": chunk.lengths, "scale": scaling,
        }  # fmt: skip
        v = part.of(values)
        states.append(ops.attention(part.queries(q), part.of(keys), v, **sets))
        if config.mode == "pod":
            lent = self.cache.leads[lead]
            assert lent.keys is not None
            if v.shape[2] > config.window:  # a token becomes distant within the chunk
                led = part.queries(lent.queries), part.of(lent.keys)
                states.append(ops.attention(*led, v, complement=True, **sets))
            if chunk.far:
                seen = chunk.before[:, None].expand(-1, len(part.heads)).flatten()
                if (gone := self.values.gone()) is not None:  # tokens of the prompt that a pruner left out
                    seen = seen - part.rows_of(gone[:, 0]).int() * self.values.pool.page_size
                begin = seen.clamp(max=config.sinks)
                end = torch.maximum(seen - config.recent + 1, begin)
                states.append(self._distant(lead, part, begin, end, scaling))
        out, cache = ops.merge_states(*states)[0], self.cache
        if not cache.skipping:
            return out
        # one token of some sequences and none of others: what _decode computes, though nothing is saved here
        (near, near_lse), far_lse = states[0], torch.full_like(states[0][1], -math.inf)
        if len(states) > 1:
            far_lse = ops.merge_states(*states[1:])[1]
        skipped = (far_lse > -math.inf) & (near_lse - far_lse >= gate_threshold(cache.tau))
        cache.count(self.held, len(part.query_heads), skipped)
        return torch.where(skipped[..., None], near, out)

    # ---- state ----

    def check_step(self, step: Step) -> None:
        """Takes the pages that a step of one token needs before any layer has changed."""
        super().check_step(step)
        if self.cache.pool_settings.max_pages is None or step.columns != 1:
            return
        for rows in (self.keys, self.values):
            if rows is not None:
                rows.pool.reserve(rows.most_slots(step.counts))

    def keys_in_sight(self, step: Step) -> int:
        held, config = self.next or [0] * len(step.counts), self.cache.pod
        most = max(have + count for have, count in zip(held, step.counts, strict=True))
        return min(most, config.recent) if config.mode == "window" and config.sinks == 0 else most

    def removable(self) -> int:
        return min((rows.removable() for rows in (self.keys, self.values) if rows is not None), default=0)

    def drop_last(self, tokens: int) -> None:
        if self.keys is None or self.values is None or self.places is None:
            return
        self.keys.drop_last(tokens)
        self.values.drop_last(tokens)
        self.next = list(self.values.tokens)
        self.places = self.places - tokens

    @torch.inference_mode(False)
    def select_batch(self, indices: list[int]) -> None:
        if self.keys is None or self.values is None or self.places is None:
            return
        heads = self.keys.heads
        rows = [b * heads + h for b in indices for h in range(heads)]
        self.parts = {}
        if self.recent is not None:
            self.recent.select_batch(indices)
        self.keys.select_rows(rows)
        self.values.select_rows(rows)
        self.places = self.places[torch.tensor(indices, dtype=torch.long).to(self.places.device)]
        self.rope_lengths, self.next = ([list_[b] for b in indices] for list_ in (self.rope_lengths, self.next))

    def _pools(self) -> list[Any]:
        return [rows.pool for rows in (self.keys, self.values) if rows is not None]

    def nbytes(self) -> int:
        return sum(pool.nbytes() for pool in self._pools())

    def reserved_nbytes(self) -> int:
        return sum(pool.reserved_nbytes() for pool in self._pools())

    def trim(self) -> None:
        for pool in self._pools():
            pool.trim()

    def stored_lengths(self) -> list[list[int]]:
        return self._lengths(self.values)

    def stored_keys(self) -> list[list[int]]:
        return self._lengths(self.keys)

    def _lengths(self, rows: NearRows | None) -> list[list[int]]:
        if rows is None:
            return []
        counts, heads = rows.pool.counts, rows.heads
        return [counts[b * heads : (b + 1) * heads] for b in range(len(self.next))]


class _Heads:
    """Some KV heads of a layer: their rows, query heads and tables."""

    def __init__(self, heads: list[int], all_heads: int, queries: Tensor) -> None:
        batch, G = queries.shape[0], queries.shape[1] // all_heads
        self.heads, self.query_heads = heads, [head * G + g for head in heads for g in range(G)]
        self.whole = len(heads) == all_heads
        rows = torch.tensor([b * all_heads + head for b in range(batch) for head in heads])
        self.index = None if self.whole else rows.to(queries.device)

    def queries(self, x: Tensor) -> Tensor:
        return x if self.whole else x[:, self.query_heads]

    def of(self, x: Tensor) -> Tensor:
        return x if self.whole else x[:, self.heads]

    def rows_of(self, x: Tensor) -> Tensor:
        return x if self.index is None else x[self.index]

    def table(self, rows: NearRows) -> Tensor:
        return rows.table(self.index)
