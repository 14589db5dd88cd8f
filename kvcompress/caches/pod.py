"""The cache of models whose layers share distant keys (PoD), and of its baselines window attention and CLA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import ops
from ..pod.config import PoDConfig
from .base import CompressedLayer, Step
from .converted import ConvertedCache
from .near import Chunk, NearRows
from .paged import step_positions

State = tuple[Tensor, Tensor]  # out, lse


@dataclass
class Lead:
    """What a layer lends to its followers in a forward pass. queries: [B, Hq, S, D]; keys: [B, Hkv, T, D], the near
    ones of the chunk (see Chunk), None in a step of one token; both rotated."""

    queries: Tensor
    keys: Tensor | None


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
        # frequencies that depend on length are settled for the whole prompt, not for its first chunk
        whole = cache.prompt_lengths or [1] * batch
        self.rope_lengths = [max(n, m, 1) for n, m in zip(counts, whole, strict=True)]
        self.next = [0] * batch
        self.places = torch.zeros(batch, 1, dtype=torch.int32, device=keys.device)

    # ---- attention ----

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        rotary, counts, S = self.cache.rotary, self.cache.step.counts, keys.shape[2]
        assert rotary is not None
        if self.keys is None:
            self._open(keys, counts)
        assert self.keys is not None and self.values is not None and self.places is not None
        positions, bound = step_positions(self.places, counts, S), max(self.next) + S
        q = rotary.rotate(queries, positions, bound, self.rope_lengths)
        k = rotary.rotate(keys, positions, bound, self.rope_lengths)
        one, config = S == 1 and min(counts) == 1, self.cache.pod
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
            if lead == self.index or config.mode == "cla":
                found = self._whole(self.cache.layers[lead], part, q, scaling)
            elif chunk is None:
                found = self._decode(lead, part, q, scaling)
            else:
                assert near_keys is not None and near_values is not None
                found = self._read(lead, part, q, near_keys, near_values, chunk, scaling)
            if len(self.groups) == 1:
                return found
            out[:, part.query_heads] = found
        return out

    def _whole(self, layer: PoDLayer, part: _Heads, q: Tensor, scaling: float) -> Tensor:
        """Causal attention to all that a layer holds."""
        assert layer.keys is not None and layer.values is not None
        return ops.decode(
            part.queries(q), layer.keys.pages, layer.values.pages, part.rows_of(layer.keys.pool.lengths),
            block_table=part.table(layer.keys), value_table=part.table(layer.values), scale=scaling, causal=True,
        )[0]  # fmt: skip

    def _decode(self, lead: int, part: _Heads, q: Tensor, scaling: float) -> Tensor:
        """One token of every sequence, already held: near keys, and the lead's distant ones."""
        keys, values, config = self.keys, self.values, self.cache.pod
        assert keys is not None and values is not None
        queries, length = part.queries(q), part.rows_of(keys.pool.lengths)
        gone = None if config.mode == "window" else keys.gone()  # with window attention values go as keys do
        table, value_table = part.table(keys), values.table_without(gone, part.index)

        def near(begin: Tensor | None, end: Tensor) -> State:
            return ops.decode(
                queries, keys.pages, values.pages, end, begin=begin, block_table=table, value_table=value_table,
                scale=scaling,
            )  # fmt: skip

        if max(self.next) <= config.window:
            return near(None, length)[0]
        recent = near(torch.minimum((length - config.recent).clamp(min=config.sinks), length), length)
        states = [near(None, length.clamp(max=config.sinks)), recent] if config.sinks else [recent]
        joined = ops.merge_states(*states)
        if config.mode == "window":
            return joined[0]
        total = part.rows_of(values.pool.lengths)
        begin = total.clamp(max=config.sinks)
        far = self._distant(lead, part, begin, torch.maximum(total - config.recent, begin), scaling)
        return self._skipped(joined, far)

    def _distant(self, lead: int, part: _Heads, begin: Tensor, end: Tensor, scaling: float) -> State:
        """Attention to a range of tokens by the lead's queries and keys, and the layer's own values."""
        keys, values = self.cache.layers[lead].keys, self.values
        assert keys is not None and values is not None
        return ops.decode(
            part.queries(self.cache.leads[lead].queries), keys.pages, values.pages, end, begin=begin, scale=scaling,
            block_table=part.table(keys), value_table=part.table(values),
        )  # fmt: skip

    def _skipped(self, near: State, far: State) -> Tensor:
        """The two joined, or the near one alone where the gate is at least tau."""
        out, tau = ops.merge_states(near, far)[0], self.cache.tau
        if tau is None or tau == 1:
            return out
        least = math.log(tau / (1 - tau)) if tau > 0 else -math.inf
        return torch.where((near[1] - far[1] >= least)[..., None], near[0], out)

    def _read(
        self, lead: int, part: _Heads, q: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, scaling: float
    ) -> Tensor:
        """Some tokens of each sequence, with the near keys and values of the chunk."""
        config, states = self.cache.pod, []
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
                begin = seen.clamp(max=config.sinks)
                end = torch.maximum(seen - config.recent + 1, begin)
                states.append(self._distant(lead, part, begin, end, scaling))
        return ops.merge_states(*states)[0]

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


class PoDCache(ConvertedCache):
    """The cache of a model converted to PoD, or to one of its baselines (config.kvcompress says which).

    PoD: every layer keeps all values; a KV head that leads itself keeps all keys, one that follows keeps those of the
    first tokens and of the recent ones and reads the distant ones of its lead. What a follower drops is gone: pages go
    back as soon as no query to come sees a key of theirs. Window attention: every head keeps what is near, keys and
    values. CLA: a follower keeps nothing and reads its lead's keys and values. Results are those of the model without a
    cache, however a prompt is divided into chunks or batches.

    config: the converted model's config. chunk_size: tokens that `prefill` reads at a time, None = the whole prompt.
    tau: a follower's decoded token takes the near tokens alone where they have at least this probability; None = the
    config's. It shows what skipping does to answers: the distant tokens are read nonetheless. page_size, max_pages,
    grow: see PoolSettings; keys have as many pages in each layer as values.
    A prompt of several chunks that finds no page leaves the cache incomplete: reset() it.
    Raises ValueError for settings out of range and for a config that is not of a converted model.
    Source: PoD, section 2.3.
    """

    title = "PoD"
    layers: list[PoDLayer]
    smaller = "PoDCache lets every token be seen; use shorter prompts"

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        page_size: int = 64,
        max_pages: int | None = None,
        grow: str = "double",
        chunk_size: int | None = None,
        tau: float | None = None,
    ) -> None:
        if tau is not None and not 0 <= tau <= 1:
            raise ValueError(f"tau must be between 0 and 1 or None, got {tau}")
        self.leads: dict[int, Lead] = {}  # of the forward pass that is under way
        super().__init__(config, page_size, max_pages, grow, chunk_size)
        self.tau = self.pod.tau if tau is None else tau

    @property
    def pod(self) -> PoDConfig:
        return self.settings

    @staticmethod
    def parsed(saved: dict[str, Any]) -> PoDConfig:
        return PoDConfig.from_dict(saved)

    def _settings_of(self, config: Any) -> PoDConfig:
        settings: PoDConfig = super()._settings_of(config)
        settings.check_model(config)
        return settings

    def _new_layer(self, index: int, sliding_window: int | None) -> PoDLayer:
        return PoDLayer(self, index, sliding_window)

    # ---- reading ----

    def begin_forward(self, decoder: Any, name: str, tokens: Tensor, attention_mask: Tensor | None) -> None:
        self.leads = {}
        super().begin_forward(decoder, name, tokens, attention_mask)

    def end_forward(self) -> None:
        self.leads = {}
        super().end_forward()

    def check_guide(self) -> None:
        raise ValueError("guide has no effect with PoDCache, which keeps tokens by their place alone")

    def reset(self) -> None:
        self.leads = {}
        super().reset()

    def activate_past_recording(self) -> None:
        if self.pod.mode != "cla" and (self.pod.followers or self.pod.mode == "window"):
            raise NotImplementedError(
                "assisted decoding is not supported by PoDCache: near keys that were dropped cannot come back"
            )
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back tokens; a negative number, as transformers has it. Not those of the prompt, and not so many that
        a near key that was dropped would be near again."""
        most = min(layer.removable() for layer in self.layers)
        if most < -tokens_to_remove <= self.seen - self.fixed:
            raise ValueError(
                f"crop can remove at most {most} tokens here, got {-tokens_to_remove}: earlier near keys were dropped"
            )
        super().crop(tokens_to_remove)

    # ---- what users ask ----

    def stored_keys(self) -> list[list[list[int]]]:
        """Keys held per layer, sequence and KV head: [L][B][Hkv]; stored_lengths() says it of values."""
        return [layer.stored_keys() for layer in self.layers]
