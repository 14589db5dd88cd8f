"""Sizes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(nbytes: float) -> str:
    """Bytes, in the largest unit that they fill."""
    for unit, one in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= one:
            return f"{nbytes / one:,.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def nbytes_of(text: str, name: str, wish: str = "a text of bytes like '512MiB'") -> int:
    """Of a text such as "512MiB". name: of the argument, wish: what it may be, for the ValueError of another text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{name} must be {wish} (units: {', '.join(UNITS)}), got the text {text!r}")
    return int(Fraction(match[1]) * UNITS[match[2]])
