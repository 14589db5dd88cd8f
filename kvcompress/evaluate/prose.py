"""What is known of a text that people read once its cache was cut: how it goes on, facts in it, a conversation about
it, asked in prose."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..reading.framing import Framing
from ..support.checks import need
from .fitting import TooShort, largest
from .followed import Followed
from .losses import Text
from .measure import Asked, Prompt
from .questions import Questions, begins_with
from .reading import Following

CITIES = (
    "Paris", "London", "Tokyo", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Cairo", "Lima", "Delhi", "Boston",
    "Dublin", "Prague", "Athens", "Moscow", "Chicago", "Seattle", "Toronto", "Sydney",
)  # fmt: skip
SENTENCES = (  # how each begins, and ends
    ("The best thing to do in San Francisco is to", " eat a sandwich in Dolores Park on a sunny day."),
    ("The favorite food of the old sailor was", " roasted chestnuts with honey."),
    ("The lost key of the library was hidden under", " the blue piano in the hall."),
    ("The name of the gardener's dog was", " Captain Pickles."),
    ("The password of the castle gate was", " yellow submarine."),
)
NUMBERS = 4  # facts of a text
_SCORED = 3  # tokens of the sentence that are to be said
_STEP = (math.sqrt(5) - 1) / 2  # between places of a book: however many there are, they are spread over it


@dataclass(frozen=True)
class Question:
    """kind: number or sentence. words: what is asked; prefix: how the answer begins; answer: what it then says. depth:
    of the fact, 0 to 1."""

    kind: str
    words: str
    prefix: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Passage:
    """A place of a book with facts planted in it. book: its name. context: what is read, a chat's first turn from its
    beginning where there is a template. behind: how the book goes on. questions: NUMBERS of numbers, then a sentence's.
    """

    book: str
    context: list[int]
    behind: list[int]
    questions: tuple[Question, ...]


def passage(framing: Framing, books: Sequence[tuple[str, str]], length: int, number: int, scored: int) -> Passage:
    """The number-th: books take turns, and the places of a book lie apart. books: name and text of each. length: most
    tokens of the context. scored: tokens behind it. The same whatever others are asked for.

    Raises ValueError for a length that has no room for the facts, or a book that is too short.
    """
    book, text = books[number % len(books)]
    rng = random.Random(f"prose {length} {number}")
    cities = rng.sample(CITIES, NUMBERS)
    values = ["".join(rng.choice("123456789") for _ in range(5)) for _ in cities]
    begins, ends = rng.choice(SENTENCES)
    facts = [f" The special magic number for {city} is: {value}." for city, value in zip(cities, values, strict=True)]
    facts.append(f" {begins}{ends}")
    order = rng.sample(range(len(facts)), len(facts))
    sentences = _sentences(book, text, _share(books, number), 12 * (length + scored))

    def planted(size: int) -> str:
        cuts = [round(size * _depth(place)) for place in range(len(facts))]
        parts = []
        for begin, end, fact in zip([0, *cuts], [*cuts, size], [*order, None], strict=True):
            parts += [*sentences[begin:end], "" if fact is None else facts[fact]]
        return "".join(parts).strip()

    try:
        size = largest(lambda size: framing.count(planted(size), ""), 1, length, most=len(sentences))
    except TooShort as error:
        raise ValueError(f"length must be at least {error.count} tokens for the facts, got {length}") from None
    behind = framing.bare("".join(sentences[size:])[: 12 * (scored + 1)])[: scored + 1]
    need(len(behind) == scored + 1, f"length must leave {scored + 1} tokens behind it in {book}, got {length}")
    depths = {fact: _depth(place) for place, fact in enumerate(order)}
    asked = [
        Question("number", f"\n\nWhat is the special magic number for {city} mentioned in the text above?",
                 f"The special magic number for {city} is:", f" {value}", depths[fact])
        for fact, (city, value) in enumerate(zip(cities, values, strict=True))
    ]  # fmt: skip
    asked.append(Question("sentence", f"\n\nComplete the sentence: {begins} ...", begins, ends, depths[NUMBERS]))
    return Passage(book, framing.parts(planted(size), "")[0], behind, tuple(asked))


def _depth(place: int) -> float:
    return (place + 0.5) / (NUMBERS + 1)


def stretch(
    framing: Framing, books: Sequence[tuple[str, str]], length: int, number: int, read: int
) -> tuple[str, Text]:
    """The number-th piece of a book without anything planted, and the book's name: `read` tokens of it are read, and
    those up to `length` are scored, as a text that goes on; per token, not per byte. Pieces lie as passages do."""
    book, text = books[number % len(books)]
    piece = _piece(book, text, _share(books, number), 12 * length)
    ids = (framing.begin + framing.bare(piece.lstrip()))[:length]
    need(len(ids) == length, f"length must be at most {len(ids)} tokens there in {book}, got {length}")
    return book, Text(ids[:read], ids[read:], length - read)


def _share(books: Sequence[tuple[str, str]], number: int) -> float:
    """Of a book, behind which its next piece begins."""
    return (number // len(books) * _STEP) % 1


def _sentences(book: str, text: str, share: float, characters: int) -> list[str]:
    """Of a piece, each with what stands before it."""
    return re.split(r"(?<=[.!?])(?=\s+[\"'(]?[A-Z0-9])", _piece(book, text, share, characters))


def _piece(book: str, text: str, share: float, characters: int) -> str:
    """From the first paragraph behind a share of the text on."""
    room = len(text) - characters
    need(room >= 0, f"length must be shorter than {book}, of {len(text):,} characters, got one that may take "
         f"{characters:,}")  # fmt: skip
    begin = text.find("\n\n", int(share * room)) + 2
    return text[begin : begin + characters]


# ---- what is measured ----


@dataclass(frozen=True)
class Prose(Followed):
    """Beside how the text goes on, which questions about it are answered right: each of a copy of the cache (number,
    sentence), and two numbers one after the other in one conversation (turn)."""

    passages: tuple[Passage, ...]
    framing: Framing

    @property
    def count(self) -> int:
        return len(self.passages)

    def context(self, index: int) -> list[int]:
        return self.passages[index].context

    def followings(self, index: int) -> list[Following]:
        """The text, each question, two of them as turns."""
        read = self.passages[index]
        found = [Following("text", read.behind, ((1, len(read.behind)),))]
        for question in read.questions:
            ids, answer = question_ids(self.framing, question), answer_ids(self.framing, question)
            found.append(Following(question.kind, ids + answer, ((len(ids), len(ids) + len(answer)),)))
        first, second = read.questions[:2]
        ids, answer = question_ids(self.framing, first), answer_ids(self.framing, first)
        next_ids, next_answer = next_turn(self.framing, second), answer_ids(self.framing, second)
        then = len(ids) + len(answer) + len(next_ids)
        spans = ((len(ids), len(ids) + len(answer)), (then, then + len(next_answer)))
        return [*found, Following("turn", ids + answer + next_ids + next_answer, spans)]

    def said_of(
        self, index: int, asked: Sequence[Following], scored: Sequence[tuple[float, tuple[bool, ...]]]
    ) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        for following, (nats, right) in zip(asked, scored, strict=True):
            said += [{"kind": following.kind, "score": float(x), "nats": nats} for x in right]
        for answer, question in zip(said, self.passages[index].questions, strict=False):  # turns ask again
            answer["depth"] = question.depth
        return said


def question_ids(framing: Framing, question: Question) -> list[int]:
    return framing.parts("", question.words, _beginning(framing, question))[1]


def answer_ids(framing: Framing, question: Question) -> list[int]:
    ids = framing.bare(question.answer)
    return ids if question.kind == "number" else ids[:_SCORED]


def next_turn(framing: Framing, question: Question) -> list[int]:
    """What stands between an answer that ends here and the next question's: that question, in a turn of its own."""
    return framing.later(question.words, _beginning(framing, question), ".")


def _beginning(framing: Framing, question: Question) -> str:
    return question.prefix if framing.chat else f"\n{question.prefix}"


def asked_once(framing: Framing, length: int, read: Passage, number: int, where: str) -> Questions:
    """One of the passage's numbers, whose question stands where Questions has it: at the prompt's end, or known as a
    guide. number: of the passage; they ask for each of their numbers in turn."""
    question = read.questions[number % NUMBERS]
    new = len(answer_ids(framing, question)) + 1
    asked = Asked(question_ids(framing, question), (question.answer.strip(),), new, question.depth)
    return Questions(where, length, (Prompt(read.context, (asked,)),), begins_with, where)
