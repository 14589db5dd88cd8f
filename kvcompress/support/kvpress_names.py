"""What kvpress calls things, and what they are called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .checks import refuse_misspelt
from .units import instead_of

P = ParamSpec("P")
T = TypeVar("T")

SETTINGS = {
    "compression_ratio": "keep",
    "window_size": "window",
    "n_sink": "num_sink_tokens",
    "press": "pruner",
    "n_future_positions": "future_positions",
    "alpha_safeguard": "floor",
}
# what keep is called elsewhere, or was before 0.1.0
KEEPS = {"share": "keep", "memory_size": "keep", "keep_ratio": "keep", "target_cr": "keep = 1 / target_cr"}
_PRESSES = {"CURPress": "CurDKV", "CriticalAdaKVPress": "CriticalKV", "FastKVzipPress": "Gate",
            "KVzapPress": "Gate", "KnormPress": "KeyNorm"}  # fmt: skip
# what no class here takes the place of, but docs/kvpress.md says what does their work
ELSEWHERE = ("ChunkPress", "ComposedPress", "DMSPress", "DecodingPress", "KeyRerotationPress", "PrefillDecodingPress")
PIPELINE = "KVPressTextGenerationPipeline"


def class_of(press: str) -> str:
    """What a press is called here, if there is one: most have their own name without Press."""
    return _PRESSES.get(press, press.removesuffix("Press"))


def without_class(press: str) -> str:
    """What to say of a press that no class here takes the place of."""
    if press in (*ELSEWHERE, PIPELINE):
        return f"{press} is kvpress's; docs/kvpress.md says what does its work here"
    return f"{press} has no counterpart here; docs/kvpress.md lists the presses that have one"


def in_ours(setting: str) -> str:
    """What a setting of kvpress's is called here."""
    return "keep = 1 - compression_ratio" if setting == "compression_ratio" else SETTINGS[setting]


def keep_of(ratio: Any) -> str | None:
    """The keep= that says what a compression_ratio does; None for what is none."""
    keep = instead_of(ratio) if isinstance(ratio, float) and 0 <= ratio < 1 else None
    return None if keep is None else keep.partition(" ")[0]


def no_ratio(instead: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Of a function: compression_ratio and other names of keep, which it does not take, and what to give, which the
    ValueError of one says. instead: of keep, where it takes none."""

    def of(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **given: P.kwargs) -> T:
            if "compression_ratio" in given:
                ratio = given["compression_ratio"]
                use = instead or f"keep = 1 - compression_ratio here: {keep_of(ratio) or 'keep=0.5, say'}"
                raise ValueError(f"kvpress's compression_ratio is {use}; got compression_ratio={ratio!r}")
            for name in () if instead else KEEPS.keys() & given.keys():
                raise ValueError(f"{name} is {KEEPS[name]} here, got {name}={given[name]!r}")
            refuse_misspelt(function, given)
            return function(*args, **given)

        return run

    return of


def refuse_theirs(made: type, given: dict[str, Any], called: str = "") -> None:
    """Raises no_field's TypeError for a field that a pruner or a budget has under another name than kvpress's, or a
    misspelt one. called: see no_field."""
    for name in given.keys() & SETTINGS.keys():
        known, ours = inspect.signature(made).parameters, SETTINGS[name]
        if name not in known and (ours == "keep" or ours in known):
            raise no_field(made, name, given[name], called)
    refuse_misspelt(made, given)


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
