"""RULER's tasks as training sequences: prompts of the training text with their answers, which count most."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
import torch

from ..evaluate.fitting import TooShort, largest
from ..evaluate.ruler.registry import MADE
from ..evaluate.ruler.task import Compose
from ..evaluate.texts import Library
from .text import training_text

LENGTHS = (768, 1024, 1536, 2048)  # tokens that a prompt with its answer may take
ANSWER, PROMPT = 6.0, 0.15  # what a token of an answer, and of its prompt, counts; one of a text counts 1
SHARES = {  # how often; what is learnt late comes more often
    "niah_single_1": 0.6, "niah_single_2": 1.0, "niah_single_3": 1.2, "niah_multikey_1": 1.2, "niah_multikey_2": 1.4,
    "niah_multikey_3": 1.2, "niah_multivalue": 1.2, "niah_multiquery": 1.2, "vt": 1.4, "cwe": 1.0, "fwe": 1.2,
}  # fmt: skip
_FEWER = (0.0, 0.05, 0.1, 0.2)  # parts of a size that is tried, for texts of the same size that take more tokens


class _TrainingText(Library):
    """Each time another place of the files that held-out text has no part of."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @functools.cached_property
    def text(self) -> str:
        return training_text(np.random.default_rng(0)).replace(b"\0", b"").decode("utf-8", "ignore")

    def pieces(self, size: int) -> list[str]:
        first = self._rng.randrange(max(len(self._lines) - size, 1))
        return self._lines[first : first + size]


def written(task: str, answers: Sequence[str]) -> str:
    """How a task's answers are written behind its prompt."""
    if task == "cwe":
        return " " + " ".join(f"{number}. {word}" for number, word in enumerate(answers, 1))
    if task in ("vt", "fwe"):
        return " " + " ".join(answers)
    *others, last = answers
    return " " + (f"{', '.join(others)}, and {last}" if others else last)


class TaskMixture:
    """Draws sequences of bytes, and what each byte counts."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = random.Random(int(rng.integers(1 << 62)))
        self._source = _TrainingText(self._rng)
        self._sizes: dict[tuple[str, int], tuple[Compose, int, int] | None] = {}

    def _composer(self, name: str, length: int) -> tuple[Compose, int, int] | None:
        """(what makes a prompt, the size that fits, the least); None where the definition has none so short."""
        if (name, length) not in self._sizes:
            task, found = MADE[name], None
            try:
                compose = task.composer(len, length, self._source)

                def tokens(size: int) -> int:
                    return len(compose(random.Random(1), size, 0).prompt.encode())

                least = task.least(length)
                found = compose, largest(tokens, least, length - task.new_tokens), least
            except (TooShort, ValueError):
                pass
            self._sizes[name, length] = found
        return self._sizes[name, length]

    def sample(self, name: str, length: int) -> tuple[bytes, bytes] | None:
        """(prompt, answer) of a task, in at most so many bytes; None where there is none so short."""
        made = self._composer(name, length)
        if made is None:
            return None
        compose, size, least = made
        for fewer in _FEWER:
            found = compose(self._rng, max(least, int(size * (1 - fewer))), 0)
            prompt, answer = found.prompt.encode(), written(name, found.answers).encode()
            if len(prompt) + len(answer) < length:
                return prompt, answer
        return None

    def sequence(self, length: int, rest: bytes) -> tuple[np.ndarray, np.ndarray]:
        """(bytes [length], weights [length]): tasks for as long as one more fits, each ended by a zero byte, then the
        last bytes of rest."""
        ids, weights = np.frombuffer(rest, np.uint8)[-length:].copy(), np.ones(length, np.float32)
        at, missed = 0, 0
        while missed < len(MADE) and (fitting := [size for size in LENGTHS if size <= length - at]):
            size = fitting[-1] if at or self._rng.random() < 0.6 else self._rng.choice(fitting)
            found = self.sample(self._rng.choices(list(SHARES), list(SHARES.values()))[0], size)
            if found is None:  # of this task there is none so short
                missed += 1
                continue
            row = b"".join((*found, b"\0"))
            end = at + len(row)
            ids[at:end], weights[at:end] = np.frombuffer(row, np.uint8), ANSWER
            weights[at : at + len(found[0])] = PROMPT
            at = end
        return ids, weights


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean nats of the next byte by weight. logits: [B, S, V]; ids: int64 [B, S]; weights: [B, S]."""
    nats = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    counts = weights[:, 1:].flatten()
    return (nats * counts).sum() / counts.sum()
