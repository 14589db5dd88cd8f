"""Figures of benchmarks/quality/long_prompts.py, one per part, from its rows and what was seen with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from kvcompress.plots import (
    loss_over_position,
    memory_attention,
    memory_map,
    memory_sources,
    recall_map,
    retention,
    save,
)

Found = Sequence[tuple[dict[str, Any], Any]]  # rows and what is drawn of them
DPI = 80
PER_ROW = 6
POINTS = 32


def position(found: Found, path: Path) -> None:
    """Left: bits where the text begins, with what they are compared with. Then, per pruner, what they are over it."""
    losses = {row["method"]: seen for row, seen in found}
    reference, dense = losses["windows"], losses["dense"]
    over = {name: x - reference for name, x in losses.items() if name not in ("windows", "dense")}
    pruners = sorted({name.split("/")[-1] for name in over})
    figure = Figure(figsize=(5.2 * (1 + len(pruners)), 4.6), layout="constrained")
    panels = figure.subplots(1, 1 + len(pruners)).tolist()
    names = ("windows", "dense", *(name for name in over if name.startswith("FM")))
    begin = {name: losses[name][: 2 * len(dense)] for name in names}
    loss_over_position(begin, window=max(len(dense) // 16, 1), unit="bits", axes=panels[0])
    panels[0].set_title(f"the first {2 * (len(dense) + 1):,} of {len(reference) + 1:,} tokens")
    for pruner, axes in zip(pruners, panels[1:], strict=True):
        lines = {name.removesuffix(f"/{pruner}"): x for name, x in over.items() if name.endswith(f"/{pruner}")}
        loss_over_position(lines, window=max(len(reference) // POINTS, 1), unit="bits", axes=axes)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylabel("bits per token over dense windows")
        axes.set_title(pruner)
    for axes in panels[2:]:
        axes.sharey(panels[1])
    _write(figure, path)


def recall(found: Found, path: Path) -> None:
    """A heat map per row; of unguided ones those of a memory of fixed size."""
    rows = [row for row, _ in found if row["guided"] or row["method"].split("/")[0] in ("dense", "FM")]
    count = -(-len(rows) // PER_ROW)
    figure = Figure(figsize=(2.8 * PER_ROW, 2.8 * count), layout="constrained")
    grid = figure.subplots(count, PER_ROW, squeeze=False).ravel().tolist()
    for axes in grid[len(rows) :]:
        axes.remove()
    for number, (row, axes) in enumerate(zip(rows, grid, strict=False)):
        cells = np.array([[np.nan if x is None else x for x in line] for line in row["recall"]])
        recall_map(cells, row["lengths"], [100 * depth for depth in row["depths"]], axes=axes)
        axes.images[0].colorbar.remove()  # the cells say it
        memory = "all kept" if row["memory_size"] is None else f"memory {row['memory_size']}"
        axes.set_title(f"{row['method']}, {memory}\n{'guided' if row['guided'] else 'unguided'}", fontsize="small")
        axes.tick_params(axis="x", labelsize="small")
        axes.set_xlabel("length (tokens)" if number >= len(rows) - PER_ROW else "")
        axes.set_ylabel("depth (%)" if number % PER_ROW == 0 else "")
    _write(figure, path)


def tracks(found: Found, path: Path) -> None:
    """Attention on memory and retention, where the final memory came from, and the layers that hold a fact's digits."""
    seen = {row["method"]: track for row, track in found if "retention" in row}
    needles = {(row["method"], row["iteration"]): share for row, share in found if "digits_held" in row}
    figure = Figure(figsize=(13, 12), layout="constrained")
    rows = figure.subfigures(4, 1)
    for draw, axes in zip((memory_attention, retention), rows[0].subplots(1, 2), strict=True):
        draw(seen, axes=axes)
        axes.legend(fontsize="small")
    pruners = sorted({name.split("/")[-1] for name in seen})
    for pruner, axes in zip(pruners, rows[1].subplots(1, len(pruners)), strict=True):
        memory_sources({name: track for name, track in seen.items() if name.endswith(pruner)}, axes=axes)
    snap = {name: track for name, track in seen.items() if name.endswith("SnapKV")}
    memory_map(snap, axes=rows[2].subplots(1, len(snap)))
    panels: Sequence[Axes] = rows[3].subplots(1, len(needles), sharey=True)
    for ((name, iteration), share), axes in zip(needles.items(), panels, strict=True):
        for layer in range(share.shape[1]):
            axes.plot(share[:, layer].tolist(), label=f"layer {layer}", linestyle=("-", "--", "-.", ":")[layer % 4])
        axes.axvline(iteration, color="black", linewidth=0.8)
        axes.set_title(f"{name}, guided", fontsize="medium")
        axes.set_xlabel("iteration (line: the fact is read)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("share of the fact's digits held")
    panels[0].legend(fontsize="small")
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    """With 128 colours, a third of the bytes."""
    save(figure, path, dpi=DPI)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(128)
    few.save(path, optimize=True)
