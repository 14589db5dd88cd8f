"""What is measured: a task at one length with its samples, and what comes of one of them with a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .reading import Reader


@dataclass(frozen=True)
class Outcome:
    """score: in the measure's unit. nbytes: what the cache held. first_seconds: until the first token; token_seconds:
    of a token after it, None where none comes alone. said: of each answer, for the file."""

    score: float
    nbytes: int
    first_seconds: float
    token_seconds: float | None = None
    said: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Measure(ABC):
    """name: of the task. length: of a prompt in tokens, as it was asked for. unit: of a score."""

    name: str
    length: int
    unit: ClassVar[str] = "of the answers"
    higher_is_better: ClassVar[bool] = True

    @property
    @abstractmethod
    def count(self) -> int:
        """Samples."""

    def check(self, reader: Reader) -> None:  # noqa: B027  (most take every cache)
        """Raises ValueError where it cannot be measured with the reader's cache, before anything is read."""

    @abstractmethod
    def held(self, reader: Reader, index: int = 0) -> int:
        """Bytes that the cache holds where `run` counts them, without what comes afterwards."""

    @abstractmethod
    def run(self, reader: Reader, index: int) -> Outcome: ...

    @abstractmethod
    def sample(self, index: int) -> dict[str, Any]:
        """What a peer is asked, in tokens, as peers/kvpress_program.py has it. Raises ValueError for what no peer
        does."""

    @abstractmethod
    def outcome(self, tokenizer: Any, index: int, answer: dict[str, Any]) -> Outcome:
        """Of a peer's answer to that sample."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """That are in the cache where its bytes are counted, in the first sample."""


@dataclass(frozen=True)
class Asked:
    """A question behind a context: its tokens, what is right, how many tokens may be written. depth: of the fact, 0 to
    1, where it has one."""

    ids: Sequence[int]
    answers: tuple[str, ...]
    new_tokens: int
    depth: float | None = None


@dataclass(frozen=True)
class Prompt:
    context: Sequence[int]
    asked: tuple[Asked, ...]


@dataclass(frozen=True)
class Mean:
    """Of scores of samples, with its standard error (None for a single one)."""

    samples: tuple[float, ...] = field(repr=False)

    @property
    def value(self) -> float:
        return sum(self.samples) / len(self.samples)

    @property
    def error(self) -> float | None:
        n, mean = len(self.samples), self.value
        if n < 2:
            return None
        return float((sum((x - mean) ** 2 for x in self.samples) / (n - 1) / n) ** 0.5)
