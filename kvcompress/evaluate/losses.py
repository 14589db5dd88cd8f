"""How well a text is predicted behind a prompt that was read through a cache, in bits per byte."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..hf.argument import CACHE
from ..reading.framing import Framing
from ..support.checks import need
from .measure import Measure, Outcome
from .reading import Reader, held_nbytes
from .texts import Source

_SAMPLE = 1 << 14  # characters whose tokens say how many a token has


@dataclass(frozen=True)
class Text:
    """read: tokens. scored: those of what follows. nbytes: of that in UTF-8."""

    read: list[int]
    scored: list[int]
    nbytes: int


@dataclass(frozen=True)
class Losses(Measure):
    """Bits per byte of what follows. block: tokens of a call behind the prompt, and bytes are counted at the end: 1 is
    decoding, where a cache with `every` compresses on the way; one that compresses behind each call of several tokens
    does with more what it does in decoding with as many `every`. None: all in one call behind the first of them, over
    what is left of the prompt, and bytes are counted after it."""

    texts: tuple[Text, ...]
    block: int | None = None
    unit: ClassVar[str] = "bits per byte"
    higher_is_better: ClassVar[bool] = False

    @property
    def count(self) -> int:
        return len(self.texts)

    @property
    def tokens(self) -> int:
        text = self.texts[0]
        return len(text.read) - 1 + (0 if self.block is None else len(text.scored))

    def held(self, reader: Reader, index: int = 0) -> int:
        if self.block is not None:
            return self.run(reader, index).nbytes
        return held_nbytes(reader.read(self.texts[index].read[:-1]))

    @torch.no_grad()
    def run(self, reader: Reader, index: int) -> Outcome:
        text, begin = self.texts[index], time.perf_counter()
        cache = reader.read(text.read[:-1])
        nbytes = held_nbytes(cache)
        coming = torch.tensor([[text.read[-1], *text.scored[:-1]]], device=reader.device)
        wanted = torch.tensor(text.scored, device=reader.device)
        parts = coming.split([1, coming.shape[1] - 1] if self.block is None else self.block, 1)
        nats, place, times = 0.0, 0, []
        for part in parts:
            count = part.shape[1]
            if count:
                logits = reader.model(part, **{CACHE: cache}).logits[0].float()
                nats += float(torch.nn.functional.cross_entropy(logits, wanted[place : place + count], reduction="sum"))
            times.append(time.perf_counter())
            place += count
        per_token = (times[-1] - times[0]) / max(len(times) - 1, 1) if self.block == 1 else None
        if self.block is not None:
            nbytes = held_nbytes(cache)
        return self._outcome(text, nats, nbytes, times[0] - begin, per_token)

    def sample(self, index: int) -> dict[str, Any]:
        need(self.block is None, f"peers must be of a task whose prompt is compressed once, got {self.name}")
        text = self.texts[index]
        return {"read": text.read[:-1], "scored": [[text.read[-1], *text.scored]]}

    def outcome(self, tokenizer: Any, index: int, answer: dict[str, Any]) -> Outcome:
        nats = sum(answer["scored"][0]["nats"])
        return self._outcome(self.texts[index], nats, answer["nbytes"], answer["first_seconds"])

    def _outcome(self, text: Text, nats: float, nbytes: int, first: float, per_token: float | None = None) -> Outcome:
        return Outcome(nats / math.log(2) / text.nbytes, nbytes, first, per_token)


def loss_measure(name: str, framing: Framing, length: int, scored: int, source: Source, count: int, seed: int, *,
                 block: int | None = None) -> Losses:  # fmt: skip
    """`count` places of a text, spread evenly: `length` tokens are read, and about `scored` tokens behind them scored,
    whole characters. Raises ValueError for a text that is too short."""
    need(not framing.chat, f"chat must be False for {name}, which is about text that goes on")
    text, sample = source.text, source.text[:_SAMPLE]
    per_token = len(sample) / max(len(framing.bare(sample)), 1)
    behind = max(round(scored * per_token), 1)
    before = math.ceil(1.5 * length * per_token) + 64
    room = len(text) - before - behind
    need(room >= 0, f"length must be at most about {int((len(text) - behind - 64) / per_token / 1.5):,} tokens for a "
         f"text of {len(text):,} characters, got {length}")  # fmt: skip
    rng, found = random.Random(f"{name} {seed}"), []
    for number in range(count):
        cut = before + int((number + rng.random()) * room / count)
        read = framing.bare(text[cut - before : cut])
        need(len(read) >= length, f"length must be at most {len(read)} tokens in this text, got {length}")
        following = text[cut : cut + behind]
        ids = framing.begin + read[len(read) - length + len(framing.begin) :]
        found.append(Text(ids, framing.bare(following), len(following.encode())))
    return Losses(name, length, tuple(found), block)


def decode_measure(framing: Framing, length: int, source: Source, count: int, seed: int) -> Losses:
    """The first quarter of `length` tokens is read, the others come one by one and are scored."""
    need(length >= 4, f"length must be at least 4 tokens, got {length}")
    read = length // 4
    measure = loss_measure("decode", framing, read, length - read, source, count, seed, block=1)
    return replace(measure, length=length)
