"""The public names of kvcompress, which gives them by the first that is asked for."""

from . import analysis
from .budgets import AdaKV, Budget, GlobalTopK, PyramidKV, Uniform
from .caches import (
    CompressedCache,
    IterativeCache,
    PoolSettings,
    PrunedCache,
    QuantizedCache,
    QuestCache,
    StreamingCache,
)
from .caches.saving import load_cache, load_caches, save_caches
from .caches.spec import CacheSpec
from .dmc.cache import DMCCache
from .gates.cache import GatedCache
from .graphs import StepGraph
from .heads import HeadProfile
from .hf import attach, detach, from_pretrained
from .logits import AllLogits, TokenLoss
from .models import load_example_model
from .planner import Adaptive, Plan, plan
from .pod.cache import PoDCache
from .positions import RemoteGap
from .prefilling import generate, prefill
from .profiles import BudgetProfile, Profiled
from .pruners import (
    H2O,
    RKV,
    TOVA,
    CenterOfGravity,
    ChunkKV,
    Compactor,
    CriticalKV,
    CurDKV,
    DuoAttention,
    ExpectedAttention,
    Gate,
    Gates,
    KeyDiff,
    KeyNorm,
    KVzip,
    LagKV,
    LeverageScore,
    ObservedAttention,
    Pruner,
    Random,
    Replay,
    ScoreProfile,
    SnapKV,
    StreamingLLM,
    Successor,
    WindowAttention,
)
from .reader import Reading, read

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "AdaKV",
    "Adaptive",
    "AllLogits",
    "Budget",
    "BudgetProfile",
    "CacheSpec",
    "CenterOfGravity",
    "ChunkKV",
    "Compactor",
    "CompressedCache",
    "CriticalKV",
    "CurDKV",
    "DMCCache",
    "DuoAttention",
    "ExpectedAttention",
    "Gate",
    "GatedCache",
    "Gates",
    "GlobalTopK",
    "HeadProfile",
    "IterativeCache",
    "KVzip",
    "KeyDiff",
    "KeyNorm",
    "LagKV",
    "LeverageScore",
    "ObservedAttention",
    "Plan",
    "PoDCache",
    "PoolSettings",
    "Profiled",
    "PrunedCache",
    "Pruner",
    "PyramidKV",
    "QuantizedCache",
    "QuestCache",
    "Random",
    "Reading",
    "RemoteGap",
    "Replay",
    "ScoreProfile",
    "SnapKV",
    "StepGraph",
    "StreamingCache",
    "StreamingLLM",
    "Successor",
    "TokenLoss",
    "Uniform",
    "WindowAttention",
    "analysis",
    "attach",
    "detach",
    "from_pretrained",
    "generate",
    "load_cache",
    "load_caches",
    "load_example_model",
    "plan",
    "prefill",
    "read",
    "save_caches",
]
