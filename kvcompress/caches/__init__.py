"""Caches: transformers caches that keep less than they have seen."""

from .base import CompressedCache
from .dense import QuantizedCache
from .formats import keys_and_values
from .iterative import IterativeCache
from .layer import CompressedLayer
from .pool import PagePool
from .pruned import PrunedCache
from .quest import QuestCache
from .store import PoolSettings
from .streaming import StreamingCache

__all__ = [
    "CompressedCache",
    "CompressedLayer",
    "IterativeCache",
    "PagePool",
    "PoolSettings",
    "PrunedCache",
    "QuantizedCache",
    "QuestCache",
    "StreamingCache",
    "keys_and_values",
]
