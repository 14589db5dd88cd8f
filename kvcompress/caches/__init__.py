"""Caches: transformers caches that keep less than they have seen."""

from .base import CompressedCache, CompressedLayer
from .dmc import DMCCache
from .iterative import IterativeCache
from .pod import PoDCache
from .pool import PagePool
from .pruned import PrunedCache
from .quest import QuestCache
from .store import PoolSettings, keys_and_values
from .streaming import StreamingCache

__all__ = [
    "CompressedCache",
    "CompressedLayer",
    "DMCCache",
    "IterativeCache",
    "PagePool",
    "PoDCache",
    "PoolSettings",
    "PrunedCache",
    "QuestCache",
    "StreamingCache",
    "keys_and_values",
]
