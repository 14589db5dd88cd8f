"""What is known of a text once its cache was cut: what a model says behind it, teacher forced."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .measure import Measure, Outcome
from .reading import Following, Reader, held_nbytes


@dataclass(frozen=True)
class Followed(Measure):
    """Bits per token of how a text goes on, the first of what follows it; what is said of the others stands in `said`.

    All is behind what was read, when it is too late to keep for it, and each of a copy of the cache. What follows goes
    through the model in one call: a span is right if every token of it is the likeliest, which is what greedy decoding
    asks. first_seconds: of the reading alone.
    """

    unit: ClassVar[str] = "bits per token"
    higher_is_better: ClassVar[bool] = False

    @abstractmethod
    def context(self, index: int) -> list[int]:
        """What is read of a sample."""

    @abstractmethod
    def followings(self, index: int) -> list[Following]:
        """The text, all of which but its first token is wanted, then what is asked."""

    @abstractmethod
    def said_of(
        self, index: int, asked: Sequence[Following], scored: Sequence[tuple[float, tuple[bool, ...]]]
    ) -> list[dict[str, Any]]:
        """Of what is asked, with the nats and right spans of each."""

    @property
    def tokens(self) -> int:
        return len(self.context(0))

    def held(self, reader: Reader, index: int = 0) -> int:
        return held_nbytes(reader.read(self.context(index)))

    def run(self, reader: Reader, index: int) -> Outcome:
        begin = time.perf_counter()
        cache = reader.read(self.context(index))
        seconds = time.perf_counter() - begin
        return self._outcome(index, reader.follow(cache, self.followings(index)), held_nbytes(cache), seconds)

    def _outcome(
        self, index: int, scored: Sequence[tuple[float, tuple[bool, ...]]], nbytes: int, seconds: float
    ) -> Outcome:
        """scored: of each following, as Reader.follow has it."""
        (text, *asked), (nats, _) = self.followings(index), scored[0]
        said = self.said_of(index, asked, scored[1:])
        return Outcome(nats / math.log(2) / (len(text.ids) - 1), nbytes, seconds, None, tuple(said))

    def sample(self, index: int) -> dict[str, Any]:
        return {"read": self.context(index), "scored": [list(x.ids) for x in self.followings(index)]}

    def outcome(self, tokenizer: Any, index: int, answer: dict[str, Any]) -> Outcome:
        scored = []
        for text, found in zip(self.followings(index), answer["scored"], strict=True):
            places = [slice(begin - 1, end - 1) for begin, end in text.wanted]
            right = tuple(found["greedy"][part] == list(text.ids)[1:][part] for part in places)
            scored.append((sum(sum(found["nats"][part]) for part in places), right))
        return self._outcome(index, scored, answer["nbytes"], answer["first_seconds"])
