"""The argument by which a model of transformers takes its cache: cache from 5.24 on, past_key_values before that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

_BEFORE = "past_key_values"
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else _BEFORE


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, None where there is none. transformers still takes the former name, and
    renames it within the call: hooks see what the user wrote."""
    cache = given.get(CACHE)
    return given.get(_BEFORE) if cache is None else cache
