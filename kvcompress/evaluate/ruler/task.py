"""What a task of RULER is: a prompt around a text that grows until it fills the length, and how answers are scored."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..fitting import TooShort, largest
from ..texts import Source

Tokens = Callable[[str], int]  # of a text


@dataclass(frozen=True)
class Sample:
    """context: with all that comes before the question. question: behind it. prefix: how the answer begins, given.
    answers: all wanted (string_match_all), or one of them (string_match_part)."""

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        return self.context + self.question + self.prefix


Compose = Callable[[random.Random, int, int], Sample]  # of a size, and which one it is


class Task(ABC):
    """One of RULER's tasks. new_tokens: that an answer may take; they count in a prompt's length, as in RULER."""

    new_tokens: ClassVar[int]

    @abstractmethod
    def least(self, length: int) -> int:
        """The smallest size that the definition allows."""

    @abstractmethod
    def composer(self, tokens: Tokens, length: int, source: Source) -> Compose:
        """What makes a prompt of a size. length: of the prompt, in tokens, at most."""

    def score(self, written: str, answers: Sequence[str]) -> float:
        """0 to 1."""
        return string_match_all(written, answers)

    def samples(self, tokens: Tokens, length: int, source: Source, count: int, seed: int) -> list[Sample]:
        """`count` prompts, each of them as long as fits into length tokens less new_tokens. Raises ValueError for a
        length that none fits into."""
        compose, found, near = self.composer(tokens, length, source), [], None
        for index in range(count):

            def drawn(size: int) -> Sample:
                return compose(random.Random(f"{self} {seed} {index}"), size, index)  # noqa: B023  (called in this round)

            limit = length - self.new_tokens
            try:
                near = largest(lambda size: tokens(drawn(size).prompt), self.least(length), limit, near=near)
            except TooShort as error:
                fewest = error.count + self.new_tokens
                raise ValueError(
                    f"length must be at least {fewest} tokens for this task with this tokenizer, got {length}"
                ) from None
            found.append(drawn(near))
        return found


def string_match_all(written: str, answers: Sequence[str]) -> float:
    """Share of the answers that are in what was written, upper or lower case. Source: RULER's eval."""
    written = _clean(written)
    return sum(answer.lower() in written for answer in answers) / len(answers)


def string_match_part(written: str, answers: Sequence[str]) -> float:
    """1 where one of the answers is in what was written, else 0. Source: RULER's eval."""
    written = _clean(written)
    return float(any(answer.lower() in written for answer in answers))


def _clean(written: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", written.strip()).strip().lower()
