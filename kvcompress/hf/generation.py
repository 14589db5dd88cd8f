"""model.generate of a converted model that is given no cache makes that of its method."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationMixin

from .argument import CACHE, cache_of
from .encoders import beside_encoder
from .method import PassCache, method_of

_ATTRIBUTE = "_prepare_cache_for_generation"


class OwnCache:
    """Stands on one model for the method of transformers' GenerationMixin by that name."""

    def __init__(self, model: Any, decoder: nn.Module) -> None:
        self.model, self.decoder = model, decoder

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        method = method_of(self.decoder)
        given = cache_of(model_kwargs)
        if isinstance(given, PassCache) and self.model.config.is_encoder_decoder:  # T5Gemma takes none that is alone
            model_kwargs.update(beside_encoder(model_kwargs))
        if method is None or given is not None or generation_config.use_cache is False:
            original: Any = getattr(type(self.model), _ATTRIBUTE)
            return original(self.model, generation_config, model_kwargs, *args, **kwargs)
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation must be None for a model converted to {method.title}, which makes "
                f"{method.cache_name}, got {wanted!r}"
            )
        model_kwargs[CACHE] = method.new_cache(self.model.config)
        return None


def make_own_caches(top: nn.Module, decoder: nn.Module) -> None:
    """top: the transformers model that users call; one that does not generate stays as it is."""
    if isinstance(top, GenerationMixin):
        object.__setattr__(top, _ATTRIBUTE, OwnCache(top, decoder))


def make_no_caches(top: nn.Module) -> None:
    """Undoes make_own_caches."""
    if _ATTRIBUTE in vars(top):
        object.__delattr__(top, _ATTRIBUTE)
