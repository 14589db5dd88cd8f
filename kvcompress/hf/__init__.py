"""The seam with transformers: hooks and an attention function, on one model; nothing is patched globally."""

from .attach import attach, base_model, detach

__all__ = ["attach", "base_model", "detach"]
