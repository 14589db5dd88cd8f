"""The largest text that fits into a number of tokens, the largest budget that fits into a number of bytes."""

from __future__ import annotations

from collections.abc import Callable


class TooShort(ValueError):
    """The smallest does not fit. count: of it."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(f"limit must be at least {count}, got {limit}")
        self.count = count


def largest(
    counted: Callable[[int], int], least: int, limit: float, *, near: int | None = None, most: int | None = None
) -> int:
    """The largest size of least to most whose count is at most `limit`, in few counts, which are dear.

    counted: of a size, growing with it. near: a size to begin with. most: None = there is no end to sizes.
    Raises TooShort where the least does not fit.
    """
    low: tuple[int, int] | None = None  # size and count of the largest that is known to fit
    high: tuple[int, int] | None = None  # of the smallest that is known not to
    size = max(least, near or least)
    while True:
        size = size if most is None else min(size, most)
        count = counted(size)
        if count <= limit:
            low = size, count
        else:
            high = size, count
        if low is not None and (low[0] == most or (high is not None and high[0] - low[0] == 1)):
            return low[0]
        if low is not None and high is not None:
            per_unit = max((high[1] - low[1]) / (high[0] - low[0]), 1e-9)
            size = min(max(low[0] + int((limit - low[1]) / per_unit), low[0] + 1), high[0] - 1)
        elif low is not None:
            size = max(low[0] + 1, min(int(low[0] * limit / max(low[1], 1)), 16 * low[0]))
        else:
            assert high is not None
            if high[0] == least:
                raise TooShort(high[1], int(limit))
            size = min(max(int(high[0] * limit / high[1]), least), high[0] - 1)
