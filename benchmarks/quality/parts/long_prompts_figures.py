"""Figures of benchmarks/quality/long_prompts.py, one per part, from its rows and what was seen with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from benchmarks.quality.parts.figures import COLOURS, label_ends, style
from kvcompress.plots import recall_map, save

Found = Sequence[tuple[dict[str, Any], Any]]  # rows and what is drawn of them
DPI = 100
POINTS = 16
KINDS = {"FM": "fixed memory", "IM": "growing memory", "IMDC": "growing, shrinking chunks"}


def _parts(method: str) -> tuple[str, str]:
    """How it reads, as COLOURS has it, and its pruner."""
    reading, _, pruner = method.rpartition("/")
    return reading, pruner


def _words(reading: str) -> str:
    kind, _, schedule = reading.partition("/")
    schedule, _, start = schedule.partition("@")
    said = KINDS[kind] + (f": {schedule}" if schedule else "")
    return said + (f", from {start} tokens" if start else "")


def position(found: Found, path: Path) -> None:
    """Per pruner, bits along the text over those of dense windows."""
    rows = [row for row, _ in found]
    reference = np.array(next(row["bits_by_block"] for row in rows if row["method"] == "windows"))
    read = [row for row in rows if row["method"] not in ("windows", "dense")]
    pruners = list(dict.fromkeys(_parts(row["method"])[1] for row in read))
    count = min(POINTS, len(reference))
    centres = [(part.mean() + 0.5) * rows[0]["block"] for part in np.array_split(np.arange(len(reference)), count)]
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(pruners), sharey=True)).tolist()
    for pruner, axes in zip(pruners, panels, strict=True):
        ends = {}
        for row in read:
            reading, own = _parts(row["method"])
            if own == pruner:
                over = [part.mean() for part in np.array_split(np.array(row["bits_by_block"]) - reference, count)]
                axes.plot(centres, over, **style(reading))
                ends[_words(reading)] = centres[-1], over[-1], COLOURS[reading]
        axes.axhline(0, color="black", linestyle=":", linewidth=1)
        axes.set_title(f"{pruner} chooses", fontsize=11)
        axes.set_xlabel("place in the text (thousands of bytes)")
        axes.xaxis.set_major_formatter(lambda place, _: f"{place / 1000:g}")
        axes.grid(alpha=0.3)
        label_ends(axes, ends)
    panels[0].set_ylabel("bits per byte over windows of 2,048,\nread densely")
    _write(figure, path)


def recall(found: Found, path: Path) -> None:
    """A heat map for all guided methods that begin as they do by themselves, and one for each other that is told of."""
    rows = [row for row, _ in found]
    usual = [row for row in rows if row["guided"] and row["initial_memory"] is None]
    shown = {"every token kept": rows[:1], f"guided by the question:\nthe least of {len(usual)} readings": usual}
    for row in rows[1:]:
        reading, pruner = _parts(row["method"])
        if row["guided"] and row["initial_memory"] is not None:
            shown[f"guided, {_words(reading)}".replace(": ", ":\n")] = [row]
        elif not row["guided"] and reading == "FM":
            shown[f"question not known:\n{pruner.replace('SnapKV31', 'SnapKV pooled over 31')}"] = [row]
    figure = Figure(figsize=(2.7 * len(shown), 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(shown), sharey=True)).tolist()
    for (title, of), axes in zip(shown.items(), panels, strict=True):
        cells = np.array([[[np.nan if x is None else x for x in line] for line in row["recall"]] for row in of])
        known = ~np.isnan(cells).all((0, 1))
        lengths = [length for length, is_known in zip(of[0]["lengths"], known, strict=True) if is_known]
        recall_map(np.nanmin(cells[..., known], 0), lengths, [100 * depth for depth in of[0]["depths"]], axes=axes)
        axes.images[0].colorbar.remove()  # the cells say it
        axes.set_xticks(range(len(lengths)), [f"{round(length / 1024):,}K" for length in lengths])
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("prompt (bytes)")
        axes.set_ylabel("depth of the fact (%)" if axes is panels[0] else "")
    _write(figure, path)


def tracks(found: Found, path: Path) -> None:
    """Attention on memory and retention over the reading; where the final memory came from, and which layers hold the
    digits of a fact."""
    seen = [(row, track) for row, track in found if "retention" in row]
    needles = [(row, share) for row, share in found if "digits_held" in row]
    figure = Figure(figsize=(13, 8), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    panels = upper.subplots(1, 2)
    fields = {
        "memory_probability": "mean attention on a key in memory",
        "retention": "share of the memory that was there before",
    }
    for (field, says), axes in zip(fields.items(), panels, strict=True):
        ends = {}
        for row, _ in seen:
            reading, pruner = _parts(row["method"])
            values = row[field]
            dashed = {} if pruner == "SnapKV" else {"linestyle": "--", "linewidth": 1.3}
            axes.plot(range(1, len(values) + 1), values, **style(reading) | dashed)
            if pruner == "SnapKV":
                ends[_words(reading)] = len(values), values[-1], COLOURS[reading]
        axes.set_ylim(bottom=0)
        axes.set_xlabel("chunk that is read; solid: SnapKV chooses, dashed: StreamingLLM")
        axes.set_ylabel(says)
        axes.grid(alpha=0.3)
        label_ends(axes, ends)
    left, right = lower.subplots(1, 2)
    sources = {_words(_parts(row["method"])[0]): track.memory_map().numpy() for row, track in seen
               if row["method"].endswith("/SnapKV")}  # fmt: skip
    _layers(left, sources, "chunk that it came from", "share of the final memory (SnapKV)")
    held = {_words(_parts(row["method"])[0]): share.numpy().T for row, share in needles}
    _layers(right, held, "chunk that is read; white: the one with the fact", "share of a fact's digits held (guided)")
    layers = needles[0][1].shape[1]
    for number, (row, _) in enumerate(needles):
        right.vlines(row["iteration"], number * layers - 0.5, (number + 1) * layers - 0.5, color="white", linewidth=2)
    _write(figure, path)


def _layers(axes: Axes, maps: Mapping[str, Any], across: str, says: str) -> None:
    """One heat map: [layers, chunks] of each name, one below the other."""
    widest = max(map_.shape[1] for map_ in maps.values())
    cells = np.concatenate([np.pad(map_, ((0, 0), (0, widest - map_.shape[1]))) for map_ in maps.values()])
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", norm=PowerNorm(0.5, 0, max(cells.max(), 1e-9)))
    layers = len(cells) // len(maps)
    names = [re.sub("(?<=[:,]) ", "\n", f"{name}, layers 0 to {layers - 1}") for name in maps]
    axes.set_yticks([layers * k + (layers - 1) / 2 for k in range(len(maps))], names, fontsize=9)
    for k in range(1, len(maps)):
        axes.axhline(layers * k - 0.5, color="white", linewidth=1.5)
    axes.set_xlabel(across)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, label=says)


def _write(figure: Figure, path: Path) -> None:
    """With 128 colours, a third of the bytes."""
    save(figure, path, dpi=DPI)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(128)
    few.save(path, optimize=True)
