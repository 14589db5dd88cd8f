"""What witness.py measures, cell by cell: a file that a run which was cut goes on from, and rows made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcompress.caches.spec import DENSE
from kvcompress.evaluate.measure import Mean, Outcome
from kvcompress.support.checks import need
from kvcompress.support.files import write_text

KINDS = {
    "number": "numbers",
    "sentence": "sentence",
    "turn": "turns",
    "greedy": "greedy",
}  # of answers: their field in a row
FIELDS = ("bits", *KINDS.values())
Key = tuple[str, int, int, str, float | None]


@dataclass(frozen=True)
class Cell:
    """One cache on one text. question: where it stands. text: its number. share: of the tokens that stay; None = the
    cache has no size to set. bits: per token of how the text goes on, None where the question ends the prompt. reason:
    why the cache refused, with nothing measured then."""

    question: str
    length: int
    text: int
    cache: str
    share: float | None
    book: str
    nbytes: int = 0
    bits: float | None = None
    said: tuple[dict[str, Any], ...] = ()
    reason: str | None = None

    @property
    def key(self) -> Key:
        return self.question, self.length, self.text, self.cache, self.share

    @staticmethod
    def of(key: Key, book: str, found: Outcome) -> Cell:
        return Cell(*key, book, found.nbytes, found.score if key[0] == "later" else None, found.said)

    def score(self, field: str) -> float | None:
        """The share of the answers of a kind that are right, or bits; None = this was not measured."""
        if field == "bits":
            return self.bits
        scores = [answer["score"] for answer in self.said if KINDS[answer.get("kind", "number")] == field]
        return sum(scores) / len(scores) if scores else None


class Cells:
    """Cells in a file of JSON lines, the first of which says what they are of. path: None = they are held alone.

    Raises ValueError for a file whose cells are of something else, with what differs.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.found: dict[Key, Cell] = {}
        self._path = path
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a run that was cut may leave half a line
        if not whole:
            write_text(path, json.dumps(about) + "\n")
            return
        before = json.loads(whole[0])
        differing = [name for name in {**before, **about} if before.get(name) != about.get(name)]
        need(not differing, f"json must be a file whose cells, in {path.name}, are of the same {', '.join(differing)}: "
             "give another, or remove that")  # fmt: skip
        for line in whole[1:]:
            saved = json.loads(line)
            self.found |= {(cell := Cell(**saved | {"said": tuple(saved["said"])})).key: cell}
        if len(whole) < len(lines):
            write_text(path, "".join(whole))

    def add(self, cell: Cell) -> None:
        self.found[cell.key] = cell
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cell)) + "\n")


# ---- rows ----


def rows_of(cells: Iterable[Cell], names: dict[str, str], split: str) -> list[dict[str, Any]]:
    """A row for each cache at each share, length and place of the question; what refused has a reason instead. names:
    of the caches, in the order of rows. Differences from the dense cache are those of the texts that both have read."""
    found: dict[tuple[str, int, str, float | None], dict[int, Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.text):
        found.setdefault((cell.question, cell.length, cell.cache, cell.share), {})[cell.text] = cell
    rows = []
    for (question, length, cache, share), own in sorted(
        found.items(), key=lambda x: (x[0][0] == "end", x[0][1], -(x[0][3] or 1.0), list(names).index(x[0][2]))
    ):
        name = f"witness/{split}/{question}/T{length}/{names[cache]}" + ("" if share is None else f"/keep{share:g}")
        row: dict[str, Any] = {"name": name, "method": names[cache], "cache": cache, "question": question,
                               "length": length, "share": share}  # fmt: skip
        reasons = [cell.reason for cell in own.values() if cell.reason is not None]
        if reasons:
            rows.append(row | {"reason": reasons[0]})
            continue
        dense = found[question, length, DENSE, None]
        shared = [number for number in own if number in dense]
        shares = [own[number].nbytes / dense[number].nbytes for number in shared]
        row |= {"texts": list(own), "nbytes_share": Mean(tuple(shares)).value if shares else None}
        for field in FIELDS:
            scores = {number: cell.score(field) for number, cell in own.items()}
            if all(x is not None for x in scores.values()):
                row |= _mean(field, list(scores.values())) | {f"{field}_samples": list(scores.values())}
        rows.append(row)
    dense_rows = {(row["question"], row["length"]): row for row in rows if row["cache"] == DENSE}
    return [row | over(row, dense_rows[row["question"], row["length"]], "over_dense") for row in rows]


def _mean(field: str, samples: Sequence[Any]) -> dict[str, Any]:
    mean = Mean(tuple(samples))
    return {field: mean.value, f"{field}_se": mean.error}


def over(row: dict[str, Any], other: dict[str, Any], called: str) -> dict[str, Any]:
    """By how much a row's scores are over another's on the texts of both, with the standard error of the difference,
    which is smaller than that of either: <field>_<called>, and with _se."""
    found: dict[str, Any] = {}
    for field in FIELDS:
        if f"{field}_samples" in row and f"{field}_samples" in other:
            ours, theirs = (dict(zip(x["texts"], x[f"{field}_samples"], strict=True)) for x in (row, other))
            both = [ours[number] - theirs[number] for number in ours if number in theirs]
            found |= _mean(f"{field}_{called}", both) if both else {}
    return found
