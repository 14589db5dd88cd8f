"""Which heads of a model look back, and which see the first and the latest tokens alone: measured before, in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .support.checks import MOST_INT32, need, need_integer, need_number
from .support.files import read_fields, write_text
from .support.names import file_of

__all__ = ["HeadProfile"]

FORMAT = "kvcompress head profile 1"
SINKS, RECENT = 128, 256  # of the published patterns of Llama 3.1


@dataclass(frozen=True)
class HeadProfile:
    """How much each KV head of a model needs tokens that are neither among the first nor the latest (DuoAttention).

    gates: [layers that compress][KV heads], 0..1, clamped; the higher, the more a head retrieves. sinks, recent: tokens
    that the other heads saw when it was measured. measured: what it comes from, for people.
    kvcompress.analysis.measure_heads and `kvcompress analyze heads` make one.
    """

    gates: tuple[tuple[float, ...], ...]
    sinks: int = SINKS
    recent: int = RECENT
    measured: str = ""

    def __post_init__(self) -> None:
        rows = self.gates
        good = isinstance(rows, (list, tuple)) and rows and all(isinstance(row, (list, tuple)) and row for row in rows)
        need(bool(good), f"gates must be a list of numbers for each layer, got {rows!r}")
        for gate in (gate for row in rows for gate in row):
            need_number("gates", gate, -(2.0**100), 2.0**100)
        object.__setattr__(self, "gates", tuple(tuple(min(max(float(x), 0.0), 1.0) for x in row) for row in rows))
        need_integer("sinks", self.sinks, 0, MOST_INT32)
        need_integer("recent", self.recent, 1, MOST_INT32)
        need(isinstance(self.measured, str), f"measured must be a text, got {self.measured!r}")

    def retrieves(self, sparsity: float) -> tuple[tuple[bool, ...], ...]:
        """Whether each head keeps all: but for the share `sparsity` of all heads, rounded, of the lowest gates, of
        equal ones the first."""
        need_number("sparsity", sparsity, 0.0, 1.0)
        flat = [gate for row in self.gates for gate in row]
        lowest = set(sorted(range(len(flat)), key=lambda i: (flat[i], i))[: round(sparsity * len(flat))])
        places = iter(range(len(flat)))
        return tuple(tuple(next(places) not in lowest for _ in row) for row in self.gates)

    def check_rows(self, heads: Sequence[int]) -> None:
        """Raises ValueError if it is not for a model whose layers that compress have so many KV heads."""
        own = [len(row) for row in self.gates]
        need(
            own == list(heads),
            f"heads must be of this model: they are {own} by layer, the model's KV heads in layers that compress "
            f"{list(heads)}" + (f"; measured: {self.measured}" if self.measured else ""),
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As JSON, whole or not at all: under a temporary name in the same folder, then renamed. Returns the path."""
        return write_text(path, json.dumps({"format": FORMAT} | asdict(self), allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> HeadProfile:
        """What save wrote; or full_attention_heads.tsv as the authors of DuoAttention publish it (a line of numbers for
        each layer), or its folder, with sink_size and recent_size from the config.json beside it, if it is there.

        path: or its name on the Hub, owner/name/file.json, of owner/name heads.json.
        Raises ValueError for anything else, FileNotFoundError for no file, ConnectionError where the Hub cannot be
        reached.
        """
        path = file_of("head profile", os.fspath(path), "heads.json")
        path = path / "full_attention_heads.tsv" if path.is_dir() else path
        if path.suffix == ".tsv":
            return _published(path)
        return HeadProfile(**read_fields(path, "head profile", FORMAT, HeadProfile))


def _published(path: Path) -> HeadProfile:
    if not path.is_file():
        raise FileNotFoundError(f"head profile must be a file, got {path}")
    sizes = {"sinks": SINKS, "recent": RECENT}
    config = path.with_name("config.json")
    try:
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        gates = tuple(tuple(map(float, row)) for row in rows)
        if config.is_file():
            said = json.loads(config.read_text(encoding="utf-8"))
            sizes = {"sinks": said["sink_size"], "recent": said["recent_size"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} must be a line of numbers for each layer, beside a config.json with sink_size "
                         f"and recent_size: {error}") from None  # fmt: skip
    return HeadProfile(gates, **sizes, measured=path.parent.name)
