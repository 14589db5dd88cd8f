"""Dynamic Memory Compression: models that learn which tokens to merge (DMC) or to drop (DMS)."""

from .config import DMCConfig
from .convert import convert, set_neuron_scale, state
from .losses import CompressionLoss, LastDecisions, compression_ratios, last_decisions
from .recipe import DMCRecipe

__all__ = [
    "CompressionLoss",
    "DMCConfig",
    "DMCRecipe",
    "LastDecisions",
    "compression_ratios",
    "convert",
    "last_decisions",
    "set_neuron_scale",
    "state",
]
