"""What transformers' generation does with caches, where an attached model wants it otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from .argument import CACHE, cache_of
from .encoders import beside_encoder
from .method import PassCache, method_of


class _Instead:
    """Stands on one model for the method of its class by that name."""

    name: ClassVar[str]

    def __init__(self, model: Any, decoder: nn.Module) -> None:
        self.model, self.decoder = model, decoder

    def original(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class OwnCache(_Instead):
    """A converted model that is given no cache makes that of its method; with an encoder each call begins it anew."""

    name = "_prepare_cache_for_generation"

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        method = method_of(self.decoder)
        given = cache_of(model_kwargs)
        crosses = isinstance(given, PassCache) and self.model.config.is_encoder_decoder
        if crosses and given.get_seq_length():  # it heard something else: Whisper calls generate for every 30 seconds
            given.reset()
            model_kwargs[CACHE] = given
        if crosses:  # T5Gemma takes none that is alone
            model_kwargs.update(beside_encoder(model_kwargs))
        if method is None or given is not None or generation_config.use_cache is False:
            return self.original(generation_config, model_kwargs, *args, **kwargs)
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation must be None for a model converted to {method.title}, which makes "
                f"{method.cache_name}, got {wanted!r}"
            )
        model_kwargs[CACHE] = method.new_cache(self.model.config)
        return None


class WithoutCache(_Instead):
    """Whisper takes what generate returns to pieces, one for each sequence, the cache's keys with it: not ours."""

    name = "_postprocess_outputs"

    def __call__(self, seek_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(seek_outputs, Tensor) and isinstance(cache_of(seek_outputs), PassCache):
            kept = {name: x for name, x in seek_outputs.items() if not isinstance(x, Cache)}
            seek_outputs = type(seek_outputs)(**kept)
        return self.original(seek_outputs, *args, **kwargs)


_EVERY = OwnCache, WithoutCache


def make_own_caches(top: nn.Module, decoder: nn.Module) -> None:
    """top: the transformers model that users call; one that does not generate stays as it is."""
    for kind in _EVERY if isinstance(top, GenerationMixin) else ():
        if hasattr(type(top), kind.name):
            object.__setattr__(top, kind.name, kind(top, decoder))


def make_no_caches(top: nn.Module) -> None:
    """Undoes make_own_caches."""
    for kind in _EVERY:
        if kind.name in vars(top):
            object.__delattr__(top, kind.name)
