"""Shared by the figures: new and given Axes, series by name, styles that differ in black and white too, bins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..support.checks import need

Kind = TypeVar("Kind")
Color = tuple[float, float, float, float]

MAP = matplotlib.colormaps["viridis"]  # its lightness rises evenly, so that it survives a printer without colours
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "x", "P")
HATCHES = ("", "///", "...", "xxx", "---", "\\\\\\")
PANELS_PER_ROW = 4


def named(argument: str, given: object, kind: type[Kind]) -> dict[str | None, Kind]:
    """What is given by name; a single one has the name None."""
    if isinstance(given, kind):
        return {None: given}
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} must be a {kind.__name__} or a dict of them, got {type(given).__name__}")
    need(len(given) > 0, f"{argument} must have at least one entry, got an empty dict")
    for name, value in given.items():
        if not isinstance(value, kind):
            raise TypeError(f"{label(argument, name)} must be a {kind.__name__}, got {type(value).__name__}")
    return dict(given)


def label(argument: str, name: str | None) -> str:
    """How an error names one entry of an argument."""
    return argument if name is None else f"{argument}[{name!r}]"


def one_panel(axes: Axes | None, width: float = 6.4, height: float = 4.0) -> Axes:
    if axes is None:
        return Figure(figsize=(width, height), layout="constrained").subplots()
    if not isinstance(axes, Axes):
        raise TypeError(f"axes must be a matplotlib Axes, got {type(axes).__name__}")
    return axes


def panels(
    axes: Axes | Iterable[Axes] | None, names: Iterable[str | None], y_label: str, *, share_y: bool = True
) -> list[Axes]:
    """One Axes per name, titled with it. Of new ones only the first of each row has a label at its y axis."""
    names = list(names)
    if axes is None:
        columns = min(len(names), PANELS_PER_ROW)
        rows = -(-len(names) // columns)
        figure = Figure(figsize=(4.5 * columns + 1.5, 3.6 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False).ravel().tolist()
        for unused in grid[len(names) :]:
            unused.remove()
        found = grid[: len(names)]
    else:
        found = flat(axes)
        need(len(found) == len(names), f"axes must be {len(names)} Axes, one per panel, got {len(found)}")
    for number, (panel, name) in enumerate(zip(found, names, strict=True)):
        if name is not None:
            panel.set_title(name)
        if axes is not None or number % PANELS_PER_ROW == 0:
            panel.set_ylabel(y_label)
    return found


def flat(axes: Axes | Iterable[Axes]) -> list[Axes]:
    """Axes as a list, also those of figure.subplots(2, 3)."""
    if isinstance(axes, Axes):
        return [axes]
    if not isinstance(axes, Iterable):
        raise TypeError(f"axes must be a matplotlib Axes or several, got {type(axes).__name__}")
    return [one for each in axes for one in flat(each)]


def shade(number: int, count: int, dark: float = 0.0, light: float = 0.8) -> Color:
    """Colour of series `number` of `count`; the default leaves out what is hard to see on white."""
    return MAP(dark + (light - dark) * number / max(count - 1, 1))


def line_style(number: int, count: int, points: int) -> dict[str, Any]:
    return {
        "color": shade(number, count),
        "linestyle": LINES[number % len(LINES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markevery": max(1, points // 16),
        "markersize": 4,
    }


def bar_style(number: int, count: int) -> dict[str, Any]:
    return {
        "color": shade(number, count, 0.3, 0.95),
        "hatch": HATCHES[number % len(HATCHES)],
        "edgecolor": "black",
        "linewidth": 0.5,
    }


def bins(length: int, limit: int) -> list[tuple[int, int]]:
    """0..length cut into at most `limit` ranges (start, stop) whose sizes differ by at most 1."""
    count = min(length, limit)
    edges = [length * k // count for k in range(count + 1)]
    return list(pairwise(edges))


def binned_label(name: str, length: int, count: int) -> str:
    """Label of an axis whose `count` bars stand for `length` of what it counts."""
    return name if count == length else f"{name} (each bar the mean of about {round(length / count)})"


def count_axis(axes: Axes, name: str) -> None:
    axes.set_xlabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def from_zero(axes: Axes) -> None:
    """The y axis begins at 0; what is drawn later still widens it."""
    axes.set_ylim(bottom=0, auto=True)
