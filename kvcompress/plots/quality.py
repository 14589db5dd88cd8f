"""What a memory is worth: the loss along a text, and the recall of what stood somewhere in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor

from ..support.checks import need, need_choice
from .panels import MAP, label, line_style, named, one_panel

LOG_FROM = 100  # an axis that spans more than two decades is logarithmic
MOST_NUMBERED_CELLS = 150
MOST_TICKS = 16


def loss_over_position(
    losses: Tensor | Mapping[str, Tensor], *, window: int = 256, unit: str = "perplexity", axes: Axes | None = None
) -> Axes:
    """Perplexity or bits per token along a text, from the loss of each token.

    losses: [T - 1] in nats, losses[t] that of the token at position t + 1; or a line per name. nan where it was not
    measured. window: the losses are averaged over windows of about that many tokens, whose lengths differ by at most 1.
    unit: "perplexity" (exp of a window's mean loss) or "bits" (mean loss / ln 2). x: mean position of a window's
    tokens, logarithmic where it spans more than two decades.
    Returns the Axes.
    Raises TypeError for what is no tensor, ValueError for a wrong shape, a window below 1, an unknown unit, or losses
    without a number.
    """
    need_choice("unit", unit, ("perplexity", "bits"))
    need(window >= 1, f"window must be at least 1, got {window}")
    by_name = named("losses", losses, Tensor)
    lines = []
    for name, loss in by_name.items():
        where = label("losses", name)
        need(loss.ndim == 1 and len(loss) > 0,
             f"{where} must be [T - 1] with at least one loss, got shape {tuple(loss.shape)}")  # fmt: skip
        loss = loss.detach().to("cpu", torch.float64)
        need(not bool(loss.isnan().all()), f"{where} must hold a number, got NaN everywhere")
        count = max(1, round(len(loss) / window))
        means = torch.stack([part.nanmean() for part in loss.tensor_split(count)])
        places = torch.arange(1, len(loss) + 1, dtype=torch.float64)
        centres = torch.stack([part.mean() for part in places.tensor_split(count)])
        lines.append((name, centres, means.exp() if unit == "perplexity" else means / math.log(2)))
    axes = one_panel(axes)
    for number, (name, centres, values) in enumerate(lines):
        axes.plot(centres.tolist(), values.tolist(), label=name, **line_style(number, len(lines), len(values)))
    ends = [float(centres[end]) for _, centres, _ in lines for end in (0, -1)]
    if max(ends) / min(ends) > LOG_FROM:
        axes.set_xscale("log")
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("perplexity" if unit == "perplexity" else "bits per token")
    if not isinstance(losses, Tensor):
        axes.legend()
    return axes


def recall_map(
    recall: Tensor | ArrayLike, lengths: Sequence[int], depths: Sequence[float], *, axes: Axes | None = None
) -> Axes:
    """Heat map of how much of a needle is recalled, by the prompt's length and the needle's depth in it.

    recall: [depths, lengths], 0 to 1, nan where it was not measured (blank). lengths: tokens, increasing. depths:
    percent, increasing. x: length; y: depth, 0 at the top; cells are of equal size. Up to 150 cells show their number.
    Returns the Axes.
    Raises ValueError for a recall of another shape, out of 0 to 1 or without a number, and for lengths or depths that
    do not increase or are out of range.
    """
    try:
        rows = recall.detach().cpu().double().numpy() if isinstance(recall, Tensor) else recall
        cells = torch.from_numpy(np.array(rows, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"recall must be numbers [depths, lengths]: {error}") from error
    lengths, depths = list(lengths), list(depths)
    _need_increasing("lengths", lengths, 1, math.inf)
    _need_increasing("depths", depths, 0, 100)
    allowed = (len(depths), len(lengths))
    need(tuple(cells.shape) == allowed, f"recall must have shape {allowed}, got {tuple(cells.shape)}")
    measured = cells[~cells.isnan()]
    need(len(measured) > 0, "recall must hold a number, got NaN everywhere")
    for extreme in (float(measured.min()), float(measured.max())):
        need(0 <= extreme <= 1, f"recall must be 0 to 1, got {extreme:g}")

    axes = one_panel(axes, height=4.4)
    image = axes.imshow(cells.numpy(), cmap=MAP, vmin=0, vmax=1, origin="upper", aspect="auto", interpolation="nearest")
    if cells.numel() <= MOST_NUMBERED_CELLS:
        for (row, column), value in zip(
            torch.cartesian_prod(*map(torch.arange, allowed)).tolist(), cells.flatten().tolist(), strict=True
        ):
            if not math.isnan(value):
                ink = "black" if value > 0.6 else "white"
                axes.text(column, row, f"{value:.2g}", ha="center", va="center", color=ink, fontsize="small")
    shown = range(0, len(lengths), -(-len(lengths) // MOST_TICKS))
    slant: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if len(shown) > 6 else {}
    axes.set_xticks(shown, [f"{lengths[k]:,}" for k in shown], **slant)
    shown = range(0, len(depths), -(-len(depths) // MOST_TICKS))
    axes.set_yticks(shown, [f"{depths[k]:g}" for k in shown])
    axes.set_xlabel("length of the prompt (tokens)")
    axes.set_ylabel("depth of the needle (%)")
    axes.figure.colorbar(image, ax=axes, label="recall")
    return axes


def _need_increasing(name: str, values: Iterable[float], low: float, high: float) -> None:
    values = list(values)
    need(all(low <= value <= high for value in values), f"{name} must be {low} to {high}, got {values}")
    need(all(a < b for a, b in pairwise(values)), f"{name} must increase, got {values}")
