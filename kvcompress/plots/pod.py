"""Figures of PoD: which layers attend alike, who leads whom, what a query reads from where, and what that saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter, ScalarFormatter
from numpy.typing import ArrayLike
from torch import Tensor

from ..pod.lead import check_lead
from ..pod.plan import PoDPlan, lead_table
from ..pod.similarity import Agreement
from ..support.checks import need, need_integer
from .panels import LINES, MAP, Color, count_axis, line_style, named, one_panel, panels, shade

MOST_DRAWN_TOKENS = 512
SETS = ("not seen", "proximal", "distant")


def similarity_heatmap(
    similarity: PoDPlan | Tensor | ArrayLike,
    *,
    delta: float | None = None,
    mean: bool = False,
    axes: Axes | Iterable[Axes] | None = None,
) -> list[Axes]:
    """How alike each pair of layers attends, one panel per KV head, and the blocks that follow from it.

    similarity: a plan that holds it, or [Hkv, L, L], 0 to 1. mean: one panel, the mean over the KV heads; without
    blocks, which are each head's own. delta: draws the blocks of this threshold; None = the plan's own, or none.
    x, y: layer, from the lower left; colour: 0 to 1.
    Returns a list of Axes.
    Raises ValueError for a plan without similarity, another shape or values outside 0..1. Source: PoD, figure 1d.
    """
    plan = similarity if isinstance(similarity, PoDPlan) else None
    if plan is not None:
        need(plan.similarity is not None, "similarity must be of a plan that holds it, got one without")
        similarity = plan.similarity  # type: ignore[assignment]
    shown = torch.as_tensor(similarity, dtype=torch.float64).detach().cpu()
    lead = lead_table(shown, 2.0 if delta is None else delta)  # checks the values too
    if plan is not None and delta is None:
        lead = plan.lead
    L = len(lead)
    outlined = not mean and (plan is not None or delta is not None)
    maps = shown.mean(0, keepdim=True) if mean else shown
    names = ["mean over KV heads"] if mean else [f"KV head {head}" for head in range(len(maps))]
    found = panels(axes, names, "layer")
    for head, (panel, each) in enumerate(zip(found, maps, strict=True)):
        image = panel.imshow(each.numpy(), cmap=MAP, vmin=0, vmax=1, origin="lower", interpolation="nearest")
        if outlined:
            for first, last in _blocks(lead, head):
                size = last - first + 1
                panel.add_patch(Rectangle((first - 0.5, first - 0.5), size, size, fill=False, edgecolor="red", lw=1.5))
        panel.set_xlim(-0.5, L - 0.5)
        panel.set_ylim(-0.5, L - 0.5)
        count_axis(panel, "layer")
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    found[0].figure.colorbar(image, ax=found, label="similarity (1 - divergence in bits)")
    return found


def block_map(plan: PoDPlan | Sequence[Sequence[int]], *, axes: Axes | None = None) -> Axes:
    """Which layers form a block in each KV head; the lead of each, the only one with distant keys, has a dot.

    plan: a plan or its lead table [L][Hkv]. x: KV head; y: layer, upwards; colours tell neighbouring blocks apart.
    Returns the Axes.
    Raises ValueError for a table that breaks the rules of one. Source: PoD, figure 2.
    """
    lead = torch.tensor(plan.lead if isinstance(plan, PoDPlan) else check_lead(plan))
    L, Hkv = lead.shape
    leads = lead == torch.arange(L)[:, None]
    number = leads.long().cumsum(0) - 1
    axes = one_panel(axes, 1.5 + min(0.5 * Hkv, 12.0), 1.2 + min(0.25 * L, 12.0))
    colours = ListedColormap([shade(k, 4, 0.2, 0.95) for k in (0, 2, 1, 3)])
    cells = (number % 4).numpy()
    axes.imshow(cells, cmap=colours, vmin=0, vmax=3, origin="lower", aspect="auto", interpolation="nearest")
    y, x = leads.nonzero().T.tolist()
    axes.plot(x, y, linestyle="", marker="o", markersize=4, color="white", markeredgecolor="black", label="lead")
    count_axis(axes, "KV head")
    axes.set_ylabel("layer")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.5, Hkv - 0.5)
    axes.set_ylim(-0.5, L - 0.5)
    axes.set_title(f"phi = {1 - leads.double().mean():.2f}: {int((~leads).sum())} of {L * Hkv} follow")
    return axes


def attention_sets(tokens: int, *, sinks: int, recent: int, axes: Axes | None = None) -> Axes:
    """From whom each query of a layer that follows takes each key: its own layer (proximal) or the lead (distant).

    tokens: 1 to 512. x: key; y: query, downwards.
    Returns the Axes; its image holds 0 = not seen, 1 = proximal, 2 = distant.
    Raises ValueError for another number of tokens, sinks below 0 or recent below 1. Source: PoD, figure 2.
    """
    need_integer("tokens", tokens, 1, MOST_DRAWN_TOKENS)
    need_integer("sinks", sinks, 0)
    need_integer("recent", recent, 1)
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)  # from the query to the key
    proximal = (back < recent) | (torch.arange(tokens) < sinks)
    near, distant = (back >= 0) & proximal, (back >= 0) & ~proximal
    axes = one_panel(axes, 5.5, 4.8)
    fills: list[Color] = [(1.0, 1.0, 1.0, 1.0), shade(1, 2, 0.1, 0.85), shade(0, 2, 0.3, 0.85)]
    axes.imshow((near.long() + 2 * distant.long()).numpy(), cmap=ListedColormap(fills), vmin=0, vmax=2,
                interpolation="nearest")  # fmt: skip
    handles = [Patch(facecolor=fill, edgecolor="black", label=name) for fill, name in zip(fills, SETS, strict=True)]
    axes.legend(handles=handles, loc="upper right")
    count_axis(axes, "key (position)")
    axes.set_ylabel("query (position)")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def agreement_curve(measured: Agreement | Mapping[str, Agreement], *, axes: Axes | None = None) -> Axes:
    """How often near tokens suffice for the same next token, with bars of one standard error where it is known.

    measured: what kvcompress.pod.similarity.agreement returns; a line per name. x: near tokens, logarithmic; y: % of
    equal predictions.
    Returns the Axes.
    Raises TypeError for what is no Agreement. Source: PoD, figure 1c.
    """
    by_name = named("measured", measured, Agreement)
    axes = one_panel(axes)
    for number, (name, each) in enumerate(by_name.items()):
        order = sorted(range(len(each.sizes)), key=each.sizes.__getitem__)
        y, error = ([100 * values[j] for j in order] for values in (each.share, each.error))
        bars = None if any(e != e for e in error) else error
        axes.errorbar(
            [each.sizes[j] for j in order], y, bars, label=name, capsize=3, **line_style(number, len(by_name), 1)
        )
    _length_axis(axes, "near tokens (sinks and recent)")
    axes.set_ylim(0, 102)
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set_ylabel("equal next-token predictions")
    if isinstance(measured, Mapping):
        axes.legend()
    return axes


def saved_over_length(
    plan: PoDPlan | Mapping[str, PoDPlan], *, lengths: Sequence[int] | None = None, axes: Axes | None = None
) -> Axes:
    """Share of a dense cache's bytes that plans save, by their formula, and what it tends to (phi / 2).

    plan: one, or a line per name. lengths: tokens; None = powers of two from 256 to 1 Mi. x: tokens, logarithmic; y: %.
    Returns the Axes.
    Raises TypeError for what is no plan, ValueError for a length below 1.
    """
    by_name = named("plan", plan, PoDPlan)
    chosen = _lengths(lengths, [1 << k for k in range(8, 21)])
    axes = one_panel(axes)
    for number, (name, each) in enumerate(by_name.items()):
        style = line_style(number, len(by_name), len(chosen))
        text = f"phi = {each.share:.2f}, near = {each.window:,}"
        axes.plot(chosen, [100 * each.saved(n) for n in chosen], label=f"{name}: {text}" if name else text, **style)
        axes.axhline(50 * each.share, color=style["color"], linewidth=0.8, linestyle=LINES[3])
    _length_axis(axes, "tokens")
    axes.set_ylim(bottom=0, auto=True)
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set_ylabel("of the cache saved")
    axes.legend()
    return axes


def memory_curve(
    plan: PoDPlan,
    *,
    dtype: torch.dtype = torch.bfloat16,
    lengths: Sequence[int] | None = None,
    measured: Mapping[int, int] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Bytes of a dense cache and of a plan's, one sequence, over its length.

    dtype: of keys and values. lengths: tokens; None = 65 of them up to 8 times the near tokens. measured: bytes of a
    real cache by tokens, drawn as crosses. x: tokens; y: MiB, or GiB from 4 GiB on.
    Returns the Axes.
    Raises TypeError for what is no plan, ValueError for a length below 1.
    """
    if not isinstance(plan, PoDPlan):
        raise TypeError(f"plan must be a PoDPlan, got {type(plan).__name__}")
    most = 8 * plan.window
    chosen = _lengths(lengths, sorted({max(1, most * k // 64) for k in range(65)} | {plan.window}))
    dense, ours = ([nbytes(n, dtype) for n in chosen] for nbytes in (plan.dense_nbytes, plan.nbytes))
    unit, size = ("GiB", 2**30) if dense[-1] >= 4 * 2**30 else ("MiB", 2**20)
    axes = one_panel(axes)
    for number, (name, line) in enumerate((("dense", dense), (f"PoD, phi = {plan.share:.2f}", ours))):
        axes.plot(chosen, [x / size for x in line], label=name, **line_style(number, 2, len(chosen)))
    if measured:
        axes.plot(
            list(measured),
            [x / size for x in measured.values()],
            label="measured",
            linestyle="",
            marker="x",
            color="black",
        )
    axes.axvline(plan.window, color="black", linewidth=0.8, linestyle=LINES[3])
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"cache, {unit}")
    axes.set_ylim(bottom=0, auto=True)
    axes.legend()
    return axes


# ---- what is given ----


def _blocks(lead: Sequence[Sequence[int]], head: int) -> list[tuple[int, int]]:
    """(first, last) layer of each block."""
    starts = [layer for layer, row in enumerate(lead) if row[head] == layer]
    return [(a, b - 1) for a, b in zip(starts, [*starts[1:], len(lead)], strict=True)]


def _lengths(given: Sequence[int] | None, default: list[int]) -> list[int]:
    chosen = default if given is None else list(given)
    need(len(chosen) > 0, "lengths must have at least one, got none")
    for j, n in enumerate(chosen):
        need_integer(f"lengths[{j}]", n, 1)
    return chosen


def _length_axis(axes: Axes, name: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(name)
