"""Texts that ask for what stands far back: pass keys planted in them, and asked for at their end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..models.text import fact, question, random_name, random_pass_key
from ..support.checks import need, need_integer


class PassKeys(NamedTuple):
    """ids: int64 [T]. asked: bool [T], the tokens whose successor is one of a pass key that is asked for."""

    ids: Tensor
    asked: Tensor


def pass_keys(tokenizer: Any, texts: Sequence[Tensor], *, facts: int = 5, seed: int = 0) -> list[PassKeys]:
    """Texts with facts planted in them, which are asked for at their ends.

    texts: token ids int64 [T] each. tokenizer: a transformers one of theirs, for the sentences. facts: how many, of
    different names, at random places in the front of each text; in its place at the end, in the same order, each fact
    once more; seed draws names, keys and places. Returns one sample of each text, of the text's length.
    Raises ValueError for a text that is too short.
    """
    need_integer("facts", facts, 1)
    rng, samples = np.random.default_rng(seed), []
    for j, text in enumerate(texts):
        pairs: dict[bytes, bytes] = {}
        while len(pairs) < facts:
            pairs[random_name(rng)] = random_pass_key(rng)
        said = [_ids(tokenizer, fact(name, key)) for name, key in pairs.items()]
        ends: list[Tensor] = []
        marks: list[Tensor] = []
        for own, (name, key) in zip(said, pairs.items(), strict=True):
            start, end = (len(_ids(tokenizer, words)) for words in (question(name), question(name) + key))
            places = torch.arange(len(own))
            ends.append(own)
            marks.append((places >= start - 1) & (places < end - 1))
        room = len(text) - 2 * sum(map(len, said))
        need(
            room >= facts,
            f"texts[{j}] must have more than {len(text) - room} tokens for {facts} facts, got {len(text)}",
        )
        cuts = [0, *sorted(rng.choice(room, facts, replace=False).tolist()), room]
        parts = [torch.as_tensor(text[a:b]) for a, b in pairwise(cuts)]
        front = [part for pair in zip(parts, said, strict=False) for part in pair] + parts[-1:]
        ids = torch.cat([*front, *ends]).long()
        asked = torch.cat([torch.zeros(len(text) - sum(map(len, ends)), dtype=torch.bool), *marks])
        samples.append(PassKeys(ids, asked))
    return samples


def _ids(tokenizer: Any, words: bytes) -> Tensor:
    return torch.tensor(tokenizer.encode(words.decode(), add_special_tokens=False))
