"""A compressed key-value cache for model.generate: see kvcompress.custom_generate.generate for the arguments."""

from kvcompress.custom_generate import generate

__all__ = ["generate"]
