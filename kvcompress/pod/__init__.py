"""PoD: layers that attend alike share distant keys."""

from .config import PoDConfig
from .convert import convert, mean_gates, state
from .recipe import PoDRecipe

__all__ = ["PoDConfig", "PoDRecipe", "convert", "mean_gates", "state"]
