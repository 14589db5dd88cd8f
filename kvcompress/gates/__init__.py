"""Gates: what a token says, as it comes, of how much it will be attended to; fitted and trained here."""

from .cache import GatedCache
from .fitting import fit_gates
from .levels import with_levels
from .training import train_gates

__all__ = ["GatedCache", "fit_gates", "train_gates", "with_levels"]
