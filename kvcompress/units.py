"""Sizes as people read them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes, in the largest unit that they fill."""
    for unit, one in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= one:
            return f"{nbytes / one:,.1f} {unit}"
    return f"{nbytes:.0f} bytes"
