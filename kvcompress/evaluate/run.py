"""Every cache on every task: rows."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..caches.spec import DENSE, CacheSpec
from .equal_bytes import EqualBytes, dense_bytes
from .measure import Mean, Measure, Outcome
from .reading import Reader

PEER = "kvpress "  # what names of its presses begin with


@dataclass(frozen=True)
class Row:
    """One cache on one task. cache: as it was given; sized: with the size that equal bytes gave it. score: mean of the
    samples, score_se: its standard error, None for a single one. nbytes: that the cache held, mean; dense_nbytes: what
    transformers' cache holds of the first prompt, None for a converted model. first_token_seconds, token_seconds:
    medians. said: of each sample its answers. frees_memory: False for a peer that hides what it drops; nbytes is then
    what a cache without that would hold."""

    task: str
    length: int
    cache: str
    sized: str
    score: float
    score_se: float | None
    unit: str
    higher_is_better: bool
    samples: tuple[float, ...]
    nbytes: float
    dense_nbytes: int | None
    first_token_seconds: float
    token_seconds: float | None
    said: tuple[tuple[dict[str, Any], ...], ...]
    frees_memory: bool = True

    @property
    def share(self) -> float | None:
        return None if self.dense_nbytes is None else self.nbytes / self.dense_nbytes


def evaluate(
    reader: Reader, specs: Sequence[CacheSpec], measures: Sequence[Measure], equal: EqualBytes | None = None,
    told: Callable[[str], object] = lambda text: None, *, most: int | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Rows of each measure, one for each cache, as they are there. reader: the model; its spec is not looked at.

    equal: what each cache may hold. told: what comes next, of each sample, for who waits. most: samples of a measure,
    None = all.
    Raises ValueError for a cache that the model or the bytes do not allow, and, before anything is measured, for one
    that a measure does not take.
    """
    equal = equal or EqualBytes()
    for measure, spec in itertools.product(measures, specs):
        measure.check(replace(reader, spec=spec))
    for measure in measures:
        dense, samples = dense_bytes(reader, measure), range(measure.count)[:most]
        for spec in specs:
            name, outcomes = f"{measure.name}, {measure.length:,} tokens: {spec}", []
            told(name)
            given = replace(reader, spec=spec)
            sized = spec if spec.kind == DENSE else equal.sized(given, measure, dense)
            with_size = replace(reader, spec=sized)
            for i in samples:
                if i > 0:
                    told(f"{name}, {i + 1} of {len(samples)}")
                outcomes.append(measure.run(with_size, i))
            yield row_of(measure, str(spec), str(sized), outcomes, dense)


def row_of(
    measure: Measure, cache: str, sized: str, outcomes: Sequence[Outcome], dense: int | None, frees_memory: bool = True
) -> Row:
    mean = Mean(tuple(outcome.score for outcome in outcomes))
    tokens = [outcome.token_seconds for outcome in outcomes if outcome.token_seconds is not None]
    return Row(
        measure.name, measure.length, cache, sized, mean.value, mean.error, measure.unit,
        measure.higher_is_better, mean.samples, sum(outcome.nbytes for outcome in outcomes) / len(outcomes), dense,
        statistics.median(outcome.first_seconds for outcome in outcomes),
        statistics.median(tokens) if tokens else None, tuple(outcome.said for outcome in outcomes),
        frees_memory,
    )  # fmt: skip
