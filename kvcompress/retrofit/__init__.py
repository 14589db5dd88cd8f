"""Continued pre-training of converted models: what every trained method shares."""

from __future__ import annotations

from typing import Any

__all__ = ["RetrofitCallback", "RetrofitTrainer"]


def __getattr__(name: str) -> Any:
    # transformers' Trainer takes a second to import, which models that are only used need not wait for
    if name == "RetrofitTrainer":
        from .trainer import RetrofitTrainer

        return RetrofitTrainer
    if name == "RetrofitCallback":
        from .callback import RetrofitCallback

        return RetrofitCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
