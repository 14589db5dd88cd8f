"""Caches: transformers caches that keep less than they have seen."""

from .base import CompressedCache
from .dense import QuantizedCache
from .iterative import IterativeCache
from .pruned import PrunedCache
from .quest import QuestCache
from .store import PoolSettings
from .streaming import StreamingCache

__all__ = [
    "CompressedCache",
    "IterativeCache",
    "PoolSettings",
    "PrunedCache",
    "QuantizedCache",
    "QuestCache",
    "StreamingCache",
]
