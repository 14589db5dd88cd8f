"""How alike the layers of a model attend, and how far near tokens suffice: what PoD rests on, measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..hf.facts import Facts
from ..hf.reading import plain_decoder, read, token_rows, tokens_of
from ..ops.softmax import Softmax
from ..retrofit.passes import TrainingPass
from ..support.checks import need, need_choice, need_integer
from ..support.progress import Progress, showing
from .kinds import kinds_of
from .lead import Kinds

REDUCTIONS = ("mean", "min")  # over the query heads of a KV head


@dataclass(frozen=True)
class Sums:
    """Of values x [...] that samples have with weights n: sums of x, x*x and x*n; what is needed for means and their
    errors, and adds up over samples."""

    total: Tensor
    squares: Tensor
    weighted: Tensor

    @classmethod
    def of(cls, x: Tensor, n: int) -> Sums:
        return cls(x, x * x, x * n)

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.total + other.total, self.squares + other.squares, self.weighted + other.weighted)


@dataclass(frozen=True)
class LayerSimilarity:
    """What samples say of how alike layers attend: sums of the divergence of their attention rows, in bits.

    heads: [Hq, L, L]; groups: [Hkv, L, L], of the mean over the G query heads of a KV head. rows: queries that were
    compared, over all samples; rows_squared: the sum of the squares of each sample's. kinds: of the layers, see
    kinds_of; None = all alike. Adding two joins their samples.
    """

    heads: Sums
    groups: Sums
    samples: int
    rows: int
    rows_squared: int
    kinds: Kinds | None = None

    @classmethod
    def of(cls, divergence: Tensor, rows: int, kv_heads: int, kinds: Kinds | None = None) -> LayerSimilarity:
        """One sample. divergence: float64 [Hq, L, L], the sum over its rows (ops.layer_similarity)."""
        groups = divergence.unflatten(0, (kv_heads, -1)).mean(1)
        return cls(Sums.of(divergence, rows), Sums.of(groups, rows), 1, rows, rows * rows, kinds)

    def __add__(self, other: LayerSimilarity) -> LayerSimilarity:
        ours, theirs = (tuple(x.heads.total.shape) + tuple(x.groups.total.shape) for x in (self, other))
        need(ours == theirs, f"both must be of one model, got heads, layers {ours} and {theirs}")
        return LayerSimilarity(
            self.heads + other.heads, self.groups + other.groups, self.samples + other.samples, self.rows + other.rows,
            self.rows_squared + other.rows_squared, self.kinds,
        )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        return self.groups.total.shape[0]

    def per_query_head(self) -> Tensor:
        """float64 [Hq, L, L]: 1 - mean divergence, 0..1, symmetric, 1 on the diagonal. Every row weighs alike."""
        return self._similarity(self.heads)

    def similarity(self, reduce: str = "mean") -> Tensor:
        """float64 [Hkv, L, L]: of the G query heads of a KV head the mean, or "min", the least of them."""
        need_choice("reduce", reduce, REDUCTIONS)
        if reduce == "mean":
            return self._similarity(self.groups)
        return self.per_query_head().unflatten(0, (self.kv_heads, -1)).amin(1)

    def standard_error(self, reduce: str = "mean") -> Tensor:
        """float64 [Hkv, L, L]: of each entry of similarity(reduce), from the scatter of the samples; NaN for one."""
        need_choice("reduce", reduce, REDUCTIONS)
        if reduce == "mean":
            return self._error(self.groups)
        shape = (self.kv_heads, -1)
        least = self.per_query_head().unflatten(0, shape).argmin(1, keepdim=True)
        return self._error(self.heads).unflatten(0, shape).gather(1, least)[:, 0]

    def _similarity(self, sums: Sums) -> Tensor:
        need(self.rows > 0, "samples must have at least one row that counts, got none: all are within sinks and recent")
        return (1 - sums.total / self.rows).clamp(0, 1)

    def _error(self, sums: Sums) -> Tensor:
        """Of a ratio of sums over independent samples."""
        if self.samples < 2 or self.rows == 0:
            return torch.full_like(sums.total, float("nan"))
        mean = sums.total / self.rows
        scatter = sums.squares - 2 * mean * sums.weighted + mean * mean * self.rows_squared
        return (scatter.clamp(min=0) * self.samples / (self.samples - 1)).sqrt() / self.rows


class _NearPass(TrainingPass):
    """Attention of every query to the first `sinks` and the last `recent` tokens, recent None: to all, in layers that
    see all tokens; in others as the model does."""

    def __init__(self, facts: Facts, sinks: int = 0, recent: int | None = None) -> None:
        super().__init__(facts)
        self.sinks, self.recent = sinks, recent

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if self.facts[layer].is_local:
            return self.attend_locally(layer, queries, keys, values, softmax)
        queries, keys = self.queries(layer, queries), self.keys(layer, keys)
        self.record(layer, queries, keys, softmax)
        window, sinks = (None, 0) if self.recent is None else (self.recent, self.sinks)
        return ops.attention(queries, keys, values, window=window, sinks=sinks, **softmax.options)[0]

    def record(self, layer: int, queries: Tensor, keys: Tensor, softmax: Softmax) -> None:
        pass


class _RecordingPass(_NearPass):
    """Plain attention that keeps, of each layer, all rotated keys and the last queries. kinds: of layers that are
    compared with each other, whose keys are kept in one tensor."""

    def __init__(self, facts: Facts, kinds: Kinds, queries: int) -> None:
        super().__init__(facts)
        self.kinds, self.last = kinds, queries
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # by kind: queries [n, Hq, q, D], keys [n, Hkv, T, D]
        self.softmax: dict[int, Softmax] = {}

    def layers(self, kind: int) -> list[int]:
        return [layer for layer, own in enumerate(self.kinds) if own == kind]

    def record(self, layer: int, queries: Tensor, keys: Tensor, softmax: Softmax) -> None:
        kind, queries, keys = self.kinds[layer], queries[0, :, -self.last :], keys[0]
        assert kind is not None
        if kind not in self.held:
            n = len(self.layers(kind))
            self.held[kind] = queries.new_empty(n, *queries.shape), keys.new_empty(n, *keys.shape)
            self.softmax[kind] = softmax.rest
        scale = self.softmax[kind].scale
        need(softmax.scale == scale, f"layers must scale their logits alike, got {scale} and {softmax.scale}")
        place = self.layers(kind).index(layer)
        self.held[kind][0][place], self.held[kind][1][place] = queries, keys

    def divergence(self, **masked: int) -> tuple[Tensor, int]:
        """float64 [Hq, L, L], summed over rows, and how many those are; 1 for layers that cannot be compared."""
        found, rows = None, 0
        for kind, (queries, keys) in self.held.items():
            sums, rows = ops.layer_similarity(queries, keys, **self.softmax[kind].options, **masked)
            if found is None:
                L = len(self.kinds)
                found = sums.new_full((sums.shape[0], L, L), rows).cpu() * (
                    1 - torch.eye(L, dtype=sums.dtype, device="cpu")
                )
            own = torch.tensor(self.layers(kind), device="cpu")
            found[:, own[:, None], own] = sums.cpu()
        assert found is not None
        return found, rows


def measure_similarity(
    model: nn.Module,
    samples: Iterable[Tensor | Sequence[int]],
    *,
    queries: int = 16,
    distant_only: bool = False,
    sinks: int = 16,
    recent: int = 4080,
    progress: Progress | bool = False,
) -> LayerSimilarity:
    """How alike the layers of a model attend, from the last queries of each sample.

    model: attached or not, not converted; it is left as it was. Layers are compared that see all tokens and whose keys
    are of one size and rotate alike; others count as not alike at all. samples: token ids [T] or [1, T] each, of any
    lengths. queries: rows of a sample, its last ones (all of a shorter one). distant_only: compare
    the rows over distant keys alone, renormalised: neither the first `sinks` nor the last `recent` tokens, the query
    among them; rows without such keys do not count. progress: called with the tokens read, or True for a bar.
    Memory: the keys of one sample in every layer and the model's own, on the model's device; the [queries, T] rows are
    never held at once. A softcap and sink logits of the model are left out: rows are a softmax of the plain products
    over tokens alone.
    Raises ValueError for a model that PoD cannot convert or is converted, no samples, samples that are not token ids,
    and for NaN. Source: PoD, section 2.2 and figure 1d.
    """
    need_integer("queries", queries, 1)
    masked = {"sinks": sinks, "recent": recent} if distant_only else {}
    need_integer("sinks", sinks, 0)
    need_integer("recent", recent, 1)
    found: LayerSimilarity | None = None
    whole = tokens_of(samples)
    with plain_decoder(model) as (decoder, facts), showing(progress, whole, label="measuring") as show:
        kinds, tokens = kinds_of(decoder, facts), 0
        kv_heads = next(facts[kind].kv_heads for kind in kinds if kind is not None)
        for ids in token_rows(decoder, samples):
            watch = _RecordingPass(facts, kinds, queries)
            read(decoder, ids, watch)
            sums, rows = watch.divergence(**masked)
            need(bool(sums.isfinite().all()), f"the model must attend with numbers, got NaN in a sample of {len(ids)}")
            one = LayerSimilarity.of(sums, rows, kv_heads, kinds)
            found = one if found is None else found + one
            show(tokens := tokens + len(ids))
    if found is None:
        raise ValueError("samples must hold at least one, got none")
    return found


@dataclass(frozen=True)
class Agreement:
    """How often near tokens suffice for the same next token: share of equal predictions, 0..1, for each number of near
    tokens; error: standard error over the samples, NaN for one."""

    sizes: tuple[int, ...]
    share: tuple[float, ...]
    error: tuple[float, ...]
    samples: int


def agreement(
    model: nn.Module,
    samples: Iterable[Tensor | Sequence[int]],
    sizes: Sequence[int],
    *,
    sinks: int = 16,
    positions: int = 100,
    progress: Progress | bool = False,
) -> Agreement:
    """How often a model predicts the same token with near tokens alone as with all.

    samples: as for measure_similarity. sizes: numbers n of near tokens; each query of each layer sees the first
    min(sinks, n - 1) and the last others of n. positions: the last predictions of a sample that are compared.
    Raises as measure_similarity does, and ValueError for a size below 1. Source: PoD, figure 1c; sinks are ours.
    """
    need(len(sizes) > 0, "sizes must have at least one, got none")
    for j, size in enumerate(sizes):
        need_integer(f"sizes[{j}]", size, 1)
    need_integer("sinks", sinks, 0)
    need_integer("positions", positions, 1)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ValueError(f"model must predict tokens, got {type(model).__name__} without an output layer")
    shares: list[list[float]] = []
    whole = tokens_of(samples)
    with plain_decoder(model) as (decoder, facts), showing(progress, whole, label="measuring") as show:
        tokens = 0
        for ids in token_rows(decoder, samples):

            def predicted(size: int | None, ids: Tensor = ids) -> Tensor:
                first = 0 if size is None else min(sinks, size - 1)
                near = _NearPass(facts, first, None if size is None else size - first)
                return head(read(decoder, ids, near)[0, -positions:]).argmax(-1)

            full = predicted(None)
            shares.append([float((predicted(size) == full).double().mean()) for size in sizes])
            show(tokens := tokens + len(ids))
    need(len(shares) > 0, "samples must hold at least one, got none")
    all_shares = torch.tensor(shares, dtype=torch.float64, device="cpu")
    error = all_shares.std(0) / len(shares) ** 0.5 if len(shares) > 1 else torch.full_like(all_shares[0], float("nan"))
    return Agreement(tuple(sizes), tuple(all_shares.mean(0).tolist()), tuple(error.tolist()), len(shares))
