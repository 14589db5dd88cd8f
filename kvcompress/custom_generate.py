"""What model.generate(custom_generate=...) of transformers calls: a folder of the Hub needs no more than its name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .caches.spec import DENSE, CacheSpec
from .hf import attach
from .hf.argument import CACHE, cache_of
from .reading import prefilling
from .support.checks import need

DEFAULT = "pruned,keep=1/4"


def generate(
    model: Any,
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    compress: str | None = None,
    guide: Tensor | None = None,
    tokenizer: Any = None,
    **generation: Any,
) -> Any:
    """model.generate with a compressed cache: the prompt is read through it, and generation goes on from there.

    model: any of transformers that kvcompress attaches to, attached or not; it is left as it was. inputs or input_ids:
    int64 [B, T]. attention_mask: [B, T] for left-padded batches. compress: the cache, as text (CacheSpec.parse), such
    as "pruned,pruner=snapkv,keep=1k"; None = that of a converted model, of others "pruned,keep=1/4": a quarter of a
    prompt's tokens stays. guide: token ids [g] of the question, where it is known and the cache looks at one.
    tokenizer: for caches that need words (KVzip), and for stop_strings. generation: all other arguments of
    model.generate. Returns what model.generate returns.
    Raises ValueError for a wrong cache or prompt, TypeError for a cache of transformers among the arguments.
    """
    if compress is not None and not isinstance(compress, str):
        raise TypeError(f"compress must be a cache as text, such as {DEFAULT!r}, got {type(compress).__name__}")
    if cache_of(generation) is not None:
        raise TypeError(f"{CACHE} must not be given: compress makes the cache")
    need((inputs is None) != (input_ids is None), "input_ids must be given, once: as inputs or as input_ids")
    ids: Any = inputs if input_ids is None else input_ids
    spec = CacheSpec.parse(compress if compress is not None else CacheSpec.kind_of(model.config) or DEFAULT)
    need(spec.kind != DENSE, f"compress must be a compressed cache, got {spec}")
    options = {name: value for name, value in generation.items() if value is not None}
    if tokenizer is not None and "stop_strings" in options:
        options["tokenizer"] = tokenizer
    replaced = vars(model).pop("generate", None)  # a model whose folder brings this function has it in place of its own
    try:
        with attach(model):
            cache = spec.make(model.config, tokenizer)
            return prefilling.generate(model, ids, cache, attention_mask, guide=guide, **options)
    finally:
        if replaced is not None:
            model.generate = replaced
