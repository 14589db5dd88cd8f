"""Dynamic Memory Compression: models that learn which tokens to merge (DMC) or to drop (DMS)."""

from .config import DMCConfig

__all__ = ["DMCConfig"]
