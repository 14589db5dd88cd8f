"""Figures as files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..checks import need
from .panels import flat


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
    suffix = path.suffix[1:].lower()
    allowed = sorted(figure.canvas.get_supported_filetypes())
    need(suffix in allowed, f"path must end in one of .{', .'.join(allowed)}, got {str(path)!r}")
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        figure.savefig(temporary, format=suffix, dpi=dpi)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
