"""The seam with transformers: hooks and an attention function, on one model; nothing is patched globally."""

from .attach import attach, base_model, detach
from .load import from_pretrained

__all__ = ["attach", "base_model", "detach", "from_pretrained"]
