"""Figures 1a and 7 of IMDC: what memory receives and what stays in it, over the iterations of a reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import overload

import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from torch import Tensor

from ..caches.track import Track
from ..support.checks import need
from .panels import count_axis, from_zero, label, line_style, named, one_panel, panels, shade

MOST_NAMED_LAYERS = 8


def memory_attention(tracks: Track | Mapping[str, Track], *, axes: Axes | None = None) -> Axes:
    """Mean attention probability that a chunk's queries give to a key in memory, over the iterations.

    tracks: one Track, or a line per name. x: iteration, from 1 (the first has no memory); y: mean over the KV heads,
    layers and those sequences that have the iteration. Returns the Axes.
    Raises TypeError for what is no Track, ValueError for tracks of fewer than 2 iterations, of layers that differ from
    one iteration to the next, or without a number. Source: IMDC, figure 1a.
    """
    axes = _lines(tracks, Track.memory_probability, axes)
    axes.set_ylabel("mean attention probability\nof a key in memory")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    return axes


def retention(tracks: Track | Mapping[str, Track], *, axes: Axes | None = None) -> Axes:
    """Retention ratio p, the share of the new memory that was in the old one, over the iterations.

    tracks: one Track, or a line per name. x: iteration, from 1 (p of the first is 0); y: mean over the KV heads, layers
    and those sequences that have the iteration. A growing memory bounds p by old size / new size: compare methods at a
    fixed memory. Returns the Axes.
    Raises TypeError for what is no Track, ValueError for tracks of fewer than 2 iterations, of layers that differ from
    one iteration to the next, or without a number. Source: IMDC, equation 2 and figure 7.
    """
    axes = _lines(tracks, Track.retention, axes)
    axes.set_ylabel("retention ratio p")
    return axes


@overload
def memory_share(tracks: Track, *, axes: Axes | None = None) -> Axes: ...
@overload
def memory_share(tracks: Mapping[str, Track], *, axes: Iterable[Axes] | None = None) -> list[Axes]: ...
def memory_share(
    tracks: Track | Mapping[str, Track], *, axes: Axes | Iterable[Axes] | None = None
) -> Axes | list[Axes]:
    """Share of a chunk's attention that memory receives, over the iterations, a line per layer.

    tracks: one Track, or one panel per name. x: iteration, from 1 (the first has no memory); y: mean over the KV heads
    and those sequences that have the iteration. Up to 8 layers stand in a legend, more in a colour bar, layer 0 dark.
    Returns the Axes, for a dict a list of them.
    Raises TypeError for what is no Track, ValueError for tracks of fewer than 2 iterations, of layers that differ from
    one iteration to the next, or without a number, and for a wrong number of axes.
    """
    by_name = named("tracks", tracks, Track)
    means = [_measured(label("tracks", name), track, Track.memory_attention, (0, 3)) for name, track in by_name.items()]
    found = panels(axes, by_name, "share of the chunk's\nattention on memory")
    for panel, mean in zip(found, means, strict=True):
        n, L = mean.shape
        many = L > MOST_NAMED_LAYERS
        for layer in range(L):
            style = {"color": shade(layer, L)} if many else line_style(layer, L, n)
            panel.plot(range(1, n + 1), mean[:, layer].tolist(), label=f"layer {layer}", **style)
        if many:
            colors = ListedColormap([shade(layer, L) for layer in range(L)])
            scale = ScalarMappable(Normalize(-0.5, L - 0.5), colors)
            panel.figure.colorbar(scale, ax=panel, label="layer")
        else:
            panel.legend()
        count_axis(panel, "iteration")
        from_zero(panel)
    return found[0] if isinstance(tracks, Track) else found


def _lines(tracks: Track | Mapping[str, Track], quantity: Callable[[Track, int], Tensor], axes: Axes | None) -> Axes:
    by_name = named("tracks", tracks, Track)
    means = [_measured(label("tracks", name), track, quantity, (0, 2, 3)) for name, track in by_name.items()]
    axes = one_panel(axes)
    for number, (name, mean) in enumerate(zip(by_name, means, strict=True)):
        style = line_style(number, len(means), len(mean))
        axes.plot(range(1, len(mean) + 1), mean.tolist(), label=name, **style)
    count_axis(axes, "iteration")
    from_zero(axes)
    if not isinstance(tracks, Track):
        axes.legend()
    return axes


def _measured(where: str, track: Track, quantity: Callable[[Track, int], Tensor], over: tuple[int, ...]) -> Tensor:
    """Mean over dims of [B, n, L, Hkv] of what was measured, iterations 1..n-1."""
    sequences = [b for b, readings in enumerate(track.readings) if readings]
    longest = max((len(track.readings[b]) for b in sequences), default=0)
    need(longest >= 2, f"{where} must have at least 2 iterations, got {longest}")
    rows: list[Tensor] = []
    for b in sequences:
        try:
            row = quantity(track, b)
        except RuntimeError as error:
            raise ValueError(
                f"{where} must have the same layers and KV heads in every iteration, sequence {b} has not"
            ) from error
        need(row.ndim == 3, f"{where} must hold tensors [Hkv], sequence {b} has shape {tuple(row.shape[2:])}")
        need(not rows or row.shape[1:] == rows[0].shape[1:],
             f"{where} must have the same layers and KV heads in every sequence, "
             f"got {[tuple(r.shape[1:]) for r in (*rows, row)]}")  # fmt: skip
        rows.append(row)
    batch = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), torch.nan)
    for padded, row in zip(batch, rows, strict=True):
        padded[: len(row)] = row
    mean = batch[:, 1:].nanmean(over)
    need(not bool(mean.isnan().all()), f"{where} must hold a number after the first iteration, got NaN everywhere")
    return mean
