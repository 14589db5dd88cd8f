"""Pruners: which keys and values stay when a cache is over its budget. One idea each."""

from .base import Candidates, Pruner, Ranking
from .expected import ExpectedAttention
from .gravity import CenterOfGravity
from .h2o import H2O
from .keydiff import KeyDiff
from .plain import KeyNorm, Random
from .replay import Replay
from .snapkv import SnapKV
from .streaming import StreamingLLM, WindowAttention
from .successor import Successor
from .tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "Candidates",
    "CenterOfGravity",
    "ExpectedAttention",
    "KeyDiff",
    "KeyNorm",
    "Pruner",
    "Random",
    "Ranking",
    "Replay",
    "SnapKV",
    "StreamingLLM",
    "Successor",
    "WindowAttention",
]
