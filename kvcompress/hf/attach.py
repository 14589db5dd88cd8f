"""attach and detach: make one model understand compressed caches, and undo it without a trace."""

from __future__ import annotations

import inspect
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import nn

from ..caches import CompressedCache
from ..retrofit.method import KEYWORD, Method, method_of, restore_method, set_method
from .attention import is_compressed
from .families import ATTENTION_CLASSES, COMPRESSED_CLASSES, supported_families

_HOOKS = "_kvcompress_hooks"


class Attachment:
    """What attach returns; as a context manager it detaches at the end."""

    def __init__(self, model: nn.Module, *, ours: bool = True) -> None:
        self.model, self._ours = model, ours

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:  # who attached it first detaches it
            detach(self.model)


def base_model(model: nn.Module) -> Any:
    """The decoder inside a model (with or without head, wrapped by PEFT or not): what owns layers and rotary_emb."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "rotary_emb"):
            return module
    raise ValueError(
        f"{type(model).__name__} is not supported: no decoder with layers and rotary_emb in it; "
        f"supported families: {supported_families()}"
    )


def attach(model: nn.Module) -> Attachment:
    """Makes `model` use compressed caches when it is given one; with any other cache it runs as before, bit for bit.

    model: a transformers model of a supported family (Llama, Mistral, Qwen2, Qwen3), PEFT-wrapped or not. No parameter
    is added and state_dict does not change. A converted model (config.kvcompress) gets its method back: without a cache
    it attends as in training, with its method's cache as that does, and other caches are refused. Attaching twice is
    attaching once. Returns a context manager that detaches what this call attached.
    Raises ValueError for a family that is not supported, naming those that are, and for a conversion that this version
    does not know; TypeError for what is no model.
    """
    decoder = base_model(model)
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in decoder.layers]
    for attention in attentions:
        if type(attention) not in ATTENTION_CLASSES and not is_compressed(attention):
            raise ValueError(
                f"{type(model).__name__} with {type(attention).__name__} is not supported; "
                f"supported families: {supported_families()}"
            )
    for attention in attentions:
        if not is_compressed(attention):
            _swap(attention, COMPRESSED_CLASSES[type(attention)])
    first = not hasattr(decoder, _HOOKS)
    if first:
        restore_method(decoder)
        before = decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
        after = decoder.register_forward_hook(_after_forward, with_kwargs=True)
        # past nn.Module.__setattr__ and state_dict: this is no part of the model
        object.__setattr__(decoder, _HOOKS, (before, after))
    return Attachment(model, ours=first)


def detach(model: nn.Module) -> None:
    """Undoes attach; does nothing to a model that is not attached."""
    decoder = base_model(model)
    for layer in decoder.layers:
        attention = getattr(layer, "self_attn", None)
        if is_compressed(attention):
            _swap(attention, type(attention).__mro__[2])
    for hook in getattr(decoder, _HOOKS, ()):
        hook.remove()
    if hasattr(decoder, _HOOKS):
        object.__delattr__(decoder, _HOOKS)
    set_method(decoder, None)


def _swap(attention: Any, cls: Any) -> None:
    attention.__class__ = cls
    if "_old_forward" in vars(attention):  # accelerate's hooks (device_map) keep the forward that they call
        attention._old_forward = MethodType(cls.forward, attention)


def is_attached(model: nn.Module) -> bool:
    return hasattr(base_model(model), _HOOKS)


@torch.compiler.disable
def _before_forward(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hands the padding mask to a compressed cache, so that transformers builds no [B, 1, S, T] mask of it."""
    given = dict(kwargs)
    if args:
        given |= inspect.signature(type(decoder).forward).bind_partial(decoder, *args).arguments
        given.pop("self", None)
    cache, method = given.get("past_key_values"), method_of(decoder)
    if not isinstance(cache, CompressedCache):
        return None if method is None else ((), _converted(decoder, method, given))
    if method is not None:
        method.check_cache(cache)
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    if given.get(name) is None:
        raise ValueError("input_ids or inputs_embeds must be given with a compressed cache, got neither")
    if not isinstance(given[name], torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(given[name]).__name__}")
    _check_call(decoder, given)
    mask = given.get("attention_mask")
    given[name] = tokens = given[name][:, cache.repeated_columns(given[name].shape[1], mask) :]
    cache.begin_forward(decoder, name, tokens, mask)
    # positions are the cache's business; small ones keep length-dependent rotary embeddings of the model as they are
    given["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
    given["attention_mask"] = None
    return (), given


def _converted(decoder: Any, method: Method, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a converted model's forward pass without a compressed cache."""
    if (cache := given.get("past_key_values")) is not None:
        raise ValueError(
            f"past_key_values must be {method.cache_name} for this converted model, or None, got "
            f"{type(cache).__name__}: generate makes one where none is given, unless use_cache=False"
        )
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    if given.get(name) is None:
        raise ValueError("input_ids or inputs_embeds must be given, got neither")
    if given.get("output_attentions"):
        raise ValueError("output_attentions must be False with a converted model: attention weights are never formed")
    given[KEYWORD] = method.begin(decoder, given)
    # positions and padding are the method's business, and there is nothing to keep for later
    given["position_ids"] = torch.arange(given[name].shape[1], device=given[name].device)[None]
    given["attention_mask"], given["use_cache"] = None, False
    return given


def _check_call(decoder: Any, given: dict[str, Any]) -> None:
    """Refuses what a compressed cache cannot do, before anything is stored."""
    if torch.is_grad_enabled():
        embeds = given.get("inputs_embeds")
        if (embeds is not None and embeds.requires_grad) or any(p.requires_grad for p in decoder.parameters()):
            raise RuntimeError(
                "compressed caches do not carry gradients: use torch.no_grad(), or train without a cache"
            )
    if given.get("use_cache") is False:
        raise ValueError("use_cache must not be False with a compressed cache: what it is given is stored")
    if given.get("output_attentions"):
        raise ValueError("output_attentions must be False with a compressed cache: attention weights are never formed")


@torch.compiler.disable
def _after_forward(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, CompressedCache):
        cache.end_forward()
