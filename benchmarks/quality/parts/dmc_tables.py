"""How benchmarks/quality/dmc_quality.py shows its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import print_table
from benchmarks.quality.parts.figures import legend_below, share_axis
from benchmarks.quality.parts.measures import PRUNERS, number


def show(rows: list[dict[str, Any]]) -> None:
    lines = [
        (
            row["name"].split("/", 2)[2],
            "" if row.get("compression_ratio") is None else f"{row['compression_ratio']:.2f}",
            f"{row['nbytes_share']:.3f}",
            number(row, "full_bits_per_byte_over_dense", "+"),
            number(row, "bits_per_byte_over_dense", "+"),
            *(number(row, field) for field in ("fact_recall", "later_recall", "pair_recall")),
        )
        for row in rows
    ]
    fields = {"full bits per byte": "full_bits_per_byte", "bits per byte": "bits_per_byte"}
    dense = [f"{text} {rows[0][field]:.3f}" for text, field in fields.items() if field in rows[0]]
    columns = ("model or pruner", "CR", "bytes", "+full", "+bits", "facts", "later", "pairs")
    print_table(", ".join(["original", *dense]), columns, lines, left=("model or pruner",))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Each measure against the real bytes on the same prompts, one line per method."""
    from matplotlib.figure import Figure

    from kvcompress.plots import save

    panels = {
        "bits_per_byte": ("bits_per_byte_over_dense", "bits per byte over the original, held-out text"),
        "fact_recall": ("fact_recall", "recall of a fact, question at the prompt's end"),
        "later_recall": ("later_recall", "recall of facts, questions after the prompt"),
        "pair_recall": ("pair_recall", "recall of key-value pairs, questions after the prompt"),
    }
    figure = Figure(figsize=(12, 9))
    shown = rows[1:]
    names = list(dict.fromkeys((row["method"], bool(row.get("stepwise"))) for row in shown))
    methods = list(dict.fromkeys(method for method, _ in names))
    for axis, (measured, (field, title)) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        place = f"{measured}_nbytes_share"
        for method, stepwise in names:
            line = [row for row in shown if row["method"] == method and bool(row.get("stepwise")) == stepwise]
            line = sorted((row for row in line if row.get(field) is not None), key=lambda row: row[place])
            place_of = methods.index(method) % 10
            if line and not (stepwise and method not in PRUNERS):
                axis.errorbar(
                    [row[place] for row in line], [row[field] for row in line],
                    [row.get(f"{field}_se") or 0 for row in line], color=f"C{place_of}", marker="osD^vXP<>*"[place_of],
                    label=f"{method}, compressing while decoding" if stepwise else method, capsize=2,
                    markerfacecolor="white" if stepwise else f"C{place_of}",
                    linestyle=":" if stepwise else "--" if method in PRUNERS else "-",
                )  # fmt: skip
        if rows[0].get(field) is not None:
            axis.axhline(rows[0][field], color="black", linewidth=0.8, linestyle=":", label="original")
        axis.set_title(title, fontsize=10)
        if field != "bits_per_byte_over_dense":
            axis.set_ylim(-0.03, 1.03)
        share_axis(axis)
    legend_below(figure, figure.axes, 4, 0.12)
    save(figure, path, dpi=110)
