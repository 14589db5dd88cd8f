"""Attention over a compressed key-value cache for PyTorch and Hugging Face models."""

from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from .support.converted import register as _register
from .support.versions import check_versions as _check_versions

__version__ = "0.1.0"

_check_versions()
_register()

if TYPE_CHECKING:
    from .public import *  # noqa: F403
    from .public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """A module of the package, or a public name: the first one asked for imports PyTorch, transformers and all
        others, which `kvcompress --help` need not wait for."""
        if name.startswith("__") and name != "__all__":  # what tools ask of any module
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if PathFinder.find_spec(f"{__name__}.{name}", __path__) is not None:  # noqa: F405
            return import_module(f".{name}", __name__)
        public = import_module(".public", __name__)
        globals().update({known: getattr(public, known) for known in public.__all__}, __all__=public.__all__)
        if name not in globals():
            raise import_module(".support.homes", __name__).missing(__name__, name)
        return globals()[name]

    def __dir__() -> list[str]:
        public = import_module(".public", __name__)
        return sorted([*public.__all__, "__all__", "__doc__", "__version__"])
