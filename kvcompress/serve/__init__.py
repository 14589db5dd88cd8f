"""Many requests over one store of pages: a core that knows no engine, and transformers' continuous batching with it."""

from .batching import Batching, batching

__all__ = ["Batching", "batching"]
