"""Where a name is that stands in a module and not at the root."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from .support.kvpress_names import class_of, without_class

_HERE = Path(__file__).parent


def hint_of(name: str, root: Iterable[str], modules: Iterable[str]) -> str | None:
    """What to write for a name that the root has not; None where nothing here is called so. root: its names. modules:
    those that have others. Imports none of them: some want packages that nobody needs who asks."""
    homes = {known: ["kvcompress"] for known in root}
    for module in modules:
        for known in _names_in(module):
            homes.setdefault(known, []).append(f"kvcompress.{module}")
    ours = class_of(name)
    if ours not in homes:
        if name.endswith("Press"):
            return without_class(name)
        return None
    what = f"is in {' and '.join(homes[name])}" if name == ours else f"of kvpress is {ours} here"
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
