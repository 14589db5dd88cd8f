"""Sizes as people write and read them."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from .checks import MOST_INT32, need, need_integer

UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_ANY_CASE = {name.lower(): nbytes for name, nbytes in UNITS.items()}
Size = int | float | str  # how much stays, as Keep.of takes it
Tokens = int | str  # a number of them, as tokens_of takes it
_LONG = 16  # characters that nobody writes for a share
WISH = "tokens (1024, '4k'), the share that stays (0.25, '25%', '1/4') or bytes ('512MiB')"


def size(nbytes: float) -> str:
    """Bytes, in the largest unit that they fill."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:,.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def plain(given: Any) -> Any:
    """A number of NumPy's as Python's, of the same digits; all else as it is."""
    return type(given.item())(str(given)) if isinstance(given, np.number) else given


def nbytes_of(text: str, name: str, wish: str = "a text of bytes like '512MiB'") -> int:
    """Of a text such as "512MiB". name: of the argument, wish: what it may be, for the ValueError of another text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = None if match is None else _ANY_CASE.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError(f"{name} must be {wish} (units: {', '.join(UNITS)}), got the text {text!r}")
    return int(Fraction(match[1]) * unit)


def tokens_of(name: str, given: Tokens, least: int = 1) -> int:
    """Of 1024 or "1024" or "1k" (a k is 1,024 tokens). name: of the argument, for the ValueError of anything else."""
    given = plain(given)
    tokens = whole_of(given) if isinstance(given, str) else given
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        share = _share_of(_text_of(given)) if isinstance(given, (float, str)) else None
        hint = ": the share that stays is keep=, of PrunedCache and GatedCache" if share and share <= 1 else ""
        raise ValueError(f"{name} must be a number of tokens (1024, '1k'), got {given!r}{hint}")
    need_integer(name, tokens, least, MOST_INT32)
    return tokens


@dataclass(frozen=True)
class Keep:
    """How much stays, as text: tokens, or the share of a sequence's tokens, or bytes. Keep.of makes it."""

    text: str

    @staticmethod
    def of(given: Size, name: str = "keep", wish: str = WISH) -> Keep:
        """Of 1024 or "1024" or "1k" (a k is 1,024 tokens, an M 1,024 k), of 0.25 or "0.25" or "25%" or
        "1/4", of "512MiB".

        A share is taken as it is written, not as its binary neighbour; a number that is a sum's or quotient's is the
        fraction that it is next to (1 - 0.7 is 3/10). A whole number is tokens, one with a point a
        share: 1 is one token, 1.0 everything. name: of the argument, wish: what it may be, for the ValueError of
        anything else.
        """
        given = plain(given)
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ValueError(f"{name} must be {wish}, got {given!r}, a {type(given).__name__}")
        text = _text_of(given)
        tokens, share, nbytes = _read(text, name, wish)
        need(nbytes != 0, f"{name} must be above 0 bytes, got {given}")
        if tokens is not None:
            need(tokens > 0, f"{name} must be at least 1, got {given}: a whole number is tokens; a share of them is "
                 "above 0 and has a point, or is text (0.25, '25%', '1/4')")  # fmt: skip
            need_integer(name, tokens, 1, MOST_INT32)
        elif share is not None and not 0 < share <= 1:
            hint = f"; tokens are a whole number, {share}" if share > 1 and share.denominator == 1 else ""
            raise ValueError(f"{name} as a share must be above 0 and at most 1, got {given}{hint}")
        return Keep(text)

    @property
    def tokens(self) -> int | None:
        return _read(self.text)[0]

    @property
    def share(self) -> Fraction | None:
        return _read(self.text)[1]

    @property
    def nbytes(self) -> int | None:
        return _read(self.text)[2]

    def __str__(self) -> str:
        return self.text


@functools.lru_cache(maxsize=256)
def _read(text: str, name: str = "keep", wish: str = WISH) -> tuple[int | None, Fraction | None, int | None]:
    """(tokens, share, bytes) of a text, one of the three."""
    if (tokens := whole_of(text)) is not None:
        return tokens, None, None
    if (share := _share_of(text)) is not None:
        return None, share, None
    return None, None, nbytes_of(text, name, wish)


def whole_of(text: str) -> int | None:
    """Of "1024", "1k", "1.5k" or "1M"; None for what is none."""
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+(?=[kKmM]))?)([kKmM]?)\s*", text)
    whole = None if match is None else Fraction(match[1]) * 1024 ** " km".index(match[2].lower() or " ")
    return None if whole is None or whole.denominator > 1 else int(whole)


def _share_of(text: str) -> Fraction | None:
    """Of "0.25", "1e-3", "25%" or "1/4"; None for what is none. Of what floats are besides, 0."""
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE%]|\s+%))([eE][+-]?\d+)?(\s*%)?", text):
        return Fraction(text.rstrip("% ")) / (100 if text.endswith("%") else 1)
    if text in ("nan", "inf", "-inf"):
        return Fraction(0)
    if match := re.fullmatch(r"(\d+)\s*/\s*(0*[1-9]\d*)", text):
        return Fraction(int(match[1]), int(match[2]))
    return None


def _text_of(given: Size) -> str:
    if isinstance(given, str):
        return given.strip()
    if not isinstance(given, float):
        return repr(int(given))
    text = repr(float(given))
    if 0 < given < 1 and len(text) > _LONG:  # what a sum or quotient came to: 1 - 0.7 is not quite 0.3
        near = Fraction(given).limit_denominator(10_000)
        if abs(near - Fraction(given)) <= 2 * math.ulp(given):
            return f"{near.numerator}/{near.denominator}"
    return text


def instead_of(budget: object, *, quoted: bool = True) -> str | None:
    """The keep= that says what a size was as a budget, before 0.1.0: a share was the one to remove. None for what was
    no size. quoted: as Python has it, not a text of a cache."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        return None
    text = _text_of(budget)
    if re.fullmatch(r"0*\.\d+|0+\.|\d(\.\d+)?e-\d+", text):
        left = 1 - Decimal(text)
        stays = f", or keep={text} if it is to stay" if left < 1 else ""
        return f"keep={left if left < 1 else '1.0'} ({text} was the share to remove){stays}"
    try:
        keep = Keep.of(text)
    except ValueError:
        return None
    return f"keep={text!r}" if quoted and keep.tokens is None else f"keep={text}"
