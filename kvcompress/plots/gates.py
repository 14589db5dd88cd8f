"""How well gates say what they were fitted to."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes

from ..pruners import Gates
from ..support.checks import need
from .panels import MAP, count_axis, one_panel


def gates_fit(gates: Gates, *, axes: Axes | None = None) -> Axes:
    """Heat map of R2, in texts held out, of each layer and KV head: how much of the variance of the logarithms of its
    teacher's scores a head's gate explains.

    gates: with r2, as fit_gates makes them. x: layer, those that compress; y: KV head. Colours go from 0 to 1. Returns
    the Axes. Raises ValueError for gates without r2, or layers of different numbers of heads.
    """
    need(len(gates.r2) > 0, "gates must have r2 for a figure, got none")
    heads = {len(row) for row in gates.r2}
    need(len(heads) == 1, f"gates must have as many KV heads in each layer for a figure, got {sorted(heads)}")
    panel = one_panel(axes, 8.0, 2.2)
    cells = torch.tensor(gates.r2).T
    image = panel.imshow(cells.numpy(), cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    count_axis(panel, "layer")
    panel.set_ylabel("KV head")
    panel.set_yticks(range(len(cells)))
    panel.set_title(f"share of the variance explained, mean {float(cells.mean()):.2f}")
    panel.figure.colorbar(image, ax=panel, label="R2, texts held out")
    return panel
