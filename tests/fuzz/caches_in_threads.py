"""Forks of one cache that decode in several threads at once, with few pages: each thread's tokens are those that it
finds alone, a cache that cannot get its pages is refused before it changes and goes on later, and no page is lost."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from helpers import deciding_model, random_ids, tiny_model
from transformers import PreTrainedModel

from kvcompress import (
    DMCCache,
    IterativeCache,
    PrunedCache,
    QuestCache,
    Replay,
    SnapKV,
    StreamingCache,
    attach,
    prefill,
)

UNITS = "decoded tokens"
SNAPKV = SnapKV(window=4, num_sink_tokens=1)
CACHES: dict[str, Callable[..., Any]] = {
    "pruned": lambda config, **pages: PrunedCache(config, SNAPKV, keep=16, every=3, **pages),
    "replay": lambda config, **pages: PrunedCache(config, Replay(), keep=16, every=4, **pages),
    "prompt": lambda config, **pages: PrunedCache(config, SNAPKV, keep=0.5, **pages),
    "iterative": lambda config, **pages: IterativeCache(
        config, memory_size=16, chunk_size=8, pruner=SNAPKV, every=3, **pages
    ),
    "quest": lambda config, **pages: QuestCache(config, token_budget=16, **pages),
    "streaming": lambda config, **pages: StreamingCache(config, window_size=12, num_sink_tokens=2),
    "dmc": lambda config, **pages: DMCCache(config, **pages),
    "dms": lambda config, **pages: DMCCache(config, **pages),
}
THREADS, STEPS = 4, 10


@functools.cache
def model_for(kind: str) -> PreTrainedModel:
    if kind in ("dmc", "dms"):
        model = deciding_model(dmc={"mode": "dms", "dms_window": 5} if kind == "dms" else {})
    else:
        model = tiny_model()
    attach(model)
    return model


class Asking:
    """A fork that answers a question token by token; `left` steps are to come."""

    def __init__(self, model: PreTrainedModel, cache: Any, question: torch.Tensor) -> None:
        self.model, self.cache = model, cache
        self.given, self.tokens, self.left = question, list[int](), STEPS

    def step(self) -> bool:
        """One call; False, and nothing has changed, where pages are too few."""
        seen, held = self.cache.get_seq_length(), self.cache.stored_lengths()
        try:
            with torch.no_grad():
                logits = self.model(self.given, past_key_values=self.cache).logits[0, -1]
        except RuntimeError as error:
            if "max_pages" not in str(error):
                raise
            self.cache.check_complete()
            assert self.cache.get_seq_length() == seen and self.cache.stored_lengths() == held, "refused, and changed"
            return False
        self.tokens.append(int(logits.argmax()))
        self.given, self.left = logits.argmax()[None, None], self.left - 1
        return True

    def go_on(self, tries: int = 1) -> bool:
        """To the end, or until so many calls have been refused in turn."""
        while self.left:
            if not any(self.step() for _ in range(tries)):
                return False
        return True


def pages_of(cache: Any) -> list[tuple[int, int]]:
    """Of each layer's store: pages in use, and those that this cache names."""
    pools = [layer.pool for layer in cache.layers if getattr(layer, "pool", None) is not None]
    return [(pool.store.pages - pool.store.count_free(), pool.pages_in_use()) for pool in pools]


def least_pages(new: Callable[[int], Any], model: PreTrainedModel, question: torch.Tensor) -> int:
    """Pages with which the cache and one fork of it find their way."""
    least = 2
    while True:
        try:
            cache = new(least)
            if Asking(model, cache.fork(), question).go_on():
                return least
        except RuntimeError as error:  # of the prompt
            if "max_pages" not in str(error):
                raise
        least += 2


def one_round(chance: random.Random) -> int:
    kind = chance.choice(sorted(CACHES))
    model, page_size = model_for(kind), chance.choice([1, 2, 4, 8])
    prompt = random_ids(chance.randint(20, 44), seed=chance.randrange(1000))

    def new(max_pages: int | None = None) -> Any:
        pages = {} if max_pages is None else {"max_pages": max_pages, "grow": grow}
        return prefill(model, prompt, CACHES[kind](model.config, page_size=page_size, **pages))

    grow = chance.choice(["double", "error"])
    # of DMC, what a call of several tokens takes is known too late to be refused (docs/limits.md)
    most = 0 if kind in ("dmc", "dms") else 5
    questions = [random_ids(1 + chance.randint(0, most), seed=100 + n) for n in range(THREADS)]
    want = []
    for question in questions:
        alone = Asking(model, new(), question)
        assert alone.go_on()
        want.append(alone.tokens)
    limit = None
    if kind != "streaming" and chance.random() < 0.8:
        least = max(least_pages(new, model, question) for question in questions)
        limit = least + chance.randint(0, least)
    cache = new(limit)
    asked = [Asking(model, cache.fork(), question) for question in questions]
    errors, start, before = [], threading.Barrier(THREADS), sys.getswitchinterval()

    def work(asking: Asking) -> None:
        try:
            start.wait(60)
            asking.go_on(tries=chance.randint(1, 3))
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)  # threads change places at every chance
    try:
        threads = [threading.Thread(target=work, args=(one,)) for one in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a thread waits for ever"
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
    checked = 0
    for number in range(THREADS):  # one after the other, and those that come later give up their pages
        one = asked[number]
        if one is None:
            continue
        while not one.go_on():
            given_up = next((n for n in range(THREADS - 1, number, -1) if asked[n] is not None), None)
            assert given_up is not None, f"{limit} pages are too few for one fork, though they were enough before"
            asked[given_up] = None
        assert one.tokens == want[number], f"{kind}: {one.tokens} instead of {want[number]}"
        checked += len(one.tokens)
        asked[number] = one = None  # its pages return
    assert all(used == own for used, own in pages_of(cache)), f"{kind}: pages are lost: {pages_of(cache)}"
    again = Asking(model, cache.fork(), questions[0])
    assert again.go_on() and again.tokens == want[0]
    return checked
