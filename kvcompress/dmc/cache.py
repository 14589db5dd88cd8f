"""DMCCache: for models converted to Dynamic Memory Compression, whose heads append a token or merge it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import ops
from ..dmc.config import DMCConfig
from ..dmc.gates import weights_of
from .base import decoder_config, sizes_of
from .converted import ConvertedCache
from .deciding import DecidingLayer, hiding
from .dms import DMSLayer


class DMCLayer(DecidingLayer):
    """Rows of entries, each the average of one or more tokens; the newest one's sums are kept in float32."""

    def __init__(self, cache: DMCCache, index: int, sliding_window: int | None) -> None:
        super().__init__(cache, index, sliding_window)
        self.tail: ops.Tail | None = None

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        super().open_pool(rows, head_dim, like, rope_lengths)
        self.tail = ops.Tail.empty(rows, head_dim, window=self.cache.dmc.window, device=like.device)

    # ---- attention ----

    def attend_one(self, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, scaling: float) -> Tensor:
        pool, places = self.pool, self.places
        assert pool is not None and places is not None
        # a token takes one page at most: that of a new slot, or a copy of the shared one that holds the newest
        with torch.inference_mode():
            weights, rotated = self._weights(queries, keys), self._without_neuron(queries, places)
        self._append(keys, values, alpha, weights, [1] * len(pool.bounds), None, known=False)
        return self._decode(rotated, pool.lengths, None, scaling, causal=False)[0]

    def attend_many(self, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, scaling: float) -> Tensor:
        """Attention over the chunk's own partial averages and over entries that were closed before it.

        A token's partial average is hidden from later ones where the next token merges into it, and so is the newest
        entry where the first token does.
        """
        pool, places, counts, S = self.pool, self.places, self.cache.step.counts, keys.shape[2]
        assert pool is not None and places is not None
        omega = self._weights(queries, keys)
        k, v, gates, weights = self._left_aligned(keys, values, alpha, omega)
        mean_k, mean_v = self._averages(k, v, gates, weights)
        first = places + torch.arange(S, dtype=torch.int32, device=places.device)
        rotated_k = self._without_neuron(mean_k, first)
        q = self._without_neuron(queries, self._positions(places, S))
        lengths = None if min(counts) == S else self._counts(places.device).flatten()
        out = ops.attention(q, rotated_k, mean_v, key_bias=hiding(gates), lengths=lengths, scale=scaling)

        here = torch.arange(S, device=places.device) < self._counts(places.device)
        opens = ((gates < 0.5) & here[:, None]).sum(-1, dtype=torch.int32).flatten()
        merges = ((gates[..., 0] > 0.5) & here[:, :1]).flatten().to(torch.int32)
        if max(pool.bounds) > 0:
            out = ops.merge_states(out, self._decode(q, pool.lengths - merges, None, scaling, causal=False))
        opened, rewrites = torch.stack([opens, merges]).tolist()
        self._append(keys, values, alpha, omega, opened, [bool(row) for row in rewrites], known=True)
        return out[0]

    def _weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """float32 [B, Hkv, S], omega: how much each token weighs in the average of its entry."""
        return weights_of(self.cache.dmc, queries[..., self.cache.neuron], keys.shape[1])

    def _averages(self, k: Tensor, v: Tensor, alpha: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
        """Partial averages that the chunk's tokens see of their entries, un-rotated, what was there included."""
        tail, neuron, window = self.tail, self.cache.neuron, self.cache.dmc.window
        assert tail is not None
        B, Hkv, S, D = k.shape
        if window is None:
            initial = (tail.keys.view(B, Hkv, D), tail.values.view(B, Hkv, D), tail.weights.view(B, Hkv))
            return ops.dmc_accumulate(k, v, alpha, omega, neuron=neuron, initial=initial)[:2]
        if window == 1:
            return ops.dmc_accumulate(k, v, alpha, omega, neuron=neuron, window=1)[:2]
        # tokens of the window once more, before the chunk; one joins the one before it where there is one
        ages = torch.arange(window - 1, 0, -1, device=k.device)
        age, count = ages[None], tail.counts[:, None]
        held = (age <= count)[..., None]
        place = ((count - age) % window)[..., None].long()
        before_k, before_v = (
            torch.where(held, x.gather(1, place.expand(-1, -1, D)), 0).to(k.dtype).view(B, Hkv, -1, D)
            for x in (tail.keys, tail.values)
        )
        before_weight = torch.where(held[..., 0], tail.weights.gather(1, place[..., 0]), 1).view(B, Hkv, -1)
        before_alpha = (age < count.clamp(max=window - 1)).float().view(B, Hkv, -1)
        out = ops.dmc_accumulate(
            torch.cat([before_k, k], 2),
            torch.cat([before_v, v], 2),
            torch.cat([before_alpha, alpha], 2),
            torch.cat([before_weight, omega], 2),
            neuron=neuron,
            window=window,
        )
        return out[0][:, :, window - 1 :], out[1][:, :, window - 1 :]

    def _append(
        self, keys: Tensor, values: Tensor, alpha: Tensor, omega: Tensor, opened: list[int],
        rewrites: list[bool] | None, *, known: bool,
    ) -> None:  # fmt: skip
        """Stores new tokens. opened, rewrites, known: as PagePool.extend takes them."""
        pool, tail, places, rotary = self.pool, self.tail, self.places, self.cache.rotary
        assert pool is not None and tail is not None and places is not None and rotary is not None
        counts, S = self.cache.step.counts, keys.shape[2]
        cos, sin, offsets = rotary.joint_tables(self._bound(), self.rope_lengths, keys.device)
        positions = self._positions(places, S)
        if offsets is not None:
            positions = positions + offsets
        new = None
        if min(counts) < S:
            new = torch.tensor(self._per_row(counts), dtype=torch.int32).to(keys.device)

        def write(table: ops.PageTable) -> None:
            ops.dmc_append_(
                pool.k_pages, pool.v_pages, table, tail, keys, values, alpha, omega, cos=cos, sin=sin,
                positions=positions, counts=new, neuron=self.cache.neuron, window=self.cache.dmc.window,
            )  # fmt: skip

        pool.extend(write, opened, rewrites=rewrites, known=known)

    # ---- state ----

    def select_state(self, rows: Tensor) -> None:
        assert self.tail is not None
        self.tail = ops.Tail(*(x[rows] for x in self.tail))

    def state(self) -> tuple[Tensor, ...]:
        return self.tail or ()


class DMCCache(ConvertedCache):
    """The cache of a model converted to DMC, or to DMS (config.kvcompress says which).

    DMC: each KV head of each layer decides for every token whether it opens an entry of its row or is merged, as a
    weighted average, into the newest one. DMS: the newest dms_window + 1 tokens stay, and an older one does if its
    successor so decided; the others are dropped. How much is left the model decides by itself: see stored_lengths and
    compression_ratio. The result does not depend on how a prompt is divided into chunks or batches.

    config: the converted model's config. chunk_size: tokens that `prefill` reads at a time, None = the whole prompt.
    track: remember all decisions, for decisions(). page_size, max_pages, grow: see PoolSettings; a decoded token
    needs room for the case that every head keeps it. Beside pages a row has its newest entry's sums in float32 (DMC),
    or the newest tokens (DMS).
    A prompt of several chunks that finds no page leaves the cache incomplete: reset() it.
    Raises ValueError for settings out of range and for a config that is not of a converted model, or of one that is
    still being annealed (neuron_scale above 0). Source: DMC, algorithm 1; DMS, section 3.
    """

    title = "DMC or DMS"
    layers: list[DecidingLayer]
    smaller = "DMCCache counts all that it has seen; train the model for shorter texts or a larger window"

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        page_size: int = 64,
        max_pages: int | None = None,
        grow: str = "double",
        chunk_size: int | None = None,
        track: bool = False,
    ) -> None:
        self.track = track
        super().__init__(config, page_size, max_pages, grow, chunk_size)
        if self.dmc.neuron_scale > 0:
            raise ValueError(
                f"config.kvcompress has neuron_scale {self.dmc.neuron_scale}: the model is still being annealed and "
                "decides nothing; use it without a compressed cache, or go on until it is 0"
            )
        self.neuron = self.dmc.place(sizes_of(decoder_config(config))["head dim"])

    @property
    def dmc(self) -> DMCConfig:
        return self.settings

    @staticmethod
    def parsed(saved: dict[str, Any]) -> DMCConfig:
        return DMCConfig.from_dict(saved)

    def _new_layer(self, index: int, sliding_window: int | None) -> DecidingLayer:
        return (DMSLayer if self.dmc.mode == "dms" else DMCLayer)(self, index, sliding_window)

    # ---- reading ----

    def check_guide(self) -> None:
        raise ValueError("guide has no effect with DMCCache: the model itself decides what is kept")

    # ---- what users ask ----

    def compression_ratio(self) -> list[list[float]]:
        """Tokens per entry of each layer and KV head, [L][Hkv], all sequences together: sum of T / sum of entries.

        Raises ValueError for an empty cache.
        """
        tokens = self._tokens()
        return [[tokens / sum(held) for held in zip(*layer, strict=True)] for layer in self.stored_lengths()]

    def total_compression_ratio(self) -> float:
        """Tokens per entry of the whole cache. Raises ValueError for an empty one."""
        entries = [count for layer in self.stored_lengths() for sequence in layer for count in sequence]
        heads = len(entries) // len(self.seen_lengths() or [1])
        return self._tokens() * heads / sum(entries)

    def _tokens(self) -> int:
        tokens = sum(self.seen_lengths())
        if tokens == 0:
            raise ValueError("a compression ratio needs a cache that has seen tokens, got an empty one")
        return tokens

    def decisions(self, layer: int) -> Tensor:
        """What each token decided in a layer: bool [B, Hkv, T], T tokens of the longest sequence, right-aligned.

        True: merged into the entry before it (DMC), or the token before it is dropped as it leaves the window (DMS).
        The first token of a sequence, and what stands before it, is False. Raises ValueError without track=True.
        """
        if not self.track:
            raise ValueError("decisions are remembered only with track=True")
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer must be between 0 and {len(self.layers) - 1}, got {layer}")
        return self.layers[layer].decisions()
