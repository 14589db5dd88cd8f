"""DMCCache: for models converted to Dynamic Memory Compression, whose heads append a token or merge it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..caches.converted import ConvertedCache
from ..caches.formats import Dtypes
from ..support.units import Tokens
from .config import DMCConfig
from .dms import DMSLayer
from .layer import DecidingLayer
from .merging import DMCLayer


class DMCCache(ConvertedCache):
    """The cache of a model converted to DMC, or to DMS (config.kvcompress says which).

    DMC: each KV head of each layer decides for every token whether it opens an entry of its row or is merged, as a
    weighted average, into the newest one. DMS: the newest dms_window + 1 tokens stay, and an older one does if its
    successor (dms_decides="own": it itself) so decided; the others are dropped. How much is left the model decides by
    itself: see stored_lengths and compression_ratio. The result does not depend on how a prompt is divided into chunks
    or batches (with a dtype, but for what is rounded: a chunk reads itself as it is, and what came before as stored).

    config: the converted model's config. chunk_size: tokens that `prefill` reads at a time, None = the whole prompt.
    track: remember all decisions, for decisions(). page_size, max_pages, grow, dtype: see PoolSettings; a decoded token
    needs room for the case that every head keeps it. Beside pages a row has its newest entry's sums in float32 (DMC),
    of which with a dtype its codes are made anew each time, or the newest tokens as they come (DMS).
    A prompt of several chunks that finds no page leaves the cache incomplete: reset() it.
    Raises ValueError for settings out of range and for a config that is not of a converted model, or of one that is
    still being annealed (neuron_scale above 0). Source: DMC, algorithm 1; DMS, section 3.
    """

    title = "DMC or DMS"
    answers = (*ConvertedCache.answers, "decisions")

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        page_size: int = 16,
        max_pages: int | None = None,
        grow: str = "double",
        dtype: Dtypes = None,
        chunk_size: Tokens | None = None,
        track: bool = False,
    ) -> None:
        self.track = track
        super().__init__(config, page_size, max_pages, grow, chunk_size, dtype)
        if self.dmc.neuron_scale > 0:
            raise ValueError(
                f"config.kvcompress has neuron_scale {self.dmc.neuron_scale}: the model is still being annealed and "
                "decides nothing; use it without a compressed cache, or go on until it is 0"
            )
        self.dmc.check_model(config)

    @property
    def dmc(self) -> DMCConfig:
        """How the model decides."""
        return self.settings

    @staticmethod
    def parsed(saved: dict[str, Any]) -> DMCConfig:
        return DMCConfig.from_dict(saved)

    def _new_layer(self, index: int, number: int) -> DecidingLayer:
        kind = DMSLayer if self.dmc.mode == "dms" else DMCLayer
        return kind(index, number, self.pool_settings, self.dmc, self.track)

    # ---- reading ----

    def check_guide(self) -> None:
        raise ValueError("guide has no effect with DMCCache: the model itself decides what is kept")

    # ---- what users ask ----

    def kept_positions(self) -> list[list[list[Tensor]]]:
        """As in every cache. DMC: the token that opened each entry, which holds that token and all that follow up to
        the next entry's (with a window, the last so many of them). DMS: the tokens that are held. In layers that are
        not converted as in any cache. Raises ValueError without track=True."""
        return super().kept_positions()

    def decisions(self, layer: int) -> Tensor:
        """What each token decided in a converted layer: bool [B, Hkv, T], T tokens of the longest sequence,
        right-aligned.

        layer: the model's number of it. True: merged into the entry before it (DMC), or the token before it
        (dms_decides="own": it itself) is dropped as it leaves the window (DMS). The first token of a sequence, and what
        stands before it, is False. Raises ValueError without track=True and for a layer that decides nothing.
        """
        if not self.track:
            raise ValueError("decisions are remembered only with track=True")
        found = self.layers[layer] if 0 <= layer < len(self.layers) else None
        if not isinstance(found, DecidingLayer):
            raise ValueError(f"layer must be one of {self.converted_layers}, which decide, got {layer}")
        return found.decisions()
