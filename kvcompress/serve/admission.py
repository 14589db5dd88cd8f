"""Whether a waiting request may come in: whether all find their pages until each has written its last token."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

TYPICAL = 512  # tokens of an answer: as if one of this length had ended before any has
REMEMBERED = 64  # answers that have ended, by which those that are being written are judged


class Answer(NamedTuple):
    """Tokens that a request has written, and may write in all."""

    written: int
    most: int


class Lengths:
    """Of answers: how many tokens are still to come."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque([TYPICAL], maxlen=REMEMBERED)

    def note(self, written: int) -> None:
        """An answer has ended with so many tokens."""
        self._ended.append(written)

    def left(self, answer: Answer) -> float:
        """Those that an answer will still have: as those had that were longer than it is; as many again, where none
        was."""
        longer = [tokens for tokens in self._ended if tokens > answer.written]
        expected = statistics.fmean(longer) if longer else 2.0 * answer.written
        return max(min(expected, answer.most) - answer.written, 1.0)


def most_pages(held: Callable[[float], np.ndarray], left: np.ndarray) -> float:
    """The most pages that requests hold at once until all have ended, where each writes a token in every step.
    held: float64 [n], pages of each after so many tokens more. left: float64 [n], tokens that each will still write.

    Whoever ends gives its pages back, so that the most are held when one of them is about to: its tokens left are the
    time, and those are there that have as many left or more (as the "Past-Future Scheduler", ASPLOS 2025, has it).
    """
    return max((float(held(end)[left >= end].sum()) for end in np.unique(left)), default=0.0)
