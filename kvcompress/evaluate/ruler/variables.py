"""Variable tracking (vt): chains of assignments in noise; which variables have a value?"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import ClassVar

from ..fitting import TooShort, largest
from ..texts import Source
from .needles import NOISE
from .task import Compose, Sample, Task, Tokens

CONTEXT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
)  # fmt: skip
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class Variables(Task):
    """chains: of hops + 1 variables each; the first one's value is asked. An example with an answer, in about 500
    tokens and with names of three letters, comes first. Source: RULER, section 3 (multi-hop tracing),
    variable_tracking.py."""

    chains: int = 1
    hops: int = 4
    new_tokens: ClassVar[int] = 30

    def least(self, length: int) -> int:
        return self.hops + 1

    def composer(self, tokens: Tokens, length: int, source: Source) -> Compose:
        def example(rng: random.Random, size: int) -> str:
            solved = self._one(rng, size, 3)
            return f"{solved.prompt} {' '.join(solved.answers)}\n"

        least = self.least(length)
        try:
            size_of_example = largest(lambda size: tokens(example(random.Random(0), size)), least, EXAMPLE_TOKENS)
        except TooShort:
            size_of_example = least

        def compose(rng: random.Random, size: int, index: int) -> Sample:
            shown = example(rng, size_of_example)
            asked = self._one(rng, size, 5)
            return Sample(f"{shown}\n{asked.context}", asked.question, asked.prefix, asked.answers)

        return compose

    def _one(self, rng: random.Random, size: int, letters: int) -> Sample:
        names: dict[str, None] = {}
        while len(names) < self.chains * (self.hops + 1):
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        lines, first, value = [NOISE] * size, list(names)[: self.hops + 1], ""
        for number in range(self.chains):
            chain = list(names)[number * (self.hops + 1) :][: self.hops + 1]
            given = str(rng.randint(10_000, 99_998))
            value = value or given
            said = [f"VAR {chain[0]} = {given}", *(f"VAR {b} = VAR {a} " for a, b in zip(chain, chain[1:]))]  # noqa: B905, RUF007
            places = sorted(random.Random(rng.getrandbits(64)).sample(range(len(lines)), len(said)))
            for behind, (place, line) in enumerate(zip(places, said, strict=True)):
                lines.insert(place + behind, line)
        context = CONTEXT.format(context="\n".join(lines).replace(". \n", ".\n"))
        question, prefix = (text.format(value=value, count=self.hops + 1) for text in (QUESTION, PREFIX))
        return Sample(context, question, prefix, tuple(first))
