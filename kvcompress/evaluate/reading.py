"""A prompt through a cache: what is read, what is written then, how long both take, and what the cache holds."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from ..apps.write_text import held_nbytes
from ..caches.base import CompressedCache
from ..caches.spec import CacheSpec
from ..hf.argument import CACHE
from ..reading.prefilling import prefill
from ..support.checks import need

QUESTIONS = ("end", "later", "guide")
_ANY_SIZE = 4096  # tokens


@dataclass(frozen=True)
class Reader:
    """A model that is attached, its tokenizer, and what cache it reads with: a new one for every prompt."""

    model: Any
    tokenizer: Any
    spec: CacheSpec

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    @torch.no_grad()
    def read(self, ids: list[int], guide: list[int] | None = None) -> Cache:
        """A new cache that has read ids. guide: what chooses what stays, without being read. Raises ValueError for a
        cache that looks at none; the dense one, which keeps everything, is not told."""
        cache, read = self.spec.make(self.model.config, self.tokenizer), self._tensor(ids)
        if not isinstance(cache, CompressedCache):
            self.model(read, logits_to_keep=1, **{CACHE: cache})
            return cache
        if guide is not None:
            self._check_guide(cache)
            known = self._tensor(guide)
            prefill(self.model, torch.cat([read, known], 1), cache, guide=known[0])
            return cache  # the guide's own tokens are left to who goes on
        prefill(self.model, torch.cat([read, read[:, -1:]], 1), cache)  # which leaves the last token to who goes on
        return cache

    def write(self, cache: Cache, ids: list[int], new_tokens: int) -> Written:
        """Goes on after ids, all that was said so far, greedily; the cache has read a part of them, and keeps what
        comes."""
        clock, begin = _Clock(), time.perf_counter()
        out = self.model.generate(
            self._tensor(ids), attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=self.device),
            max_new_tokens=new_tokens, do_sample=False, streamer=clock, **{CACHE: cache},
        )  # fmt: skip
        return Written(out[0, len(ids) :].tolist(), clock.times[1] - begin, clock.per_token)

    @torch.no_grad()
    def follow(self, cache: Cache, texts: Sequence[Following]) -> list[tuple[float, tuple[bool, ...]]]:
        """Of each: (nats of all that is wanted, which parts of it are the likeliest tokens), in a call for those of one
        length; each of a copy of the cache, which stays as it is."""
        found: dict[int, tuple[float, tuple[bool, ...]]] = {}
        alike: dict[tuple[int, int], list[int]] = {}
        for number, text in enumerate(texts):
            alike.setdefault((len(text.ids), text.wanted[0][0]), []).append(number)
        for (length, first), numbers in alike.items():
            own = copy_of(cache)
            if len(numbers) > 1:
                own.batch_repeat_interleave(len(numbers))
            ids = torch.tensor([list(texts[number].ids) for number in numbers], device=self.device)
            logits = self.model(ids[:, :-1], logits_to_keep=length - first, **{CACHE: own}).logits.float()
            nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, first:], reduction="none")
            right = logits.argmax(-1) == ids[:, first:]
            for row, number in enumerate(numbers):
                parts = [slice(begin - first, end - first) for begin, end in texts[number].wanted]
                found[number] = (
                    sum(float(nats[row, part].sum()) for part in parts),
                    tuple(bool(right[row, part].all()) for part in parts),
                )
        return [found[number] for number in range(len(texts))]

    def check_guide(self) -> None:
        """Raises ValueError for a cache that looks at no guide, before anything is read. Its size does not matter."""
        spec = self.spec if self.spec.size_key is None else self.spec.sized(_ANY_SIZE)
        cache = spec.make(self.model.config, self.tokenizer)
        if isinstance(cache, CompressedCache):
            self._check_guide(cache)

    def _check_guide(self, cache: CompressedCache) -> None:
        try:
            cache.check_guide()
        except ValueError as error:
            raise ValueError(f"question must be end or later with {self.spec}: {error}") from None

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.device)


@dataclass(frozen=True)
class Following:
    """Tokens that go on behind what a cache has read. kind: what they are. wanted: from which to before which of them
    the model is to say itself, rising; never the first."""

    kind: str
    ids: Sequence[int]
    wanted: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Written:
    """ids: new tokens. first_seconds: until the first of them; token_seconds: a token after it, None = there is one."""

    ids: list[int]
    first_seconds: float
    token_seconds: float | None


class _Clock(BaseStreamer):
    """When the prompt was handed over, and when each new token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def per_token(self) -> float | None:
        first, last, count = self.times[1], self.times[-1], len(self.times) - 2
        return (last - first) / count if count else None


def copy_of(cache: Cache) -> Cache:
    """For one of several questions."""
    return cache.fork() if isinstance(cache, CompressedCache) else copy.deepcopy(cache)


def check_question(question: str) -> None:
    need(question in QUESTIONS, f"question must be one of {', '.join(QUESTIONS)}, got {question!r}")


__all__ = ["QUESTIONS", "Following", "Reader", "Written", "check_question", "copy_of", "held_nbytes"]
