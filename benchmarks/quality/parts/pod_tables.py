"""How benchmarks/quality/pod_quality.py shows its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import print_table
from benchmarks.quality.parts.figures import COLOURS, label_ends, share_axis, style
from benchmarks.quality.parts.measures import number

Row = dict[str, Any]
RECALLS = ("fact_recall", "later_recall", "pair_recall")
SKIPPED = {
    "skipped_of_followers": "skipped, of followers' pairs",
    "skipped_of_distant": "skipped, of distant pairs",
    "attention_work": "multiply-adds",
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


SHOWN = {  # lines of the figure; the table has the others too
    "PoD": "PoD, trained", "PoD+SnapKV31": "PoD and SnapKV, trained", "CLA": "CLA, trained",
    "window": "window attention, trained", "SnapKV31": "SnapKV, pooled over 31", "H2O": "H2O",
}  # fmt: skip


def draw(rows: list[Row], path: Path) -> None:
    """Bits and recall against the real bytes on the same prompts, and what tau skips and costs."""
    from matplotlib.figure import Figure

    from kvcompress.plots import save

    others, taus = [row for row in rows if "tau" not in row], [row for row in rows if "tau" in row]
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    bits, recall, skipped = figure.subplots(1, 3)
    _against_bytes(bits, others, "bits_per_byte_over_dense", "bits_per_byte_nbytes_share")
    bits.set_ylabel("bits per byte over the original", fontsize=11)
    _against_bytes(recall, others, "recall_kept", "recall_nbytes_share")
    recall.set_ylabel("recall, of the original's", fontsize=11)
    _over_tau(skipped, taus)
    save(figure, path, dpi=120)


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
    """A line per method: trained solid, pruners dashed."""
    known, ends = [row for row in rows if row.get(field) is not None], {}
    for row in known[:1]:
        axis.axhline(row[field], color="black", linewidth=1, linestyle=":")
    for number_, (method, name) in enumerate(SHOWN.items()):
        line = [row for row in known[1:] if row["method"] == method and not row.get("untrained")]
        line.sort(key=lambda row: row[place])
        if line:
            axis.errorbar(
                [row[place] for row in line], [row[field] for row in line],
                [row.get(f"{field}_se") or 0 for row in line], marker="osD^vX"[number_], capsize=2,
                linestyle="-" if "trained" in name else "--", **style(method),
            )  # fmt: skip
            ends[name] = line[-1][place], line[-1][field], COLOURS[method]
    for row in known[:1]:
        ends["the original"] = max(x for x, _, _ in ends.values()), row[field], "black"
    share_axis(axis)
    label_ends(axis, ends)


def _over_tau(axis: Any, rows: list[Row]) -> None:
    """Shares that are skipped, and recall."""
    if not rows:
        axis.set_axis_off()
        return
    rows = sorted(rows, key=lambda row: row["tau"])
    recall = {"recall_kept": "recall, of the original's"} if "recall_kept" in rows[0] else {}
    for number_, (field, name) in enumerate((SKIPPED | recall).items()):
        # of shares that are not known (nothing was distant) there is no point
        y = [float("nan") if row[field] is None else row[field] for row in rows]
        of_recall = field in recall
        axis.plot([row["tau"] for row in rows], y, label=name, marker="osD^"[number_], color="C0" if of_recall else
                  ("C7", "C8", "C9")[number_], linestyle="-" if of_recall else "--",
                  linewidth=3 if of_recall else 1.6)  # fmt: skip
    axis.set_xlabel("attention on near tokens, from\nwhich on followers skip the rest", fontsize=11)
    axis.set_ylabel("share", fontsize=11)
    axis.set_ylim(-0.03, 1.05)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, loc="lower left", framealpha=0.9)
