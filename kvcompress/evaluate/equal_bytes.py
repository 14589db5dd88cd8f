"""Sizes at which caches hold the same bytes: found by reading, tables and what a pruner keeps besides included."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..caches.spec import DENSE, CacheSpec
from ..support.checks import need
from ..support.units import Keep, Size
from .fitting import TooShort, largest
from .measure import Measure
from .reading import Reader

TOLERANCE = 0.01  # of the bytes: what the tables of a page and running scores come to
WISH = "a share of the dense cache's bytes (1/4, 25%), or bytes (512KiB)"
_UNITS = {"streaming": 8}  # tokens; of the others a page
_PAGE = 16
_SMALLER = {"int8": 0.52, "k8v4": 0.4}  # than bfloat16, where the search begins


@dataclass
class EqualBytes:
    """What each cache may hold after reading. keep: a share, of the dense cache's bytes, or bytes; None = it is as its
    text says. Caches without a size to set (CacheSpec.size_key) are as they are.

    A cache gets the largest size, in whole pages, with which it holds no more than that after reading a task's first
    prompt, to within TOLERANCE.
    """

    keep: Keep | None = None
    _found: dict[str, float] = field(default_factory=dict)  # of the prompt, by cache: where to begin the next search

    def __post_init__(self) -> None:
        if self.keep is not None:
            tokens = self.keep.tokens
            need(tokens is None, f"keep must be {WISH}, got {tokens} tokens")

    @staticmethod
    def parse(keep: Size | None) -> EqualBytes:
        """keep: "1/4" or "512KiB"."""
        return EqualBytes(None if keep is None else Keep.of(keep, wish=WISH))

    def target(self, dense_nbytes: int | None) -> float | None:
        if self.keep is None or self.keep.share is None:
            return None if self.keep is None else self.keep.nbytes
        if dense_nbytes is None:
            raise ValueError(f"keep must be bytes for a converted model, which has no dense cache, got {self.keep}")
        return float(self.keep.share * dense_nbytes)

    def sized(self, reader: Reader, measure: Measure, dense_nbytes: int | None) -> CacheSpec:
        """Raises ValueError where the least that a cache can hold is more."""
        spec, target = reader.spec, self.target(dense_nbytes)
        if target is None or spec.size_key is None:
            return spec
        unit = _UNITS.get(spec.kind) or int(spec.given.get("page_size", _PAGE))
        pages = -(-measure.tokens // unit)
        share = target / dense_nbytes / _SMALLER.get(spec.given.get("dtype", ""), 1.0) if dense_nbytes else 0.0
        near = round(self._found.get(str(spec), share) * pages)

        def held(size: int) -> int:
            return measure.held(replace(reader, spec=spec.sized(size * unit)))

        try:
            found = largest(held, 1, (1 + TOLERANCE) * target, near=near, most=pages)
        except TooShort as error:
            raise ValueError(
                f"keep must leave room for {spec}: after {measure.name}'s "
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
