"""Figures as files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from ..support.checks import need
from ..support.files import staged
from .panels import flat


def format_of(name: str, path: Path) -> str:
    """Of a figure, by the file's suffix. Raises ValueError for one that matplotlib does not write."""
    suffix, allowed = path.suffix[1:].lower(), sorted(FigureCanvasBase.get_supported_filetypes())
    need(suffix in allowed, f"{name} must end in one of .{', .'.join(allowed)}, got {str(path)!r}")
    return suffix


def save(drawn: Axes | Iterable[Axes] | Figure, path: str | os.PathLike[str], *, dpi: int = 150) -> Path:
    """Writes a figure, whole or not at all: under a temporary name in the same folder, then renamed.

    drawn: what a function of kvcompress.plots returned, or a Figure. path: its suffix is the format, one that
    matplotlib writes (png, pdf, svg, ...). dpi: pixels per inch. Returns the path.
    Raises TypeError for what is no Axes or Figure, ValueError for another suffix or for Axes of several figures.
    """
    if isinstance(drawn, Figure):
        figure = drawn
    else:
        figures = {axes.figure.canvas.figure for axes in flat(drawn)}
        need(len(figures) == 1, f"drawn must be of one figure, got {len(figures)}")
        (figure,) = figures
    path = Path(path)
    suffix = format_of("path", path)
    with staged(path) as temporary:
        figure.savefig(temporary, format=suffix, dpi=dpi)
    return path
