"""Questions over documents (qa): those that answer among those that do not."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ...support.checks import need
from ..texts import Source
from .task import Compose, Sample, Task, Tokens, string_match_part

ASKED = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
CONTEXT = f"{ASKED}\n\nThe following are given documents.\n\n{{context}}\n\n"
QUESTION = f"{ASKED}\n\nQuestion: {{query}}"
PREFIX = " Answer:"


@dataclass(frozen=True)
class Question:
    """needed: documents that answer it. near: others of the same article, taken before any other one."""

    query: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Data:
    documents: list[str]
    questions: list[Question]


def read_squad(path: Path) -> Data:
    """SQuAD's JSON (dev-v2.0.json): questions that can be answered."""
    articles = _json(path, "squad")["data"]
    found = sorted({paragraph["context"] for article in articles for paragraph in article["paragraphs"]})
    number, questions = {text: i for i, text in enumerate(found)}, []
    for article in articles:
        of_article = [number[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            near = tuple(i for i in of_article if i != own)
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    questions.append(Question(asked["question"], answers, (own,), near))
    return Data(found, questions)


def read_hotpotqa(path: Path) -> Data:
    """HotpotQA's JSON (hotpot_dev_distractor_v1.json): each question with its ten paragraphs."""
    entries = _json(path, "hotpotqa")
    own = [[f"{title}\n{''.join(lines)}" for title, lines in entry["context"]] for entry in entries]
    found = sorted({text for texts in own for text in texts})
    number = {text: i for i, text in enumerate(found)}
    questions = [
        Question(entry["question"], (entry["answer"],), tuple(number[text] for text in texts))
        for entry, texts in zip(entries, own, strict=True)
    ]
    return Data(found, questions)


def _json(path: Path, name: str) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{name} must be a file, got {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} must be {name}'s JSON, got {path}: {error}") from None


@dataclass(frozen=True)
class Documents(Task):
    """read: what gives a file's questions and documents. They are asked in their order. Source: RULER, section 3
    (question answering), qa.py."""

    path: Path = field(repr=False)
    read: Callable[[Path], Data] = field(repr=False)
    new_tokens: ClassVar[int] = 32

    @functools.cached_property
    def data(self) -> Data:
        try:
            data = self.read(self.path)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{self.path} must be of the form that {self.read.__name__} reads: {error!r}") from None
        need(bool(data.questions), f"{self.path} must have questions with answers, got none")
        return data

    def least(self, length: int) -> int:
        return 1

    def score(self, written: str, answers: Sequence[str]) -> float:
        return string_match_part(written, answers)

    def samples(self, tokens: Tokens, length: int, source: Source, count: int, seed: int) -> list[Sample]:
        need(count <= len(self.data.questions), f"limit must be at most the {len(self.data.questions)} questions of "
             f"{self.path}, got {count}")  # fmt: skip
        return super().samples(tokens, length, source, count, seed)

    def composer(self, tokens: Tokens, length: int, source: Source) -> Compose:
        data = self.data

        def compose(rng: random.Random, size: int, index: int) -> Sample:
            asked = data.questions[index]
            first = {*asked.needed, *asked.near}
            near, others = list(asked.near), [i for i in range(len(data.documents)) if i not in first]
            rng.shuffle(near)
            rng.shuffle(others)
            behind = near + others or list(asked.needed)
            wanted = max(size - len(asked.needed), 0)
            chosen = [*asked.needed, *(behind * -(-wanted // len(behind)))[:wanted]]
            rng.shuffle(chosen)
            texts = [f"Document {number}:\n{data.documents[i]}" for number, i in enumerate(chosen, 1)]
            context = CONTEXT.format(context="\n\n".join(texts))
            return Sample(context, QUESTION.format(query=asked.query), PREFIX, asked.answers)

        return compose
