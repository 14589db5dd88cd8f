"""Gates: what a token's own queries say of how much it will be attended to; fitted and trained here."""

from .fitting import fit_gates

__all__ = ["fit_gates"]
