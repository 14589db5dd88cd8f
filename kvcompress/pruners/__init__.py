"""Pruners: which keys and values stay when a cache is over its budget. One file each."""

from .base import Candidates, Pruner
from .snapkv import SnapKV
from .streaming import StreamingLLM

__all__ = ["Candidates", "Pruner", "SnapKV", "StreamingLLM"]
