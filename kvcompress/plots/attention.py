"""Figures of what a model's attention is like: sparsity, where the mass lies, and how alike near queries are."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, PercentFormatter, ScalarFormatter

from ..analysis.statistics import MASS, AttentionStatistics
from .panels import MAP, bar_style, count_axis, line_style, one_panel, panels


def attention_sparsity(measured: AttentionStatistics, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """How few keys weigh more than 1/n, by layer and head, and how few hold the mass, which tells a sparse row from a
    uniform one.

    Two Axes: x: query head, y: layer, colour: % of keys below 1/n; and x: layer, y: % of a row's keys that hold 50, 90
    and 99 % of its mass, means over heads. Returns both. Source: IntelLLM, figure 1c; the mass curve is ours.
    """
    heads, mass = panels(axes, ["keys below 1/n", "keys that hold the mass"], "layer", share_y=False)
    values = 100 * measured.sparsity.mean
    image = heads.imshow(values.numpy(), cmap=MAP, vmax=100, origin="lower", aspect="auto", interpolation="nearest")
    heads.set_yticks(range(len(measured.layers)), [str(layer) for layer in measured.layers])
    heads.yaxis.set_major_locator(MaxNLocator(integer=True))
    count_axis(heads, "query head")
    heads.figure.colorbar(image, ax=heads, label="% of keys")
    for number, share in enumerate(MASS):
        curve = 100 * measured.mass_share.mean[..., number].nanmean(1)
        style = line_style(number, len(MASS), len(curve))
        mass.plot(list(measured.layers), curve.tolist(), label=f"{share:.0%} of the mass", **style)
    count_axis(mass, "layer")
    mass.set_ylim(0, None)
    mass.set_ylabel("share of keys")
    mass.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    mass.legend()
    return [heads, mass]


def attention_gravity(measured: AttentionStatistics, *, axes: Axes | None = None) -> Axes:
    """Where the mass of attention lies: on the first keys, on the last ones, and between.

    x: layer; y: % of the mass, stacked, means over heads. Where first and last keys overlap, in short rows, a key
    counts for both and the rest ends at 0. Returns the Axes. Source: IntelLLM, section 4.1.
    """
    axes = one_panel(axes)
    head, tail = (100 * x.mean.nanmean(1) for x in (measured.head_gravity, measured.tail_gravity))
    parts = {
        f"first {measured.head}": head,
        "between": (100 - head - tail).clamp(min=0),
        f"last {measured.tail}": tail,
    }
    bottom = head * 0
    for number, (name, values) in enumerate(parts.items()):
        style = bar_style(number, len(parts))
        axes.bar(list(measured.layers), values.tolist(), bottom=bottom.tolist(), label=name, **style)
        bottom = bottom + values
    count_axis(axes, "layer")
    axes.set_ylabel("mass of attention")
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return axes


def attention_neighbours(measured: AttentionStatistics, *, axes: Axes | None = None) -> Axes:
    """How alike the last queries of a text are, by their distance: means over layers and heads.

    x: distance in tokens, logarithmic; y: 0 to 1, the cosine of queries before rotation, the similarity of their rows,
    and the share of their strongest keys that is common. Returns the Axes. Source: IntelLLM, figures 1a and 1b.
    """
    axes = one_panel(axes)
    lines = {
        "queries (cosine)": measured.cosine,
        "rows (1 - divergence)": measured.similarity,
        f"strongest {measured.top_k} keys (Jaccard)": measured.overlap,
    }
    for number, (name, values) in enumerate(lines.items()):
        curve = values.mean.flatten(0, 1).nanmean(0)
        style = line_style(number, len(lines), len(curve))
        axes.plot(list(measured.distances), curve.tolist(), label=name, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(measured.distances)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("distance of two queries (tokens)")
    axes.set_ylabel("how alike")
    axes.legend()
    return axes
