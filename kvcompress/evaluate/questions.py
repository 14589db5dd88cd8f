"""Questions about a text that was read through a cache, and what is right of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..models.text import fact, question, random_name, random_pass_key
from ..reading.framing import Framing, unended
from ..support.checks import need
from .fitting import TooShort, largest
from .measure import Asked, Measure, Outcome, Prompt
from .reading import Reader, check_question, copy_of, held_nbytes
from .ruler.task import Task
from .texts import Source

Score = Callable[[str, Sequence[str]], float]


@dataclass(frozen=True)
class Questions(Measure):
    """question: where it stands when the text is read.

    end: with the text, as its last tokens, which go through the cache like the others. later: behind the text that was
    read, when it is too late to keep for it. guide: behind the text, and known while that is read, by a cache that
    looks at one, or the dense one. Several stand behind the text and are each asked of a copy of the cache; turns: one
    after the other, with the answers between them, of the cache itself.
    """

    prompts: tuple[Prompt, ...]
    score: Score
    question: str = "end"
    turns: bool = False

    def __post_init__(self) -> None:
        check_question(self.question)
        several = max(len(prompt.asked) for prompt in self.prompts) > 1
        need(not several or self.question == "later", f"question must be later where there are several, got "
             f"{self.question!r}")  # fmt: skip

    @property
    def count(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        return len(self._read_first(self.prompts[0])[0])

    def _read_first(self, prompt: Prompt) -> tuple[list[int], list[int] | None]:
        """(what is in the cache before anything is answered, the guide)."""
        context, first = list(prompt.context), list(prompt.asked[0].ids)
        if self.question == "end":
            return (context + first)[:-1], None
        return context, first if self.question == "guide" else None

    def check(self, reader: Reader) -> None:
        if self.question == "guide":
            reader.check_guide()

    def held(self, reader: Reader, index: int = 0) -> int:
        return held_nbytes(reader.read(*self._read_first(self.prompts[index])))

    def run(self, reader: Reader, index: int) -> Outcome:
        prompt, begin = self.prompts[index], time.perf_counter()
        cache = reader.read(*self._read_first(prompt))
        reading = time.perf_counter() - begin
        nbytes, said = held_nbytes(cache), list(prompt.context)
        firsts, tokens, texts = [], [], []
        for number, asked in enumerate(prompt.asked):
            last = self.turns or number + 1 == len(prompt.asked)
            conversation = said + list(asked.ids)
            written = reader.write(cache if last else copy_of(cache), conversation, asked.new_tokens)
            texts.append(_text(reader.tokenizer, written.ids))
            firsts.append(written.first_seconds)
            tokens += [] if written.token_seconds is None else [written.token_seconds]
            if self.turns:
                said = conversation + unended(reader.model, written.ids)
        per_token = sum(tokens) / len(tokens) if tokens else None
        return self._outcome(prompt, texts, nbytes, reading + firsts[0], per_token)

    def sample(self, index: int) -> dict[str, Any]:
        """Presses know no guide."""
        prompt = self.prompts[index]
        read, _ = self._read_first(prompt)
        whole = [*prompt.context, *prompt.asked[0].ids]  # of the first question, of which a part may be read
        follows = [whole[len(read) :], *(list(asked.ids) for asked in prompt.asked[1:])]
        asked = [{"ids": ids, "new_tokens": asked.new_tokens} for ids, asked in zip(follows, prompt.asked, strict=True)]
        return {"read": read, "asked": asked, "turns": self.turns}

    def outcome(self, tokenizer: Any, index: int, answer: dict[str, Any]) -> Outcome:
        texts = [_text(tokenizer, ids) for ids in answer["written"]]
        first, per_token = answer["first_seconds"], answer["token_seconds"]
        return self._outcome(self.prompts[index], texts, answer["nbytes"], first, per_token)

    def _outcome(self, prompt: Prompt, texts: Sequence[str], nbytes: int, first: float, per_token: float | None
                 ) -> Outcome:  # fmt: skip
        scores, told = [], []
        for asked, text in zip(prompt.asked, texts, strict=True):
            scores.append(self.score(text, asked.answers))
            told.append({"answers": list(asked.answers), "written": text, "score": scores[-1]}
                        | ({} if asked.depth is None else {"depth": asked.depth}))  # fmt: skip
        return Outcome(sum(scores) / len(scores), nbytes, first, per_token, tuple(told))


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


# ---- tasks ----


class _Lines:
    """A fact is a comment among source code, and the question its beginning."""

    @staticmethod
    def fact(name: str, pass_key: str) -> str:
        return fact(name.encode(), pass_key.encode()).decode()

    @staticmethod
    def asked(name: str) -> tuple[str, str]:
        """(the question, how its answer begins)."""
        return question(name.encode()).decode(), ""


class _Prose:
    """The same for models that talk."""

    @staticmethod
    def fact(name: str, pass_key: str) -> str:
        return f"\nThe pass key of {name} is {pass_key}.\n"

    @staticmethod
    def asked(name: str) -> tuple[str, str]:
        return f"\nWhat is the pass key of {name}?", f"The pass key of {name} is"


def _words(framing: Framing) -> type[_Lines] | type[_Prose]:
    return _Prose if framing.chat else _Lines


def ruler_measure(name: str, task: Task, framing: Framing, length: int, source: Source, count: int, seed: int,
                  question: str) -> Questions:  # fmt: skip
    """RULER's prompts; what the answer begins with is given."""
    frame = framing.count("", "") if framing.chat else len(framing.begin)
    try:
        found = task.samples(lambda text: len(framing.bare(text)) + frame, length, source, count, seed)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    prompts = []
    for sample in found:
        context, asked = framing.parts(sample.context, sample.question, sample.prefix)
        prompts.append(Prompt(context, (Asked(asked, sample.answers, task.new_tokens),)))
    return Questions(name, length, tuple(prompts), task.score, question)


def begins_with(written: str, answers: Sequence[str]) -> float:
    return float(written.strip().startswith(answers[0]))


def needle_measure(framing: Framing, length: int, source: Source, depths: int, count: int, seed: int, question: str
                   ) -> Questions:  # fmt: skip
    """`count` texts for each of so many depths, spread evenly, their ends left out: a fact in a text of `length` tokens
    that ends with the question for it."""
    prompts = []
    for number in range(count):
        for place in range(depths):
            rng = np.random.default_rng([seed, number, place])
            prompts.append(_facts_prompt(framing, source, length, rng, 1, [(place + 0.5) / depths], ask_within=True))
    return Questions("needle", length, tuple(prompts), begins_with, question)


def turns_measure(framing: Framing, length: int, source: Source, questions: int, count: int, seed: int) -> Questions:
    """Facts spread evenly over a text of `length` tokens, all asked after it, one after the other in one cache."""
    depths = [(number + 0.5) / questions for number in range(questions)]
    prompts = tuple(
        _facts_prompt(framing, source, length, np.random.default_rng([seed, number]), questions, depths)
        for number in range(count)
    )
    return Questions("turns", length, prompts, begins_with, "later", turns=True)


def recall_measure(framing: Framing, length: int, questions: int, count: int, seed: int) -> Questions:
    """Nothing but facts, as many as fit into `length` tokens; `questions` of them, spread evenly, are asked afterwards,
    each of its own copy of the cache."""
    prompts = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        items = _items(rng, 256)
        texts = [_words(framing).fact(*item) for item in items]

        def counted(size: int) -> int:
            return len(framing.parts("".join(texts[:size]), "")[0])  # noqa: B023  (called in this round)

        size = _at_most(counted, 1, length, len(items))
        asked = sorted({min(int((k + 0.5) * size / questions), size - 1) for k in range(questions)})
        context, _ = framing.parts("".join(texts[:size]), "")
        order = rng.permutation(len(asked))
        prompts.append(Prompt(context, tuple(_asked(framing, items[asked[k]], (asked[k] + 0.5) / size) for k in order)))
    return Questions("recall", length, tuple(prompts), begins_with, "later")


def _facts_prompt(
    framing: Framing, source: Source, length: int, rng: np.random.Generator, count: int, depths: Sequence[float],
    *, ask_within: bool = False,
) -> Prompt:  # fmt: skip
    """Facts at their depths of the largest text that fits, asked one after the other in any order. ask_within: the
    question counts in the length."""
    items = _items(rng, count)
    order = rng.permutation(count)
    asked = [_asked(framing, items[k], depths[k], later=number > 0) for number, k in enumerate(order)]
    within = len(asked[0].ids) if ask_within else 0

    def planted(size: int) -> str:
        text, out = _first(source.text, size), ""
        cuts = [0, *(int(size * depth) for depth in depths), size]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            out += text[begin:end] + (_words(framing).fact(*items[number]) if number < count else "")
        return out

    size = _at_most(lambda size: len(framing.parts(planted(size), "")[0]) + within, count, length)
    context, _ = framing.parts(planted(size), "")
    return Prompt(context, tuple(asked))


def _first(text: str, size: int) -> str:
    """So many characters of a text, which begins again for as long as it takes."""
    return (text * -(-size // len(text)))[:size]


def _asked(framing: Framing, item: tuple[str, str], depth: float, *, later: bool = False) -> Asked:
    """later: behind another answer."""
    name, pass_key = item
    text, begins = _words(framing).asked(name)
    ids = framing.later(text, begins) if later else framing.parts("", text, begins)[1]
    return Asked(ids, (pass_key,), len(framing.bare(f" {pass_key}" if begins else pass_key)) + 1, depth)


def _items(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Names and their pass keys; there are 256 names."""
    need(count <= 256, f"questions must be at most 256, got {count}")
    found: dict[str, str] = {}
    while len(found) < count:
        found[random_name(rng).decode()] = random_pass_key(rng).decode()
    return list(found.items())


def _at_most(counted: Callable[[int], int], least: int, length: int, most: int | None = None) -> int:
    try:
        return largest(counted, least, length, most=most)
    except TooShort as error:
        raise ValueError(f"length must be at least {error.count} tokens for the facts and the question, got {length}"
                         ) from None  # fmt: skip
