"""What users ask of the plugin: additional_config={"kvcompress": {...}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...caches.spec import DENSE, CacheSpec
from ...hf.config import decoder_config
from ..memory import swap_nbytes
from ..prefixes import check_prefixes

KEY = "kvcompress"  # in vLLM's additional_config
# where none was given: a request leaves half a page of every KV head of every layer empty; of fewer slots, CPUs wait
# for memory once a page
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Settings:
    """cache: as CacheSpec writes it. ratio: tokens per slot that a cache with learned ratio (DMC, DMS, gates) is taken
    to reach before any prompt was read, afterwards what was measured counts; None = 1, or what gates are to keep.
    prefixes: most that are kept of prompts that
    begin alike, as Requests takes it; None = 0 without vLLM's enable_prefix_caching or enable_chunked_prefill. swap: as
    Requests takes it, bytes or a text such as "1GiB". cuda_graphs: whether steps in which all requests decode are
    launched as a whole, as kvcompress.serve.batching has it.

    Raises ValueError for what is out of range or unknown.
    """

    cache: str
    ratio: float | None = None
    prefixes: int | None = None
    swap: int | str | None = None
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.cache, str):
            raise ValueError(f"cache must be text such as 'dmc', got {self.cache!r}")
        _ = self.spec
        check_prefixes(self.prefixes, False)
        _ = self.swap_nbytes
        if not isinstance(self.cuda_graphs, bool):
            raise ValueError(f"cuda_graphs must be True or False, got {self.cuda_graphs!r}")
        ratio = self.ratio
        number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if ratio is not None and not (number and 1 <= ratio < math.inf):
            raise ValueError(f"ratio must be a finite number of at least 1, or None, got {ratio!r}")

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec.parse(self.cache)

    @property
    def swap_nbytes(self) -> int | None:
        return None if self.swap is None else swap_nbytes(self.swap)

    @staticmethod
    def asked(additional_config: Any, config: Any) -> Settings | None:
        """What additional_config asks for a model of this config; a converted model asks by itself for its own cache.
        None where nothing is asked."""
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        own = CacheSpec.kind_of(decoder_config(config))
        if given is None:
            return None if own is None else Settings(own)
        known = [field.name for field in fields(Settings)]
        if not isinstance(given, Mapping) or (unknown := [key for key in given if key not in known]):
            what = repr(given) if not isinstance(given, Mapping) else repr(unknown[0])
            raise ValueError(f"additional_config[{KEY!r}] takes {', '.join(known)}, got {what}")
        return Settings(**({"cache": own or DENSE} | dict(given)))
