"""A layer of PoDCache: which keys and values it holds, and how it attends to them and to those of its lead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..caches.layer import CompressedLayer
from ..caches.paged import step_positions
from ..caches.passes import CachePass
from ..caches.queries import RecentQueries
from ..caches.rows import by_sequence
from ..caches.store import PoolSettings
from ..hf.facts import LayerFacts
from ..ops.decode_shared import gate_threshold
from ..ops.softmax import Softmax
from ..support.checks import MOST_INT32
from .config import PoDConfig
from .lead import need_alike
from .rows import Chunk, WindowRows
from .skips import Skips

State = tuple[Tensor, Tensor]  # out, lse


@dataclass
class Lent:
    """What a layer lends to its followers in a forward pass. queries: [B, Hq, S, D]; keys: [B, Hkv, T, D], the near
    ones of the chunk (see Chunk), None in a step of one token; both rotated. softmax: the layer's. probabilities:
    float32 [B, Hq', columns] of the distant tokens of a step of one token, and their lse [B, Hq', 1], of the query
    heads of KV heads `heads`; None where followers compute them anew."""

    queries: Tensor
    keys: Tensor | None
    softmax: Softmax
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
    all values and near keys (PoD) or nothing (CLA); with window attention every head keeps what is near.

    reuse: as PoDCache has it, None = where it moves fewer bytes. skips: those of the whole cache. votes: latest queries
    of a prompt that are kept for a pruner, 0 = none.
    """

    is_croppable = True
    places: Tensor  # int32 [B, 1], tokens seen of each sequence, on the device; once there are rows

    def __init__(
        self, index: int, number: int, pool_settings: PoolSettings, config: PoDConfig, *, reuse: bool | None,
        skips: Skips, votes: int,
    ) -> None:  # fmt: skip
        super().__init__(index, number)
        self.pool_settings, self.config, self.skips = pool_settings, config, skips
        self.keys: WindowRows | None = None
        self.values: WindowRows | None = None
        self.rope_lengths: list[int] = []
        self.parts: dict[int, _Heads] = {}  # by lead
        self.leads_any = index in config.lead[index]
        self.lends = config.mode == "pod" and config.last_follower(index) > index
        self.reuse = reuse
        self.reuses = False  # whether followers take over its probabilities
        self.votes = votes if self.leads_any else 0
        self.recent: RecentQueries | None = None  # of a prompt that is being read, for the pruner
        self.softmax = Softmax(1.0)  # of those
        every = [(-1, list(range(len(config.lead[index]))))]
        self.groups = tuple(every if config.mode == "window" else config.led_by(index))

    def _open(self, step: CachePass, queries: Tensor, keys: Tensor) -> None:
        config, batch = self.config, len(step.counts)
        of_mode = {"pod": ("near", "all"), "window": ("near", "near"), "cla": ("none", "none")}[config.mode]
        own = [config.mode != "window" and a == self.index for a in config.lead[self.index]]
        self.keys, self.values = (
            WindowRows(
                name, batch, ["all" if leads else keep for leads in own], config.sinks, config.recent, keys,
                self.pool_settings,
            )
            for name, keep in zip(("keys", "values"), of_mode, strict=True)
        )  # fmt: skip
        if self.lends:
            self.reuses = self._saves(queries, keys) if self.reuse is None else self.reuse
        self.rope_lengths = step.whole
        self.places = torch.zeros(batch, 1, dtype=torch.int32, device=keys.device)

    def _saves(self, queries: Tensor, keys: Tensor) -> bool:
        """Whether probabilities that are written once and read by each follower are fewer bytes than the keys that each
        would read."""
        lead, G = self.config.lead, queries.shape[1] // keys.shape[1]
        leads = sum(a == self.index for a in lead[self.index])
        followers = sum(a == self.index for row in lead[self.index + 1 :] for a in row)
        store = self.rows[0].pool.store
        return 4 * G * (leads + followers) < followers * (store.page_nbytes() // store.settings.page_size)

    @property
    def rows(self) -> tuple[WindowRows, WindowRows]:
        """Those of keys and of values, once there are any."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    @property
    def next(self) -> list[int]:
        """Tokens seen of each sequence."""
        return self.rows[1].tokens

    @property
    def held(self) -> list[int]:
        """Values of each sequence, which are those of all its tokens until a pruner chose (not with window)."""
        values = self.rows[1]
        return values.pool.bounds[:: values.heads]

    # ---- attention ----

    def attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if self.keys is None:
            self._open(step, queries, keys)
        layers = [self, *(step.layers[lead] for lead, _ in self.groups if lead not in (-1, self.index))]
        # a fork in another thread may move pages, and the tables after them
        locks = [rows.pool.store.lock for layer in layers for rows in (layer.keys, layer.values)]
        for lock in locks:
            lock.acquire()
        try:
            found = self._step(step, queries, keys, values, softmax) if step.one else None
            return self._attend(step, queries, keys, values, softmax) if found is None else found
        finally:
            for lock in locks:
                lock.release()

    def _step(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor | None:
        """One token of every sequence in a single op; None, and nothing is stored, where heads differ in whose distant
        tokens they follow or rotation is more than a table."""
        facts, config, places = step.facts[self.index], self.config, self.places
        held, all_ = self.rows
        longest = max(self.next) + 1
        distant = longest > config.window
        if config.mode != "pod" or (distant and len(self.groups) > 1) or facts.query_rotary is not facts.key_rotary:
            return None
        tables = facts.query_rotary.step_tables(longest, self.rope_lengths, queries.device)
        if tables is None:
            return None
        lead, heads = self.groups[0]
        lent = step.lent.get(lead)
        given: dict[str, Any] = {"sinks": config.sinks, "recent": config.recent}
        probabilities = far_lse = None
        if lead == self.index and self.reuses and distant:
            columns = max(max(self.held) + 1 - config.window, 0)
            probabilities = torch.empty(*queries.shape[:2], columns, dtype=torch.float32, device=queries.device)
            far_lse = torch.empty(*queries.shape[:3], dtype=torch.float32, device=queries.device)
            given |= {"far": "own", "probabilities": probabilities, "far_lse": far_lse}
        elif distant and lead == self.index:  # all of it at once
            given = {"sinks": 0, "recent": MOST_INT32}
        elif distant:
            assert lent is not None
            need_alike(self.index, lead, softmax, lent.softmax)
            if lent.probabilities is None:
                theirs: WindowRows = step.layers[lead].keys
                given |= {
                    "far": "led",
                    "lead": ops.Lead(lent.queries, theirs.pages, theirs.table(), *theirs.scales.values()),
                }
            else:
                shared, shared_lse = lent.shared(heads)
                given |= {"far": "shared", "probabilities": shared, "far_lse": shared_lse}
                given["tau"] = self.skips.tau if self.skips.any else None

        def write(table: ops.PageTable, value_table: ops.PageTable) -> ops.PodStep:
            return ops.pod_step_(
                queries, keys, values, held.pages, all_.pages, table, value_table, places, first=held.first,
                moved=all_.moved_as(held), cos=tables[0], sin=tables[1], **held.scales, **all_.scales, **given,
                **softmax.options,
            )  # fmt: skip

        found = held.step(lambda table: all_.step(lambda value_table: write(table, value_table)))
        if self.lends:
            own = None if probabilities is None or far_lse is None else (probabilities, far_lse)
            step.lent[self.index] = Lent(found.turned, None, softmax, own, heads)
        if self.skips.any:
            skipped = found.skipped if given.get("far") == "shared" else None
            self.skips.count(step, self.held, queries.shape[1], skipped)
        return found.out

    def _attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        facts, counts, S = step.facts[self.index], step.counts, keys.shape[2]
        own_keys, own_values = self.rows
        positions, bound = step_positions(self.places, counts, S), max(self.next) + S
        one, config = S == 1 and min(counts) == 1, self.config
        with torch.inference_mode(one):
            q = facts.query_rotary.rotate(queries, positions, bound, self.rope_lengths)
            k = facts.key_rotary.rotate(keys, positions, bound, self.rope_lengths)
        self._note(step, queries, softmax)
        chunk, near_keys, near_values = None, None, None
        follows = any(lead != self.index for lead, _ in self.groups)
        if not one and config.mode != "cla" and (follows or self.lends):
            chunk = Chunk.of(self.next, counts, S, config.sinks, config.recent, k.device)
            near_keys = chunk.sequence(own_keys, k)
            near_values = chunk.sequence(own_values, values) if follows else None
        if self.lends:
            step.lent[self.index] = Lent(q, near_keys, softmax)
        own_keys.append(k, counts)
        own_values.append(values, counts)
        self.places = self.places + (1 if one else step.on(k.device))
        out = torch.zeros_like(q) if len(self.groups) > 1 else q
        for lead, heads in self.groups:
            if lead not in self.parts:
                self.parts[lead] = _Heads(heads, own_keys.heads, q)
            part = self.parts[lead]
            own = softmax if part.whole else softmax.of_heads(part.query_heads)
            if lead == self.index and self.reuses and one and max(self.next) > config.window:
                found = self._lend(step, part, q, own)
            elif lead == self.index or config.mode == "cla":
                found = self._whole(step.layers[lead], part, q, own)
                if config.mode == "pod":
                    self.skips.count(step, self.held, len(part.query_heads), None)
            elif chunk is None:
                found = self._decode(step, lead, part, q, own)
            else:
                assert near_keys is not None and near_values is not None
                found = self._read(step, lead, part, q, near_keys, near_values, chunk, own)
            if len(self.groups) == 1:
                return found
            out[:, part.query_heads] = found
        return out

    def _note(self, step: CachePass, queries: Tensor, softmax: Softmax) -> None:
        """Keeps the latest queries of a prompt where a pruner will look at them."""
        if self.votes and (step.columns > 1 or step.iteration is not None):
            self.recent = self.recent or RecentQueries(self.votes)
            self.recent.add(queries, step.counts)
            self.softmax = softmax

    def _whole(self, layer: PoDLayer, part: _Heads, q: Tensor, softmax: Softmax) -> Tensor:
        """Causal attention to all that a layer holds."""
        keys, values = layer.rows
        return ops.decode(
            part.queries(q), keys.pages, values.pages, part.rows_of(keys.pool.lengths), block_table=part.table(keys),
            value_table=part.table(values), causal=True, **keys.scales, **values.scales, **softmax.options,
        )[0]  # fmt: skip

    def _decode(self, step: CachePass, lead: int, part: _Heads, q: Tensor, softmax: Softmax) -> Tensor:
        """One token of every sequence, already held: near keys, and the lead's distant ones."""
        values, config = self.rows[1], self.config
        if config.mode == "window" or max(self.next) <= config.window:
            self.skips.count(step, self.held, len(part.query_heads), None)  # nothing is distant
            return self._near(part, q, softmax)[0]
        with torch.inference_mode():
            near, (begin, end) = self._near(part, q, softmax), self._far(part)
        lent: Lent = step.lent[lead]
        need_alike(self.index, lead, softmax, lent.softmax)
        if lent.probabilities is None:
            self.skips.count(step, self.held, len(part.query_heads), None)
            return ops.merge_states(near, self._distant(step, lead, part, begin, end, softmax))[0]
        out, skipped = ops.decode_shared(
            near, *lent.shared(part.heads), values.pages, begin, end, block_table=part.table(values),
            tau=self.skips.tau if self.skips.in_step(step) else None, **values.scales,
        )  # fmt: skip
        self.skips.count(step, self.held, len(part.query_heads), skipped)
        return out

    def _lend(self, step: CachePass, part: _Heads, q: Tensor, softmax: Softmax) -> Tensor:
        """One token of every sequence, of heads that lead: plain attention, whose distant part followers reuse."""
        queries = part.queries(q)
        columns = max(self.held) - self.config.window
        probabilities = torch.empty(*queries.shape[:2], columns, dtype=torch.float32, device=q.device)
        with torch.inference_mode():
            near, (begin, end) = self._near(part, q, softmax), self._far(part)
        far = self._distant(step, self.index, part, begin, end, softmax, probabilities)
        lent: Lent = step.lent[self.index]
        lent.probabilities, lent.heads = (probabilities, far[1]), part.heads
        self.skips.count(step, self.held, len(part.query_heads), None)
        return ops.merge_states(near, far)[0]

    def _far(self, part: _Heads) -> tuple[Tensor, Tensor]:
        """Where the distant tokens of one more query lie in rows that hold all: begin, end, int32 [rows]."""
        total = part.rows_of(self.rows[1].pool.lengths)
        begin = total.clamp(max=self.config.sinks)
        return begin, torch.maximum(total - self.config.recent, begin)

    def _near(self, part: _Heads, q: Tensor, softmax: Softmax) -> State:
        """Attention of one token to the first and the recent ones, by own keys and values."""
        (keys, values), config = self.rows, self.config
        end = part.rows_of(keys.pool.lengths)
        own = part.table(values) if config.mode == "window" else values.table_as(keys, part.index)
        return ops.decode(
            part.queries(q), keys.pages, values.pages, end, begin=(end - config.recent).clamp(min=0),
            sinks=config.sinks, block_table=part.table(keys), value_table=own, **keys.scales, **values.scales,
            **softmax.options,
        )  # fmt: skip

    def _distant(
        self, step: CachePass, lead: int, part: _Heads, begin: Tensor, end: Tensor, softmax: Softmax,
        probabilities: Tensor | None = None,
    ) -> State:  # fmt: skip
        """Attention to a range of tokens by the lead's queries and keys, and the layer's own values; sinks of the
        softmax count in that to near ones."""
        keys, values = step.layers[lead].rows[0], self.rows[1]
        return ops.decode(
            part.queries(step.lent[lead].queries), keys.pages, values.pages, end, begin=begin,
            block_table=part.table(keys), value_table=part.table(values), probabilities=probabilities,
            **keys.scales, **values.scales, **softmax.rest.options,
        )  # fmt: skip

    def _read(
        self, step: CachePass, lead: int, part: _Heads, q: Tensor, keys: Tensor, values: Tensor, chunk: Chunk,
        softmax: Softmax,
    ) -> Tensor:  # fmt: skip
        """Some tokens of each sequence, with the near keys and values of the chunk."""
        config, held, states = self.config, self.rows[1], []
        sets: dict[str, Any] = {"window": config.recent, "sinks": config.sinks, "lengths": chunk.lengths}
        v = part.of(values)
        states.append(ops.attention(part.queries(q), part.of(keys), v, **sets, **softmax.options))
        if config.mode == "pod":
            lent: Lent = step.lent[lead]
            assert lent.keys is not None
            need_alike(self.index, lead, softmax, lent.softmax)
            if v.shape[2] > config.window:  # a token becomes distant within the chunk
                led_q, led_k = part.queries(lent.queries), part.of(lent.keys)
                states.append(ops.attention(led_q, led_k, v, complement=True, **sets, **softmax.rest.options))
            if chunk.far:
                seen = chunk.before[:, None].expand(-1, len(part.heads)).flatten()
                if (gone := held.gone()) is not None:  # tokens of the prompt that a pruner left out
                    seen = seen - part.rows_of(gone[:, 0]).int() * held.pool.page_size
                begin = seen.clamp(max=config.sinks)
                end = torch.maximum(seen - config.recent + 1, begin)
                states.append(self._distant(step, lead, part, begin, end, softmax))
        out = ops.merge_states(*states)[0]
        if not self.skips.in_step(step):
            return out
        # one token of some sequences and none of others: what _decode computes, though nothing is saved here
        (near, near_lse), far_lse = states[0], torch.full_like(states[0][1], -math.inf)
        if len(states) > 1:
            far_lse = ops.merge_states(*states[1:])[1]
        skipped = (far_lse > -math.inf) & (near_lse - far_lse >= gate_threshold(self.skips.tau))
        self.skips.count(step, self.held, len(part.query_heads), skipped)
        return torch.where(skipped[..., None], near, out)

    # ---- state ----

    def check_step(self, step: CachePass, facts: LayerFacts) -> None:
        """Takes the pages that a step of one token needs before any layer has changed."""
        if self.pool_settings.max_pages is None or step.columns != 1:
            return
        for rows in (self.keys, self.values):
            if rows is not None:
                step.claim(rows.pool, rows.most_slots(step.counts))

    def removable(self) -> int:
        """Tokens that can be taken back."""
        return min((rows.removable() for rows in (self.keys, self.values) if rows is not None), default=0)

    def drop_last(self, tokens: int) -> None:
        if self.keys is not None:
            for rows in self.rows:
                rows.drop_last(tokens)
            self.places = self.places - tokens

    def select(self, indices: list[int], batch: int) -> None:
        super().select(indices, batch)
        self.parts = {}

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

    def kept_positions(self) -> list[list[Tensor]]:
        return [] if self.values is None else self.values.kept_positions()

    def kept_key_positions(self) -> list[list[Tensor]]:
        return [] if self.keys is None else self.keys.kept_positions()

    def stored_keys(self) -> list[list[int]]:
        return self._lengths(self.keys)

    def _lengths(self, rows: WindowRows | None) -> list[list[int]]:
        return [] if rows is None else by_sequence(rows.pool.counts, len(rows.tokens))


class _Heads:
    """Some KV heads of a layer: their rows, query heads and tables."""

    def __init__(self, heads: list[int], all_heads: int, queries: Tensor) -> None:
        batch, G = queries.shape[0], queries.shape[1] // all_heads
        self.heads, self.query_heads = heads, [head * G + g for head in heads for g in range(G)]
        self.whole = len(heads) == all_heads
        rows = [b * all_heads + head for b in range(batch) for head in heads]
        self.index = None if self.whole else torch.tensor(rows, device=queries.device)

    def queries(self, x: Tensor) -> Tensor:
        return x if self.whole else x[:, self.query_heads]

    def of(self, x: Tensor) -> Tensor:
        return x if self.whole else x[:, self.heads]

    def rows_of(self, x: Tensor) -> Tensor:
        return x if self.index is None else x[self.index]

    def table(self, rows: WindowRows) -> Tensor:
        return rows.table(self.index)
