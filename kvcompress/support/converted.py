"""Tells transformers of the attention that a converted model's config names, so that any class of it loads one.

transformers takes seconds to import: where nobody has yet, that waits until somebody does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "kvcompress"
_WHERE = "transformers.modeling_utils"


def refuse(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The attention of a converted model that is not attached."""
    raise RuntimeError(
        "this model is converted (config.kvcompress) and not attached: call kvcompress.attach(model), or load it by "
        "kvcompress.from_pretrained(name); attn_implementation='sdpa' runs its weights as the plain model that they "
        "are no longer"
    )


class _Waiting(MetaPathFinder):
    """Registers it right after transformers' module of attention functions has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _WHERE else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            module.AttentionInterface.register(NAME, refuse)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        setattr(spec.loader, "exec_module", run_and_register)  # noqa: B010  (mypy refuses an assignment)
        return spec


def register() -> None:
    """Now, or once it is there; another thread that is importing it is waited for."""
    if _WHERE in sys.modules:
        import_module(_WHERE).AttentionInterface.register(NAME, refuse)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())
