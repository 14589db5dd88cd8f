"""Dynamic Memory Compression: models that learn which tokens to merge (DMC) or to drop (DMS)."""

from .config import DMCConfig
from .convert import convert, set_neuron_scale, state
from .costs import neuron_costs
from .fitting import Fitted, fit
from .losses import CompressionLoss, LastDecisions, compression_ratios, last_decisions
from .recipe import DMCRecipe

__all__ = [
    "CompressionLoss",
    "DMCConfig",
    "DMCRecipe",
    "Fitted",
    "LastDecisions",
    "compression_ratios",
    "convert",
    "fit",
    "last_decisions",
    "neuron_costs",
    "set_neuron_scale",
    "state",
]
