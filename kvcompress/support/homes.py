"""Where a name is that stands in a module and not at the root."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from opcode import opmap
from pathlib import Path
from typing import Any

from .kvpress_names import PIPELINE, class_of, without_class

_HERE = Path(__file__).parents[1]
MODULES = (
    "analysis",
    "budgets",
    "caches",
    "dmc",
    "gates",
    "heads",
    "logits",
    "ops",
    "planner",
    "plots",
    "pod",
    "profiles",
    "pruners",
    "retrofit",
    "serve",
)


def elsewhere(module: str) -> Callable[[str], Any]:
    """The __getattr__ of a module, which says where a name is that it has not."""

    def __getattr__(name: str) -> Any:
        raise missing(module, name)

    return __getattr__


def missing(module: str, name: str) -> AttributeError | ImportError:
    """What a module's __getattr__ raises. `from module import name` drops what an AttributeError says: it gets an
    ImportError, hasattr and all others that."""
    hint, asking = None if name.startswith("_") else hint_of(name), sys._getframe(2)
    if hint and asking.f_code.co_code[asking.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(hint, name=module)
    return AttributeError(hint or f"module {module!r} has no attribute {name!r}")


def hint_of(name: str) -> str | None:
    """What to write for a name that stands elsewhere; None where nothing here is called so. Imports no module to find
    it: some want packages that nobody needs who asks."""
    homes = {known: ["kvcompress"] for known in _names_in("public")}
    for module in MODULES:
        for known in _names_in(module):
            homes.setdefault(known, []).append(f"kvcompress.{module}")
    ours = {known.lower(): known for known in homes}.get(class_of(name).lower())
    if ours is None:
        return without_class(name) if name.endswith("Press") or name == PIPELINE else None
    what = f"is in {' and '.join(homes[name])}" if name == ours else f"is {ours} here"
    what = f"of kvpress {what}" if name.endswith("Press") else what
    return f"{name} {what}: from {homes[ours][0]} import {ours}"


@functools.cache
def _names_in(module: str) -> list[str]:
    """Its __all__, as it is written; none where its source is not there."""
    path = _HERE / module / "__init__.py"
    try:
        tree = ast.parse((path if path.is_file() else _HERE / f"{module}.py").read_text(encoding="utf-8"))
    except OSError:
        return []
    return [name for part in tree.body if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "__all__"
            for name in ast.literal_eval(part.value)]  # fmt: skip
