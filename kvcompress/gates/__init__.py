"""Gates: what a token's own queries say of how much it will be attended to; fitted and trained here."""

from .cache import GatedCache
from .fitting import fit_gates
from .training import train_gates

__all__ = ["GatedCache", "fit_gates", "train_gates"]
