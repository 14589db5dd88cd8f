"""How benchmarks/quality/pod_quality.py shows its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import print_table
from benchmarks.quality.parts.figures import legend_below, share_axis
from benchmarks.quality.parts.measures import number

Row = dict[str, Any]
RECALLS = ("fact_recall", "later_recall", "pair_recall")
SKIPPED = {
    "skipped_of_followers": "skipped, of the followers' distant pairs",
    "skipped_of_distant": "skipped, of all distant pairs",
    "attention_work": "multiply-adds of attention",
}


def show(rows: list[Row]) -> None:
    """What every cache keeps; recall over depth; tau."""
    others, taus = [row for row in rows if "tau" not in row], [row for row in rows if "tau" in row]
    quality = ("full_bits_per_byte_over_dense", "bits_per_byte_over_dense")
    lines = [
        (
            _name(row), _plain(row, "phi"), f"{row['nbytes_share']:.3f}",
            *(number(row, field, "+") for field in quality),
            *(number(row, field) for field in RECALLS), _plain(row, "recall_kept"),
        )
        for row in others
    ]  # fmt: skip
    columns = ("model, cache or pruner", "phi", "bytes", "+full", "+bits", "facts", "later", "pairs", "kept")
    print_table(_title(rows), columns, lines, left=columns[:1])
    deep = [row for row in others if "recall_by_depth" in row]
    if deep:
        depths = [f"{(n + 0.5) / 8:.2f}" for n in range(8)]
        lines = [(_name(row), *("" if x is None else f"{x:.2f}" for x in row["recall_by_depth"])) for row in deep]
        print_table("recall by the depth of the fact", ("model, cache or pruner", *depths), lines, left=columns[:1])
    if taus:
        lines = [
            (
                _name(row), *(_plain(row, field) for field in SKIPPED), number(row, quality[1], "+"),
                *(number(row, field) for field in RECALLS), _plain(row, "recall_kept"),
            )
            for row in taus
        ]  # fmt: skip
        columns = ("tau", "of followers", "of all", "work", "+bits", "facts", "later", "pairs", "kept")
        print_table("what followers skip while decoding", columns, lines, left=columns[:1])


def draw(rows: list[Row], path: Path) -> None:
    """Bits and recall against the real bytes on the same prompts, recall over depth, and what tau skips and costs."""
    from matplotlib.figure import Figure

    from kvcompress.plots import save

    others, taus = [row for row in rows if "tau" not in row], [row for row in rows if "tau" in row]
    deep = [row for row in others if "recall_by_depth" in row]
    figure = Figure(figsize=(15, 6 + max(0.16 * len(deep), 5)))
    grid = figure.subplots(2, 2, height_ratios=(5, max(0.16 * len(deep), 5)))
    _against_bytes(grid[0, 0], others, "bits_per_byte_over_dense", "bits_per_byte_nbytes_share")
    grid[0, 0].set_title("bits per byte over the original, held-out text", fontsize=10)
    _against_bytes(grid[0, 1], others, "recall_kept", "recall_nbytes_share")
    grid[0, 1].set_title("recall, of the original's", fontsize=10)
    _over_depth(grid[1, 0], deep)
    _over_tau(grid[1, 1], taus)
    legend_below(figure, grid[0], 7, 0.08)
    save(figure, path, dpi=110)


def _name(row: Row) -> str:
    return row["name"].split("/", 2)[2]


def _plain(row: Row, field: str) -> str:
    return "" if row.get(field) is None else f"{row[field]:.3f}"


def _title(rows: list[Row]) -> str:
    """The original, the length of its prompts, and what is near."""
    parts = ["original"]
    fields = {"full bits per byte": "full_bits_per_byte", "bits per byte": "bits_per_byte"}
    parts += [f"{text} {rows[0][field]:.3f}" for text, field in fields.items() if field in rows[0]]
    parts.append("T = " + "/".join(f"{n:,} ({task})" for task, n in rows[0]["prompt_tokens"].items()))
    config = next((row["config"] for row in rows if row.get("config", {}).get("mode") == "pod"), None)
    if config is not None:
        parts.append(f"W = {config['sinks']} + {config['recent']}")
    return ", ".join(parts)


def _against_bytes(axis: Any, rows: list[Row], field: str, place: str) -> None:
    """A line per method; models that were not trained are hollow."""
    from matplotlib import colormaps

    shown = [row for row in rows if row.get(field) is not None]
    methods = list(dict.fromkeys(row["method"] for row in rows[1:]))
    colors = [colormaps["tab20"](n) for n in (*range(0, 20, 2), *range(1, 20, 2))]  # dark ones first
    for row in shown[:1]:
        axis.axhline(row[field], color="black", linewidth=0.8, linestyle=":", label="original")
    for untrained in (False, True):
        for number_, method in enumerate(methods):
            line = [row for row in shown[1:] if row["method"] == method and bool(row.get("untrained")) == untrained]
            line.sort(key=lambda row: row[place])
            color = colors[number_ % 20]
            if line:
                axis.errorbar(
                    [row[place] for row in line], [row[field] for row in line],
                    [row.get(f"{field}_se") or 0 for row in line], color=color, capsize=2, elinewidth=0.7,
                    marker="osD^vXP<>*"[(number_ + number_ // 10) % 10], linestyle="-" if "config" in line[0] else "--",
                    markerfacecolor="white" if untrained else color, label=method + " untrained" * untrained,
                )  # fmt: skip
    share_axis(axis)


def _over_depth(axis: Any, rows: list[Row]) -> None:
    """A map: a line of cells per row."""
    from kvcompress.plots.panels import MAP

    axis.set_title("recall by the depth of the fact, mean over the tasks", fontsize=10)
    if not rows:
        axis.set_axis_off()
        return
    cells = [[float("nan") if x is None else x for x in row["recall_by_depth"]] for row in rows]
    image = axis.imshow(cells, cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=7)
    axis.set_xticks(range(8), [f"{100 * (n + 0.5) / 8:.0f}" for n in range(8)])
    axis.set_xlabel("depth of the fact in the prompt (%)")
    axis.figure.colorbar(image, ax=axis, label="recall")


def _over_tau(axis: Any, rows: list[Row]) -> None:
    """Left: shares, and recall; right: bits."""
    axis.set_title("skipping while decoding: followers where near tokens have at least tau", fontsize=10)
    if not rows:
        axis.set_axis_off()
        return
    rows = sorted(rows, key=lambda row: row["tau"])
    x = [row["tau"] for row in rows]
    recall = {"recall_kept": "recall, of the original's"} if "recall_kept" in rows[0] else {}
    for number_, (field, label) in enumerate((SKIPPED | recall).items()):
        # of shares that are not known (nothing was distant) there is no point
        y = [float("nan") if row[field] is None else row[field] for row in rows]
        axis.plot(x, y, label=label, marker="osD^"[number_], linestyle="-" if field in recall else "--")
    axis.set_xlabel("tau")
    axis.set_ylabel("share")
    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.3)
    lines, labels = axis.get_legend_handles_labels()
    field = "bits_per_byte_over_dense"
    if rows[0].get(field) is not None:
        right = axis.twinx()
        # without errors: those of the original's texts are far above what tau changes in them
        right.plot(x, [row[field] for row in rows], color="black", marker="x", label="bits per byte (right)")
        right.set_ylabel("bits per byte over the original")
        more = right.get_legend_handles_labels()
        lines, labels = lines + more[0], labels + more[1]
    axis.legend(lines, labels, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
