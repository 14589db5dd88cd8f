"""The seam with transformers: un-rotated queries and keys of every family; no class swapped, and none known by name but
those whose attention is code of their own (own_attention).

Hooks on the rotary embeddings turn them into identities while a forward pass is one of ours (of a cache or of a
converted model): the family's own code projects, norms and rotates by nothing. An attention function registered with
transformers gets the result and asks the pass. Every other forward pass gets what the model had before, bit for bit.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    bidirectional_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops.opaque import Handled
from ..positions import parts
from . import compiled
from .answering import answer
from .argument import CACHE, cache_of
from .attending import begun, checked_call, hidden_of
from .config import has_indexers
from .encoders import STATES, beside_encoder
from .facts import Facts
from .indexing import shown
from .method import KEYWORD, Pass, PassCache, method_of
from .now import THREAD
from .own_attention import NoMask, OwnForward, needs_no_mask, own_forward
from .probe import ROWS, TOKENS, MaskTicket, Probe, like

PREFIX = "kvcompress_"
_SEAM = "_kvcompress_seam"
_REGISTERING = threading.Lock()


class _Weak:
    """A reference that keeps nothing alive, and that a copy of a model has to that copy."""

    def __init__(self, target: nn.Module) -> None:
        self._target = weakref.ref(target)

    def __call__(self) -> nn.Module:
        target = self._target()
        assert target is not None
        return target

    def __reduce__(self) -> Any:
        return _Weak, (self(),)


@dataclass(eq=False)
class Seam(Handled):
    """What attaching leaves on a decoder. arguments: of its forward, by position. references: how often it was
    attached. arrives: whether the family hands keywords down to its attention layers. guarded: whether it raised
    before (hf/guard). attributes: of the rotary embeddings, by their names, as they were before. attending: the modules
    that call the attention function. own: what stands on those that would not. watches: whether what enters them is
    noted."""

    decoder: _Weak
    arguments: tuple[str, ...]
    hooks: list[Any] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    references: int = 0
    arrives: bool = False
    guarded: bool = False
    attributes: dict[str, set[str]] = field(default_factory=dict)
    attending: list[_Weak] = field(default_factory=list)
    own: list[OwnForward] = field(default_factory=list)
    watches: bool = False

    def learned(self, facts: Facts, probe: Probe) -> None:
        """What a probe has found."""
        self.facts, self.arrives, self.attending = facts, probe.arrives, [_Weak(x) for x in probe.attending]

    def watch(self) -> None:
        """Has it noted, from now on, what enters each layer's attention."""
        with _REGISTERING:
            if not self.watches:
                for module in self.attending:
                    self.hooks.append(module().register_forward_pre_hook(_attention_before, with_kwargs=True))
                self.watches = True

    def __post_init__(self) -> None:
        self.take_handle()


def seam_of(decoder: nn.Module) -> Seam | None:
    """What attach left on a decoder; None if it is not attached."""
    return vars(decoder).get(_SEAM)


def open_seam(model: nn.Module, decoder: nn.Module) -> Seam:
    """Puts the hooks on a decoder, and on the multimodal models around it."""
    seam = Seam(_Weak(decoder), _positional(decoder))
    for depth, around in enumerate(model.modules()):
        if not isinstance(around, PreTrainedModel) or around.config.is_encoder_decoder:  # which makes no masks
            continue
        if around.config is not decoder.config and decoder in around.modules():
            outer = _Outer(decoder, depth, _positional(around))
            seam.hooks.append(around.register_forward_pre_hook(outer.before, with_kwargs=True))
            seam.hooks.append(around.register_forward_hook(outer.after, with_kwargs=True, always_call=True))
    seam.hooks.append(decoder.register_forward_pre_hook(_decoder_before, with_kwargs=True))
    seam.hooks.append(decoder.register_forward_hook(_decoder_after, with_kwargs=True, always_call=True))
    for name, module in decoder.named_modules():
        if is_rotary(module):
            seam.attributes[name] = set(vars(module))
            seam.hooks.append(module.register_forward_pre_hook(_rotary_before, with_kwargs=True))
            seam.hooks.append(module.register_forward_hook(_rotary_after, with_kwargs=True))
        elif (own := own_forward(module, _implementation)) is not None:
            seam.own.append(own)
    # past nn.Module.__setattr__ and state_dict: this is no part of the model
    object.__setattr__(decoder, _SEAM, seam)
    return seam


def close_seam(decoder: Any) -> None:
    """Takes them off again."""
    seam = seam_of(decoder)
    assert seam is not None
    for hook in seam.hooks:
        hook.remove()
    for own in seam.own:
        own.undo()
    for name, module in decoder.named_modules():
        for new in vars(module).keys() - seam.attributes.get(name, vars(module).keys()):
            if "inv_freq" in new:  # those of long prompts (longrope), which any call settles anew
                delattr(module, new)
    object.__delattr__(decoder, _SEAM)
    config = decoder.config
    config._attn_implementation_internal = _implementation(config)


@contextmanager
def evaluating(decoder: nn.Module) -> Iterator[None]:
    """All modules in evaluation mode, and afterwards as they were, frequencies that depend on length included."""
    modes = [(module, module.training) for module in decoder.modules()]
    rotary = [module for module in decoder.modules() if is_rotary(module)]
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


def is_rotary(module: nn.Module) -> bool:
    return any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))


# ---- attention and mask functions ----


def _is_taken_over(config: Any) -> bool:
    return (config._attn_implementation or "").startswith(PREFIX)


def _implementation(config: Any) -> str | None:
    """That of the attention of an attached decoder, as it was before."""
    return (config._attn_implementation or "").removeprefix(PREFIX) or None


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
        layer, ours = answer(module, query, key, value, attention_mask, kwargs)
        if ours is not None:
            return ours, None
        if name in ("eager", "sdpa") and kwargs.get("indices") is not None:  # such families look for these names
            attention_mask = shown(attention_mask, kwargs.pop("indices"), key.shape[2], query.dtype)
        out = _before(module, name)(module, query, key, value, attention_mask, **kwargs)
        if (watcher := THREAD.now.watcher) is not None:
            watcher(layer, out[0])
        return out

    def mask(*args: Any, **kwargs: Any) -> Any:
        now = THREAD.now
        across = kwargs.get("mask_function") is bidirectional_mask_function  # to an encoder's keys
        own = needs_no_mask(kwargs.get("config"))
        if now.ours and own and not across:
            return NoMask()
        if now.probe is not None and not own:  # whose own code attends to an encoder, by a mask
            return MaskTicket(kwargs["mask_function"], indexed=has_indexers(kwargs.get("config")))
        if now.outer is None and (across or not now.ours):
            return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)
        if now.outer is not None:
            _check_causal(now.outer, kwargs)
        return NoMask() if has_indexers(kwargs.get("config")) else None

    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(PREFIX + name, mask)
    AttentionInterface.register(PREFIX + name, attention)


def _attention_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    now = THREAD.now
    if now.handle is not None or now.current is not None:
        now.entered = module, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0] if args else None


def _before(module: nn.Module, name: str) -> Any:
    """The attention function that the family would have called; "eager" is in the family's own file."""
    eager = None
    for cls in type(module).__mro__:
        eager = eager or getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


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
    now = THREAD.now
    if not now.ours:
        return None
    at = _position_ids(args, kwargs)
    if now.probe is not None:
        new = now.probe.positions.to(at.device).expand(*at.shape[:-2], ROWS, TOKENS)
    else:
        new = at.new_full((*at.shape[:-2], 1, 1), _settled(module, args, kwargs))
    return (args, kwargs | {"position_ids": new}) if "position_ids" in kwargs else ((args[0], new, *args[2:]), kwargs)


def _rotary_after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    now = THREAD.now
    if not now.ours:
        return None
    if now.probe is not None:
        rest = {name: x for name, x in kwargs.items() if name != "position_ids"}
        behind = args[2:] if "position_ids" not in kwargs else args[1:]
        return now.probe.rotary(module, behind, rest, _position_ids(args, kwargs), out)
    cos, sin = parts(out)
    x = args[0] if args else kwargs.get("x")
    tokens = x.shape[-2] if isinstance(x, Tensor) else 1
    shape = (*cos.shape[:-3], 1, tokens, cos.shape[-1])
    return like(out, torch.ones_like(cos).expand(shape), torch.zeros_like(sin).expand(shape))


# ---- the decoder ----


def _decoder_before(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_dynamo_compiling():
        seam = seam_of(decoder)
        assert seam is not None
        given = _named(seam.arguments, args, kwargs)
        outer = _masked_as_outer(decoder, given)
        if _is_taken_over(decoder.config) and compiled.before(decoder, seam, given):
            return None if outer is None else ((), given)
    return _begin(decoder, args, kwargs)


@torch.compiler.disable(reason="kvcompress begins or refuses this pass uncompiled: without fullgraph=True it says why")
def _begin(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _take_over(decoder.config)  # set_attn_implementation may have been called since
    now = THREAD.now
    if now.probe is not None:
        return None
    now.over()  # of a pass that an error ended
    seam = seam_of(decoder)
    assert seam is not None
    given = _named(seam.arguments, args, kwargs)
    _masked_as_outer(decoder, given)
    cache, method = cache_of(given), method_of(decoder)
    current: Pass | None = given.pop(KEYWORD, None) or now.coming
    if given.get(STATES) is None and (current is not None or isinstance(cache, PassCache)):
        seam.facts.check_alone("a pass without encoder_hidden_states")
    if current is None and isinstance(cache, PassCache):
        call, current = begun(decoder, seam.facts, cache, given, _shifted(now.outer))
        if call.tokens is not given[call.name]:  # the cache has read some of them already
            at = call.axes if call.position_ids is None else call.position_ids
            given |= {call.name: call.tokens, "position_ids": at}
        if given.get(STATES) is not None:
            given = beside_encoder(given)
    elif current is None and method is not None:
        if cache is not None:
            raise ValueError(
                f"{CACHE} must be {method.cache_name} for this converted model, or None, got "
                f"{type(cache).__name__}; generate of the attached model makes it where none is given"
            )
        whole = checked_call(decoder, seam.facts, given)
        whole.need_text(f"a model converted to {method.title} has learned one position a token")
        current = method.begin(whole)
        given["use_cache"] = False  # there is nothing to keep for later
    if current is None:
        return None
    if current.wants_entering:
        seam.watch()
    if isinstance(cache, PassCache):
        now.handle = cache.handle
    else:
        _check_checkpointing(decoder, seam)
        if seam.arrives:
            given[KEYWORD] = current
    now.current = current
    return (), given


def _decoder_after(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    now = THREAD.now
    if now.probe is not None:
        return
    if torch.compiler.is_dynamo_compiling():
        compiled.after(output)
        return
    current, cache = now.current, cache_of(kwargs)
    now.over()
    if current is not None and current.ends_cache and isinstance(cache, PassCache) and output is not None:
        _end(cache, current, output)


@torch.compiler.disable
def _end(cache: PassCache, current: Pass, output: Any) -> None:
    cache.end(current, hidden_of(output))


def _positional(module: nn.Module) -> tuple[str, ...]:
    """Arguments that a module takes by position."""
    every = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return tuple(x.name for x in every if x.kind is x.POSITIONAL_OR_KEYWORD)


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name. names: by position."""
    if len(args) > len(names):
        raise TypeError(f"the model takes {len(names)} arguments by position, got {len(args)}")
    return dict(zip(names, args, strict=False)) | kwargs if args else dict(kwargs)


def _masked_as_outer(decoder: nn.Module, given: dict[str, Any]) -> dict[str, Any] | None:
    """What the model around the decoder was given, if this call of the decoder is of its pass. It has made masks of its
    padding; there are none in a pass of ours."""
    now = THREAD.now
    if not _goes_on(now.outer, decoder, given):
        now.outer = None
        return None
    given["attention_mask"] = now.outer.get("attention_mask")
    return now.outer


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
    """Hooks of a model that makes masks itself and hands them to its decoder. depth: greater than those around it.
    arguments: of its forward, by position."""

    decoder: nn.Module
    depth: int
    arguments: tuple[str, ...]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = THREAD.now
        given, outer = _named(self.arguments, args, kwargs), now.outer
        if now.probe is not None or (_goes_on(outer, self.decoder, given) and outer["hooks"].depth < self.depth):
            return
        now.over()  # Ctrl-C runs no hook behind a pass
        now.outer = None
        if self._is_ours(given):
            _take_over(self.decoder.config)
            now.outer = given | {"module": module, "hooks": self}

    def _is_ours(self, given: dict[str, Any]) -> bool:
        return isinstance(cache_of(given), PassCache) or method_of(self.decoder) is not None

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        now = THREAD.now
        if now.outer is not None and now.outer["module"] is module:
            now.outer = None


def _goes_on(outer: dict[str, Any] | None, decoder: nn.Module, given: dict[str, Any]) -> TypeGuard[dict[str, Any]]:
    """Whether a call with these arguments is part of that pass, which may be one that Ctrl-C ended."""
    if outer is None or outer["hooks"].decoder is not decoder:
        return False
    cache = cache_of(given)
    # torch.compile knows a cache by where it finds it first: as an argument, so that its length is no constant
    if isinstance(cache, PassCache) and cache is cache_of(outer):
        return True
    return not isinstance(cache_of(outer), PassCache)


def _shifted(outer: dict[str, Any] | None) -> Tensor | None:
    """What a multimodal model adds to the numbers of text tokens since the last image (M-RoPE): it keeps that itself,
    and knows of no cache whose image it was."""
    around = () if outer is None else (outer["module"], *outer["module"].children())
    found = (getattr(module, "rope_deltas", None) for module in around)
    return next((x for x in found if isinstance(x, Tensor)), None)


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
