"""Caches that keep every token: in pages as the model makes them, or as codes of 8 or 4 bits."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedConfig

from ..hf.method import Call
from ..ops.softmax import Softmax
from ..support.checks import need, renamed
from ..support.units import Tokens, tokens_of
from .attention import prompt_attention
from .base import CompressedCache
from .formats import FORMATS, Dtypes
from .paged import Alone, PagedLayer
from .passes import CachePass
from .store import PoolSettings

FEW = 8  # queries of a sequence that read its pages where they lie


class DenseLayer(PagedLayer):
    """Pages; many queries at once read a contiguous copy of them, which attention over prompts is made for, or the keys
    and values that they came with, where those are all."""

    def attend_held(self, step: CachePass, queries: Tensor, rotated: Tensor, softmax: Softmax, alone: Alone) -> Tensor:
        pool, B = self.opened, len(self.next)
        if step.columns <= FEW:
            return super().attend_held(step, queries, rotated, softmax, alone)
        keys, values = alone or (x.unflatten(0, (B, -1)) for x in pool.gather(max(pool.counts)))
        return prompt_attention(rotated, keys, values, pool.counts[:: self.heads], softmax)


class DenseCache(CompressedCache):
    """Keeps every token, in pages. config: the model's config. page_size, max_pages, grow, dtype: see PoolSettings.
    chunk_size: tokens that `prefill` reads at a time, None = the whole prompt."""

    def __init__(
        self, config: PreTrainedConfig, *, page_size: int = 64, max_pages: int | None = None, grow: str = "double",
        dtype: Dtypes = None, chunk_size: Tokens | None = None,
    ) -> None:  # fmt: skip
        if chunk_size is not None:
            chunk_size = tokens_of("chunk_size", chunk_size)
        self.pool_settings, self.chunk_size = PoolSettings(page_size, max_pages, grow, dtype), chunk_size
        super().__init__(config)

    def _new_layer(self, index: int, number: int) -> DenseLayer:
        return DenseLayer(index, number, self.pool_settings)

    def check_indexer(self, top: int) -> None:
        pass

    def check_images(self, call: Call) -> None:
        pass

    def check_guide(self) -> None:
        raise ValueError(f"guide has no effect with {type(self).__name__}, which keeps every token")


class QuantizedCache(DenseCache):
    """Keeps every token, as codes of 8 or 4 bits: nothing is forgotten, all is rounded once, and attended to as it
    is stored: a prompt in one pass, in chunks or token by token gives the same, but for the rounding of sums.

    config: the model's config. dtype: "int8", or "k8v4": keys of 8 bits, values of 4; or one for each layer (see
    PoolSettings). Each key and value of a head has a float16 scale besides: 8.25 and 6.25 bits a number with heads of
    64, 8.125 and 6.125 with heads of 128.
    page_size, max_pages, grow: see PoolSettings. chunk_size: tokens that `prefill` reads at a time, None = the whole
    prompt.
    PrunedCache and IterativeCache take the same dtype, to drop tokens and round what stays.
    Raises ValueError for settings out of range, and for "k8v4" with heads of an odd size.
    """

    @renamed(keep="of PrunedCache, which takes dtype too: every token stays")
    def __init__(
        self, config: PreTrainedConfig, dtype: Dtypes = "int8", *, page_size: int = 16, max_pages: int | None = None,
        grow: str = "double", chunk_size: Tokens | None = None,
    ) -> None:  # fmt: skip
        need(dtype is not None, f"dtype must be {' or '.join(map(repr, FORMATS))}, got None")
        super().__init__(
            config, page_size=page_size, max_pages=max_pages, grow=grow, dtype=dtype, chunk_size=chunk_size
        )
