"""Where training texts come from: data sets by name, folders and files, each with its columns, splits and weight."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support.extras import need_packages

KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_LOOKED_AT = 1000  # records of a stream among which one must hold text


@dataclass(frozen=True)
class DataSource:
    """Documents of one data set, as they are written on a command line: DataSource.parse(text).

    name: a file (.txt: one document; .jsonl, .json, .csv, .parquet: a document per record), a pattern of such files, a
    folder of them, or a data set on the Hub. config, split, column: of the data set; a split may be a slice,
    train[:1%], where nothing is streamed. weight: share of training rows, and so of tokens, relative to the other
    sources' weights; None = as large as it is. validation: a split of the same data set to measure on.

        HuggingFaceFW/fineweb-edu,config=sample-10BT,weight=0.8
        books.jsonl,column=body,weight=0.2

    Raises ValueError for an unknown key, and a weight that is not positive.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    weight: float | None = None
    validation: str | None = None

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be positive, got {self.weight} for {self.name}")

    @staticmethod
    def parse(text: str) -> DataSource:
        """Of "name,key=value,..."."""
        name, *items = (item.strip() for item in text.split(","))
        known = [field.name for field in dataclasses.fields(DataSource)][1:]
        given: dict[str, Any] = {}
        for item in items:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals or not value or key not in known or key in given:
                keys = ", ".join(f"{key}=..." for key in known)
                raise ValueError(
                    f"data must be written as name,key=value,... with {keys}, once each; got {item!r} in {text!r}"
                )
            given[key] = value
        if not name:
            raise ValueError(f"data must begin with the name of a file, a folder or a data set, got {text!r}")
        if "weight" in given:
            try:
                given["weight"] = float(given["weight"])
            except ValueError:
                raise ValueError(f"weight must be a number, got {given['weight']!r} in {text!r}") from None
        return DataSource(name, **given)

    def __str__(self) -> str:
        """As parse takes it."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name) != field.default
        }
        return ",".join([self.name, *(f"{key}={value}" for key, value in given.items())])

    @property
    def shown(self) -> str:
        """In messages."""
        path = Path(self.name)
        return path.name if path.suffix in KINDS or path.expanduser().is_dir() else self.name

    def load(self, *, streaming: bool = False, split: str | None = None) -> Any:
        """A Dataset or IterableDataset with the documents' texts in a column "text" and nothing else. split: another
        one than the source's.

        streaming: read as it goes; nothing is downloaded or converted before.
        Raises FileNotFoundError for what is meant as a file or folder and is none, ValueError for what cannot be read,
        a split or a column that is not there, and a column of something else than text; all name the source.
        """
        datasets, split = load_datasets(), split or self.split
        kind, options = self._files()
        what = f"text must be readable as {kind}" if options else "data must be the name, folder or file of a data set"
        try:
            found = datasets.load_dataset(kind, name=self.config, split=split, streaming=streaming, **options)
            columns, first = self._look(found)
        except Exception as error:  # of pyarrow, the Hub, a builder: all kinds
            reason = next((x for x in str(error.__cause__ or error).splitlines() if x.strip()), type(error).__name__)
            raise ValueError(f"{what}, got {self.shown} (split {split!r}): {reason}") from None
        if columns and self.column not in columns:
            raise ValueError(f"column must be one of {', '.join(columns)}, which {self.shown} has, got {self.column!r}")
        if first is not None and not isinstance(first, str):
            raise ValueError(f"column {self.column!r} of {self.shown} must hold text, got {type(first).__name__}")
        if not first and streaming:
            raise ValueError(f"data must hold text, got none in the first {_LOOKED_AT:,} records of {self.shown}")
        if columns != ["text"]:
            found = found.select_columns([self.column])
            found = found if self.column == "text" else found.rename_column(self.column, "text")
        return found

    def _files(self) -> tuple[str, dict[str, Any]]:
        """What load_dataset is given: a data set or folder; or a kind of file, and files."""
        path = Path(self.name).expanduser()
        if path.is_dir():
            return str(path), {}
        is_pattern = any(mark in self.name for mark in "*?[")
        if not path.is_file() and not is_pattern:
            if path.suffix in KINDS or path.is_absolute() or self.name.startswith((".", "~")) or len(path.parts) > 2:
                raise FileNotFoundError(f"text must be a file, a folder or the name of a data set, got {self.name}")
            return self.name, {}
        if is_pattern and not glob.glob(str(path), recursive=True):
            raise FileNotFoundError(f"text must be a pattern of files that are there, got {self.name}")
        if path.suffix not in KINDS:
            raise ValueError(f"text must end in {', '.join(KINDS)}, got {path.name!r}")
        kind = KINDS[path.suffix]
        return kind, {"data_files": [str(path)]} | ({"sample_by": "document"} if kind == "text" else {})

    def _look(self, found: Any) -> tuple[list[str], Any]:
        """The columns, and the first value of ours that is not empty."""
        columns: list[str] = found.column_names or []
        first = None
        for record in itertools.islice(found, _LOOKED_AT):
            columns = columns or list(record)
            first = record.get(self.column)
            if first or self.column not in record:
                break
        return columns, first


def load_datasets() -> Any:
    need_packages("training text", "datasets")
    import datasets

    return datasets
