"""Shared by the figures of quality."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def share_axis(axis: Any) -> None:
    """x: bytes of a cache, of the dense one's."""
    axis.set_xlabel("bytes of the cache, of the dense one's")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda share, _: f"1/{1 / share:g}" if share < 1 else f"{share:g}")
    axis.xaxis.label.set_size(11)
    axis.grid(alpha=0.3)


def legend_below(figure: Any, axes: Iterable[Any], columns: int, height: float) -> None:
    """One legend of all axes, in the lowest part of the figure, 0..1."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}  # noqa: B905
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=columns, fontsize=10, frameon=False)
    figure.tight_layout(rect=(0, height, 1, 1))
