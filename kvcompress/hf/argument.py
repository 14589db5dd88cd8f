"""The argument by which a model of transformers takes its cache: cache from 5.24 on, past_key_values before that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import transformers
from transformers import EncoderDecoderCache

from ..support.versions import numbers_of

P = ParamSpec("P")
T = TypeVar("T")
_BEFORE = "past_key_values"
CACHE = "cache" if (numbers_of(transformers.__version__) or (0, 0)) >= (5, 24) else _BEFORE


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache of a decoder's own keys among the arguments of a call, None where there is none. transformers still
    takes the former name, and renames it within the call: hooks see what the user wrote."""
    cache = given.get(CACHE)
    cache = given.get(_BEFORE) if cache is None else cache
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def takes_cache(function: Callable[P, T]) -> Callable[P, T]:
    """Of a function of ours (model, input_ids, cache): the TypeError of a cache that is named as transformers does."""

    @functools.wraps(function)
    def run(*args: P.args, **given: P.kwargs) -> T:
        if len(args) < 3 and "cache" not in given and _BEFORE in given:
            call = f"kvcompress.{function.__name__}(model, input_ids, cache)"
            raise TypeError(f"{_BEFORE} is model.generate's; here it is cache: {call}")
        return function(*args, **given)

    return run


def with_cache(cache: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call and the cache that it is given. Configs that say that a model uses none (MPT's) count
    for nothing. Raises TypeError where they bring one of their own: of two transformers would take one and leave the
    other without a word."""
    for name in (CACHE, _BEFORE):
        if options.get(name) is not None:
            raise TypeError(f"{name} must not be given where a cache is already, got {type(options[name]).__name__}")
    return {"use_cache": True, **options, CACHE: cache}
