"""GatedCache: what a token says as it comes decides whether it stays once the window has left it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..caches.base import CompressedCache
from ..caches.formats import Dtypes
from ..caches.passes import CachePass
from ..caches.store import PoolSettings
from ..dmc.config import DMCConfig
from ..dmc.dms import DMSLayer
from ..hf.facts import Facts
from ..hf.method import Call
from ..pruners import Gates
from ..pruners.gates import HIDDEN, as_gates
from ..support.checks import need, need_number
from ..support.kvpress_names import no_ratio
from ..support.units import Keep, Tokens, tokens_of

_LARGEST = 1e6


class GatedLayer(DMSLayer):
    """A layer of DMS whose decisions are those of gates, and that no neuron carries.

    A token is dropped where what its gate says lies under threshold; the first `sinks`, at least one, never are.
    """

    def __init__(
        self, index: int, number: int, pool_settings: PoolSettings, gates: Gates, threshold: float, window: int,
        sinks: int, track: bool,
    ) -> None:  # fmt: skip
        decides = DMCConfig(mode="dms", dms_window=window - 1, dms_decides="own")
        super().__init__(index, number, pool_settings, decides, track)
        self.gates, self.threshold, self.sinks = gates, threshold, max(sinks, 1)  # the kernel never drops the first

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        super().open_pool(rows, head_dim, like, rope_lengths)
        self.neuron = None

    @property
    def decides_apart(self) -> bool:
        return True

    def _decide(self, step: CachePass, queries: Tensor, keys: Tensor) -> Tensor:
        said = self.gates.says(self.number, self.gates.seen(step.facts[self.index].own(queries), step.entering))
        return self._sparing((said < self.threshold).float(), step)


class GatedCache(CompressedCache):
    """Drops a token of a KV head once it has left the window, if the token's own gate said so when it came.

    What stays follows the text: more of one that holds much, less of one that holds little; each head of each layer
    keeps what its gate lets through, and memory is really freed. A token's fate depends on what came before it alone:
    a prompt in one pass, in chunks or token by token gives the same rows, and so does decoding.

    config: the model's config. gates: Gates of the model, or the folder that `kvcompress fit gates` made, here or on
    the Hub ("owner/name"), or what others have published (Gates.load). keep: the share of tokens behind the window that
    stays, on the average of the texts held out (0.25, "25%" or "1/4"; 1.0: all). threshold: the logarithm under which a
    token goes, instead of keep. window: newest tokens that always stay, at least 1. num_sink_tokens: first ones that
    do; the very first does in any case.
    chunk_size: tokens that `prefill` reads at a time, None = the whole prompt. track: remember all decisions, for
    kept_positions(). page_size, max_pages, grow, dtype: see PoolSettings; a decoded token needs room for the case that
    every head keeps it, and is rounded to codes as the window leaves it.
    A prompt of several chunks that finds no page leaves the cache incomplete: reset() it.
    Raises ValueError for settings out of range, for gates of another model, and for layers that read others' keys,
    whose keys and values differ in size, or whose keys are normed behind their rotation.
    Source: KVzap (thresholds on gates); DMS, section 3 (dropped with delay).
    """

    answers = ("kept_share",)

    @no_ratio()
    def __init__(
        self,
        config: PreTrainedConfig,
        gates: Gates | str,
        *,
        keep: float | str | None = None,
        threshold: float | None = None,
        window: Tokens = 64,
        num_sink_tokens: Tokens = 4,
        page_size: int = 16,
        max_pages: int | None = None,
        grow: str = "double",
        dtype: Dtypes = None,
        chunk_size: Tokens | None = None,
        track: bool = False,
    ) -> None:
        self.gates = as_gates(gates)
        self.wants_entering = self.gates.looks_at == HIDDEN
        window, num_sink_tokens = tokens_of("window", window), tokens_of("num_sink_tokens", num_sink_tokens, 0)
        if chunk_size is not None:
            chunk_size = tokens_of("chunk_size", chunk_size)
        need((keep is None) != (threshold is None), "keep must be given, or a threshold instead of it, got "
             f"{'neither' if keep is None else 'both'}")  # fmt: skip
        if threshold is not None:
            need_number("threshold", threshold, -_LARGEST, _LARGEST)
            self.threshold = float(threshold)
        else:
            assert keep is not None
            share = Keep.of(keep).share
            if share is None:
                raise ValueError(
                    "keep must be a share with GatedCache (0.25, '25%', '1/4'), whose gates decide token by token, got "
                    f"{keep!r}"
                )
            self.threshold = self.gates.threshold(float(share)) if share < 1 else -_LARGEST
        self.keep, self.window, self.num_sink_tokens, self.track = keep, window, num_sink_tokens, track
        self.pool_settings, self.chunk_size = PoolSettings(page_size, max_pages, grow, dtype), chunk_size
        super().__init__(config)

    def _new_layer(self, index: int, number: int) -> GatedLayer:
        return GatedLayer(
            index, number, self.pool_settings, self.gates, self.threshold, self.window, self.num_sink_tokens, self.track
        )

    def check_layers(self, decoder: Any, facts: Facts) -> None:
        self.gates.check_model(decoder, [facts[layer.index] for layer in self.compressing])
        name = type(decoder).__name__
        for layer, own in facts.items():
            reason = None
            if own.reads is not None:
                reason = f"reads the keys of layer {own.reads}"
            elif own.is_local:
                continue
            elif own.normed:
                reason = "norms its keys behind their rotation"
            elif own.value_dim != own.head_dim:
                reason = (
                    f"has keys of {own.head_dim} and values of {own.value_dim} numbers (keys made from latents, MLA)"
                )
            if reason is not None:
                raise ValueError(f"{name} is not supported by GatedCache: layer {layer} {reason}")

    # ---- reading ----

    def check_images(self, call: Call) -> None:
        pass

    def check_guide(self) -> None:
        raise ValueError("guide has no effect with GatedCache: a token's own queries decide what is kept")

    # ---- what users ask ----

    def kept_positions(self) -> list[list[list[Tensor]]]:
        """As in every cache. Raises ValueError without track=True."""
        return super().kept_positions()

    @property
    def expected_share(self) -> float:
        """That of tokens which stays, as far as it is known before any were read: keep, 1.0 with a threshold."""
        share = None if self.keep is None else Keep.of(self.keep).share
        return 1.0 if share is None else float(share)

    def kept_share(self) -> float:
        """Tokens held over tokens seen, mean over layers that compress and heads; 1.0 before any."""
        held = [n for layer in self.compressing for row in layer.stored_lengths() for n in row]
        seen = [n for layer in self.compressing for n in layer.next for _ in range(layer.heads)] if held else []
        return sum(held) / sum(seen) if sum(seen) else 1.0
