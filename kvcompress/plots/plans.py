"""Figures 2 and 3 of IMDC: what each iteration of a plan has in sight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import overload

from matplotlib.axes import Axes

from ..planner import Plan
from ..support.checks import need
from .panels import binned_label, bins, count_axis, label, named, panels, shade

MOST_BARS = 100
MOST_OUTLINED_BARS = 32


@overload
def plan(plans: Plan, *, axes: Axes | None = None) -> Axes: ...
@overload
def plan(plans: Mapping[str, Plan], *, axes: Iterable[Axes] | None = None) -> list[Axes]: ...
def plan(plans: Plan | Mapping[str, Plan], *, axes: Axes | Iterable[Axes] | None = None) -> Axes | list[Axes]:
    """Stacked bars of the memory before each iteration and its chunk, and a line of the keys in sight.

    plans: one Plan, or one panel per name. x: iteration i; y: tokens. The bars are the scheduled memory m_{i-1} (0 for
    the first iteration) and the chunk c_i, the line is K_i = stored[i - 1] + c_i: it runs below the bars where the
    schedule asks for more than was read. Over 100 iterations a bar is the mean of several and as wide as they are, so
    that its area stays their sum; the line stays exact.
    Returns the Axes, for a dict a list of them.
    Raises TypeError for what is no Plan, ValueError for an empty plan or a wrong number of axes. Source: IMDC, figures
    2 and 3.
    """
    by_name = named("plans", plans, Plan)
    for name, one in by_name.items():
        need(len(one) > 0, f"{label('plans', name)} must have at least one iteration, got 0")
    found = panels(axes, by_name, "tokens (per layer and KV head)")
    highest = max([_draw(panel, one) for panel, one in zip(found, by_name.values(), strict=True)])
    for panel in found:
        panel.set_ylim(0, 1.2 * highest, auto=True)  # room for the legend
    found[0].legend(loc="upper center", ncols=3, fontsize="small", columnspacing=1.2)
    return found[0] if isinstance(plans, Plan) else found


def _draw(axes: Axes, plan: Plan) -> float:
    """Draws a plan and returns its highest bar or key count."""
    n = len(plan)
    before = (0, *plan.memory[:-1])
    ranges = bins(n, MOST_BARS)
    widths = [stop - start for start, stop in ranges]
    centres = [(start + stop - 1) / 2 for start, stop in ranges]
    memory, chunk = ([sum(row[start:stop]) / (stop - start) for start, stop in ranges] for row in (before, plan.chunks))
    outlined = n <= MOST_OUTLINED_BARS
    shown = [0.8] * n if outlined else widths
    edge = {"edgecolor": "black", "linewidth": 0.5} if outlined else {"linewidth": 0}
    axes.bar(centres, memory, shown, label="memory $m_{i-1}$", color=shade(0, 2, 0.25), **edge)
    axes.bar(centres, chunk, shown, memory, label="chunk $c_i$", color=shade(1, 2, 0.25, 0.9), **edge)
    keys = [held + read for held, read in zip((0, *plan.stored[:-1]), plan.chunks, strict=True)]
    axes.plot(
        range(n), keys, color="black", linewidth=1.2, label="keys in sight $K_i$", marker="o" if outlined else None,
        markersize=3,
    )  # fmt: skip
    count_axis(axes, binned_label("iteration", n, len(ranges)))
    return max(*keys, *map(sum, zip(memory, chunk, strict=True)))
