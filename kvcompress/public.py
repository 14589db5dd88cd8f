"""The public names of kvcompress, which gives them by the first that is asked for: what most people take. All others
stand in their modules, of which MODULES have an __all__."""

from .budgets import AdaKV, GlobalTopK, PyramidKV, Uniform
from .caches import CompressedCache, IterativeCache, PrunedCache, QuantizedCache, QuestCache, StreamingCache
from .caches.graphs import StepGraph
from .caches.saving import load_cache, load_caches, save_caches
from .caches.spec import CacheSpec
from .dmc.cache import DMCCache
from .gates.cache import GatedCache
from .hf import attach, detach, from_pretrained
from .models import load_example_model
from .planner import plan
from .pod.cache import PoDCache
from .positions import RemoteGap
from .pruners import Gate, KeyDiff, KVzip, Replay, SnapKV
from .reading.prefilling import generate, prefill
from .reading.reader import Reading, read
from .support.homes import MODULES as MODULES

__all__ = [
    "AdaKV",
    "CacheSpec",
    "CompressedCache",
    "DMCCache",
    "Gate",
    "GatedCache",
    "GlobalTopK",
    "IterativeCache",
    "KVzip",
    "KeyDiff",
    "PoDCache",
    "PrunedCache",
    "PyramidKV",
    "QuantizedCache",
    "QuestCache",
    "Reading",
    "RemoteGap",
    "Replay",
    "SnapKV",
    "StepGraph",
    "StreamingCache",
    "Uniform",
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
