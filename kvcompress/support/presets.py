"""Settings of known implementations, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from .checks import need
from .kvpress_names import no_field

T = TypeVar("T")


def preset_of(
    made: type[T], presets: Mapping[str, Mapping[str, Any]], name: str, changes: Mapping[str, Any], called: str = ""
) -> T:
    """One of them, with other fields. called: see no_field. Raises ValueError for a name that is none, or a field out
    of range, TypeError for no field."""
    one = "one of " if len(presets) > 1 else ""
    known = isinstance(name, str) and name in presets
    need(known, f"preset must be {one}{', '.join(presets)}, got {name!r}")
    fields = inspect.signature(made).parameters
    for field, value in changes.items():
        if field not in fields:
            raise no_field(made, field, value, called)
    return made(**{**presets[name], **changes})
