"""The seam with transformers: attention classes are swapped in and out on one model, nothing is patched globally."""

from .attach import attach, base_model, detach

__all__ = ["attach", "base_model", "detach"]
