"""Figures 1b and 6 of IMDC: which chunks the final memory came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import overload

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ..caches.track import Track
from ..support.checks import need
from .panels import MAP, bar_style, binned_label, bins, count_axis, label, named, one_panel, panels

MOST_BARS = 100
MOST_SHARP_COLUMNS = 400  # more would fall between the pixels


def memory_sources(tracks: Track | Mapping[str, Track], *, axes: Axes | None = None) -> Axes:
    """Share of the final memory that came from each chunk, as bars.

    tracks: one Track, or bars side by side per name. x: chunk; y: mean over the layers and sequences, which sums to 1.
    Sequences of a Track that differ in length are aligned at their last chunk. Where there are over 100 bars, each is
    the mean of several chunks and as wide as they are, so that its area stays their sum.
    Returns the Axes.
    Raises TypeError for what is no Track, ValueError for tracks without iterations, with tensors of a wrong shape or
    with nothing in memory. Source: IMDC, figure 1b.
    """
    by_name = named("tracks", tracks, Track)
    shares = [_mean_shares(label("tracks", name), track) for name, track in by_name.items()]
    longest, count = max(map(len, shares)), len(shares)
    ranges = bins(longest, max(1, MOST_BARS // count))
    axes = one_panel(axes)
    for number, (name, share) in enumerate(zip(by_name, shares, strict=True)):
        values = torch.nn.functional.pad(share, (0, longest - len(share)))
        widths = [(stop - start) * 0.9 / count for start, stop in ranges]
        lefts = [
            start - 0.5 + (stop - start) * 0.05 + number * width
            for (start, stop), width in zip(ranges, widths, strict=True)
        ]
        heights = [float(values[start:stop].mean()) for start, stop in ranges]
        axes.bar(lefts, heights, widths, align="edge", label=name, **bar_style(number, count))
    aligned = any(len({len(readings) for readings in track.readings if readings}) > 1 for track in by_name.values())
    x_label = "chunk of the longest sequence, all aligned at their last" if aligned else "chunk"
    count_axis(axes, binned_label(x_label, longest, len(ranges)))
    axes.set_ylabel("share of the final memory" + ("" if len(ranges) == longest else " per chunk"))
    if not isinstance(tracks, Track):
        axes.legend()
    return axes


@overload
def memory_map(tracks: Track, sequence: int = 0, *, axes: Axes | None = None) -> Axes: ...
@overload
def memory_map(tracks: Mapping[str, Track], sequence: int = 0, *, axes: Iterable[Axes] | None = None) -> list[Axes]: ...
def memory_map(
    tracks: Track | Mapping[str, Track], sequence: int = 0, *, axes: Axes | Iterable[Axes] | None = None
) -> Axes | list[Axes]:
    """Heat map of the chunks that each layer's final memory came from.

    tracks: one Track, or one panel per name with one scale of colours. sequence: of the batch. x: chunk, without the
    last one, which would outshine the others; y: layer, 0 at the bottom; colour: share of the layer's final memory, the
    last chunk's included in the whole. A layer that holds nothing stays blank.
    Returns the Axes, for a dict a list of them.
    Raises TypeError for what is no Track, ValueError for a sequence out of range or of fewer than 2 iterations, with
    tensors of a wrong shape or with nothing in memory, and for a wrong number of axes. Source: IMDC, figure 6.
    """
    by_name = named("tracks", tracks, Track)
    maps = []
    for name, track in by_name.items():
        where, batch = label("tracks", name), len(track.readings)
        need(batch > 0, f"{where} must have at least one sequence, got 0")
        need(0 <= sequence < batch, f"sequence must be 0 to {batch - 1} in {where}, got {sequence}")
        n = len(track.readings[sequence])
        need(n >= 2, f"{where} must have at least 2 iterations in sequence {sequence}, got {n}")
        maps.append(_shares(where, track, sequence)[:, :-1])
    found = panels(axes, by_name, "layer", share_y=False)
    largest = max(float(shares.nan_to_num().max()) for shares in maps) or 1.0
    for panel, shares in zip(found, maps, strict=True):
        sharp = shares.shape[1] <= MOST_SHARP_COLUMNS
        image = panel.imshow(
            shares.numpy(), cmap=MAP, vmin=0, vmax=largest, origin="lower", aspect="auto",
            interpolation="nearest" if sharp else "auto",
        )  # fmt: skip
        count_axis(panel, "chunk (the last left out)")
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    found[0].figure.colorbar(
        image, ax=found, fraction=0.15 / len(found), pad=0.03, label="share of the layer's final memory"
    )
    return found[0] if isinstance(tracks, Track) else found


def _shares(where: str, track: Track, sequence: int) -> Tensor:
    """[L, n]: share of each layer's final memory from each chunk; rows sum to 1, or are nan where a layer is empty."""
    try:
        shares = track.memory_map(sequence)
    except RuntimeError as error:
        raise ValueError(
            f"{where} must hold positions [tokens] of each layer and KV head, sequence {sequence} has not"
        ) from error
    shares = shares / shares.sum(1, keepdim=True)
    need(not bool(shares.isnan().all()), f"{where} must have a token in the final memory of sequence {sequence}, got 0")
    return shares


def _mean_shares(where: str, track: Track) -> Tensor:
    """[n]: mean over layers and sequences, these aligned at their last chunk."""
    sequences = [b for b, readings in enumerate(track.readings) if readings]
    need(len(sequences) > 0, f"{where} must have at least 1 iteration, got 0")
    rows = [_shares(where, track, b).nanmean(0) for b in sequences]
    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows]).mean(0)
