"""How benchmarks/quality/dmc_quality.py shows its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import print_table
from benchmarks.quality.parts.figures import COLOURS, label_ends, share_axis, style
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


SHOWN = {  # lines of the figure; the table has the others too
    "DMC": "DMC, trained", "GQA": "GQA, trained", "DMS": "DMS, trained", "pooling": "fixed pooling, trained",
    "SnapKV31": "SnapKV, pooled over 31", "H2O": "H2O",
}  # fmt: skip
PANELS = {  # measure: its numbers, and what they are
    "bits_per_byte": ("bits_per_byte_over_dense", "bits per byte over the original"),
    "pair_recall": ("pair_recall", "pairs recalled, questions after the prompt"),
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bits and recall against the real bytes on the same prompts, a line per method: trained solid, pruners dashed."""
    from matplotlib.figure import Figure

    from kvcompress.plots import save

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    for axis, (measured, (field, says)) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        place = f"{measured}_nbytes_share"
        known = [row for row in rows[1:] if not row.get("stepwise") and row.get(field) is not None]
        ends = {}
        for number_, (method, name) in enumerate(SHOWN.items()):
            line = sorted((row for row in known if row["method"] == method), key=lambda row: row[place])
            if line:
                axis.errorbar(
                    [row[place] for row in line], [row[field] for row in line],
                    [row.get(f"{field}_se") or 0 for row in line], marker="osD^vX"[number_], capsize=2,
                    linestyle="--" if method in PRUNERS else "-", **style(method),
                )  # fmt: skip
                ends[name] = line[-1][place], line[-1][field], COLOURS[method]
        if rows[0].get(field) is not None:
            axis.axhline(rows[0][field], color="black", linewidth=1, linestyle=":")
            ends["the original"] = max(x for x, _, _ in ends.values()), rows[0][field], "black"
        axis.set_ylabel(says, fontsize=11)
        if field != "bits_per_byte_over_dense":
            axis.set_ylim(-0.03, 1.03)
        share_axis(axis)
        label_ends(axis, ends)
    save(figure, path, dpi=120)
