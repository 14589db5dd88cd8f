"""What the layers of every compressed cache are."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..hf.argument import CACHE
from ..hf.facts import LayerFacts
from ..ops.softmax import Softmax
from .passes import CachePass
from .rows import BatchState


class CompressedLayer(BatchState, CacheLayerMixin):
    """One attention layer's cache. Subclasses store keys and values and answer `attend`.

    index: the model's number of the layer. number: its place among the layers of its cache that compress.
    """

    is_sliding = False
    supports_early_init = False
    is_croppable = False
    joins = False  # whether its sequences can stand behind those of another (join)

    def __init__(self, index: int, number: int) -> None:
        super().__init__()
        self.index, self.number = index, number
        self.seen = 0  # columns of input, as transformers counts them

    @abstractmethod
    def attend(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Stores the new tokens and returns their attention.

        queries: [B, Hq, S, D], keys, values: [B, Hkv, S, D], before rotation (after any q/k norm). Which columns are
        tokens says the step. Returns [B, Hq, S, D].
        """

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys, values and tables in use now."""

    def reserved_nbytes(self) -> int:
        """Bytes of all tensors held for them, room to grow included."""
        return self.nbytes()

    def most_beside(self, facts: LayerFacts, dtype: torch.dtype) -> int:
        """Bytes that each sequence keeps beside pages in any case, however many tokens it has. dtype: of the model."""
        return 0

    def trim(self) -> None:
        """Gives back room to grow."""

    @abstractmethod
    def stored_lengths(self) -> list[list[int]]:
        """Tokens held per sequence and KV head: [B][Hkv]; [] before the first token."""

    @abstractmethod
    def kept_positions(self) -> list[list[Tensor]]:
        """Which tokens those are, per sequence and KV head; [] before the first token. See CompressedCache."""

    def check_step(self, step: CachePass, facts: LayerFacts) -> None:
        """Refuses what the layer cannot do, and takes what it needs, before any layer has changed."""

    def drop_last(self, tokens: int) -> None:
        """Takes back the last tokens of every sequence; called only where is_croppable is true."""

    # the rest of CacheLayerMixin, and what generation calls besides

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError(
            "compressed caches have no update(): an attached model fills them in its own forward pass. If a model "
            "called it, that model is not attached: call kvcompress.attach(model) first. If you did: give the cache to "
            f"a model, model(input_ids, {CACHE}=cache)"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.14

    def offload(self) -> None:
        raise NotImplementedError(
            "offloading is not supported by compressed caches; they are small: keep them in place"
        )

    prefetch = offload
