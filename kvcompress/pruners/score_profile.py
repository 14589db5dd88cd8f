"""How the scores of a model's heads compare: measured before, in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..support.checks import need
from ..support.files import read_fields, write_text
from ..support.names import file_of

FORMAT = "kvcompress score profile 1"
_LEAST, _MOST = 1e-12, 1e30


@dataclass(frozen=True)
class ScoreProfile:
    """What attention to a key is worth in each KV head: factor * most ** a * mean ** b.

    most: the most attention that a key gets as the text is read again; mean: what it would get of the first reading's
    queries behind the text, over an even share (KVzip with mass).
    heads: [layers that compress][KV heads] of (a, b, logarithm of factor); (1, 1, 0) is KVzip's score with mass, (1, 0,
    0) the paper's. measured: what it comes from, for people. kvcompress.analysis.measure_scores and `kvcompress analyze
    scores` make one.
    """

    heads: tuple[tuple[tuple[float, float, float], ...], ...]
    measured: str = ""

    def __post_init__(self) -> None:
        rows = self.heads
        good = isinstance(rows, (list, tuple)) and rows and all(isinstance(row, (list, tuple)) and row for row in rows)
        need(bool(good), f"heads must be a list of heads for each layer, got {rows!r}")
        for head in (head for row in rows for head in row):
            good = isinstance(head, (list, tuple)) and len(head) == 3 and all(type(x) in (int, float) for x in head)
            need(good and all(abs(x) <= 1e3 for x in head), "heads must be three numbers from -1000 to 1000 each: two "
                 f"powers and the logarithm of a factor, got {head!r}")  # fmt: skip
        made = tuple(tuple((float(a), float(b), float(c)) for a, b, c in row) for row in rows)
        object.__setattr__(self, "heads", made)
        need(isinstance(self.measured, str), f"measured must be a text, got {self.measured!r}")

    def scores(self, layer: int, most: Tensor, mean: Tensor) -> Tensor:
        """float32 [n * Hkv, T], above 0. layer: its place among those that compress. most, mean: of n sequences, at
        least 0."""
        numbers = torch.tensor(self.heads[layer], device=most.device)
        of_most, of_mean, factor = numbers.repeat(len(most) // len(numbers), 1)[..., None].unbind(1)
        logs = of_most * _log(most) + of_mean * _log(mean) + factor
        return logs.exp().clamp(1 / _MOST, _MOST)

    def check_rows(self, heads: Sequence[int]) -> None:
        """Raises ValueError if it is not for a model whose layers that compress have so many KV heads."""
        own = [len(row) for row in self.heads]
        need(
            own == list(heads),
            f"profile must be of this model: it has KV heads {own}, the model's layers that compress {list(heads)}"
            + (f"; measured: {self.measured}" if self.measured else ""),
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As JSON, whole or not at all: under a temporary name in the same folder, then renamed. Returns the path."""
        return write_text(path, json.dumps({"format": FORMAT} | asdict(self), allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ScoreProfile:
        """What save wrote. path: or its name on the Hub, owner/name/file.json, of owner/name scores.json. Raises
        ValueError for anything else, FileNotFoundError for no file, ConnectionError where the Hub cannot be reached."""
        path = file_of("score profile", os.fspath(path), "scores.json")
        return ScoreProfile(**read_fields(path, "score profile", FORMAT, ScoreProfile))


def _log(attention: Tensor) -> Tensor:
    """Of less than can be told apart, the same."""
    return attention.clamp_min(_LEAST).log()
