"""`kvcompress analyze`: what a model says of how it can be compressed, before anything is trained."""

from .heads import measure_heads
from .passkeys import pass_keys
from .scores import measure_scores
from .shares import measure_profile
from .statistics import AttentionStatistics, Estimate, attention

__all__ = [
    "AttentionStatistics",
    "Estimate",
    "attention",
    "measure_heads",
    "measure_profile",
    "measure_scores",
    "pass_keys",
]
