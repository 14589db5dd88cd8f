"""What attends in a family's place: passes, the caches that give them, and the methods of converted models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor, nn

from ..ops.opaque import Handled
from ..ops.softmax import Softmax
from ..support.checks import refuse_misspelt
from .facts import Facts
from .indexing import Index

if TYPE_CHECKING:
    from typing_extensions import Self

# A method is registered here and nowhere else: by the name in config.kvcompress, where its Method is.
METHODS = {"dmc": ("kvcompress.dmc.method", "DMCMethod"), "pod": ("kvcompress.pod.method", "PoDMethod")}
_ATTRIBUTE = "_kvcompress_method"
KEYWORD = "kvcompress_pass"  # by which a Pass travels from the decoder to its attention layers


@dataclass(eq=False)
class Call:
    """One call of a decoder. name, tokens: what brings them, input_ids [B, T] or inputs_embeds [B, T, hidden].
    attention_mask, position_ids: as given, None where they are not. axes: where tokens stand elsewhere on each axis, as
    those of an image (M-RoPE), in place of position_ids: [A, B, T]. shifted: [B or 1, 1], what the model has added to
    tokens' numbers behind the image that it saw last, this cache's or another's."""

    decoder: Any
    facts: Facts
    name: str
    tokens: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    axes: Tensor | None = None
    shifted: Tensor | None = None

    def skip(self, columns: int) -> None:
        """Leaves the first columns out."""
        if columns:
            self.tokens = self.tokens[:, columns:]
            self.position_ids = None if self.position_ids is None else self.position_ids[..., columns:]
            self.axes = None if self.axes is None else self.axes[..., columns:]

    def need_text(self, why: str) -> None:
        """Raises ValueError for an image or video. why: what it is that takes none."""
        if self.axes is not None:
            raise ValueError(
                f"position_ids must be the same on every axis, got those of an image or video: {why}; give text"
            )


class Pass(ABC):
    """One forward pass in which we attend. It is handed from layer to layer as an argument where the family hands
    arguments down, so that gradient checkpointing gives the second run of a layer what the first one had.

    A plain object: FSDP2 makes new dataclasses of those that it finds among a layer's arguments.

    wants_entering: whether it is to be told what enters each layer's attention. entering: [B, 1, T, n], that of the
    layer that attends, as queries of one head. ends_cache: whether the cache of its call is told when the decoder has
    run; who opened the pass does else. chooses: whether it goes by layers' indexers. index: that of the layer that
    attends, None = it has none.
    """

    facts: Facts
    ends_cache: bool = True
    wants_entering: bool = False
    entering: Tensor | None = None
    chooses: bool = False
    index: Index | None = None

    @abstractmethod
    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """queries: [B, Hq, T, D], keys, values: [B, Hkv, T, D], before rotation. Returns [B, Hq, T, D]."""


class PassCache(Handled, ABC):
    """A cache that attends itself: the seam asks it for a pass, and tells it when that is over.

    wants_entering: whether its passes do, see Pass.
    """

    wants_entering: bool = False

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Says how a misspelt setting is written; all others __init__ takes, or refuses."""
        refuse_misspelt(cls, given)
        return super().__new__(cls)

    @property
    @abstractmethod
    def rereads(self) -> bool:
        """Whether the coming pass may bring tokens that it has read already, which begin leaves out of the call."""

    @abstractmethod
    def begin(self, call: Call) -> Pass:
        """The coming forward pass. Raises, before anything is stored, for what it cannot do."""

    @abstractmethod
    def end(self, current: Pass, hidden: Tensor | None) -> None:
        """Every layer has attended. hidden: [B, T, hidden size], what the decoder returns, where it says so."""


class Method(ABC):
    """Lives on the decoder of an attached, converted model; no part of its state_dict.

    title: for messages. config_class: to_dict, from_dict and check_model(config of a model), which raise ValueError.
    """

    title: ClassVar[str]
    config_class: ClassVar[Any]
    cache_class: ClassVar[type[PassCache]]

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def restore(cls, decoder: Any, saved: dict[str, Any]) -> Method:
        """From what config.kvcompress says; ValueError for what this version does not know."""
        config = cls.config_class.from_dict(saved)
        config.check_model(decoder.config)
        return cls(config)

    def store(self, decoder: Any) -> None:
        decoder.config.kvcompress = self.config.to_dict()

    @abstractmethod
    def check_facts(self, decoder: nn.Module, facts: Facts) -> None:
        """Raises ValueError for a family that the method cannot take, with the reason."""

    @abstractmethod
    def begin(self, call: Call) -> Pass:
        """The coming forward pass without a cache."""

    def check_cache(self, cache: PassCache) -> None:
        """Raises ValueError if the model's weights mean nothing to this cache."""
        if not isinstance(cache, self.cache_class):
            raise ValueError(f"a model converted to {self.title} needs {self.cache_name}, got {type(cache).__name__}")

    def new_cache(self, config: Any) -> PassCache:
        """What generation uses where it is given none. config: of the model."""
        return self.cache_class(config)

    def fit_base(self, decoder: Any, facts: Facts) -> None:
        """Makes the weights of a plain model those that an adapter of a converted one stands on."""
        del decoder, facts

    @property
    def cache_name(self) -> str:
        """What to generate with, for messages."""
        return f"kvcompress.{self.cache_class.__name__}(model.config)"


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


def method_class(name: str) -> type[Method]:
    """The Method registered as `name`."""
    module, found = METHODS[name]
    return cast(type[Method], getattr(import_module(module), found))


def restored_method(decoder: Any) -> Method | None:
    """The method that a decoder's config names; None if it names none."""
    saved = saved_method(decoder)
    if saved is None:
        return None
    if not isinstance(saved, dict) or saved.get("method") not in METHODS:
        raise ValueError(
            f"config.kvcompress must name a method ({', '.join(METHODS)}), got {saved!r}: saved by a newer version?"
        )
    return method_class(saved["method"]).restore(decoder, saved)
