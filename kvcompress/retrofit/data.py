"""Training data as rows of token ids: any text in windows, what the shipped model was trained on, and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..models.text import held_out_text, training_text
from ..models.train_example import Mixture
from .packing import LENGTHS, Packing, Validation
from .sources import KINDS, DataSource

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
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"text must be a file, got {path}")
    found = {KINDS[path.suffix] for path in paths if path.suffix in KINDS}
    if len(found) > 1:
        raise ValueError(f"text must be files of one kind, got {', '.join(sorted(found))}")
    sources = [DataSource(str(path), column=column) for path in paths]
    return Packing(length, borders=False).rows(sources, tokenizer)[0]


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


def example_validation(length: int, count: int) -> Validation:
    """`count` rows of text that the shipped model was never trained on, evenly spread over it.

    Raises ValueError for more than there are.
    """
    from datasets import Dataset

    text = held_out_text()
    most = len(text) // length
    if not 1 <= count <= most:
        raise ValueError(f"validation must be 1 to {most} rows of {length:,} tokens for the example model, got {count}")
    rows = [text[i * most // count * length :][:length] for i in range(count)]
    return Validation(Dataset.from_dict({"input_ids": [list(row) for row in rows]}), count * length, count * length)


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
    """A batch of rows of equal length; position_ids go from 0 in each document, where rows say what documents they
    hold; labels are the ids where there are none, but for each document's first token, which nothing foretells.

    Rows that are all cut into documents of one length become a row per document, without position_ids: plain causal
    attention, where packed ones would need a mask.
    """
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0] if name != LENGTHS}
    if LENGTHS in rows[0]:
        every = [torch.cat([torch.arange(tokens) for tokens in row[LENGTHS]]) for row in rows]
        batch["position_ids"] = torch.stack(every)
    places = batch.get("position_ids")
    if "labels" not in batch:
        labels = batch["input_ids"].clone()
        batch["labels"] = labels if places is None else labels.masked_fill(places == 0, -100)
    if places is not None:
        size = int(places.max()) + 1
        count, left = divmod(places.shape[1], size)
        if not left and torch.equal(places, torch.arange(size).repeat(count).expand_as(places)):
            batch = {name: x.reshape(-1, size) for name, x in batch.items() if name != "position_ids"}
    return batch
