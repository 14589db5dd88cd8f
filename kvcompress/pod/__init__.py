"""PoD: layers that attend alike share the keys of distant tokens."""

from .config import PoDConfig
from .convert import convert, mean_gates, state
from .plan import PoDPlan
from .recipe import PoDRecipe
from .refine import refine

__all__ = ["PoDConfig", "PoDPlan", "PoDRecipe", "convert", "mean_gates", "refine", "state"]
