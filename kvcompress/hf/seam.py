"""The seam with transformers: un-rotated queries and keys of every family; no class swapped, none known by name.

Hooks on the rotary embeddings turn them into identities while a forward pass is one of ours (of a cache or of a
converted model): the family's own code projects, norms and rotates by nothing. An attention function registered with
transformers gets the result and asks the pass. Every other forward pass gets what the model had before, bit for bit.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..positions import parts
from ..softmax import Softmax
from .facts import Facts
from .method import KEYWORD, Call, Pass, PassCache, method_of
from .probe import ROWS, TOKENS, MaskTicket, Probe, like

PREFIX = "kvcompress_"
_SEAM = "_kvcompress_seam"
_REGISTERING = threading.Lock()


@dataclass(eq=False)
class Seam:
    """What attaching leaves on a decoder. references: how often it was attached. arrives: whether the family hands
    keywords down to its attention layers."""

    hooks: list[Any] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    references: int = 0
    arrives: bool = False


class _Now(threading.local):
    """What the forward pass of this thread is; at most one of them is set."""

    current: Pass | None = None
    outer: dict[str, Any] | None = None  # arguments of the multimodal model around the decoder, whose pass will be ours
    probe: Probe | None = None
    watcher: Any = None  # sees the attention of passes that are not ours (hf/verify)
    layer: int | None = None  # whose keys the family has just handed to the cache

    @property
    def ours(self) -> bool:
        return self.current is not None or self.probe is not None


NOW = _Now()


def noted_update(key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
    """What the update of a cache of ours does in a pass of ours: keys and values go on to our attention. Notes the
    layer, which a module that serves several layers does not know."""
    NOW.layer = layer_idx
    return key_states, value_states


class NotedCache(DynamicCache):
    """A plain cache that notes whose keys it is handed, for passes that are to tell layers apart. keeps: whether it
    holds them. note: called with the layer's number. asked: whether a layer asked for the length."""

    def __init__(self, config: Any, *, keeps: bool, note: Callable[[int], None] | None = None) -> None:
        super().__init__(config=config)
        self._keeps, self._note, self._began, self.asked = keeps, note, False, False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.asked = self.asked or self._began  # the decoder asks before its layers
        return super().get_seq_length(layer_idx)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._began = True
        if self._note is not None:
            self._note(layer_idx)
        out = noted_update(key_states, value_states, layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs) if self._keeps else out


def seam_of(decoder: nn.Module) -> Seam | None:
    """What attach left on a decoder; None if it is not attached."""
    return vars(decoder).get(_SEAM)


def open_seam(model: nn.Module, decoder: nn.Module) -> Seam:
    """Puts the hooks on a decoder, and on the multimodal models around it."""
    seam = Seam()
    for depth, around in enumerate(model.modules()):
        if isinstance(around, PreTrainedModel) and around.config is not decoder.config and decoder in around.modules():
            outer = _Outer(decoder, depth)
            seam.hooks.append(around.register_forward_pre_hook(outer.before, with_kwargs=True))
            seam.hooks.append(around.register_forward_hook(outer.after, with_kwargs=True, always_call=True))
    seam.hooks.append(decoder.register_forward_pre_hook(_decoder_before, with_kwargs=True))
    seam.hooks.append(decoder.register_forward_hook(_decoder_after, with_kwargs=True, always_call=True))
    for module in decoder.modules():
        if _is_rotary(module):
            seam.hooks.append(module.register_forward_pre_hook(_rotary_before, with_kwargs=True))
            seam.hooks.append(module.register_forward_hook(_rotary_after, with_kwargs=True))
    # past nn.Module.__setattr__ and state_dict: this is no part of the model
    object.__setattr__(decoder, _SEAM, seam)
    return seam


def close_seam(decoder: Any) -> None:
    """Takes them off again."""
    seam = seam_of(decoder)
    assert seam is not None
    for hook in seam.hooks:
        hook.remove()
    object.__delattr__(decoder, _SEAM)
    config = decoder.config
    config._attn_implementation_internal = (config._attn_implementation or "").removeprefix(PREFIX) or None


@contextmanager
def evaluating(decoder: nn.Module) -> Iterator[None]:
    """All modules in evaluation mode, and afterwards as they were, frequencies that depend on length included."""
    modes = [(module, module.training) for module in decoder.modules()]
    rotary = [module for module in decoder.modules() if _is_rotary(module)]
    buffers = [{name: (x, x.clone()) for name, x in module.named_buffers(recurse=False)} for module in rotary]
    others = [{name: x for name, x in vars(module).items() if not name.startswith("_")} for module in rotary]
    decoder.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, held, attributes in zip(rotary, buffers, others, strict=True):
            for name, (x, content) in held.items():
                module._buffers[name] = x.copy_(content) if not torch.equal(x, content) else x
            for name, value in attributes.items():
                if getattr(module, name) is not value and name != "training":
                    setattr(module, name, value)


def _is_rotary(module: nn.Module) -> bool:
    return any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))


# ---- attention and mask functions ----


def _take_over(config: Any) -> None:
    """Our functions before those that the model has now. The name says what was there: two models, or one whose
    implementation is set anew, need no other record."""
    name = config._attn_implementation or "eager"
    name = name.removeprefix(PREFIX)
    ours = PREFIX + name
    if ours not in AttentionInterface._global_mapping:
        with _REGISTERING:
            _register(name)
    if config._attn_implementation != ours:
        config._attn_implementation_internal = ours


def _register(name: str) -> None:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        keyword: Pass | None = kwargs.pop(KEYWORD, None)  # checkpoints run again when NOW is another pass, or none
        current = keyword or NOW.current
        layer, NOW.layer = NOW.layer, None
        if layer is None:
            layer = getattr(module, "layer_idx", None)
        if NOW.probe is not None:
            NOW.probe.arrives = keyword is not None
            return NOW.probe.arrived(layer, module, query, key, value, attention_mask, kwargs), None
        if current is not None:
            return _attend(current, layer, query, key, value, kwargs), None
        out = _before(module, name)(module, query, key, value, attention_mask, **kwargs)
        if NOW.watcher is not None:
            NOW.watcher(layer, out[0])
        return out

    def mask(*args: Any, **kwargs: Any) -> Any:
        if NOW.probe is not None:
            return MaskTicket(kwargs["mask_function"])
        if NOW.current is None and NOW.outer is None:
            return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)
        if NOW.outer is not None:
            _check_causal(NOW.outer, kwargs)
        return None

    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(PREFIX + name, mask)
    AttentionInterface.register(PREFIX + name, attention)


def _before(module: nn.Module, name: str) -> Any:
    """The attention function that the family would have called; "eager" is in the family's own file."""
    eager = None
    for cls in type(module).__mro__:
        eager = eager or getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _attend(
    current: Pass, layer: int | None, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> Tensor:
    """[B, T, Hq, value dim], of un-rotated queries and keys as the family has them."""
    if layer is None or layer not in current.facts:
        raise ValueError(
            f"layer {layer} is not one that attach saw: one attention module serves several layers of this family, "
            "which only a cache tells apart; use it with a compressed cache"
        )
    if kwargs.get("dropout"):
        raise ValueError(f"attention_dropout must be 0 where kvcompress attends, got {kwargs['dropout']}")
    facts = current.facts[layer]
    scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    softmax = Softmax(
        query.shape[3] ** -0.5 if scale is None else scale,
        kwargs.get("softcap"),
        None if sinks is None else sinks.float().reshape(-1),
    )
    # under autocast a norm may have left float32
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = current.attend(layer, facts.framed(query), facts.framed(key), facts.padded(value), softmax)
    return out[..., : facts.value_dim].transpose(1, 2).contiguous()


# ---- rotary embeddings ----


def _position_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    at = kwargs["position_ids"] if "position_ids" in kwargs else args[1] if len(args) > 1 else None
    if not isinstance(at, Tensor) or at.ndim < 2:
        raise ValueError("its rotary embedding is not called with position_ids [B, T]")
    return at


def _settled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A position that leaves an embedding whose frequencies depend on length as it is: the last that it has seen."""
    kind = getattr(module, "rope_type", "")
    types = [x for x in (*args, *kwargs.values()) if isinstance(x, str)] if isinstance(kind, dict) else []
    prefix = f"{types[0]}_" if types else ""
    length = getattr(module, f"{prefix}max_seq_len_cached", getattr(module, "max_seq_len_cached", 1))
    return max(int(length) - 1, 0)


def _rotary_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not NOW.ours:
        return None
    at = _position_ids(args, kwargs)
    if NOW.probe is not None:
        new = NOW.probe.positions.to(at.device).expand(*at.shape[:-2], ROWS, TOKENS)
    else:
        new = at.new_full((*at.shape[:-2], 1, 1), _settled(module, args, kwargs))
    return (args, kwargs | {"position_ids": new}) if "position_ids" in kwargs else ((args[0], new, *args[2:]), kwargs)


def _rotary_after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    if not NOW.ours:
        return None
    if NOW.probe is not None:
        rest = {name: x for name, x in kwargs.items() if name != "position_ids"}
        behind = args[2:] if "position_ids" not in kwargs else args[1:]
        return NOW.probe.rotary(module, behind, rest, _position_ids(args, kwargs), out)
    cos, sin = parts(out)
    x = args[0] if args else kwargs.get("x")
    tokens = x.shape[-2] if isinstance(x, Tensor) else 1
    shape = (*cos.shape[:-3], 1, tokens, cos.shape[-1])
    return like(out, torch.ones_like(cos).expand(shape), torch.zeros_like(sin).expand(shape))


# ---- the decoder ----


@torch.compiler.disable
def _decoder_before(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _take_over(decoder.config)  # set_attn_implementation may have been called since
    if NOW.probe is not None:
        return None
    NOW.current = NOW.layer = None  # of a pass that an error ended
    given = _named(decoder, args, kwargs)
    if not _goes_on(NOW.outer, decoder, given):
        NOW.outer = None
    outer = NOW.outer
    if outer is not None:  # it has made masks of its padding; there are none in a pass of ours
        given["attention_mask"] = outer.get("attention_mask")
    seam, cache, method = seam_of(decoder), given.get("past_key_values"), method_of(decoder)
    assert seam is not None
    current: Pass | None = given.pop(KEYWORD, None)
    if current is None and isinstance(cache, PassCache):
        if method is not None:
            method.check_cache(cache)
        call = checked_call(decoder, seam.facts, given)
        _check_storing(decoder, given)
        columns = call.tokens.shape[1]
        current = cache.begin(call)
        if call.tokens.shape[1] < columns:  # the cache has read some of them already
            given |= {call.name: call.tokens, "position_ids": call.position_ids}
    elif current is None and method is not None:
        if cache is not None:
            raise ValueError(
                f"past_key_values must be {method.cache_name} for this converted model, or None, got "
                f"{type(cache).__name__}: generate makes one where none is given, unless use_cache=False"
            )
        current = method.begin(checked_call(decoder, seam.facts, given))
        given["use_cache"] = False  # there is nothing to keep for later
    if current is None:
        return None
    if not isinstance(cache, PassCache):
        _check_checkpointing(decoder, seam)
        if seam.arrives:
            given[KEYWORD] = current
    NOW.current = current
    return (), given


@torch.compiler.disable
def _decoder_after(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if NOW.probe is not None:
        return
    current, NOW.current = NOW.current, None
    cache = kwargs.get("past_key_values")
    if current is not None and isinstance(cache, PassCache) and output is not None:
        hidden = getattr(output, "last_hidden_state", output[0] if isinstance(output, tuple) else None)
        cache.end(current, hidden)


def checked_call(decoder: Any, facts: Facts, given: dict[str, Any]) -> Call:
    """What a decoder was given, for a pass of ours. Raises for what no pass can do, before anything is stored."""
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    tokens, mask, at = (given.get(key) for key in (name, "attention_mask", "position_ids"))
    if tokens is None:
        raise ValueError("input_ids or inputs_embeds must be given, got neither")
    for key, x in ((name, tokens), ("attention_mask", mask), ("position_ids", at)):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{key} must be a torch.Tensor, got {type(x).__name__}")
    if given.get("output_attentions"):
        raise ValueError("output_attentions must be False: kvcompress never forms attention weights")
    if at is not None and at.ndim == 3:  # M-RoPE: one row of positions for each axis of an image
        if bool((at != at[:1]).any()):
            raise ValueError(
                "position_ids must be the same on every axis, got those of an image or video: its tokens have places "
                "that compressed caches do not know; give text"
            )
        at = at[0]
    return Call(decoder, facts, name, tokens, mask, at)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call of a module by name."""
    if not args:
        return dict(kwargs)
    named = inspect.signature(type(module).forward).bind_partial(module, *args).arguments
    return {name: x for name, x in named.items() if name != "self"} | kwargs


def _check_storing(decoder: Any, given: dict[str, Any]) -> None:
    if torch.is_grad_enabled():
        embeds = given.get("inputs_embeds")
        if (embeds is not None and embeds.requires_grad) or any(p.requires_grad for p in decoder.parameters()):
            raise RuntimeError(
                "compressed caches do not carry gradients: use torch.no_grad(), or train without a cache"
            )
    if given.get("use_cache") is False:
        raise ValueError("use_cache must not be False with a compressed cache: what it is given is stored")


def _check_checkpointing(decoder: Any, seam: Seam) -> None:
    if seam.arrives or not decoder.training or not torch.is_grad_enabled():
        return
    if any(getattr(module, "gradient_checkpointing", False) for module in decoder.modules()):
        raise ValueError(
            f"gradient checkpointing is not supported for {type(decoder).__name__}: its layers hand no keywords down "
            "to their attention, by which a second run would find its pass; train it without"
        )


# ---- multimodal models around the decoder ----


@dataclass(frozen=True)
class _Outer:
    """Hooks of a model that makes masks itself and hands them to its decoder. depth: greater than those around it."""

    decoder: nn.Module
    depth: int

    @torch.compiler.disable
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, outer = _named(module, args, kwargs), NOW.outer
        if NOW.probe is not None or (_goes_on(outer, self.decoder, given) and outer["hooks"].depth < self.depth):
            return
        NOW.current = NOW.layer = NOW.outer = None  # Ctrl-C runs no hook behind a pass
        if self._is_ours(given):
            _take_over(self.decoder.config)
            NOW.outer = given | {"module": module, "hooks": self}

    def _is_ours(self, given: dict[str, Any]) -> bool:
        return isinstance(given.get("past_key_values"), PassCache) or method_of(self.decoder) is not None

    @torch.compiler.disable
    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if NOW.outer is not None and NOW.outer["module"] is module:
            NOW.outer = None


def _goes_on(outer: dict[str, Any] | None, decoder: nn.Module, given: dict[str, Any]) -> TypeGuard[dict[str, Any]]:
    """Whether a call with these arguments is part of that pass, which may be one that Ctrl-C ended."""
    if outer is None or outer["hooks"].decoder is not decoder:
        return False
    cache = outer.get("past_key_values")
    return not isinstance(cache, PassCache) or cache is given.get("past_key_values")


def _check_causal(outer: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Refuses prompts and images whose tokens see each other whatever their order."""
    tokens = outer.get("input_ids") if outer.get("input_ids") is not None else outer.get("inputs_embeds")
    if tokens is None or tokens.shape[1] < 2:
        return
    batch, last = torch.arange(tokens.shape[0], device=tokens.device)[:, None], tokens.shape[1] - 1
    query, zero = torch.arange(last, device=tokens.device)[None], tokens.new_zeros((), dtype=torch.long)
    if bool(torch.as_tensor(kwargs["mask_function"](batch, zero, query, query + 1)).any()):
        raise ValueError(
            f"{type(outer['module']).__name__} lets tokens of this call see what follows them (as in images); "
            "a compressed cache reads in one direction: give text alone, to the text decoder if need be"
        )
