"""Which words are most frequent: common words (cwe) of a numbered list, frequent words (fwe) of a coded text."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass
from typing import ClassVar

from ...support.checks import need
from ..texts import Source
from .task import Compose, Sample, Task, Tokens

COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\n"
)
COMMON_QUESTION = "Question: What are the 10 most common words in the above list?"
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FREQUENT_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\n"
)
FREQUENT_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
SHORT = 4096  # tokens, below which words come less often
LETTERS = 6  # of a coded word
VOCABULARY_TOKENS = 50  # tokens of the prompt for each coded word there is
ZETA = math.pi**2 / 6  # zeta(2): the n-th coded word is said as 1 / n^2


@dataclass(frozen=True)
class CommonWords(Task):
    """Ten words that come 30 times among others that come 3 times (6 and 1 in prompts below 4,096 tokens), behind a
    short example with its answer. Source: RULER, section 3 (aggregation), common_words_extraction.py."""

    common: int = 10
    new_tokens: ClassVar[int] = 120

    def least(self, length: int) -> int:
        return self.common + 1

    def composer(self, tokens: Tokens, length: int, source: Source) -> Compose:
        words = source.words()
        short = length < SHORT
        example_words, example_often, often = (20, (3, 1), (6, 1)) if short else (40, (10, 3), (30, 3))

        def one(rng: random.Random, count: int, often: tuple[int, int]) -> tuple[str, tuple[str, ...]]:
            need(count <= len(words), f"text must have at least {count} different words of 3 to 10 letters a-z for a "
                 f"prompt of {length} tokens, got {len(words)}")  # fmt: skip
            drawn = rng.sample(words, count)
            common, others = drawn[: self.common], drawn[self.common :]
            said = common * often[0] + others * often[1]
            rng.shuffle(said)
            return COMMON_CONTEXT.format(context=_numbered(said)), tuple(common)

        def compose(rng: random.Random, size: int, index: int) -> Sample:
            shown, solved = one(rng, example_words, example_often)
            example = f"{shown}{COMMON_QUESTION}{COMMON_PREFIX} {_numbered(solved)}"
            context, answers = one(rng, size, often)
            return Sample(f"{example}\n{context}", COMMON_QUESTION, COMMON_PREFIX, answers)

        return compose


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@dataclass(frozen=True)
class FrequentWords(Task):
    """Coded words of six letters whose frequencies fall as 1 / rank^2; the most frequent of all are dots, the three
    after it are asked. Source: RULER, section 3 (aggregation), freq_words_extraction.py.

    Their size is the words of which these are the frequencies, so small that the third of them is ahead of the fourth.
    """

    asked: int = 3
    new_tokens: ClassVar[int] = 50

    def least(self, length: int) -> int:
        return next(size for size in range(1, 10**6) if self._strict(size))

    def _strict(self, size: int) -> bool:
        return said(size, self.asked + 1) > said(size, self.asked + 2)

    def composer(self, tokens: Tokens, length: int, source: Source) -> Compose:
        count = max((length - self.new_tokens) // VOCABULARY_TOKENS, self.asked + 2)

        def compose(rng: random.Random, size: int, index: int) -> Sample:
            while not self._strict(size):
                size -= 1
            drawn: dict[str, None] = {"...": None}
            while len(drawn) < count:
                drawn["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
            words = [word for rank, word in enumerate(drawn, 1) for _ in range(said(size, rank))]
            rng.shuffle(words)
            context = FREQUENT_CONTEXT.format(context=" ".join(words))
            return Sample(context, FREQUENT_QUESTION, FREQUENT_PREFIX, tuple(drawn)[1 : self.asked + 1])

        return compose


def said(size: int, rank: int) -> int:
    """How often the word of a rank, from 1 on, comes among `size`."""
    return int(size / ZETA / rank**2)
