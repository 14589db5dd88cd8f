"""Many requests over one store of pages: a core that knows no engine, transformers' batching with it, and vLLM."""

from .batching import Batching, batching

__all__ = ["Batching", "batching"]
