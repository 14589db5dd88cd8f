"""The pages that are made and not written: python tools/pages.py

docs/models.md, the tables of docs/results/tasks.md and shapes.md, and docs/figures/recall.png from
benchmarks/results, docs/cli.md from the command line itself.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from kvcompress.cli import app
from kvcompress.files import write_text

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks/results", ROOT / "docs"
MADE = "<!-- from here on made by tools/pages.py -->"
REASON = "is not supported: "
# of quality.json: what is drawn, and what it is called
DRAWN = {
    "Replay/GlobalTopK": "Replay, one budget for all layers and heads",
    "Replay/AdaKV": "Replay, a budget per layer",
    "KeyDiff/GlobalTopK": "KeyDiff, one budget for all",
    "SnapKV31/AdaKV": "SnapKV (pooled over 31), a budget per layer",
}


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


# ---- models ----


def _cell(text: str) -> str:
    """One line of a table, without what Markdown reads as its own."""
    return text.replace("|", "/").replace("<", "").replace(">", "").replace("*", "").strip().rstrip(".")


def _says(row: dict[str, Any]) -> str:
    if row["outcome"] == "refused":
        return _cell(row["reason"].split(REASON, 1)[-1])
    return _cell("; ".join(dict.fromkeys(note.split(": ", 1)[-1] for note in row["notes"].split("; ") if note)))


def models_page() -> str:
    """docs/models.md with its table made anew: what stands before MADE is written by hand."""
    found = rows("families")
    counts = Counter(row["outcome"] for row in found)
    wrong = len(found) - counts["right"] - counts["refused"]
    summary = f"Of {len(found)} configurations {counts['right']} are right, {counts['refused']} are refused, each with"
    lines = [
        f"{summary} its reason, and {wrong or 'none'} is wrong.",
        "",
        "| family, configuration | | |",
        "|---|---|---|",
    ]
    for row in sorted(found, key=lambda row: row["name"].lower()):
        family, _, configuration = row["name"].removeprefix("family/").partition("/")
        name = f"{family}, {configuration.replace('_', ' ')}" if configuration else family
        lines.append(f"| {name} | {row['outcome']} | {_says(row)} |")
    written = (DOCS / "models.md").read_text().partition(MADE)[0]
    return written + MADE + "\n\n" + "\n".join(lines) + "\n"


# ---- tables of results ----


def _made(page: str, lines: list[str]) -> str:
    """A page with its tables made anew: what stands before MADE is written by hand."""
    written = (DOCS / "results" / page).read_text().partition(MADE)[0]
    return written + MADE + "\n\n" + "\n".join(lines) + "\n"


def _number(row: dict[str, Any], field: str, sign: str = "") -> str:
    error = row.get(f"{field}_se")
    return f"{row[field]:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")


def tasks_page() -> str:
    """Of table.json: a table for each share of the bytes, each column's best in bold."""
    found = rows("table")
    best = {row["name"].removeprefix("best/"): row["methods"] for row in found if row["name"].startswith("best/")}
    measured = [row for row in found if "method" in row]
    tasks = [row["task"] for row in measured if row["method"] == "dense"]
    lines = []
    for part in sorted({row["part"] for row in measured} - {1}):
        heads = [f"{task}, bits" if task == "ppl" else task for task in tasks]
        lines += [f"## 1/{part} of the bytes", "", f"| | {' | '.join(heads)} |", "|---" * (len(tasks) + 1) + "|"]
        for method in dict.fromkeys(row["method"] for row in measured if row["part"] in (1, part)):
            cells = []
            for task in tasks:
                own = [row for row in measured if (row["method"], row["task"]) == (method, task)]
                cell = next((_number(row, "score") for row in own if row["part"] in (1, part)), "refused")
                cells.append(f"**{cell}**" if method in best[f"{task}/{part}"] else cell)
            hides = any(row["method"] == method and row.get("frees_memory") is False for row in measured)
            lines.append(f"| {method}{' †' * hides} | {' | '.join(cells)} |")
        lines.append("")
    left = [f"- {row['name'].removeprefix('left_out/')}: {row['reason']}" for row in found if "reason" in row]
    return _made("tasks.md", lines + (["Left out:", "", *left] if left else []))


def shapes_page() -> str:
    """Of shapes.json: a table for each share, divergences over chance's, each column's best in bold."""
    found = rows("shapes")
    shapes = list(dict.fromkeys(row["shape"] for row in found))
    lines = []
    for part in sorted({row["part"] for row in found}):
        own = {(row["method"], row["shape"]): row["of_random"] for row in found if row["part"] == part}
        best = {shape: min(value for (_, of), value in own.items() if of == shape) for shape in shapes}
        lines += [f"## 1/{part} of the tokens", "", f"| | {' | '.join(shapes)} |", "|---" * (len(shapes) + 1) + "|"]
        for method in dict.fromkeys(method for method, _ in own):
            cells = [f"{own[method, shape]:.2f}" for shape in shapes]
            cells = [
                f"**{x}**" if own[method, shape] == best[shape] else x for x, shape in zip(cells, shapes, strict=True)
            ]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines.append("")
    return _made("shapes.md", lines[:-1])


# ---- command line ----


def cli_page() -> str:
    """What `kvcompress --help` says, of every command."""
    command = typer.main.get_command(app)
    said = get_docs_for_click(obj=command, ctx=typer.Context(command), name="kvcompress", title="Command line")
    return f"{MADE}\n" + html.unescape(said).replace("```console", "```text").strip() + "\n"


# ---- the figure of the README ----


def draw_recall(path: Path) -> None:
    """Share of what is asked after the pruning that is recalled, over the bytes that the cache holds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [row for row in rows("quality") if "later_recall" in row]  # others say what is best
    dense = next(row for row in found if row["method"] == "dense")
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    shown = (("later_recall", "Facts in source code"), ("pair_recall", "Key-value pairs"))
    for axes, (field, title) in zip(panels, shown, strict=True):
        for method, label in DRAWN.items():
            of = sorted((row for row in found if row["method"] == method), key=lambda row: row["nbytes_share"])
            shares, recall = [row["nbytes_share"] for row in of], [row[field] for row in of]
            axes.plot(shares, recall, marker="o", linewidth=2, label=label)
        axes.axhline(dense[field], color="black", linestyle=":", linewidth=1, label="dense: every token kept")
        axes.set_xscale("log", base=2)
        axes.set_xticks([1 / 16, 1 / 8, 1 / 4, 1 / 2], ["1/16", "1/8", "1/4", "1/2"])
        axes.set_xlabel("bytes held, of the dense cache's")
        axes.set_title(title, fontsize=11)
        axes.set_ylim(-0.03, 1.05)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("recalled, questions unknown\nwhen the cache was cut")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    write_text(DOCS / "models.md", models_page())
    write_text(DOCS / "cli.md", cli_page())
    write_text(DOCS / "results/tasks.md", tasks_page())
    write_text(DOCS / "results/shapes.md", shapes_page())
    draw_recall(DOCS / "figures/recall.png")
