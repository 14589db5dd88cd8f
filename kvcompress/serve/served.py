"""What can be served: which caches, of which settings and models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..caches.base import CompressedCache
from ..caches.dense import DenseCache
from ..caches.pruned import PrunedCache
from ..caches.spec import DENSE, CacheSpec
from ..caches.streaming import StreamingCache
from ..dmc.cache import DMCCache
from ..gates.cache import GatedCache
from ..hf.facts import Facts
from ..hf.method import Method
from .bounds import paged_layers

KINDS = (DENSE, "dmc", "gated", "pruned", "quantized", "streaming")


def cache_maker(spec: CacheSpec, config: PreTrainedConfig, page_size: int) -> Callable[[], CompressedCache]:
    """What makes a request's cache, in pages of so many slots. Raises ValueError for one that cannot be
    served, with the reason."""
    if spec.kind not in KINDS:
        raise ValueError(f"cache must be one of {', '.join(KINDS)} to be served, got {spec.kind!r}")
    for name in ("page_size", "max_pages", "grow", "chunk_size", "track"):
        if name in spec.given:
            raise ValueError(
                f"{name} must not be given for a cache that is served, got {spec.given[name]}: pages, and the parts "
                "in which prompts are read, are those of the server"
            )
    if spec.kind == DENSE:
        return lambda: DenseCache(config, page_size=page_size)
    if spec.kind != "streaming":
        spec = CacheSpec(spec.kind, {**spec.given, "page_size": str(page_size)})

    def make() -> CompressedCache:
        cache = spec.make(config)
        assert isinstance(cache, CompressedCache)
        return cache

    return make


def check_served(cache: CompressedCache, facts: Facts, method: Method | None) -> None:
    """Raises ValueError for settings and models that cannot be served, with the reason."""
    if method is not None:
        method.check_cache(cache)
    if not isinstance(cache, (DenseCache, DMCCache, GatedCache, PrunedCache, StreamingCache)):
        raise ValueError(f"cache must be one of {', '.join(KINDS)} to be served, got {type(cache).__name__}")
    if isinstance(cache, PrunedCache):
        if cache.policy.gap is not None:
            raise ValueError("positions must be 'original' for a cache that is served, got others")
        if cache.later != "compress":
            raise ValueError(f"later must be 'compress' for a cache that is served, got {cache.later!r}")
        if cache.pruner.rereads:
            raise ValueError(
                f"pruner must not read prompts twice in a cache that is served, as {type(cache.pruner).__name__} does"
            )
    if not facts.hands_states:
        raise ValueError("model must hand its recurrent states to a cache to be served: this one keeps them itself")
    if facts.loops:
        raise ValueError(
            "model must have an attention module for each layer to be served: one of this one's has several"
        )
    if any(own.indexer is not None for own in facts.values()):
        raise ValueError("model must attend to all tokens to be served: layers of this one choose some by an indexer")
    if not facts.takes_positions or facts.asks_length:
        raise ValueError("model must take position_ids to be served: this one counts its tokens by itself")
    sizes = {facts[layer.index].size for layer in paged_layers(cache)}
    if len(sizes) > 1:
        raise ValueError(f"model must have one head dim to be served from one store of pages, got {sorted(sizes)}")


def spec_of(cache: str | CacheSpec | None, config: Any) -> CacheSpec:
    """A CacheSpec of what users give; None: a converted model's own cache, else dense."""
    if isinstance(cache, CacheSpec):
        return cache
    if not isinstance(cache, (str, type(None))):
        raise TypeError(
            "cache must be text, such as 'pruned,keep=1/4', or a CacheSpec, for each request has a cache of its own, "
            f"got {type(cache).__name__}"
        )
    return CacheSpec.parse(cache or CacheSpec.kind_of(config) or DENSE)


class Known:
    """What a decoder has embeddings for. words: of tokens; places: of positions (GPT-2, OPT), None = any may come."""

    def __init__(self, decoder: Any) -> None:
        words, most = decoder.get_input_embeddings(), getattr(decoder.config, "max_position_embeddings", None)
        self.words = getattr(words, "num_embeddings", None)
        others = [x.num_embeddings for x in decoder.modules() if isinstance(x, nn.Embedding) and x is not words]
        self.places = most if most is not None and any(0 <= size - most <= 2 for size in others) else None

    def refusal(self, tokens: Sequence[int], more: int) -> str | None:
        """Why a request of these tokens, and `more` that follow, has none; None where it has."""
        words = self.words
        wrong = None if words is None else next((token for token in tokens if not 0 <= token < words), None)
        if wrong is not None and words is not None:
            return f"has the token {wrong} in its prompt, but the model knows 0 to {words - 1}"
        if self.places is not None and len(tokens) + more - 1 > self.places:
            return (
                f"may have {len(tokens) + more} tokens, its prompt's {len(tokens)} included, but the model has "
                f"embeddings for {self.places} positions: give less of max_new_tokens"
            )
        return None
