"""Sizes at which caches hold the same bytes: found by reading, tables and what a pruner keeps besides included."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from ..budgets import bytes_of
from ..caches.spec import DENSE, CacheSpec
from ..checks import need
from .fitting import TooShort, largest
from .measure import Measure
from .reading import Reader

TOLERANCE = 0.01  # of the bytes: what the tables of a page and running scores come to
_UNITS = {"streaming": 8}  # tokens; of the others a page
_PAGE = 16


@dataclass
class EqualBytes:
    """What each cache may hold after reading: a share of the dense cache's bytes, or bytes; None = it is as its text
    says. Caches without a size to set (CacheSpec.size_key) are as they are.

    A cache gets the largest size, in whole pages, with which it holds no more than that after reading a task's first
    prompt, to within TOLERANCE.
    """

    share: Fraction | None = None
    nbytes: int | None = None
    _found: dict[str, float] = field(default_factory=dict)  # of the prompt, by cache: where to begin the next search

    def __post_init__(self) -> None:
        need(self.share is None or self.nbytes is None, "share must be None where bytes are given")
        need(self.share is None or 0 < self.share <= 1, f"share must be above 0 and at most 1, got {self.share}")
        need(self.nbytes is None or self.nbytes > 0, f"bytes must be above 0, got {self.nbytes}")

    @staticmethod
    def parse(share: str | None, nbytes: str | None) -> EqualBytes:
        """share: "1/4" or "0.25". nbytes: "512KiB"."""
        try:
            part = None if share is None else Fraction(share)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"share must be a number such as 1/4 or 0.25, got {share!r}") from None
        return EqualBytes(part, None if nbytes is None else bytes_of(nbytes, "bytes"))

    def target(self, dense_nbytes: int | None) -> float | None:
        if self.share is None:
            return self.nbytes
        if dense_nbytes is None:
            raise ValueError(f"share must be None for a converted model, which has no dense cache, got {self.share}")
        return float(self.share * dense_nbytes)

    def sized(self, reader: Reader, measure: Measure, dense_nbytes: int | None) -> CacheSpec:
        """Raises ValueError where the least that a cache can hold is more."""
        spec, target = reader.spec, self.target(dense_nbytes)
        if target is None or spec.size_key is None:
            return spec
        unit = _UNITS.get(spec.kind) or int(spec.given.get("page_size", _PAGE))
        pages = -(-measure.tokens // unit)
        share = target / dense_nbytes if dense_nbytes else 0.0
        near = round(self._found.get(str(spec), share) * pages)

        def held(size: int) -> int:
            return measure.held(replace(reader, spec=spec.sized(size * unit)))

        try:
            found = largest(held, 1, (1 + TOLERANCE) * target, near=near, most=pages)
        except TooShort as error:
            raise ValueError(
                f"{'bytes' if self.share is None else 'share'} must leave room for {spec}: after {measure.name}'s "
                f"prompt of {measure.tokens} tokens it holds at least {error.count:,} bytes, got {target:,.0f}; a "
                "smaller page_size takes less"
            ) from None
        self._found[str(spec)] = found / pages
        return spec.sized(found * unit)


def dense_bytes(reader: Reader, measure: Measure) -> int | None:
    """What transformers' cache holds of the first prompt; None for a converted model."""
    if CacheSpec.kind_of(reader.model.config) is not None:
        return None
    return measure.held(replace(reader, spec=CacheSpec(DENSE, {})))
