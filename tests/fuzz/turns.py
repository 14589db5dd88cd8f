"""compress() and forks over several turns, against loops over dense attention in which each row sees what reading the
prompt with that budget alone leaves of it, and all that followed."""

from __future__ import annotations

import copy
import random
from typing import Any

import pruned_definition as definition
import torch
from helpers import random_ids
from torch import Tensor

from kvcompress import AdaKV, PrunedCache, SnapKV, Uniform, prefill
from kvcompress.pruners import H2O, ExpectedAttention, KeyDiff, KeyNorm, StreamingLLM

from .votes import models

UNITS = "calls of a model"
PRUNERS = [SnapKV(window=6, num_sink_tokens=2), KeyNorm(), KeyDiff(last=4), H2O(), StreamingLLM(),
           ExpectedAttention(future_positions=16)]  # fmt: skip


class Pair:
    """A cache and what it must hold."""

    def __init__(self, cache: Any, plain: definition.Definition) -> None:
        self.cache, self.plain = cache, plain

    def fork(self) -> Pair:
        plain = copy.copy(self.plain)
        plain.rows, plain.queries = copy.deepcopy(self.plain.rows), copy.deepcopy(self.plain.queries)
        return Pair(self.cache.fork(), plain)

    def call(self, ids: Tensor) -> int:
        """Tokens that follow, in one call; the next one by the model."""
        with torch.no_grad():
            ours = models()[0](ids, past_key_values=self.cache).logits[0, -1]
        torch.testing.assert_close(ours.double(), self.plain(ids[0]), atol=3e-3, rtol=3e-3)
        return int(ours.argmax())

    def keep(self, kept: list[list[Tensor]], prompt: int) -> None:
        """Of the prompt's tokens, those alone."""
        for rows, left in zip(self.plain.rows, kept, strict=True):
            for row, places in zip(rows, left, strict=True):
                stays = set(places.tolist())
                row.keep([j for j, place in enumerate(row.place) if place >= prompt or place in stays], 0)

    def check(self) -> None:
        kept = [[held.tolist() for held in layer[0]] for layer in self.cache.kept_positions()]
        assert kept == [[row.place for row in rows] for rows in self.plain.rows]


def one_round(chance: random.Random) -> int:
    model, exact = models()
    pruner, length = chance.choice(PRUNERS), chance.randint(20, 50)
    ids, page_size = random_ids(length + 1, seed=chance.randrange(10_000)), 1 << chance.randint(0, 4)

    def read(keep: int | float, budget: Any = None) -> Any:
        cache = PrunedCache(model.config, pruner, budget, keep=keep, later="keep", page_size=page_size)
        return prefill(model, ids, cache)

    plain = definition.Definition(exact, None, 1 << 30)
    plain(ids[0, :length])
    pairs, calls = [Pair(read(1.0), plain)], 0
    left = [length]  # tokens of the prompt that each has, at most
    for _ in range(chance.randint(3, 7)):
        which = chance.randrange(len(pairs))
        pair = pairs[which]
        action = chance.choice(["fork", "compress", "turn", "turn", "decode"])
        if action == "fork" and len(pairs) < 4:
            pairs.append(pair.fork())
            left.append(left[which])
        elif action == "compress" and left[which] > 6:
            size = chance.randint(6, left[which])
            budget = AdaKV() if chance.random() < 0.3 and left[which] == length else Uniform()
            pair.cache.compress(budget, keep=size)
            pair.keep([layer[0] for layer in read(size, budget).kept_positions()], length)
            # heads differ with AdaKV: what another budget leaves is another set
            left[which] = size if budget == Uniform() else 0
        else:
            given = ids[:, -1:] if pair.plain.seen == length else random_ids(1, seed=chance.randrange(10_000))
            if action == "turn":
                given = torch.cat([given, random_ids(chance.randint(1, 9), seed=chance.randrange(10_000))], 1)
            following = pair.call(given)
            calls += 1
            for _ in range(chance.randint(0, 4) if action == "decode" else 0):
                following = pair.call(torch.tensor([[following]]))
                calls += 1
        for one in pairs:
            one.check()
    return calls
