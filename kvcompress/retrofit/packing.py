"""Texts as rows of equal length: tokenised once, packed with their documents' borders, mixed by weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .sources import DataSource, load_datasets

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

LENGTHS = "documents"  # of a row: tokens of each of its documents
PACKED, STREAMED = 10_000, 1_000  # documents that are packed together; what is left of their last row is dropped


class TooLittle(ValueError):
    """Of texts that make no row. held: their tokens."""

    def __init__(self, length: int, held: int, names: str) -> None:
        super().__init__(f"text must hold at least the {length} tokens of a row (length), got {held} in {names}")
        self.held = held


@dataclass(frozen=True)
class Validation:
    """Held-out documents as rows. tokens, nbytes: of their texts, ends left out: bits per byte are those of a token
    times tokens / nbytes. Source: The Pile (Gao et al. 2020), section 3.1."""

    rows: Dataset
    tokens: int
    nbytes: int


def tokenised(texts: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A data set of texts as one of input_ids, an end token after each; empty texts become nothing.

    What is not streamed goes through the cache of `datasets`: the same texts and tokenizer are read from there.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokens(batch: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
        texts = [text for text in batch["text"] if text]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return {"input_ids": [[*row, *end] for row in ids]}

    return texts.map(tokens, batched=True, remove_columns=["text"], features=_numbers("input_ids"))


def packed(documents: Any, length: int, *, borders: bool = True) -> Any:
    """Rows of `length` tokens, documents one after another: input_ids, and with borders `documents`, the tokens of each
    document in a row. One that does not fit goes on in the next row, as a document of its own."""

    def pack(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        flat = list(itertools.chain.from_iterable(batch["input_ids"]))
        whole = len(flat) // length * length
        rows = {"input_ids": [flat[i : i + length] for i in range(0, whole, length)]}
        if borders:
            ends = np.cumsum([len(row) for row in batch["input_ids"]])
            cuts = np.union1d(ends[ends < whole], np.arange(0, whole + 1, length))
            sizes, last = np.diff(cuts), np.flatnonzero(cuts[1:] % length == 0)
            rows[LENGTHS] = [part.tolist() for part in np.split(sizes, last[:-1] + 1)] if whole else []
        return rows

    is_stream = isinstance(documents, load_datasets().IterableDataset)
    return documents.map(
        pack, batched=True, batch_size=STREAMED if is_stream else PACKED, remove_columns=["input_ids"],
        features=_numbers("input_ids", *([LENGTHS] if borders else [])),
    )  # fmt: skip


def _numbers(*columns: str) -> Any:
    datasets = load_datasets()
    return datasets.Features({name: datasets.List(datasets.Value("int32")) for name in columns})


def need_validation(validation: float, *, counted: bool) -> None:
    """ValueError for what is neither a number of documents nor, unless they are counted one by one, a share of them."""
    if not validation >= 0 or (validation % 1 != 0 and (validation > 1 or counted)):
        what = "a number of documents" if counted else "a number of documents, or a share of them below 1"
        raise ValueError(f"validation must be {what}, got {validation}")


@dataclass(frozen=True)
class Packing:
    """How sources become rows. length: tokens of a row. borders: rows know where their documents begin, so that none
    sees another; False = they are one text. streaming: sources are read as they go, in an order that `buffer` documents
    at a time are drawn from, again from their beginning when they end. validation: documents that are held out of each
    source without a split of its own for it; below 1 a share of them, where nothing is streamed; 0 = none. seed: of all
    that is drawn."""

    length: int
    borders: bool = True
    streaming: bool = False
    buffer: int = 1000
    validation: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        need_validation(self.validation, counted=self.streaming)

    def rows(self, sources: Sequence[DataSource], tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Validation | None]:
        """Training rows, and what is held out (None: nothing). With weights each source has its share of the rows, and
        begins again until all were read once; without, sources are as large as they are.

        Raises ValueError for weights of some sources alone, none of several streams, texts that make no row, and
        sources that cannot be held out from; and as DataSource.load does.
        """
        datasets, weights = load_datasets(), [x.weight for x in sources if x.weight is not None]
        if weights and len(weights) < len(sources):
            without = next(source for source in sources if source.weight is None)
            raise ValueError(f"weight must be given for all sources or for none, got none for {without.shown}")
        if self.streaming and len(sources) > 1 and not weights:
            raise ValueError("weight must be given for each of several sources that are streamed: none knows its size")
        parts, held = zip(*(self._divided(source) for source in sources), strict=True)
        documents = [self._documents(part, tokenizer) for part in parts]
        names = ", ".join(source.shown for source in sources)
        if not weights:
            rows = self._packed(datasets.concatenate_datasets(documents), names)
        else:
            every = [self._packed(found, source.shown) for found, source in zip(documents, sources, strict=True)]
            shares = [weight / sum(weights) for weight in weights]
            rows = datasets.interleave_datasets(
                every, probabilities=shares, seed=self.seed, stopping_strategy="all_exhausted"
            )
        return rows, self._validation([x for x in held if x is not None], tokenizer, names)

    def _documents(self, texts: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
        if self.streaming and self.buffer > 1:
            texts = texts.shuffle(seed=self.seed, buffer_size=self.buffer)
        return tokenised(texts, tokenizer)

    def _packed(self, documents: Any, names: str) -> Any:
        rows = packed(documents, self.length, borders=self.borders)
        if next(iter(rows), None) is None:
            held = sum(len(row["input_ids"]) for row in documents)
            raise TooLittle(self.length, held, names)
        return rows.repeat(None) if self.streaming else rows  # a run is one epoch, which can be resumed anywhere

    # ---- validation ----

    def _divided(self, source: DataSource) -> tuple[Any, Any]:
        """Texts to train on, and to measure on (None: none)."""
        texts = source.load(streaming=self.streaming)
        if source.validation is not None:
            return texts, source.load(split=source.validation)
        if not self.validation:
            return texts, None
        if self.streaming:
            first: set[str] = set()
            for record in texts:
                first |= {record["text"]} if record["text"] else set()
                if len(first) == int(self.validation):
                    break
            # skip would leave out others where ranks divide the files among them
            rest = texts.filter(lambda text: text not in first, input_columns="text")
            return rest, load_datasets().Dataset.from_dict({"text": sorted(first)})
        count = int(self.validation if self.validation >= 1 else max(1, self.validation * len(texts)))
        if count >= len(texts):
            raise ValueError(
                f"validation must leave documents to train on, got {count} of {len(texts)} in {source.shown}"
            )
        divided = texts.train_test_split(test_size=count, seed=self.seed)
        return divided["train"], divided["test"]

    def _validation(self, held: list[Any], tokenizer: PreTrainedTokenizerBase, names: str) -> Validation | None:
        if not held:
            return None
        texts = load_datasets().concatenate_datasets(held)
        documents = tokenised(texts, tokenizer)
        rows = packed(documents, self.length, borders=self.borders)
        tokens = sum(len(row) for row in documents["input_ids"])
        if len(rows) == 0:
            raise ValueError(
                f"validation must hold at least the {self.length} tokens of a row (length), got {tokens} in {names}"
            )
        ends = 0 if tokenizer.eos_token_id is None else len(documents)
        return Validation(rows, tokens - ends, sum(len(text.encode()) for text in texts["text"] if text))
