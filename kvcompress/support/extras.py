"""Packages that only extras bring: asked for before anything starts, and named with the line that installs them."""

from __future__ import annotations

from importlib.util import find_spec

# by the name that is imported, its extra in pyproject.toml
EXTRAS = {
    "accelerate": "train", "datasets": "train", "peft": "train", "matplotlib": "plots", "lm_eval": "eval",
    "vllm": "vllm",
}  # fmt: skip


def need_packages(what: str, *packages: str) -> None:
    """Raises ImportError where one of them is not installed. what: needs them, for the message. packages: of one
    extra; none is imported."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        extra = EXTRAS[missing[0]]
        raise ImportError(
            f"{what} needs {' and '.join(missing)}, of the extra {extra}: pip install 'kvcompress[{extra}]'",
            name=missing[0],
        )
