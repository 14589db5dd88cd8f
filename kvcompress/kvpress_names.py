"""What kvpress calls things, and what they are called here."""

from __future__ import annotations

import inspect
from typing import Any

from .units import instead_of

SETTINGS = {
    "compression_ratio": "keep",
    "window_size": "window",
    "n_sink": "num_sink_tokens",
    "press": "pruner",
    "n_future_positions": "future_positions",
    "alpha_safeguard": "floor",
}
_PRESSES = {"CURPress": "CurDKV", "CriticalAdaKVPress": "CriticalKV", "FastKVzipPress": "Gate",
            "KVzapPress": "Gate", "KnormPress": "KeyNorm"}  # fmt: skip


def class_of(press: str) -> str:
    """What a press is called here, if there is one: most have their own name without Press."""
    return _PRESSES.get(press, press.removesuffix("Press"))


def in_ours(setting: str) -> str:
    """What a setting of kvpress's is called here."""
    return "keep = 1 - compression_ratio" if setting == "compression_ratio" else SETTINGS[setting]


def no_field(made: type, name: str, value: Any, called: str = "") -> TypeError:
    """That a pruner or a budget has no such field, and what is meant where kvpress has one. called: how the cache is
    given it; not given, as the pruner."""
    known, ours = inspect.signature(made).parameters, SETTINGS.get(name)
    said = f"{made.__name__} has no {name!r}; known are {', '.join(known) or 'none'}"
    if ours is None or (ours != "keep" and ours not in known):
        return TypeError(said)
    keep = instead_of(value) if ours == "keep" else None
    called = called or f"{made.__name__}()"
    use = "" if keep is None else f": PrunedCache(config, {called}, {keep.partition(' ')[0]})"
    return TypeError(f"{said}; kvpress's {name} is {in_ours(name)} here{use}")
