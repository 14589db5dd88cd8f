"""Where a prompt's tokens come from: a tensor, an array that may lie in a file, or an iterator without end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..support.checks import need

TokenIds = Tensor | np.ndarray | Iterable[int | Tensor | np.ndarray]

OF_TEXT = (
    "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "special_tokens_mask", "offset_mapping",
    "overflow_to_sample_mapping", "length",
)  # fmt: skip


def from_tokenizer(given: Any, attention_mask: Any) -> tuple[Any, Any]:
    """(input_ids, attention_mask) of what a tokenizer or a chat template returns; of all else as they are."""
    if not isinstance(given, Mapping) or "input_ids" not in given:
        return given, attention_mask
    more = [name for name in given if name not in OF_TEXT]
    need(not more, f"input_ids must be of text alone, got a {type(given).__name__} with {', '.join(more)}")
    ids, own = given["input_ids"], given.get("attention_mask")
    need(own is None or attention_mask is None, "attention_mask must be None where input_ids bring their own")
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"input_ids must be tensors, got a {type(given).__name__} of {type(ids).__name__}: the tokenizer makes "
            'them with return_tensors="pt"'
        )
    return ids, attention_mask if own is None else own


class Prompt(ABC):
    """lengths[b]: tokens of each sequence that are to be read; None = nobody knows. columns: of input_ids that they
    are, padding included; 0 where there are no input_ids."""

    lengths: list[int] | None
    columns = 0

    @abstractmethod
    def take(self, b: int, count: int) -> Tensor:
        """int64 [n], the next n = count tokens of sequence b; fewer where it ends."""

    @abstractmethod
    def peek(self, b: int) -> int | None:
        """The token after those taken, or None where there is none. It may lie beyond `lengths`."""


class Columns(Prompt):
    """Left-padded input_ids [B, T] on any device; the last held_back columns are not read, but seen by `peek`."""

    def __init__(self, input_ids: Tensor, lengths: list[int], held_back: int, columns: int) -> None:
        self.ids, self.lengths, self.columns = input_ids, lengths, columns
        self._places = [input_ids.shape[1] - held_back - length for length in lengths]
        self._end = input_ids.shape[1] - held_back

    def take(self, b: int, count: int) -> Tensor:
        begin = self._places[b]
        self._places[b] = min(begin + count, self._end)
        return self.ids[b, begin : self._places[b]].long()

    def peek(self, b: int) -> int | None:
        return int(self.ids[b, self._places[b]]) if self._places[b] < self.ids.shape[1] else None


class Array(Prompt):
    """One sequence of known length: [T] integers, a numpy.memmap for example. Nothing but a chunk is ever copied."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.lengths, self._place = tokens, [len(tokens)], 0

    def take(self, b: int, count: int) -> Tensor:
        part = self.tokens[self._place : self._place + count]
        self._place += len(part)
        return _as_tensor(part)

    def peek(self, b: int) -> int | None:
        return int(self.tokens[self._place]) if self._place < len(self.tokens) else None


class Stream(Prompt):
    """One sequence of unknown length: an iterator of tokens, or of pieces of them."""

    lengths = None

    def __init__(self, pieces: Iterable[int | Tensor | np.ndarray]) -> None:
        self._pieces: Iterator[int | Tensor | np.ndarray] = iter(pieces)
        self._held = torch.empty(0, dtype=torch.int64)
        self._ended = False

    def _fill(self, count: int) -> None:
        parts, held = [self._held], len(self._held)
        while held < count and not self._ended:
            try:
                piece = next(self._pieces)
            except StopIteration:
                self._ended = True
                break
            part = _as_tensor(piece)
            parts.append(part)
            held += len(part)
        self._held = torch.cat(parts)

    def take(self, b: int, count: int) -> Tensor:
        self._fill(count)
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def available(self, count: int) -> int:
        """How many of the next `count` tokens there are."""
        self._fill(count)
        return min(len(self._held), count)

    def peek(self, b: int) -> int | None:
        self._fill(1)
        return int(self._held[0]) if len(self._held) else None


def _as_tensor(piece: object) -> Tensor:
    """int64 [n] on the CPU."""
    if isinstance(piece, (int, np.integer)) and not isinstance(piece, bool):
        return torch.tensor([int(piece)])
    if isinstance(piece, np.ndarray) and piece.dtype.kind in "iu":
        piece = torch.from_numpy(piece.astype(np.int64))
    if not isinstance(piece, Tensor) or piece.ndim > 1 or piece.is_floating_point():
        raise TypeError(
            "input_ids as an iterator must give integers, or tensors or arrays [n] of them, got "
            + (f"{piece.dtype} of shape {tuple(piece.shape)}" if hasattr(piece, "shape") else repr(piece))  # type: ignore[attr-defined]
        )
    return piece.reshape(-1).long()


def as_stream(input_ids: object) -> Prompt | None:
    """A prompt of one sequence that is not input_ids [B, T]; None for what is no such thing."""
    if isinstance(input_ids, np.ndarray):
        if input_ids.ndim != 1 or input_ids.dtype.kind not in "iu":
            raise ValueError(
                f"input_ids as an array must be [T] integers, got {input_ids.dtype} of shape {input_ids.shape}"
            )
        return Array(input_ids)
    # a list, a str or a tensor [T] is more likely a mistake than a stream
    if isinstance(input_ids, (Tensor, Mapping, Sequence)) or not isinstance(input_ids, Iterable):
        return None
    return Stream(input_ids)
