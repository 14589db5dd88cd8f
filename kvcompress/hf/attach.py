"""attach and detach: make one model understand compressed caches, and undo it without a trace."""

from __future__ import annotations

import inspect
import threading
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from ..ops.driver import check_driver
from .adapters import check_adapter
from .argument import CACHE
from .config import cache_layers, check_version, recurs
from .encoders import beside_encoder, silent_encoder
from .facts import Facts
from .generation import make_no_caches, make_own_caches
from .guard import guard, is_guarded, set_guard
from .method import KEYWORD, method_of, restored_method, set_method
from .now import THREAD, NotedCache
from .probe import ROWS, TOKENS, Probe
from .seam import close_seam, evaluating, open_seam, seam_of
from .verify import verify_layers

_CHANGING = threading.RLock()  # models are attached and detached one at a time


class Attachment:
    """What attach returns; as a context manager it gives its attachment up at the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def detach(self) -> None:
        detach(self.model)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def base_model(model: nn.Module) -> Any:
    """The text decoder inside a model (with or without head, in a multimodal model, wrapped by PEFT or not)."""
    top = _top(model)
    inner = top.get_decoder()
    return inner if isinstance(inner, PreTrainedModel) else top


def _top(model: nn.Module) -> PreTrainedModel:
    """The transformers model that is all of a model, or what wraps it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    top = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)  # PEFT's is none
    if top is None:
        raise ValueError(f"{type(model).__name__} is not supported: there is no transformers model in it")
    return top


def attach(model: nn.Module, *, verify: bool = False) -> Attachment:
    """Makes `model` use compressed caches when it is given one; with any other cache it runs as before, bit for bit.

    model: a transformers model of any decoder family, PEFT-wrapped or not. What its layers are is learned from one
    forward pass over eight tokens. No parameter is added and state_dict does not change. A converted model
    (config.kvcompress) gets its method back: without a cache it attends as in training, with its method's cache as that
    does, and other caches are refused; its generate makes such a cache where it is given none. verify: compares with
    the dense model on a few tokens, and raises RuntimeError that names the first layer that differs (of a converted
    model, in the attention that it had before).
    Attachments are counted: a model stays attached until each of them was given up, by detach or by leaving its `with`.
    Returns a context manager that gives up what this call attached.
    Raises ValueError for a model that cannot be attached, with the reason, and for a conversion that this version does
    not know; TypeError for what is no model; RuntimeError for one on CUDA where the driver is too old for our kernels.
    """
    return _attach(model, verify, runs=True)


def attach_to_learn(model: nn.Module) -> Attachment:
    """The same, for facts alone: another engine runs the model, and needs no cache of transformers'."""
    return _attach(model, False, runs=False)


def _attach(model: nn.Module, verify: bool, runs: bool) -> Attachment:
    decoder = base_model(model)
    check_adapter(model)
    if any(weight.is_cuda for weight in decoder.parameters()):  # now, not in the middle of the first prompt
        check_driver()
    with _CHANGING:
        seam = seam_of(decoder)
        if seam is None:
            guarded = is_guarded(decoder)
            if guarded:
                set_guard(decoder, False)
            seam = open_seam(model, decoder)
            seam.guarded = guarded
            try:
                seam.learned(*_learned(model, decoder, runs))
                if (method := restored_method(decoder)) is not None:
                    method.check_facts(decoder, seam.facts)
                    set_method(decoder, method)
                    guard(model, decoder)
            except BaseException:
                _close(model, decoder)
                raise
            make_own_caches(_top(model), decoder)
        seam.references += 1
        if verify:
            method = method_of(decoder)
            set_method(decoder, None)  # what it does in place of attention has no dense model to compare with
            try:
                verify_layers(decoder, seam.facts)
            except BaseException:
                set_method(decoder, method)
                detach(model)
                raise
            set_method(decoder, method)
    return Attachment(model)


def detach(model: nn.Module) -> None:
    """Gives one attachment up; does nothing to a model that is not attached."""
    decoder = base_model(model)
    with _CHANGING:
        seam = seam_of(decoder)
        if seam is None:
            return
        seam.references -= 1
        if seam.references < 1:
            _close(model, decoder)
            set_method(decoder, None)


def _close(model: nn.Module, decoder: Any) -> None:
    """A decoder is again as it was before it was attached."""
    seam = seam_of(decoder)
    assert seam is not None
    close_seam(decoder)
    make_no_caches(_top(model))
    if seam.guarded:
        set_guard(decoder, True)


def is_attached(model: nn.Module) -> bool:
    return seam_of(base_model(model)) is not None


def facts_of(decoder: nn.Module) -> Facts:
    """What the layers of an attached decoder are. Raises RuntimeError if it is not attached."""
    seam = seam_of(decoder)
    if seam is None:
        raise RuntimeError("model is not attached: call kvcompress.attach(model) first")
    return seam.facts


def learn_again(model: nn.Module) -> None:
    """Of an attached model whose layers have changed, what they are now; of others nothing."""
    decoder = base_model(model)
    with _CHANGING:
        if (seam := seam_of(decoder)) is not None:
            seam.learned(*_learned(model, decoder))


@torch.inference_mode(False)
@torch.no_grad()
def _learned(model: nn.Module, decoder: Any, runs: bool = True) -> tuple[Facts, Probe]:
    """The facts of every layer, and what they were learned by in one forward pass. runs: by transformers, too."""
    probe = Probe(getattr(decoder.config, "max_position_embeddings", None) or 512)
    weight = next(p for p in decoder.parameters() if p.is_floating_point())
    tolerance = 1e-3 if weight.dtype == torch.float32 else 5e-2
    hooks = [
        module.register_forward_hook(lambda norm, args, out: probe.normed(norm, args[0] if args else None, out))
        for module in decoder.modules()
        if "norm" in type(module).__name__.lower()
    ]
    device = "cpu" if weight.device.type == "meta" else weight.device  # offloaded: accelerate moves its inputs
    size = decoder.config.vocab_size
    tokens = torch.arange(TOKENS, device=device) * 7 % max(size // 2, 1) + size // 4
    parameters = inspect.signature(type(decoder).forward).parameters
    try:
        if CACHE not in parameters:
            raise ValueError(f"its decoder takes no {CACHE}")
        if "input_ids" not in parameters:
            raise ValueError(f"{type(decoder).__name__} takes no input_ids, by which decoders are given their tokens")
        layers = cache_layers(decoder.config)
        if runs:
            check_version(decoder.config, layers)
        takes = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
        crosses = probe.crosses = _top(model).config.is_encoder_decoder
        with evaluating(decoder), torch.autocast(torch.device(device).type, enabled=False):
            THREAD.now.probe = probe
            cache = NotedCache(decoder.config, keeps=False, note=probe.updated)
            given: dict[str, Any] = {CACHE: cache} | ({KEYWORD: probe} if takes else {})
            if crosses:
                given = beside_encoder(given) | silent_encoder(decoder, tokens, ROWS)
            decoder(input_ids=tokens.expand(ROWS, -1), use_cache=True, **given)
            facts = probe.facts(tolerance)
            facts.asks_length, facts.crosses = cache.asked, crosses
            facts.loops = len(probe.attending) < len(facts)
            THREAD.now.probe = None
            if recurs(layers):
                facts.reads_chunks, facts.hands_states = _recurrence(decoder, tokens, tolerance)
            biased = takes and all(own.beside for own in facts.values())  # positions count in attention alone
            told = biased or "position_ids" in parameters
            facts.takes_positions = told and _counts_from_0(decoder, tokens, tolerance, crosses)
        return facts, probe
    except Exception as error:
        raise ValueError(f"{type(model).__name__} is not supported: {error}") from error
    finally:
        THREAD.now.probe = THREAD.now.layer = None
        for hook in hooks:
            hook.remove()


def _counts_from_0(decoder: Any, tokens: torch.Tensor, tolerance: float, crosses: bool) -> bool:
    """Whether the dense model gives the same where it is told the places of its tokens, from 0 on."""
    encoder = silent_encoder(decoder, tokens, 1) if crosses else {}
    given = {"position_ids": torch.arange(TOKENS, device=tokens.device)[None]}
    own, told = (decoder(input_ids=tokens[None], use_cache=False, **encoder, **more)[0] for more in ({}, given))
    return bool((own - told).norm() <= tolerance * own.norm())


def _recurrence(decoder: Any, tokens: torch.Tensor, tolerance: float) -> tuple[bool, bool]:
    """Whether the dense model gives the same in two calls of several tokens as in one, and whether all its recurrent
    layers hand their states to the cache."""
    cache, half = DynamicCache(config=decoder.config), TOKENS // 2
    whole = decoder(input_ids=tokens[None], use_cache=True, **{CACHE: DynamicCache(config=decoder.config)})[0]
    decoder(input_ids=tokens[None, :half], use_cache=True, **{CACHE: cache})
    end = decoder(input_ids=tokens[None, half:], use_cache=True, **{CACHE: cache})[0]
    # families that carry their states on differ by rounding, those that begin anew by 2 % and more
    same = bool((end - whole[:, half:]).norm() <= tolerance / 10 * end.norm())
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    held = [(*layer.conv_states.values(), *layer.recurrent_states.values()) for layer in layers]
    return same, all(any(state is not None for state in states) for states in held)
