"""What a converted model is to the rest of the package: a method that attends in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from ..caches import CompressedCache

# A method is registered here and nowhere else: by the name in config.kvcompress, where its Method is.
METHODS = {"dmc": ("kvcompress.dmc.method", "DMCMethod"), "pod": ("kvcompress.pod.method", "PoDMethod")}
_ATTRIBUTE = "_kvcompress_method"
KEYWORD = "kvcompress_pass"  # by which a Pass travels from the decoder to its attention layers


class Pass(ABC):
    """One forward pass without a compressed cache. It is handed from layer to layer as an argument, so that gradient
    checkpointing gives the second run of a layer what the first one had."""

    @abstractmethod
    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """queries: [B, Hq, T, D], keys, values: [B, Hkv, T, D], before rotation. Returns [B, Hq, T, D]."""


class Method(ABC):
    """Lives on the decoder of an attached, converted model; no part of its state_dict."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def restore(cls, decoder: nn.Module, saved: dict[str, Any]) -> Method:
        """From what config.kvcompress says; ValueError for what this version does not know."""

    @abstractmethod
    def begin(self, decoder: Any, given: dict[str, Any]) -> Pass:
        """The coming forward pass, of the decoder's arguments."""

    @abstractmethod
    def check_cache(self, cache: CompressedCache) -> None:
        """Raises ValueError if the model's weights mean nothing to this cache."""

    @property
    @abstractmethod
    def cache_name(self) -> str:
        """What to generate with, for messages."""


def saved_method(decoder: Any) -> dict[str, Any] | None:
    """What a decoder's config says of its conversion; None if it was not converted."""
    return getattr(decoder.config, "kvcompress", None)


def method_of(decoder: nn.Module) -> Method | None:
    """The method of an attached decoder; None if it was not converted."""
    return vars(decoder).get(_ATTRIBUTE)


def set_method(decoder: nn.Module, method: Method | None) -> None:
    # past nn.Module.__setattr__ and state_dict: this is no part of the model
    if method is not None:
        object.__setattr__(decoder, _ATTRIBUTE, method)
    elif _ATTRIBUTE in vars(decoder):
        object.__delattr__(decoder, _ATTRIBUTE)


def restore_method(decoder: Any) -> None:
    """Gives a decoder the method that its config names, if it names one."""
    saved = saved_method(decoder)
    if saved is None:
        return
    if not isinstance(saved, dict) or saved.get("method") not in METHODS:
        raise ValueError(
            f"config.kvcompress must name a method ({', '.join(METHODS)}), got {saved!r}: saved by a newer version?"
        )
    module, name = METHODS[saved["method"]]
    set_method(decoder, getattr(import_module(module), name).restore(decoder, saved))
