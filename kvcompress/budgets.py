"""Budgets: how the tokens that a cache keeps are divided over layers and heads."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import ops
from .support.checks import MOST_INT32, need_integer
from .support.homes import elsewhere
from .support.kvpress_names import refuse_theirs
from .support.presets import preset_of
from .support.units import Keep, instead_of

__all__ = ["AdaKV", "Budget", "GlobalTopK", "PyramidKV", "Uniform"]
if not TYPE_CHECKING:
    __getattr__ = elsewhere(__name__)


@dataclass(frozen=True)
class CacheShape:
    """What a number of bytes means: layers, rows per layer (B*Hkv), bytes of a token's slot in a row, slots per page,
    and tokens that a row grows by between two compressions."""

    layers: int
    rows: int
    slot_nbytes: int
    page_size: int
    growth: int = 0


@functools.lru_cache(maxsize=256)
def _tokens_within(budget: Budget, allowed: int, length: int, shape: CacheShape) -> int:
    """Most tokens per row, mean over layers and heads, 1..length, whose pages and tables fit into so many bytes."""
    rows = shape.layers * shape.rows
    page = shape.page_size * shape.slot_nbytes + 8  # two entries of the block table, which grows by doubling

    def nbytes(mean: int) -> int:
        return 4 * rows + page * budget.all_pages(mean, length, shape)

    if nbytes(1) > allowed:
        grow = f" that may grow by every = {shape.growth} tokens" if shape.growth else ""
        raise ValueError(
            f"keep = {allowed:,} bytes is too small for {rows} rows (layers x sequences x KV heads) of pages of "
            f"{shape.page_size} tokens of {shape.slot_nbytes} bytes{grow}: it "
            f"must be at least {nbytes(1)} bytes, less with smaller pages"
        )
    low, high = 1, max(length, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if nbytes(middle) <= allowed else (low, middle - 1)
    return low


DIVIDES = "divides tokens over layers and heads; how many stay is"


class Budget(ABC):
    """How the tokens that stay are divided over layers and heads; how many they are is the cache's `keep`. Subclasses
    are frozen dataclasses that say how many each layer keeps.

    A budget of your own:

        @dataclass(frozen=True)
        class LowerHalf(Budget):
            def layer_tokens(self, mean, length, layer, layers):
                more = min(mean // 3, length - mean)
                if layer < layers // 2:
                    return mean + more
                return mean - more if layer >= layers - layers // 2 else mean

    The heads of a layer are alike, each keeps the best of its own scores; one that divides them too overrides divide.
    Raises ValueError for a size among args or fields, which budgets had before 0.1.0.
    """

    def __new__(cls, *args: Any, **fields: Any) -> Budget:
        """Says what to write in place of a size, of kvpress's names and of a pruner; all else __init__ takes, or
        refuses."""
        refuse_theirs(cls, fields, f"SnapKV(), {cls.__name__}()")
        for given in args:
            if callable(getattr(given, "scores", None)):  # a pruner's, which budgets know nothing of
                pruner = given.__name__ if isinstance(given, type) else type(given).__name__
                raise ValueError(
                    f"{cls.__name__} must be given beside the pruner, PrunedCache(config, {pruner}(), "
                    f"{cls.__name__}(), keep=0.25), say; got {cls.__name__}({pruner}())"
                )
        size = fields.get("size", next(iter(args), None))
        if (keep := instead_of(size)) is not None:
            try:
                inspect.signature(cls).bind(*args, **fields)
            except TypeError:
                raise ValueError(f"{cls.__name__} {DIVIDES} {keep}, given to the cache; got {size!r}") from None
        return super().__new__(cls)

    @abstractmethod
    def layer_tokens(self, mean: int, length: int, layer: int, layers: int) -> int:
        """Tokens per row that one layer keeps, mean over its heads, where the mean over layers is `mean`.

        length: tokens of the sequence, at least mean. layer: its number among the `layers` that compress. From 1 to
        length where mean is at least 1; the sum over layers should be layers * mean.
        """

    def divide(self, layer: int, ranks: Tensor, keep: int, allowed: int) -> tuple[Tensor, Tensor | None]:
        """Chooses from one layer of one sequence, or of several alike.

        layer: its number among those that compress. ranks: float32 [..., Hkv, T], no NaN; higher stays, +inf always,
        -inf never. keep: tokens per head, mean. allowed: places of all heads of a sequence that are not -inf, at least
        Hkv*keep where heads are equal.
        Returns (indices int32 [..., Hkv, K] rising, kept int32 [..., Hkv] on the CPU: how many of them count; None =
        all K). Waits for the device at most once.
        """
        del layer, allowed
        return ops.select_topk(ranks.flatten(0, -2), keep).view(*ranks.shape[:-1], keep), None

    def over(self, layer: int, held: Sequence[int], keep: int, slack: int) -> bool:
        """Whether the rows of one sequence in a layer, which hold so many tokens each, are `slack` tokens over it, at
        least 1. layer: its number among those that compress. keep: tokens per row, mean (tokens_of)."""
        del layer
        return sum(held) // len(held) >= keep + slack

    def check_rows(self, heads: Sequence[int]) -> None:  # noqa: B027  (most are for any model)
        """Raises ValueError for a model whose layers that compress have so many KV heads, if it is not for it."""

    def beside(self, pruner: str, window: int | None) -> Budget:
        """The same for a pruner of this name, and so many last tokens that look at the others and always stay (None: it
        has none such). Raises ValueError where the budget counts others."""
        del pruner, window
        return self

    # ---- what follows from these ----

    @property
    def divides_layers(self) -> bool:
        """Whether layers keep different numbers of tokens."""
        return type(self).layer_tokens is not Uniform.layer_tokens

    @property
    def divides_heads(self) -> bool:
        """Whether heads of a layer do."""
        return type(self).divide is not Budget.divide

    def mean_tokens(self, keep: Keep, length: int, shape: CacheShape) -> int:
        """Tokens per row, mean over layers and heads, for a sequence of `length` tokens; at most that. Of a share, the
        tokens that it is of them, rounded up: 0.1 of 10 is 1, of 11 is 2. Bytes are those of pages and tables of the
        whole cache, as layer_tokens divides them."""
        if keep.nbytes is not None:
            return min(_tokens_within(self, keep.nbytes, max(length, 1), shape), length)
        if keep.tokens is not None:
            return min(keep.tokens, length)
        assert keep.share is not None
        return -(-keep.share.numerator * length // keep.share.denominator)  # asked in every step: no Fraction is made

    def tokens_of(self, keep: Keep, length: int, layer: int, shape: CacheShape) -> int:
        """Tokens per row of one layer, mean over its heads, for a sequence of `length` tokens."""
        mean = self.mean_tokens(keep, length, shape)
        return self.checked_tokens(mean, length, layer, shape.layers) if self.divides_layers else mean

    def checked_tokens(self, mean: int, length: int, layer: int, layers: int) -> int:
        """layer_tokens; ValueError for what no layer can keep."""
        tokens = self.layer_tokens(mean, length, layer, layers)
        if mean and not (isinstance(tokens, int) and 1 <= tokens <= length):
            raise ValueError(
                f"layer_tokens of {type(self).__name__} must be an integer between 1 and length = {length}, got "
                f"{tokens!r} for layer {layer} with mean = {mean}"
            )
        return tokens

    def all_pages(self, mean: int, length: int, shape: CacheShape) -> int:
        """Most pages of all layers, before the next compression."""
        tokens = [self.checked_tokens(mean, length, j, shape.layers) for j in range(shape.layers)]
        if self.divides_heads:
            return sum(flat_pages(count, shape, shape.rows) for count in tokens)
        return sum(shape.rows * -(-(count + shape.growth) // shape.page_size) for count in tokens)


@dataclass(frozen=True)
class Uniform(Budget):
    """The same number of tokens in every layer and head."""

    def layer_tokens(self, mean: int, length: int, layer: int, layers: int) -> int:
        return min(mean, length)


_PYRAMIDS: dict[str, dict[str, Any]] = {
    "kvpress": {"beta": 20, "window": 64, "inside": True},
    "kvcache-factory": {"beta": 20, "window": 8},
}
_WINDOW = 32  # where nothing says how many last tokens always stay


@dataclass(frozen=True, kw_only=True)
class PyramidKV(Budget):
    """Lower layers keep more: a straight line from the first layer to the last, its mean is what the cache keeps.

    The line goes from 2*b - b/beta down to b/beta, b = mean - window, and every layer keeps `window` tokens besides:
    the last ones, which look at the others and always stay. window: None = the pruner's own (SnapKV, RKV), 32 where it
    has none; a number must be that. A first layer that would keep more than there is keeps all, and the last one the
    more. Rounding conserves the sum over the layers exactly (largest remainders, ties to the lower layer).
    inside: as kvpress has it. The window counts in the line, b = mean: the first layer keeps at most length - window,
    and where the last one would keep less than window, all keep the mean. The mean of a share is not rounded first,
    and layers are rounded one by one: their sum may be some tokens off.
    preset(name): "kvpress" (window 64, inside: layers keep what they keep there, at least 1) and
    "kvcache-factory", the authors' code (window 8). SnapKV.preset has the same names.
    Raises ValueError for a field out of range. Source: PyramidKV, section 3.2.
    """

    beta: int = 20
    window: int | None = None
    inside: bool = False

    @staticmethod
    def preset(name: str, **changes: Any) -> PyramidKV:
        """PyramidKV as an implementation sets it: kvpress, kvcache-factory. changes: other fields."""
        return preset_of(PyramidKV, _PYRAMIDS, name, changes, "SnapKV(), PyramidKV()")

    def __post_init__(self) -> None:
        need_integer("beta", self.beta, 1, MOST_INT32)
        if self.window is not None:
            need_integer("window", self.window, 0, MOST_INT32)
        if not isinstance(self.inside, bool):
            raise ValueError(f"inside must be True or False, got {self.inside!r}")

    def beside(self, pruner: str, window: int | None) -> PyramidKV:
        if window is None or self.window == window:
            return self
        if self.window is not None:
            raise ValueError(
                f"window of PyramidKV must be that of {pruner}, {window} (None takes it), got {self.window}"
            )
        return replace(self, window=window)

    def tokens_of(self, keep: Keep, length: int, layer: int, shape: CacheShape) -> int:
        if self.inside and keep.share is not None:
            # as kvpress: of the share that goes
            return self._inside(length * (1 - float(1 - keep.share)), length, layer, shape.layers)
        return super().tokens_of(keep, length, layer, shape)

    def layer_tokens(self, mean: int, length: int, layer: int, layers: int) -> int:
        if self.inside:
            return self._inside(mean, length, layer, layers) if mean else 0
        return _pyramid(self.beta, self._own, mean, length, layers)[layer]

    @property
    def _own(self) -> int:
        return _WINDOW if self.window is None else self.window

    def _inside(self, mean: float, length: int, layer: int, layers: int) -> int:
        """In floats, as kvpress: the same tokens, where a half is rounded too."""
        base = (self._own + mean) - self._own  # loses what it loses there
        low = base / self.beta
        high = base * 2 - low
        if high >= length - self._own:
            high = length - self._own
            low = base * 2 - high
        falls = layers > 1 and mean < length and length >= high >= low >= self._own
        return min(max(round(high - layer * ((high - low) / (layers - 1)) if falls else mean), 1), length)


@functools.lru_cache(maxsize=256)
def _pyramid(beta: int, own: int, mean: int, length: int, layers: int) -> tuple[int, ...]:
    """Tokens per row of every layer."""
    if mean >= length or layers == 1 or mean == 0:
        return (min(mean, length),) * layers
    window = min(own, mean - 1)
    base, most = mean - window, length - window
    low = max(Fraction(base, beta), Fraction(0 if window else 1))
    high = 2 * base - low
    if high > most:
        high = Fraction(most)
        low = 2 * base - high
    exact = [high - j * (high - low) / (layers - 1) for j in range(layers)]
    tokens = [int(x) for x in exact]
    by_remainder = sorted(range(layers), key=lambda j: (tokens[j] - exact[j], j))
    for j in by_remainder[: layers * base - sum(tokens)]:
        tokens[j] += 1
    return tuple(window + count for count in tokens)


@dataclass(frozen=True)
class AdaKV(Budget):
    """Heads of a layer share its tokens: the best scores of all heads stay, wherever they are.

    inner: how layers divide what stays: a budget that divides no heads (Uniform, PyramidKV, one of your own). floor:
    share of a layer's mean that every head keeps in any case, 0..1 (1 = Uniform): its best floor*tokens, rounded down
    but at least one, or what always stays in it where that is more. A layer keeps exactly Hkv times its tokens; rows
    have lengths of their own, and what a head gives up is memory that is free. At least one token per head stays, so
    none is left without; only a head that offers less than its floor keeps less, and one that offers nothing is empty.
    Raises ValueError for a field out of range. Source: Ada-KV, section 3.3 (flat top-k) and 3.4 (safeguard).
    """

    inner: Budget = Uniform()
    floor: float = field(default=0.2, kw_only=True)

    def __post_init__(self) -> None:
        check_budget("inner", self.inner)
        if self.inner.divides_heads:
            raise ValueError(
                f"inner must be a budget that divides no heads (Uniform, PyramidKV), got {type(self.inner).__name__}"
            )
        _check_floor(self.floor)

    @property
    def divides_layers(self) -> bool:
        return self.inner.divides_layers

    def beside(self, pruner: str, window: int | None) -> AdaKV:
        return replace(self, inner=self.inner.beside(pruner, window))

    def check_rows(self, heads: Sequence[int]) -> None:
        self.inner.check_rows(heads)

    def layer_tokens(self, mean: int, length: int, layer: int, layers: int) -> int:
        return self.inner.layer_tokens(mean, length, layer, layers)

    def divide(self, layer: int, ranks: Tensor, keep: int, allowed: int) -> tuple[Tensor, Tensor | None]:
        return flat_topk(ranks, keep, allowed, sure_tokens(self.floor, keep))


@dataclass(frozen=True, kw_only=True)
class GlobalTopK(Budget):
    """All rows of all layers share one budget: the best scores of a sequence stay, whatever layer and head they are in.

    floor: share of the mean that every row keeps in any case, as in AdaKV. Layers are compared as they are read: after
    some of them what all of them have so far is cut to what is kept, and the pages of what goes are free. What stays in
    the end is what one top-k over all scores would keep (ties go to the first tokens, of all rows alike), and never is
    more held than that, an eighth of it and one layer. Further calls are cut after each layer; until the last one has
    had its turn, what the layers above held before comes on top.
    Rows have lengths of their own (on the example model up to 6 times their mean), which a decoded token waits for:
    the longest row of a layer decides. Scores must mean the same in every layer: shares of attention do (Replay,
    Successor, SnapKV), cosines do (KeyDiff).
    Source: KVzip, section 3.3 (its non-uniform budget); the running form as in CAKE's cascade of layers.
    """

    floor: float = 0.1

    def __post_init__(self) -> None:
        _check_floor(self.floor)

    def layer_tokens(self, mean: int, length: int, layer: int, layers: int) -> int:
        """What an even share is; the scores say the rest."""
        return min(mean, length)

    def all_pages(self, mean: int, length: int, shape: CacheShape) -> int:
        return flat_pages(min(mean, length), shape, shape.layers * shape.rows)

    def divide(self, layer: int, ranks: Tensor, keep: int, allowed: int) -> tuple[Tensor, Tensor | None]:
        """The same with the rows of all layers in place of one layer's heads."""
        return flat_topk(ranks, keep, allowed, sure_tokens(self.floor, keep))


def flat_pages(tokens: int, shape: CacheShape, rows: int) -> int:
    """Most pages of rows of so many tokens, mean, however they divide them: all but one end with a page of one."""
    held, others = rows * (tokens + shape.growth), rows - 1
    return others + -(-(held - others) // shape.page_size)


def _check_floor(floor: float) -> None:
    number = isinstance(floor, (int, float)) and not isinstance(floor, bool)
    if not number or not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor must be between 0 and 1, got {floor!r}")


def sure_tokens(floor: float, keep: int) -> int:
    """Tokens that every row keeps of a mean of `keep`: that share of it, as it is written, at least 1."""
    return min(max(int(Fraction(repr(float(floor))) * keep), 1), keep)


def raised(ranks: Tensor, sure: int) -> Tensor:
    """ranks [..., T] with +inf for the best `sure` of each row, as far as they are not -inf."""
    rows = ranks.flatten(0, -2)
    best = ops.select_topk(rows, sure).long()
    scores = rows.gather(1, best)
    return rows.scatter(1, best, torch.where(scores > float("-inf"), float("inf"), scores)).view(ranks.shape)


def flat_topk(ranks: Tensor, keep: int, allowed: int, sure: int) -> tuple[Tensor, Tensor]:
    """The best of all rows of ranks [..., Hkv, T]: Hkv*keep of them, at most `allowed`, the best `sure` of each row in
    any case. Returns (indices int32 [..., Hkv, K] rising, kept int32 [..., Hkv] on the CPU). Waits for the device
    once."""
    *batch, heads, T = ranks.shape
    ranks = raised(ranks, sure).reshape(-1, T)
    # token by token over the heads, so that ties go to all of them alike
    layers = ranks.view(-1, heads, T).transpose(1, 2).flatten(1)
    flat = ops.select_topk(layers, min(heads * keep, allowed)).long()
    row = flat % heads + heads * torch.arange(len(layers), device=flat.device)[:, None]
    row, order = row.flatten().sort(stable=True)
    kept = torch.zeros(len(ranks), dtype=torch.long, device=row.device).scatter_add_(0, row, torch.ones_like(row))
    places = torch.arange(len(row), device=row.device) - (kept.cumsum(0) - kept)[row]
    counts = kept.to("cpu", torch.int32)
    indices = torch.zeros(len(ranks), int(counts.max()), dtype=torch.int32, device=row.device)
    indices[row, places] = (flat.flatten()[order] // heads).to(torch.int32)
    return indices.view(*batch, heads, -1), counts.view(*batch, heads)


def check_budget(name: str, given: object) -> None:
    """Raises ValueError for what is no Budget; for a size, which it was before 0.1.0, with what to write instead."""
    if isinstance(given, Budget):
        return
    if (keep := instead_of(given)) is not None:
        raise ValueError(f"{name} {DIVIDES} {keep}; got {given!r}")
    if isinstance(given, type) and issubclass(given, Budget):
        raise ValueError(f"{name} must be an instance, got the class {given.__name__}: {given.__name__}()")
    raise ValueError(f"{name} must be a Budget, such as AdaKV() or GlobalTopK(), got {given!r}")
