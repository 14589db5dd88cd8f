"""Many requests over one store of pages: a core that knows no engine, transformers' batching with it, and vLLM."""

from transformers import __version__ as _version

from ..support.versions import check_serving as _check_serving

_check_serving(_version)

from .batching import Batching, batching  # noqa: E402

__all__ = ["Batching", "batching"]
