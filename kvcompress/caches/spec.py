"""Caches as text: "pruned,pruner=snapkv,keep=1/4" makes a cache for every prompt."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from .. import budgets, profiles, pruners
from ..budgets import DIVIDES, Budget
from ..heads import HeadProfile
from ..hf.config import decoder_config
from ..hf.method import METHODS, method_class
from ..positions import RemoteGap
from ..profiles import BudgetProfile
from ..pruners import Gates, Pruner, ScoreProfile
from ..support.checks import meant_by
from ..support.kvpress_names import KEEPS, SETTINGS, class_of, in_ours
from ..support.units import Keep, Size, instead_of, tokens_of, whole_of
from .base import trained_length_of
from .dense import QuantizedCache
from .formats import FORMATS
from .iterative import IterativeCache
from .pruned import PrunedCache
from .quest import QuestCache
from .streaming import StreamingCache

DENSE = "dense"
_IDS = tuple[int, ...]
_DTYPES = tuple[str | None, ...]
_UNTRAINED: dict[str, type[Cache]] = {
    "iterative": IterativeCache, "pruned": PrunedCache, "quantized": QuantizedCache, "quest": QuestCache,
    "streaming": StreamingCache,
}  # fmt: skip
_ABOVE = {"gated": ("kvcompress.gates.cache", "GatedCache")}  # of folders that import from this one
_SIZES = {"iterative": "memory_size", "pruned": "keep", "streaming": "window_size"}  # settings in tokens per row
KINDS = (DENSE, *sorted((*_UNTRAINED, *_ABOVE, *METHODS)))


def _concrete(module: types.ModuleType, base: type) -> dict[str, type]:
    """The classes of a module that can be made, by their names in lower case."""
    found = (x for x in vars(module).values() if isinstance(x, type) and issubclass(x, base))
    return {x.__name__.lower(): x for x in found if not inspect.isabstract(x)}


PROFILES = (BudgetProfile, HeadProfile, ScoreProfile, Gates)
PRUNERS, BUDGETS = _concrete(pruners, Pruner), _concrete(budgets, Budget) | _concrete(profiles, Budget)


class UnknownKey(ValueError):
    """A setting that nothing here has."""


@dataclass(frozen=True)
class CacheSpec:
    """What cache to make, as it is written on a command line: CacheSpec.parse(text).make(model.config).

    kind: dense (transformers' DynamicCache), quantized, pruned, iterative, streaming, quest, or a trained method: dmc
    (DMS too), pod. given: its settings as text, by name. The names are those of the cache's constructor in Python;
    `pruner` takes a pruner's class in lower case, and the pruner's own fields stand beside it; one that asks another is
    written criticalkv:tova or chunkkv:snapkv:window=64. keep is tokens (1024 or 1k), the share that stays (1/4, 25% or
    0.25) or bytes (512MiB), other counts of tokens 1024 or 1k; budget says how they are divided over layers and heads,
    with fields of its own: globaltopk, adakv:floor=0.3, and one in another adakv:floor=0.3:pyramidkv:beta=10. A
    profile's file stands behind its name: profiled:shares.json, duoattention:heads.json. preset is a field of pruners
    and budgets that have presets: snapkv:preset=kvpress:window=32. positions takes remotegap, or
    remotegap:gap=512:headroom=64. dtype may be written for each layer: 2*none+30*int8.

        pruned,pruner=snapkv,window=64,keep=1/4
        pruned,pruner=tova,preset=kvpress,keep=1k,budget=pyramidkv:preset=kvpress
        cache=iterative,memory_size=1024,chunk_size=512,schedule=sqrt,dynamic=true

    Raises ValueError for an unknown kind, key or pruner, with those that are known, and for a value of the wrong type;
    what is out of range for a cache, `make` refuses.
    """

    kind: str
    given: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            hint = f": that is a pruner, as in pruned,pruner={self.kind}" if self.kind.lower() in PRUNERS else ""
            hint = f": that is a dtype, as in quantized,dtype={self.kind}" if self.kind in FORMATS else hint
            hint = hint or meant_by(self.kind, KINDS)
            raise ValueError(f"cache must be one of {', '.join(KINDS)}, got {self.kind!r}{hint}")
        _ = self._settings  # refuses what cannot be read

    @staticmethod
    def parse(text: str) -> CacheSpec:
        """Of "kind,key=value,..." or "cache=kind,key=value,..."; order means nothing but that a bare kind is first."""
        given: dict[str, str] = {}
        for number, item in enumerate(text.split(",")):
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals and number == 0:
                key, value = "cache", key
            elif not equals or not key:
                raise ValueError(f"cache must be written as kind,key=value,..., got {item!r} in {text!r}")
            if key in given:
                raise ValueError(f"{key} must be given once, got {given[key]!r} and {value!r} in {text!r}")
            given[key] = value
        if "cache" not in given:
            raise ValueError(f"cache must be one of {', '.join(KINDS)}, got none in {text!r}")
        return CacheSpec(given.pop("cache"), given)

    @staticmethod
    def of(kind: str, settings: Mapping[str, object]) -> CacheSpec:
        """Of settings that another parser has read already: text, numbers, booleans, None."""
        return CacheSpec(kind, {key: _written(key, value) for key, value in settings.items()})

    @staticmethod
    def kind_of(config: PreTrainedConfig) -> str | None:
        """The kind that a converted model needs; None for a model that is not converted."""
        saved = getattr(decoder_config(config), "kvcompress", None)
        return None if saved is None else saved["method"]

    def make(self, config: PreTrainedConfig, tokenizer: Any = None) -> Cache:
        """A new cache for one conversation, or a batch of them. tokenizer: of what a pruner asks in words (KVzip); None
        = it asks without."""
        if self.kind == DENSE:
            return DynamicCache(config=decoder_config(config))
        settings = dict(self._settings)
        if tokenizer is not None and isinstance(pruner := settings.get("pruner"), Pruner):
            settings["pruner"] = pruner.with_tokenizer(tokenizer)
        return self._class(config, **settings)

    def __str__(self) -> str:
        return ",".join([self.kind, *(f"{key}={value}" for key, value in self.given.items())])

    @property
    def size_key(self) -> str | None:
        """The setting that says how many tokens stay in a row; None where there is none: quest keeps all."""
        pruner = self._settings.get("pruner")
        own = isinstance(pruner, Pruner) and pruner.own_budget is not None
        return None if own else _SIZES.get(self.kind)

    def sized(self, size: Size) -> CacheSpec:
        """The same with so many tokens per row, whatever the size was; how a budget divides them stays. keep takes a
        share and bytes too. Raises ValueError where there is no size to set."""
        if self.size_key is None:
            raise ValueError(f"cache must have a size to set ({', '.join(_SIZES)}), got {self}")
        return CacheSpec(self.kind, {**self.given, self.size_key: str(size)})

    # ---- names ----

    @property
    def _class(self) -> type[Cache]:
        if self.kind in _ABOVE:
            module, name = _ABOVE[self.kind]
            return typing.cast(type[Cache], getattr(importlib.import_module(module), name))
        return _UNTRAINED.get(self.kind) or typing.cast(type[Cache], method_class(self.kind).cache_class)

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        owner = f"cache={self.kind}"
        taken = {} if self.kind == DENSE else _parameters(self._class)
        rest, settings = dict(self.given), {}
        if "pruner" in taken and rest.get("pruner", "none") != "none":
            text = rest.pop("pruner")
            name = text.partition(":")[0]
            fields = _fields(_pruner(name))
            own = {key: rest.pop(key) for key in list(rest) if key in fields and key not in taken}
            settings["pruner"] = _nested(text, _pruner(name), _read(own, fields, f"pruner={name}"))
            if unknown := [key for key in rest if key not in taken]:
                raise _unknown_key(unknown[0], owner, taken, f"; of pruner={name}: {', '.join(fields) or 'none'}")
        more = "; and those of a pruner, beside pruner=..." if "pruner" in taken else ""
        found = settings | _read(rest, taken, owner, more)
        for key, parameter in {} if self.kind == DENSE else inspect.signature(self._class).parameters.items():
            if key != "config" and parameter.default is parameter.empty and key not in found:
                raise ValueError(f"{self.kind} needs {key}, as in {self.kind},{key}={_example(taken[key])}, got {self}")
        if self.kind == "gated" and not found.keys() & {"keep", "threshold"}:
            raise ValueError(
                f"gated needs keep, as in {self},keep=1/4: gates decide token by token, and no size is set for them"
            )
        return found


# ---- values ----


def _parameters(made: type) -> dict[str, frozenset[type]]:
    """What a class can be given besides a config: the types that each may have."""
    hints = typing.get_type_hints(vars(made)["__init__"])
    names = [name for name in inspect.signature(made).parameters if name != "config"]
    unions = (types.UnionType, typing.Union)
    return {
        name: frozenset(typing.get_args(hints[name]) if typing.get_origin(hints[name]) in unions else [hints[name]])
        for name in names
    }


def _fields(made: type) -> dict[str, frozenset[type]]:
    """Of a pruner, a budget or positions: what it can be given, and a preset where it has such."""
    return _parameters(made) | ({"preset": frozenset([str])} if hasattr(made, "preset") else {})


def _unknown_key(key: str, owner: str, known: Mapping[str, Any], more: str = "") -> UnknownKey:
    ours = SETTINGS.get(key, "")
    if (old := key.replace("-", "_")) in KEEPS and "keep" in known:
        more += f"; {key} is {KEEPS[old]} here"
    if key == "keep" and (size := next((name for name in (*_SIZES.values(), "token_budget") if name in known), None)):
        more += f"; its size is {size}"
    hint = (
        f"; kvpress's {key} is {in_ours(key)} here"
        if ours in known or (re.search(rf"\b{ours}\b", more) and ours)
        else ""
    )
    hint = hint or meant_by(key, known)
    return UnknownKey(f"{owner} has no {key!r}; known are {', '.join(known) or 'none'}{more}{hint}")


def _read(given: Mapping[str, str], known: Mapping[str, frozenset[type]], owner: str, more: str = "") -> dict[str, Any]:
    for key in given:
        if key not in known:
            raise _unknown_key(key, owner, known, more)
    return {key: _value(key, text, known[key]) for key, text in given.items()}


ROOM = 256  # positions behind a text that Replay asks at
MEMORY = 1024  # tokens of a row, of a cache that nobody has asked for


def unasked(config: PreTrainedConfig, tokens: int | None = None, *, later: str | None = None) -> CacheSpec:
    """The cache of a command that was given none. tokens: that come in all, the answer included; None = nobody knows.

    A converted model's own. Else, where all that comes stays within the model's trained length, PrunedCache with 1,024
    tokens a row, which no question need be known for; where it may not, IterativeCache, whose memory is half of that
    length, from 1,024 to 4,096 tokens. later: PrunedCache's, None = its default.
    """
    if (kind := CacheSpec.kind_of(config)) is not None:
        return CacheSpec(kind, {})
    trained = trained_length_of(config)
    if tokens is not None and tokens + ROOM <= trained:
        return CacheSpec("pruned", {"keep": str(MEMORY), **({} if later is None else {"later": later})})
    memory = min(max(trained // 2, MEMORY), 4 * MEMORY)
    return CacheSpec("iterative", {} if memory == MEMORY else {"memory_size": str(memory)})


def _pruner(name: str) -> type:
    if name.lower() not in PRUNERS:
        meant = meant_by(class_of(name).lower(), PRUNERS)
        raise ValueError(f"pruner must be one of {', '.join(sorted(PRUNERS))}, got {name!r}{meant}")
    return PRUNERS[name.lower()]


def _value(key: str, text: str, allowed: frozenset[type]) -> Any:
    """The first of the allowed types that a text can be read as."""
    lower, name = text.lower(), text.partition(":")[0]
    if type(None) in allowed and lower == "none":
        return None
    if key == "keep":
        Keep.of(text)
    if Budget in allowed and (keep := instead_of(text, quoted=False)) is not None:
        raise ValueError(f"{key} {DIVIDES} {keep}; got {text!r}")
    if Budget in allowed and name in BUDGETS:
        return _nested(text, BUDGETS[name])
    if RemoteGap in allowed and name == "remotegap":
        return _nested(text, RemoteGap)
    if Pruner in allowed:
        return _nested(text, _pruner(name))
    for profile in PROFILES:
        if profile in allowed:
            return profile.load(text)
    if bool in allowed and lower in ("true", "false"):
        return lower == "true"
    if int in allowed and (whole := whole_of(text)) is not None:
        return whole
    if key == "keep" and str in allowed:  # 1 is a token and no share, whatever else the cache takes
        return float(text) if re.fullmatch(r"\d*\.\d+", text) else text
    if float in allowed and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        return float(text)
    if _IDS in allowed and re.fullmatch(r"\d+(\+\d+)*", text):
        return tuple(map(int, text.split("+")))
    if name in BUDGETS:
        raise ValueError(f"{key} must be no budget, got {text!r}; budget={name} says how it is divided")
    if int in allowed and str in allowed and re.match(r"[+-]?[\d.]", text):
        tokens_of(key, text)  # raises, and says how tokens are written; a word the cache may know
    if _DTYPES in allowed and re.search(r"[+*]", text):
        return _dtypes(key, text)
    if str in allowed:
        return text
    raise ValueError(f"{key} must be {' or '.join(_expected(allowed))}, got {text!r}")


def _dtypes(key: str, text: str) -> tuple[str | None, ...]:
    """Of 2*none+int8: one for each layer."""
    found: list[str | None] = []
    for part in text.lower().split("+"):
        read = re.fullmatch(r"(?:(\d+)\*)?(\w+)", part)
        if read is None:
            raise ValueError(f"{key} must be a name, or one for each layer such as 2*none+30*int8, got {text!r}")
        found += [None if read[2] == "none" else read[2]] * int(read[1] or 1)
    return tuple(found)


def _nested(text: str, made: type, own: dict[str, Any] | None = None) -> Any:
    """Of name:field=value:...:file or name:field=value:...:operand. file: a profile's, where it needs one. operand: the
    budget in AdaKV, the pruner that another one asks. own: fields that were read elsewhere."""
    name, *parts = text.split(":")
    known, fields = _fields(made), dict(own or {})
    operand = next((x for x in known if known[x].intersection((Budget, Pruner))), None)
    profile = next((x for x in known if known[x].intersection(PROFILES)), None)
    while parts and "=" in parts[0]:
        key, _, value = parts.pop(0).partition("=")
        if key in fields:
            raise ValueError(f"{key} must be given once, got {fields[key]!r} and {value!r} for {name}")
        if key not in known or key == operand:
            raise _unknown_key(key, name, {x: 0 for x in known if x != operand})
        fields[key] = _value(key, value, known[key])
    if issubclass(made, Budget) and parts and (keep := instead_of(parts[-1], quoted=False)) is not None:
        raise ValueError(f"{name} {DIVIDES} {keep}, beside budget={text.rpartition(':')[0]}; got {text!r}")
    rest = ":".join(parts)
    if profile is not None and profile not in fields and rest and operand is None and not re.fullmatch(r"[\d.]+", rest):
        fields[profile], rest = _value(profile, rest, known[profile]), ""
    if operand is not None and rest:
        fields[operand] = _value(f"what follows {name}:", rest, known[operand])
    elif rest:
        raise ValueError(f"{name} must be written as {name}:field=value:..., got {text!r}")
    if "preset" in fields:
        return typing.cast(Any, made).preset(fields.pop("preset"), **fields)
    for key, parameter in inspect.signature(made).parameters.items():
        if parameter.default is parameter.empty and key not in fields:
            example = f"{name}:{_example(known[key])}" if key == profile else f"{name}:{key}=..."
            raise ValueError(f"{name} needs {key}, as in {example}, got {text!r}")
    return made(**fields)


def _example(allowed: frozenset[type]) -> str:
    return "folder" if Gates in allowed else "file.json" if allowed.intersection(PROFILES) else "..."


def _expected(allowed: frozenset[type]) -> list[str]:
    written = {
        int: "a whole number", float: "a number", bool: "true or false",
        str: "a name", type(None): "none",
        _IDS: "token ids such as 12+7",
        Budget: f"one of {', '.join(BUDGETS)}", RemoteGap: "remotegap",
    }  # fmt: skip
    return [words for kind, words in written.items() if kind in allowed]


def _written(key: str, value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, str)):
        return str(value)
    raise ValueError(f"{key} must be text, a number, a boolean or None, got {type(value).__name__}")
