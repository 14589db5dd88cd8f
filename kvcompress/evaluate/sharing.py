"""One reading of a text for many caches: what does not depend on a cache is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..caches.pruned import PrunedCache
from ..caches.spec import CacheSpec
from ..hf.attach import base_model, facts_of
from ..hf.outputs import output_layers
from .reading import Reader


class _Attended(Exception):
    """No error: a layer's attention is done."""


class LayerInputs:
    """What enters each layer of an attached model when a text is read in one pass: the same for every cache that is
    compressed after the pass. It is recorded in the first reading of a text within `reading`; in later ones every layer
    is given it, and ends once it has attended: no output projection, no MLP. One text is held at a time.

    Raises ValueError, when it is made, for a model whose layers' output projections are not found.
    """

    def __init__(self, model: Any) -> None:
        self._decoder: Any = base_model(model)
        facts = facts_of(self._decoder)
        numbers = range(len(self._decoder.layers))
        self._outputs = [x.module for x in output_layers(self._decoder, facts, numbers).values()]
        self._ids: tuple[int, ...] = ()
        self._held: list[Tensor] = []
        self._passes = False  # the pass that runs is one over the text
        self._again = False  # and not the first

    @contextmanager
    def reading(self, ids: list[int]) -> Iterator[None]:
        """Passes over just these tokens, from the first on, are of one pass; others are as they are."""
        if self._ids != tuple(ids):
            self._ids, self._held = tuple(ids), []
        layers = list(self._decoder.layers)
        own = [vars(layer).get("forward") for layer in layers]  # None = the class's
        hooks = [self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True)]
        hooks += [module.register_forward_pre_hook(self._attended) for module in self._outputs]
        for number, layer in enumerate(layers):
            layer.forward = self._taught(number, layer.forward)
        try:
            yield
        finally:
            self._passes = self._again = False
            for hook in hooks:
                hook.remove()
            for layer, forward in zip(layers, own, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward
            if len(self._held) < len(layers):  # an error came between
                self._held = []

    def _begin(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._passes = tuple(ids.shape) == (1, len(self._ids)) and tuple(ids[0].tolist()) == self._ids
        self._again = self._passes and bool(self._held)

    def _attended(self, module: Any, args: tuple[Any, ...]) -> None:
        if self._again:
            raise _Attended

    def _taught(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._again:
                try:
                    return forward(self._held[number], *args, **kwargs)
                except _Attended:
                    return hidden  # the next layer is given its own
            if self._passes:
                self._held.append(hidden.detach())
            return forward(hidden, *args, **kwargs)

        return run


@dataclass
class _Whole:
    """The reading of one text that keeps everything, of the pruner that asked last."""

    ids: tuple[int, ...] = ()
    spec: str = ""
    cache: PrunedCache | None = None


@dataclass(frozen=True)
class SharedReader(Reader):
    """Reads as Reader does, bit for bit, with what several caches of one text have in common computed once: a
    PrunedCache that reads in one pass takes the layers' inputs of the text's first reading, and those with later="keep"
    that differ in keep and budget alone are compressed from one reading that kept everything.
    """

    inputs: LayerInputs = field(kw_only=True)
    _whole: _Whole = field(default_factory=_Whole, kw_only=True, repr=False)

    @torch.no_grad()
    def read(self, ids: list[int], guide: list[int] | None = None) -> Cache:
        made = self.spec.make(self.model.config, self.tokenizer)
        if guide is not None or not isinstance(made, PrunedCache) or made.chunk_size is not None:
            return super().read(ids, guide)
        if not _serves_budgets(made):
            with self.inputs.reading(ids):
                return super().read(ids)
        alike = {name: text for name, text in self.spec.given.items() if name != "budget"}  # which compress is given
        spec = CacheSpec(self.spec.kind, {**alike, "keep": "1.0"})
        whole = self._whole
        if (whole.ids, whole.spec) != (tuple(ids), str(spec)):
            whole.cache = None  # before the next one takes room
            with self.inputs.reading(ids):
                cache = Reader(self.model, self.tokenizer, spec).read(ids)
            assert isinstance(cache, PrunedCache)
            whole.ids, whole.spec, whole.cache = tuple(ids), str(spec), cache
        assert whole.cache is not None
        own = whole.cache.fork()
        own.compress(made.budget, keep=made.policy.keep.text)
        return own


def _serves_budgets(cache: PrunedCache) -> bool:
    """Whether one reading serves all of them (PrunedCache.compress)."""
    pruner = cache.pruner
    return cache.later == "keep" and not pruner.uses_keep and pruner.own_budget is None
