"""Caches: transformers caches that keep less than they have seen."""

from typing import TYPE_CHECKING

from ..support.homes import elsewhere
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

if not TYPE_CHECKING:
    __getattr__ = elsewhere(__name__)
