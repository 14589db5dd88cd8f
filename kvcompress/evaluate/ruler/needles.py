"""Needles in a haystack (niah): sentences that give a key its value, and questions for values."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import ClassVar

from ...support.checks import need_choice
from ..texts import Keys, Source
from .task import Compose, Sample, Task, Tokens

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
CONTEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
DEPTHS = [round(100 * number / 39) for number in range(40)]  # percent


@dataclass(frozen=True)
class Needles(Task):
    """haystack: noise (one sentence again and again), text (RULER's essays), or needle (nothing but needles of other
    keys). keys, values: words, numbers or uuids. A number of queries is asked, of at least as many keys, with a number
    of values each. Source: RULER, section 3 (retrieval), niah.py."""

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    new_tokens: ClassVar[int] = 128

    def __post_init__(self) -> None:
        need_choice("haystack", self.haystack, ("noise", "text", "needle"))
        for name in ("keys", "values"):
            need_choice(name, getattr(self, name), ("words", "numbers", "uuids"))

    @property
    def _needles(self) -> int:
        return max(self.num_keys, self.num_queries) * self.num_values

    def least(self, length: int) -> int:
        return self._needles

    def composer(self, tokens: Tokens, length: int, source: Source) -> Compose:
        def compose(rng: random.Random, size: int, index: int) -> Sample:
            draw = {"words": Keys(rng).draw, "numbers": lambda: str(rng.randint(10**6, 10**7 - 1)),
                    "uuids": lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4))}  # fmt: skip
            key, value = draw[self.keys], draw[self.values]
            names = [key() for _ in range(max(self.num_keys, self.num_queries))]
            given = {name: [value() for _ in range(self.num_values)] for name in names}
            asked = rng.sample(names, self.num_queries)
            needles = [
                NEEDLE.format(kind=self.values, key=name, value=x) for name, values in given.items() for x in values
            ]
            rng.shuffle(needles)
            places = random.Random(rng.getrandbits(64))  # what follows depends on the size
            if self.haystack == "text":
                context = _among_sentences(places, source, source.pieces(size), needles)
            elif self.haystack == "noise":
                context = _among_lines(places, [NOISE] * size, needles)
            else:
                others = [NEEDLE.format(kind=self.values, key=key(), value=value()) for _ in range(size)]
                context = _among_lines(places, others, needles)
            return self._sample(context, asked, tuple(x for name in asked for x in given[name]))

        return compose

    def _sample(self, context: str, asked: list[str], answers: tuple[str, ...]) -> Sample:
        texts, kind = [CONTEXT, QUESTION, PREFIX], self.values
        if len(answers) == 1:  # as niah.py has it
            kind = kind[:-1]
            texts = [
                text.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")
                for text in texts
            ]
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        before, question, prefix = (text.format(kind=kind, context=context, query=query) for text in texts)
        return Sample(before, question, prefix, answers)


def _among_lines(rng: random.Random, lines: list[str], needles: list[str]) -> str:
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _among_sentences(rng: random.Random, source: Source, sentences: list[str], needles: list[str]) -> str:
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    places = [len(sentences) * depth // 100 for depth in depths]
    out, begin = [], 0
    for place, needle in zip(places, needles, strict=True):
        out += [*sentences[begin:place], needle]
        begin = place
    return source.joint.join([*out, *sentences[begin:]])
