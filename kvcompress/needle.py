"""A fact planted in a text of a model's tokens, with the question for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .models.text import fact, long_text, plant, question, random_name, random_pass_key


def needle(tokenizer: Any, length: int, depth: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """(ids [1, T] of about `length` tokens, the question's ids [g], the answer): source with a fact at depth 0 to 1."""
    rng = np.random.default_rng(seed)
    name, pass_key = random_name(rng), random_pass_key(rng)
    asked = tokenizer(question(name).decode(), return_tensors="pt", add_special_tokens=False).input_ids
    sample = long_text(4096).decode("utf-8", "ignore")
    per_token = 4096 / len(tokenizer(sample, add_special_tokens=False).input_ids)
    room = int((length - asked.shape[1]) * per_token) - len(fact(name, pass_key))
    if room < 0:
        raise ValueError(f"lengths must be large enough for the fact and its question, got {length}")
    text = plant(long_text(room), fact(name, pass_key), depth).decode("utf-8", "ignore")
    body = tokenizer(text, return_tensors="pt").input_ids
    return torch.cat([body, asked], dim=1), asked[0], pass_key.decode()
