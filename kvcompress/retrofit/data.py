"""Training data as rows of token ids: any text in windows, or what the shipped model was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..models.text import training_text
from ..models.train_example import Mixture

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


def text_windows(
    tokenizer: PreTrainedTokenizerBase, files: Sequence[str | Path], length: int, *, column: str = "text"
) -> Dataset:
    """Texts one after another, an end token after each, cut into rows of `length` tokens; what is left over is dropped.

    files: paths of .txt (a document each), .jsonl, .json, .csv or .parquet files (a document per record, in `column`).
    Returns a datasets.Dataset with input_ids.
    Raises FileNotFoundError for a missing file, ValueError for another kind, or for texts shorter than a row.
    """
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError
    except ModuleNotFoundError as error:
        raise ImportError("texts in files need the package datasets: pip install datasets", name=error.name) from error

    kinds = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"text must be a file, got {path}")
        if path.suffix not in kinds:
            raise ValueError(f"text must end in {', '.join(kinds)}, got {path.name!r}")
    found = {kinds[path.suffix] for path in paths}
    if len(found) != 1:
        raise ValueError(f"text must be files of one kind, got {', '.join(sorted(found))}")
    kind = found.pop()
    options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
    names = ", ".join(path.name for path in paths)
    try:
        texts = load_dataset(kind, data_files=[str(path) for path in paths], split="train", **options)
    except DatasetGenerationError as error:
        raise ValueError(f"text must be readable as {kind}, got {names}: {error.__cause__ or error}") from None
    if column not in texts.column_names:
        raise ValueError(f"column must be one of {', '.join(texts.column_names)}, which {names} has, got {column!r}")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokens(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch[column], add_special_tokens=False)["input_ids"]
        return {"input_ids": [[*row, *end] for row in ids]}

    rows = texts.map(tokens, batched=True, remove_columns=texts.column_names)

    def windows(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        flat = [token for row in batch["input_ids"] for token in row]
        return {"input_ids": [flat[i : i + length] for i in range(0, len(flat) - length + 1, length)]}

    windowed = rows.map(windows, batched=True, batch_size=1000)
    if len(windowed) == 0:
        held = sum(len(row) for row in rows["input_ids"])
        raise ValueError(f"text must hold at least the {length} tokens of a row (length), got {held} in {names}")
    return windowed


def example_rows(length: int, rows_per_step: int, seed: int) -> IterableDataset:
    """What the shipped model was trained on (source text, copying, recall of facts), for as long as it is asked for.

    Rows of `length` tokens. All rows of a step are cut into the same number of documents, so that short distances stay
    known: 1 for half of the steps, else drawn evenly from 1, 2, 4 and 8, without those that do not divide length or
    would leave documents under 128 tokens. Returns a datasets.IterableDataset with input_ids, position_ids (from 0 in
    each document) and labels.
    Raises ValueError for rows shorter than 128 tokens, which hold no fact and question.
    """
    if length < 128:
        raise ValueError(f"length must be at least 128 for the example model's data, got {length}")
    from datasets import IterableDataset

    return IterableDataset.from_generator(
        _example_rows, gen_kwargs={"length": length, "rows_per_step": rows_per_step, "seed": seed}
    )


def _example_rows(length: int, rows_per_step: int, seed: int) -> Iterator[dict[str, list[int]]]:
    rng = np.random.default_rng(seed)
    mixture = Mixture(training_text(rng), rng)
    pieces = [1] + [n for n in (2, 4, 8) if length % n == 0 and length // n >= 128]
    while True:
        count = 1 if rng.random() < 0.5 else int(rng.choice(pieces))
        size = length // count
        for _ in range(rows_per_step):
            ids = mixture.batch(2, count, size)
            labels = ids.clone()
            labels[:, 0] = -100  # nothing before a document says how it begins
            yield {
                "input_ids": ids.flatten().tolist(),
                "position_ids": list(range(size)) * count,
                "labels": labels.flatten().tolist(),
            }


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of rows of equal length; labels are the ids where there are none.

    Rows that are all cut into documents of one length become a row per document, without position_ids: plain causal
    attention, where packed ones would need a mask.
    """
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    if (places := batch.get("position_ids")) is not None:
        size = int(places.max()) + 1
        count, left = divmod(places.shape[1], size)
        if not left and torch.equal(places, torch.arange(size).repeat(count).expand_as(places)):
            batch = {name: x.reshape(-1, size) for name, x in batch.items() if name != "position_ids"}
    batch.setdefault("labels", batch["input_ids"].clone())
    return batch
