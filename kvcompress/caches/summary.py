"""What a cache tells of itself: how much it has seen, holds and saves; and which of its names are for users."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from ..hf.facts import Facts
from ..support.units import size

# of every cache, whatever transformers and the seam call besides
ANSWERS = (
    "batch_size", "compression_ratio", "compression_ratios", "crop", "dense_nbytes", "fork", "get_seq_length",
    "is_croppable", "kept_positions", "nbytes", "reserved_nbytes", "reset", "save", "seen_lengths", "select_sequences",
    "stored_lengths", "summary", "trim",
)  # fmt: skip


class Summary:
    """Of a cache. answers: names for users that its class adds."""

    answers: ClassVar[tuple[str, ...]] = ()
    _incomplete: bool

    @property
    @abstractmethod
    def compressing(self) -> list[Any]: ...

    def _begin_count(self) -> None:
        self._lengths: list[int] = []  # tokens that each sequence has had
        self._token_nbytes: dict[int, tuple[int, int | None]] = {}  # by layer: a token's bytes, and who sees so many

    @property
    def _batch(self) -> int:
        return len(self._lengths)

    def _count(self, tokens: Iterable[int]) -> None:
        tokens = list(tokens)
        self._lengths = [a + b for a, b in zip(self._lengths or [0] * len(tokens), tokens, strict=True)]

    def _measure(self, facts: Facts, itemsize: int) -> None:
        self._token_nbytes = {
            index: (x.kv_heads * (x.head_dim + x.value_dim) * itemsize, x.window or x.chunk)
            for index, x in facts.items()
            if x.reads is None
        }

    def _tokens(self) -> int:
        if not self._lengths:
            raise ValueError("a compression ratio needs a cache that has seen tokens, got an empty one")
        return sum(self._lengths)

    def _entries(self) -> list[list[list[float]]]:
        """Tokens held in layers that compress, as stored_lengths has them; halves where keys and values differ."""
        return [layer.stored_lengths() for layer in self.compressing]

    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def reserved_nbytes(self) -> int: ...

    # ---- what users ask ----

    def seen_lengths(self) -> list[int]:
        """Tokens that each sequence has had: [B], padding and guides not counted; [] before the first one."""
        return list(self._lengths)

    def compression_ratio(self) -> float:
        """Tokens seen for each one that is held, over all layers that compress, their KV heads and sequences: 1 where
        nothing is gone, 4 where a quarter is left. What is held are entries of DMC, and half a token where only its
        value is (PoD). dense_nbytes() / nbytes() says it in bytes, pages and tables included.

        Raises ValueError for an empty cache.
        """
        tokens = self._tokens()
        held = [count for layer in self._entries() for row in layer for count in row]
        rows = len(held) // len(self._lengths)
        if not held:
            return 1.0
        return tokens * rows / sum(held) if sum(held) else math.inf

    def compression_ratios(self) -> list[list[float]]:
        """The same of each layer that compresses and KV head: [L][Hkv], all sequences together.

        Raises ValueError for an empty cache.
        """
        tokens = self._tokens()
        entries = [[sum(held) for held in zip(*layer, strict=True)] for layer in self._entries()]
        return [[tokens / held if held else math.inf for held in layer] for layer in entries]

    def dense_nbytes(self) -> int:
        """Bytes of keys and values of all tokens seen, as a dense cache holds them: layers that see a window or a chunk
        hold no more than that. 0 before the first token. Recurrent layers' states are not counted."""
        return sum(
            nbytes * (n if most is None else min(n, most))
            for nbytes, most in self._token_nbytes.values()
            for n in self._lengths
        )

    def summary(self) -> str:
        """What it has seen and holds, in a few lines to print."""
        if not self._lengths:
            return repr(self)
        ours, dense = self.nbytes(), self.dense_nbytes()
        lines = [
            f"{type(self).__name__}: {_count(sum(self._lengths), 'token')} seen"
            + (f" of {len(self._lengths)} sequences" if len(self._lengths) > 1 else ""),
            f"  in use      {size(ours)}, {dense / ours:.1f} times less than dense ({size(dense)})"
            if ours <= dense
            else f"  in use      {size(ours)}, more than dense ({size(dense)})",
            f"  reserved    {size(self.reserved_nbytes())} with room for coming tokens",
        ]
        if entries := [held for layer in self._entries() for row in layer for held in row]:
            ratios = [_mean(x) for x in self.compression_ratios()]
            low, high = (f"{pick(ratios):.1f}" for pick in (min, max))
            least, most = (self.compressing[ratios.index(pick(ratios))].index for pick in (min, max))
            by_layer = "" if low == high else f"; {low} in layer {least} to {high} in layer {most}"
            lines += [
                f"  held        {sum(entries) / len(entries):,.0f} tokens per KV head on average, "
                f"{min(entries):,.0f} to {max(entries):,.0f}",
                f"  ratio       {self.compression_ratio():.1f} tokens seen for one held{by_layer}",
            ]
        if self._incomplete:
            lines.append("  incomplete: a prompt is being read, or stopped before its end; reset() then")
        return "\n".join(lines)

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._incomplete:
            return f"{name}(incomplete)"
        if not self._lengths:
            return f"{name}(empty)"
        several = f" of {len(self._lengths)} sequences" if len(self._lengths) > 1 else ""
        ratio = f", {self.compression_ratio():.1f} for one held" if self.compressing else ""
        return f"{name}({_count(sum(self._lengths), 'token')}{several} seen{ratio}, {size(self.nbytes())})"

    def __dir__(self) -> list[str]:
        """What users call and the settings it was made with; everything else is there, and not listed."""
        settings = (name for name in inspect.signature(type(self)).parameters if hasattr(self, name))
        return sorted({*ANSWERS, *self.answers, *settings})


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _mean(ratios: list[float]) -> float:
    """Of rows that have seen as much, together."""
    left = sum(1 / ratio for ratio in ratios)
    return len(ratios) / left if left else math.inf
