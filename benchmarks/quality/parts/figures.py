"""Shared by the figures of quality: a colour for each method, labels at the ends of lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# One method has one colour in every figure. Blue, thick and on top: what its page tells to take.
COLOURS = {
    "KVzip with mass, GlobalTopK": "C0", "DMC": "C0", "PoD": "C0", "FM": "C0",
    "Gate trained on, GlobalTopK": "C1", "GQA": "C1", "PoD+SnapKV31": "C1", "IM/linear": "C1",
    "Replay, GlobalTopK": "C2", "DMS": "C2", "CLA": "C2", "IMDC/linear": "C2",
    "kvpress KVgrad": "darkred", "kvpress KVzip": "C3", "pooling": "C3", "window": "C3", "IMDC/adaptive": "C3",
    "SnapKV31": "C4", "SnapKV31, AdaKV": "C4",
    "SnapKV": "C5",
    "H2O": "C6",
    "IMDC/sqrt": "C7", "IMDC/square": "C8", "IMDC/square-sqrt": "C9",
}  # fmt: skip
_GAP = 0.065  # between labels, of the height of a panel
_NEAR = 0.6  # of the width: from there on a line leads from what ends there to its name


def style(method: str) -> dict[str, Any]:
    """Of a method's line."""
    best = COLOURS[method] == "C0"
    return {"color": COLOURS[method], "linewidth": 3 if best else 1.6, "zorder": 5 if best else 3}


def share_axis(axis: Any) -> None:
    """x: bytes of a cache, of the dense one's."""
    axis.set_xlabel("bytes of the cache, of the dense one's", fontsize=11)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda share, _: f"1/{1 / share:g}" if share < 1 else f"{share:g}")
    axis.grid(alpha=0.3)


def label_ends(axis: Any, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Writes names right of a panel, from above as their lines end at (x, y), in their colours, none over another.
    After the panel's limits are set."""
    to_panel = axis.transData + axis.transAxes.inverted()
    places = {name: to_panel.transform((x, y)) for name, (x, y, _) in ends.items()}
    names = sorted(places, key=lambda name: places[name][1])
    heights: list[float] = []
    for name in names:
        heights.append(max(places[name][1], heights[-1] + _GAP if heights else 0.02))
    for k in range(len(heights) - 1, -1, -1):
        heights[k] = min(heights[k], 0.98 - _GAP * (len(heights) - 1 - k))
    for name, height in zip(names, heights, strict=True):
        color = ends[name][2]
        leader = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "relpos": (0, 0.5), "shrinkA": 1,
                  "shrinkB": 3}  # fmt: skip
        axis.annotate(
            name, xy=places[name], xycoords="axes fraction", xytext=(1.03, height), color=color, fontsize=10,
            va="center", arrowprops=leader if places[name][0] > _NEAR else None, annotation_clip=False,
        )  # fmt: skip
