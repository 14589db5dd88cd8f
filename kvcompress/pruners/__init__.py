"""Pruners: which keys and values stay when a cache is over its budget. One idea each.

num_sink_tokens, where a pruner has it: first tokens of the prompt that always stay, counted inside the budget, at least
0. seed, sketch and jitter of Compactor are LeverageScore's. A field out of range raises ValueError.
"""

from typing import TYPE_CHECKING

from ..support.homes import elsewhere
from .base import Candidates, Pruner, Ranking
from .chunkkv import ChunkKV
from .criticalkv import CriticalKV
from .curdkv import CurDKV
from .duo import DuoAttention
from .expected import ExpectedAttention
from .gate import Gate
from .gates import Gates
from .gravity import CenterOfGravity
from .h2o import H2O
from .keydiff import KeyDiff
from .kvzip import KVzip
from .lagkv import LagKV
from .leverage import Compactor, LeverageScore
from .observed import ObservedAttention
from .plain import KeyNorm, Random
from .replay import Replay
from .rkv import RKV
from .score_profile import ScoreProfile
from .snapkv import SnapKV
from .streaming import StreamingLLM, WindowAttention
from .successor import Successor
from .tova import TOVA

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "Candidates",
    "CenterOfGravity",
    "ChunkKV",
    "Compactor",
    "CriticalKV",
    "CurDKV",
    "DuoAttention",
    "ExpectedAttention",
    "Gate",
    "Gates",
    "KVzip",
    "KeyDiff",
    "KeyNorm",
    "LagKV",
    "LeverageScore",
    "ObservedAttention",
    "Pruner",
    "Random",
    "Ranking",
    "Replay",
    "ScoreProfile",
    "SnapKV",
    "StreamingLLM",
    "Successor",
    "WindowAttention",
]

if not TYPE_CHECKING:
    __getattr__ = elsewhere(__name__)
