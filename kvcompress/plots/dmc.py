"""Figures 6 to 9 of DMC: where a converted model compresses, from what length on, and how it came to that."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter
from numpy.typing import ArrayLike
from torch import Tensor

from ..dmc import statistics
from ..dmc.cache import DMCCache
from ..support.checks import need
from .panels import LINES, MAP, count_axis, label, line_style, one_panel, panels, shade

MOST_NUMBERED_CELLS = 150
MOST_PANELS = 8
Decisions: TypeAlias = DMCCache | Tensor | Sequence[Tensor]
Ratios: TypeAlias = DMCCache | Tensor | ArrayLike


def head_ratios(ratios: Ratios | Mapping[str, Ratios], *, axes: Axes | Iterable[Axes] | None = None) -> Any:
    """Heat map of the compression ratio of each converted layer and KV head.

    ratios: tokens per entry [L, Hkv], at least 1, or a DMCCache that has read something; a dict has one panel per name
    and one scale of colours. x: layer; y: the heads of a layer sorted by their ratio, the highest on top; colours are
    logarithmic. Up to 150 cells show their number.
    Returns the Axes, for a dict a list of them.
    Raises ValueError for another shape, NaN or a ratio below 1. Source: DMC, figures 6 and 12.
    """
    by_name = _by_name("ratios", ratios)
    maps = [_ratios(label("ratios", name), given) for name, given in by_name.items()]
    numbers = [_layers(given, len(each)) for given, each in zip(by_name.values(), maps, strict=True)]
    found = panels(axes, by_name, "KV heads, by ratio")
    highest = max(float(each.max()) for each in maps)
    for panel, each, layers in zip(found, maps, numbers, strict=True):
        cells = each.sort(1, descending=True).values.T  # [Hkv, L]
        norm = LogNorm(1, max(highest, 1.1))
        image = panel.imshow(cells.numpy(), cmap=MAP, norm=norm, origin="upper", aspect="auto", interpolation="nearest")
        if cells.numel() <= MOST_NUMBERED_CELLS:
            for head, row in enumerate(cells.tolist()):
                for layer, value in enumerate(row):
                    ink = "black" if norm(value) > 0.6 else "white"
                    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                    panel.text(layer, head, number, ha="center", va="center", color=ink, fontsize="small")
        _layer_axis(panel, layers)
        panel.set_yticks([])
    ticks = [2**k for k in range(64) if 2**k <= max(highest, 1.1)]
    bar = found[0].figure.colorbar(image, ax=found, label="tokens per entry", ticks=ticks)
    bar.ax.set_yticks(ticks, [str(tick) for tick in ticks])
    bar.ax.minorticks_off()
    return found if isinstance(ratios, Mapping) else found[0]


def ratio_over_length(
    decisions: Decisions | Mapping[str, Decisions],
    *,
    lengths: Sequence[int] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Compression ratio of the first n tokens, two lines per name: of all entries, and the mean of the heads' ratios.

    decisions: hard ones of texts of equal length, bool or 0 and 1 [L, B, Hkv, T], or a list of [B, Hkv, T] by layer, or
    a DMCCache made with track=True; several by name. lengths: n; None = powers of two and T. x: n, logarithmic.
    Returns the Axes.
    Raises TypeError for what is no tensor, ValueError for other shapes, soft decisions, NaN, a cache of DMS (whose
    window keeps tokens whatever they decide), and a length out of range. Source: DMC, figure 8.
    """
    by_name = _by_name("decisions", decisions)
    found = []
    for name, given in by_name.items():
        merged = _decisions(label("decisions", name), given, dms=False)
        T = merged.shape[3]
        chosen = [2**k for k in range(T.bit_length()) if 2**k < T] + [T] if lengths is None else lengths
        found.append((name, statistics.ratio_over_length(merged, chosen)))
    axes = one_panel(axes)
    for number, (name, over) in enumerate(found):
        lead = "" if name is None else f"{name}, "
        for kind, values, line in (("all entries", over.total, LINES[0]), ("mean over heads", over.mean, LINES[1])):
            style = line_style(number, len(found), len(over.lengths)) | {"linestyle": line}
            axes.plot(over.lengths.tolist(), values.tolist(), label=lead + kind, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)  # a head that merges everything has one entry
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("tokens per entry")
    axes.legend()
    return axes


def decision_over_position(
    decisions: Decisions | Mapping[str, Decisions], *, window: int = 64, axes: Axes | None = None
) -> Axes:
    """Share of layers, heads and texts whose decision is 1, along the text.

    decisions: as for ratio_over_length, a cache of DMS included; a line per name. window: tokens of a bin, whose sizes
    differ by at most 1. x: mean position of a bin; y: 0 to 1.
    Returns the Axes.
    Raises as ratio_over_length does, and ValueError for a window below 1. Source: DMC, figure 9.
    """
    need(window >= 1, f"window must be at least 1, got {window}")
    by_name = _by_name("decisions", decisions)
    lines = []
    for name, given in by_name.items():
        means = statistics.decision_over_position(_decisions(label("decisions", name), given, dms=True))
        count = max(1, round(len(means) / window))
        places = torch.arange(len(means), dtype=torch.float64)
        x, y = ([float(part.mean()) for part in of.tensor_split(count)] for of in (places, means))
        lines.append((name, x, y))
    axes = one_panel(axes)
    for number, (name, x, y) in enumerate(lines):
        axes.plot(x, y, label=name, **line_style(number, len(lines), len(y)))
    axes.set_ylim(0, 1)
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("share of decisions that are 1")
    if isinstance(decisions, Mapping):
        axes.legend()
    return axes


def ratios_over_training(
    metrics: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    *,
    at: Sequence[float] | None = None,
    axes: Axes | Iterable[Axes] | None = None,
) -> list[Axes]:
    """What each layer keeps while the ratio rises, one panel per ratio.

    metrics: a run's metrics.jsonl, or its lines as dicts; those with step, ratio_hard and ratio_layers count, and
    layers, where it is there, says which these are. at: the
    global ratios (ratio_hard) to show, each by the first line that reaches it; None = up to 8, evenly spread. x: layer;
    bar: share of the layer's tokens that stay as entries, the space above it is compression.
    Returns the list of Axes, titled with ratio and step.
    Raises FileNotFoundError for a missing file, ValueError for lines without the fields, another shape, NaN, or a ratio
    that was never reached. Source: DMC, figure 7.
    """
    lines = _metrics(metrics)
    ratios = [line["ratio_hard"] for line in lines]
    if at is None:
        count = min(MOST_PANELS, len(lines))
        low, high = ratios[0], max(ratios)
        wanted = [low + (high - low) * k / max(count - 1, 1) for k in range(count)]
    else:
        wanted = list(at)
    need(len(wanted) > 0, "at must have at least one ratio, got none")
    shown: list[Mapping[str, Any]] = []
    for ratio in wanted:
        first = next((line for line in lines if line["ratio_hard"] >= ratio - 1e-9), None)
        if first is None:
            raise ValueError(f"at must be ratios that were reached, at most {max(ratios):g}, got {ratio:g}")
        if at is not None or not any(first is line for line in shown):
            shown.append(first)
    titles = [f"ratio {line['ratio_hard']:.2f} (step {line['step']})" for line in shown]
    found = panels(axes, titles, "share of tokens kept")
    for number, (panel, line) in enumerate(zip(found, shown, strict=True)):
        kept = (1 / _ratios("ratio_layers", line["ratio_layers"])).mean(1)
        panel.bar(
            range(len(kept)), kept.tolist(), 0.8, color=shade(number, len(shown)), edgecolor="black", linewidth=0.5
        )
        panel.set_ylim(0, 1)
        _layer_axis(panel, [int(layer) for layer in line.get("layers") or range(len(kept))])
        panel.yaxis.set_major_locator(MaxNLocator(5))
    return found


# ---- what is given ----


def _by_name(argument: str, given: Any) -> dict[str | None, Any]:
    if not isinstance(given, Mapping):
        return {None: given}
    need(len(given) > 0, f"{argument} must have at least one entry, got an empty dict")
    return dict(given)


def _layers(given: Any, count: int) -> list[int]:
    """The model's numbers of the layers of ratios [L, Hkv]."""
    return given.converted_layers if isinstance(given, DMCCache) else list(range(count))


def _layer_axis(axes: Axes, layers: Sequence[int]) -> None:
    """The model's numbers of its converted layers, which are drawn side by side."""
    count_axis(axes, "layer")
    if list(layers) != list(range(len(layers))):
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: str(layers[round(x)]) if 0 <= round(x) < len(layers) else "")
        )


def _ratios(where: str, given: Any) -> Tensor:
    """float64 [L, Hkv]."""
    if isinstance(given, DMCCache):
        given = given.compression_ratios()
    try:
        ratios = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} must be numbers [L, Hkv]: {error}") from error
    need(ratios.ndim == 2 and ratios.numel() > 0, f"{where} must be [L, Hkv], got shape {tuple(ratios.shape)}")
    need(bool((ratios >= 1 - 1e-6).all()) and bool(ratios.isfinite().all()),
         f"{where} must be tokens per entry, at least 1, got {float(ratios.min()):g}")  # fmt: skip
    return ratios.clamp(min=1)


def _decisions(where: str, given: Decisions, *, dms: bool) -> Tensor:
    """bool [L, B, Hkv, T]. dms: whether those of DMS will do."""
    if isinstance(given, DMCCache):
        need(
            dms or given.dmc.mode == "dmc", f"{where} must be of a model converted to DMC, got mode {given.dmc.mode!r}"
        )
        lengths = given.seen_lengths()
        need(len(set(lengths)) == 1, f"{where} must be a cache of texts of equal length, got lengths {lengths}")
        given = [given.decisions(layer) for layer in given.converted_layers]
    if not isinstance(given, (Tensor, Sequence)) or isinstance(given, str):
        raise TypeError(f"{where} must be a tensor, a list of them or a DMCCache, got {type(given).__name__}")
    return statistics.as_decisions(given)


def _metrics(given: str | os.PathLike[str] | Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(given, (str, os.PathLike)):
        given = [json.loads(line) for line in Path(given).read_text().splitlines() if line.strip()]
    fields = ("step", "ratio_hard", "ratio_layers")
    lines = [line for line in given if all(field in line for field in fields)]
    need(len(lines) > 0, f"metrics must have lines with {', '.join(fields)}, got none")
    for line in lines:
        ratio = line["ratio_hard"]
        need(math.isfinite(ratio), f"ratio_hard must be a number, got {ratio} at step {line['step']}")
    return lines
