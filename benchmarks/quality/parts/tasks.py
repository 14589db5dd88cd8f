"""What the benchmarks of quality measure: held-out text, facts over depth, dense key-value recall.

A task is a number of prompts of equal length and, for each, what follows. A cache reads the prompts with
`kvcompress.prefill`, which prunes; what follows then goes through the model in one call over the pruned cache, teacher
forced. In that call nothing is pruned: a PrunedCache compresses after a call, so every scored token sees what is left
of the prompt and all that followed it. That is what decoding token by token sees too (without `every`), in less time.
The cache is thrown away after the call.
An answer is right if every token of it is the likeliest one, which is what greedy decoding asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from kvcompress import CompressedCache
from kvcompress.models.text import fact, held_out_text, question, random_name, random_pass_key

MakeCache = Callable[[], "CompressedCache | DynamicCache"]


@dataclass(frozen=True)
class Question:
    """One question of a prompt: its tokens, the answer's, where the answer begins in what follows, the fact's depth."""

    asked: tuple[int, ...]
    answer: tuple[int, ...]
    place: int
    depth: float


@dataclass(frozen=True)
class Task:
    """prompts: N lists of P tokens. following: N lists of tokens. sizes: bytes of each following text, where there are
    no questions. questions: of each prompt. question_tokens: last tokens of each prompt that ask its one question."""

    name: str
    prompts: list[list[int]]
    following: list[list[int]]
    sizes: list[int] = field(default_factory=list)
    questions: list[list[Question]] = field(default_factory=list)
    question_tokens: list[int] = field(default_factory=list)

    def first(self, prompts: int) -> Task:
        """The same with its first prompts alone."""
        lists = ("prompts", "following", "sizes", "questions", "question_tokens")
        return replace(self, **{name: getattr(self, name)[:prompts] for name in lists})


@dataclass(frozen=True)
class Result:
    """samples: one number per prompt, bits per byte or the share of its questions that were answered right.

    by_depth: that share for each depth, from the start of the prompt to its end. asked: questions in all. nbytes: of
    the caches after reading.
    """

    samples: list[float]
    by_depth: list[float]
    asked: int
    nbytes: int

    @property
    def mean(self) -> float:
        return float(np.mean(self.samples))

    @property
    def standard_error(self) -> float:
        return standard_error(self.samples)


def standard_error(samples: Sequence[float]) -> float:
    """Of the mean, over prompts: answers to one prompt are not independent. nan for a single prompt."""
    return float(np.std(samples, ddof=1) / math.sqrt(len(samples))) if len(samples) > 1 else math.nan


# ---- tasks ----


class Writer:
    """Text as the model's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        begin = tokenizer.bos_token_id
        self.begin = [begin] if begin is not None and tokenizer("a").input_ids[0] == begin else []

    def __call__(self, text: bytes) -> list[int]:
        return list(self.tokenizer(text.decode("utf-8", "ignore"), add_special_tokens=False).input_ids)

    def gives_text_back(self) -> bool:
        """Whether tokens can be turned into the text again, so that bits per byte mean something."""
        text = held_out_text()[:4096].decode()
        return self.tokenizer.decode(self(text.encode())) == text

    def source(self, count: int, length: int) -> list[list[int]]:
        """`count` pieces of `length` tokens, evenly spread over the held-out text, begin token included."""
        text, size = held_out_text(), length
        while True:
            starts = np.linspace(0, len(text) - size, count).astype(int)
            pieces = [self.begin + self(text[start : start + size]) for start in starts]
            if min(map(len, pieces)) >= length:
                return [piece[:length] for piece in pieces]
            if size == len(text):
                raise ValueError(f"length must be at most that of the held-out text, got {length} tokens")
            size = min(2 * size, len(text))


def text_task(write: Writer, *, count: int, length: int, following: int) -> Task:
    """Held-out source text: `length` tokens are read, then one more, then `following` tokens are scored."""
    pieces = write.source(count, length + following + 1)
    sizes = [len(write.tokenizer.decode(piece[length + 1 :]).encode()) for piece in pieces]
    return Task("text", [piece[:length] for piece in pieces], [piece[length:] for piece in pieces], sizes)


Item = tuple[bytes, bytes]  # name, pass key


def _items(rng: np.random.Generator, count: int) -> list[Item]:
    found: dict[bytes, bytes] = {}
    while len(found) < count:
        found[random_name(rng)] = random_pass_key(rng)
    return list(found.items())


def planted(write: Writer, text: list[int], items: Sequence[Item], depths: Sequence[float], length: int) -> list[int]:
    """text with the facts at their depths, cut at its end so that all is `length` tokens."""
    sentences = [write(fact(*item)) for item in items]
    body = length - sum(map(len, sentences))
    if body < len(items):
        raise ValueError(f"length must leave room for {len(items)} facts, got {length}")
    out, previous = [], 0
    for sentence, depth in zip(sentences, depths, strict=True):
        cut = max(int(body * depth), len(write.begin))
        out += text[previous:cut] + sentence
        previous = cut
    return out + text[previous:body]


def _depths(count: int) -> list[float]:
    return [(number + 0.5) / count for number in range(count)]


def facts_task(write: Writer, *, count: int, length: int, per_prompt: int) -> Task:
    """Facts at evenly spread depths of source text; the prompt ends with the question for one of them.

    A pruner that looks at the last queries sees the question; another does not. Prompts take turns in the depth that
    they ask for.
    """
    rng, depths = np.random.default_rng(0), _depths(per_prompt)
    prompts, following, questions, ends = [], [], [], []
    for number, text in enumerate(write.source(count, length)):
        items = _items(rng, per_prompt)
        chosen = number % per_prompt if count >= per_prompt else number * per_prompt // count
        name, pass_key = items[chosen]
        asked, answer = write(question(name)), write(pass_key)
        # the question's last token is read after the pruning: it brings the logits of the answer's first
        prompts.append(planted(write, text, items, depths, length - len(asked) + 1) + asked[:-1])
        following.append([asked[-1], *answer])
        questions.append([Question(tuple(asked), tuple(answer), 1, depths[chosen])])
        ends.append(len(asked) - 1)
    return Task("facts", prompts, following, questions=questions, question_tokens=ends)


def _ask_all(
    write: Writer, items: Sequence[Item], depths: Sequence[float], rng: np.random.Generator
) -> tuple[list[int], list[Question]]:
    following: list[int] = []
    questions = []
    for number in rng.permutation(len(items)):
        name, pass_key = items[number]
        asked, answer = write(question(name)), write(pass_key)
        questions.append(Question(tuple(asked), tuple(answer), len(following) + len(asked), depths[number]))
        following += [*asked, *answer, *write(b".\n")]
    return following, questions


def later_task(write: Writer, *, count: int, length: int, per_prompt: int) -> Task:
    """Facts at evenly spread depths of source text; all are asked after the prompt, so nothing says what to keep."""
    rng, depths = np.random.default_rng(1), _depths(per_prompt)
    prompts, following, questions = [], [], []
    for text in write.source(count, length):
        items = _items(rng, per_prompt)
        prompts.append(planted(write, text, items, depths, length))
        tail, asked = _ask_all(write, items, depths, rng)
        following.append(tail)
        questions.append(asked)
    return Task("later", prompts, following, questions=questions)


def pairs_task(write: Writer, *, count: int, per_prompt: int) -> Task:
    """Nothing but facts, all asked after the prompt: every answer is wanted.

    Prompts are cut at their start to the length of the shortest; a fact that this cuts is not asked.
    """
    rng = np.random.default_rng(2)
    drawn = [_items(rng, per_prompt + 1) for _ in range(count)]
    texts = [[write(fact(*item)) for item in items] for items in drawn]
    length = min(sum(map(len, sentences[1:])) for sentences in texts)
    prompts, following, questions = [], [], []
    for items, sentences in zip(drawn, texts, strict=True):
        prompt = [token for sentence in sentences for token in sentence][-length:]
        prompt[: len(write.begin)] = write.begin
        whole = [i for i in range(len(items)) if sum(map(len, sentences[i:])) <= length - len(write.begin)]
        tail, asked = _ask_all(write, [items[i] for i in whole], _depths(len(whole)), rng)
        prompts.append(prompt)
        following.append(tail)
        questions.append(asked)
    return Task("pairs", prompts, following, questions=questions)


# ---- measuring ----


def dense_nbytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.no_grad()
def logits_after(
    model: PreTrainedModel,
    prompts: list[list[int]],
    following: list[list[int]],
    make: MakeCache,
    guide: tuple[int, ...] | None = None,
    *,
    stepwise: bool = False,
) -> tuple[Tensor, int]:
    """(float32 logits [B, n, vocabulary] of the following tokens, bytes that the cache holds after reading).

    stepwise: one token at a time, as in decoding, so that a cache with `every` compresses between them."""
    cache, device = make(), model.device
    ids = torch.tensor(prompts, device=device)
    if isinstance(cache, CompressedCache):
        known = None if guide is None else torch.tensor(guide, device=device)
        # prefill leaves the last token, or the guide, to who goes on
        tail = ids[:, -1:] if known is None else known.expand(len(ids), -1)
        kvcompress.prefill(model, torch.cat([ids, tail], 1), cache, guide=known)
        nbytes = cache.nbytes()
    else:
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        nbytes = dense_nbytes(cache)
    longest = max(map(len, following))
    later = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in following], device=device)
    parts = later.split(1, dim=1) if stepwise else (later,)
    return torch.cat([model(input_ids=part, past_key_values=cache).logits.float() for part in parts], 1), nbytes


def _right(logits: Tensor, asked: Question, place: int) -> bool:
    return logits[place - 1 : place - 1 + len(asked.answer)].argmax(-1).tolist() == list(asked.answer)


def measure(model: PreTrainedModel, task: Task, make: MakeCache, *, batch: int = 8, stepwise: bool = False) -> Result:
    """One task with one kind of cache; the model is attached. stepwise: see logits_after."""
    nats: list[float] = []
    right: list[list[bool]] = []
    nbytes = 0
    for first in range(0, len(task.prompts), batch):
        part = slice(first, first + batch)
        logits, held = logits_after(model, task.prompts[part], task.following[part], make, stepwise=stepwise)
        nbytes += held
        for row, scores in enumerate(logits, first):
            if task.questions:
                right.append([_right(scores, asked, asked.place) for asked in task.questions[row]])
            else:
                wanted = torch.tensor(task.following[row][1:], device=scores.device)
                nats.append(torch.nn.functional.cross_entropy(scores[: len(wanted)], wanted, reduction="sum").item())
    return result_of(task, nats, right, nbytes)


def measure_guided(model: PreTrainedModel, task: Task, make: MakeCache, *, per_prompt: int = 2) -> Result:
    """The same where each question is known before its prompt is read; the first per_prompt of each prompt, each with a
    reading of its own. A question at the prompt's end is taken from there."""
    right: list[list[bool]] = []
    nbytes = 0
    for row, prompt in enumerate(task.prompts):
        read = prompt[: len(prompt) - task.question_tokens[row]] if task.question_tokens else prompt
        answers = []
        for asked in task.questions[row][:per_prompt]:
            logits, held = logits_after(model, [read], [[*asked.asked, *asked.answer]], make, asked.asked)
            answers.append(_right(logits[0], asked, len(asked.asked)))
        nbytes += held
        right.append(answers)
    return result_of(task, [], right, nbytes)


def result_of(task: Task, nats: Sequence[float], right: Sequence[Sequence[bool]], nbytes: int) -> Result:
    """nats: of each following text, where there are no questions. right: whether the first questions of each prompt
    were answered so."""
    if not task.questions:
        samples = [total / math.log(2) / size for total, size in zip(nats, task.sizes, strict=True)]
        return Result(samples, [], 0, nbytes)
    found: dict[int, list[bool]] = {}
    for questions, answers in zip(task.questions, right, strict=True):
        for asked, answer in zip(questions, answers, strict=False):
            found.setdefault(int(8 * asked.depth), []).append(answer)
    by_depth = [float(np.mean(found[depth])) if depth in found else math.nan for depth in range(8)]
    return Result([float(np.mean(answers)) for answers in right], by_depth, sum(map(len, right)), nbytes)
