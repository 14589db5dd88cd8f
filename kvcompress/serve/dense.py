"""The cache of served requests of which nothing is compressed."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedConfig

from ..caches.attention import prompt_attention
from ..caches.base import CompressedCache
from ..caches.paged import PagedLayer
from ..caches.passes import CachePass
from ..caches.store import PoolSettings
from ..softmax import Softmax

FEW = 8  # queries of a sequence that read its pages where they lie


class DenseLayer(PagedLayer):
    """Pages; many queries at once read a contiguous copy of them, which attention over prompts is made for."""

    def attend_held(self, step: CachePass, queries: Tensor, rotated: Tensor, softmax: Softmax) -> Tensor:
        pool, B = self.pool, len(self.next)
        assert pool is not None
        if step.columns <= FEW:
            return super().attend_held(step, queries, rotated, softmax)
        keys, values = (x.unflatten(0, (B, -1)) for x in pool.gather(max(pool.counts)))
        return prompt_attention(rotated, keys, values, pool.counts[:: self.heads], softmax)


class DenseCache(CompressedCache):
    """Keeps every token, in pages. config: the model's config. page_size: slots per page, a power of two."""

    def __init__(self, config: PreTrainedConfig, *, page_size: int = 64) -> None:
        self.pool_settings = PoolSettings(page_size)
        super().__init__(config)

    def _new_layer(self, index: int, number: int) -> DenseLayer:
        return DenseLayer(index, number, self.pool_settings)

    def check_guide(self) -> None:
        raise ValueError("guide has no effect with a dense cache, which keeps every token")
