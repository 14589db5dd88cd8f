"""The pages that are made and not written: python tools/pages.py

docs/models.md, the tables of docs/results/pruning.md and shapes.md, and docs/figures/recall.png from
benchmarks/results, docs/cli.md from the command line itself.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.quality.parts.figures import style
from kvcompress.cli import app
from kvcompress.support.files import write_text

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks/results", ROOT / "docs"
MADE = "<!-- from here on made by tools/pages.py -->"
SEVERAL = 3  # commands that say the same of an option: it stands once
# in the command line's own page: usage without arguments, the list of the commands that follow, a group's --help
NOTHING_NEW = (
    r"\*\*Usage\*\*:\n\n```text\n\$ [\w ]+ \[OPTIONS\]\n```\n\n|\*\*Commands\*\*:\n\n(\* .*\n)+\n"
    r"|\*\*Options\*\*:\n\n\* `--help`.*\n\n"
)
REASON = "is not supported: "
HIDING = (  # presses that hide what they drop
    "KVzip", "KVzip/plus", "KVgrad", "AdaKV(SnapKV)", "AdaKV(ExpectedAttention)", "AdaKV(KeyDiff)",
    "AdaKV(Compactor)", "CriticalAdaKV(ExpectedAttention)",
)  # fmt: skip
# of witness.json: what is drawn, and what it is called
DRAWN = {
    "KVzip with mass, GlobalTopK": "KVzip with mass: two readings",
    "Gate trained on, GlobalTopK": "gates, trained: one reading",
    "Replay, GlobalTopK": "Replay: one reading, the default",
    "kvpress KVgrad": "kvpress's KVgrad: two readings, a gradient, frees nothing",
    "kvpress KVzip": "kvpress's KVzip: two readings, frees nothing",
    "SnapKV31, AdaKV": "SnapKV (pooled over 31), AdaKV",
    "SnapKV": "SnapKV",
}
WHERE = {"later": "asked afterwards", "end": "the question at the prompt's end", "guide": "the question known before"}
FIELDS = {"bits_over_dense": "bits over dense", "numbers": "numbers", "sentence": "sentence", "turns": "turns"}


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
    failing = counts["no answer"]
    wrong = len(found) - counts["right"] - counts["refused"] - failing
    summary = f"Of {len(found)} configurations {counts['right']} are right, {counts['refused']} are refused, each with"
    lines = [
        f"{summary} its reason, and {wrong or 'none'} is wrong."
        + (f" In {failing} the dense model itself fails." if failing else ""),
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


def pruning_page() -> str:
    """Of witness.json, witness_guide.json and witness_long.json: a table for each length and place of the question,
    each share's best in bold; of witness_presses.json: one of presses; of writing.json and long_answers.json: those of
    long generation."""
    found = [*rows("witness"), *rows("witness_guide"), *rows("witness_long")]
    lines: list[str] = []
    for question, length in dict.fromkeys((row["question"], row["length"]) for row in found):
        own = [row for row in found if (row["question"], row["length"]) == (question, length)]
        dense = next(row for row in own if row["method"] == "dense")
        fields = [field for field in FIELDS if field in dense]
        where = WHERE[question]
        told = [f"{dense['bits']:.3f} bits per token"] if "bits" in dense else []
        told += [f"{FIELDS[field]} {dense[field]:.3f}" for field in fields if field != "bits_over_dense"]
        lines += [
            f"## {length:,} tokens, {where}",
            "",
            f"{len(dense['texts'])} passages. Dense: {', '.join(told)}.",
            "",
        ]
        lines += [f"| | keeps | held | {' | '.join(map(FIELDS.get, fields))} |", "|---" * (len(fields) + 3) + "|"]
        measured = [row for row in own if row["method"] != "dense" and "reason" not in row]
        for row in measured:
            alike = [other for other in measured if other["share"] == row["share"]]
            cells = []
            for field in fields:
                best = (min if field == "bits_over_dense" else max)(other[field] for other in alike)
                cell = _number(row, field, "+" if field == "bits_over_dense" else "")
                cells.append(f"**{cell}**" if row[field] == best else cell)
            share = Fraction(row["share"]).limit_denominator(64)
            hides = row["method"].removeprefix("kvpress ") in HIDING
            name = f"{row['method']}{' †' * hides}"
            few = len(row["texts"]) < len(dense["texts"])
            name += f" ({len(row['texts'])} passages)" * few
            lines.append(f"| {name} | {share} | {row['nbytes_share']:.3f} | {' | '.join(cells)} |")
        lines.append("")
    left = [f"- {row['name'].removeprefix('witness/')}: {row['reason']}" for row in found if "reason" in row]
    lines += ["Left out:", "", *left, ""] if left else []
    return _made("pruning.md", [*lines, *_presses_lines(), "", *_writing_lines(), "", *_answers_lines()])


def _presses_lines() -> list[str]:
    """Of witness_presses.json: a line for each press, the best first."""
    found = [row for row in rows("witness_presses") if "reason" not in row]
    dense = next(row for row in found if row["method"] == "dense")
    shares = sorted({row["share"] for row in found if row["share"] is not None}, reverse=True)
    fields = {"bits_over_dense": "bits", "numbers": "numbers", "sentence": "sentence", "turns": "turns"}
    heads = [f"{Fraction(share).limit_denominator(64)}: {name}" for share in shares for name in fields.values()]
    told = ", ".join(f"{FIELDS[field]} {dense[field]:.2f}" for field in fields if field != "bits_over_dense")
    lines = [
        "## Every press, asked afterwards",
        "",
        f"{len(dense['texts'])} passages of {dense['length']:,} tokens. Dense: {told}.",
        "",
        f"| | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    by_method: dict[str, dict[float, dict[str, Any]]] = {}
    for row in found:
        if row["share"] is not None:
            by_method.setdefault(row["method"], {})[row["share"]] = row
    for method, own in sorted(by_method.items(), key=lambda x: x[1][shares[0]]["bits_over_dense"]):
        name = f"{method}{' †' * (method.removeprefix('kvpress ') in HIDING)}"
        cells = []
        for share in shares:
            for field in fields:
                best = (min if field == "bits_over_dense" else max)(x[share][field] for x in by_method.values())
                form = "+.3f" if field == "bits_over_dense" else ".2f"
                cell = f"{own[share][field]:{form}}"
                cells.append(f"**{cell}**" if own[share][field] == best else cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _writing_lines() -> list[str]:
    found = rows("writing")
    dense = next(row for row in found if row["method"] == "dense")
    kept = sorted({row["share"] for row in found if row["share"] is not None}, reverse=True)
    told = [f"{round(share * dense['length'])} of {dense['length']:,}" for share in kept]
    lines = [
        "## Long generation",
        "",
        f"{len(dense['texts'])} pieces of books. Dense: {dense['bits']:.3f} bits per token.",
        "",
        f"| | {' | '.join(f'bits over dense, {x} | share' for x in told)} |",
        "|---" * (2 * len(kept) + 1) + "|",
    ]
    for method in dict.fromkeys(row["method"] for row in found if row["share"] is not None):
        cells = []
        for share in kept:
            alike = [row for row in found if row["share"] == share]
            row = next(row for row in alike if row["method"] == method)
            best = row["bits_over_dense"] == min(other["bits_over_dense"] for other in alike)
            cell = _number(row, "bits_over_dense", "+")
            cells += [f"**{cell}**" if best else cell, f"{row['bits_over_dense_share']:+.1%}"]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def _answers_lines() -> list[str]:
    """Of long_answers.json: a line for each method, each column's best in bold."""
    found = rows("long_answers")
    dense = next(row for row in found if row["method"] == "dense")
    kept = sorted({row["share"] for row in found if row["share"] is not None}, reverse=True)
    fields = {"bits_over_dense_share": "bits over dense", "greedy": "alike", "numbers": "numbers"}
    heads = [f"{round(share * dense['length']):,}: {name}" for share in kept for name in fields.values()]
    lines = [
        "## Long answers",
        "",
        f"{len(dense['texts'])} answers of {dense['length']:,} tokens. Dense: {dense['bits']:.3f} bits per token, "
        f"numbers {dense['numbers']:.2f}.",
        "",
        f"| | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for method in dict.fromkeys(row["method"] for row in found if row["share"] is not None):
        cells = []
        for share in kept:
            alike = [row for row in found if row["share"] == share]
            row = next(row for row in alike if row["method"] == method)
            for field in fields:
                best = (min if field == "bits_over_dense_share" else max)(other[field] for other in alike)
                form = "+.1%" if field == "bits_over_dense_share" else ".2f"
                cell = f"{row[field]:{form}}"
                if field == "bits_over_dense_share":  # the error of the difference, as a share too
                    cell += f" ± {row['bits_over_dense_se'] / dense['bits']:.1%}"
                cells.append(f"**{cell}**" if row[field] == best else cell)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


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
    """What `kvcompress --help` says, of every command; what several say of an option stands at the end."""
    command = typer.main.get_command(app)
    said = get_docs_for_click(obj=command, ctx=typer.Context(command), name="kvcompress", title="Command line")
    text = html.unescape(said).replace("```console", "```text").strip()
    lines = re.sub(NOTHING_NEW, "", text).splitlines()
    shared = dict[str, str]()  # by the option's name
    for line, count in Counter(line for line in lines if line.startswith("* `--")).most_common():
        if count >= SEVERAL:
            shared.setdefault(line.split("`")[1].split()[0], line)
    out, names = list[str](), list[str]()
    for line in [*lines, ""]:
        if (name := next((name for name, said in shared.items() if said == line), None)) is not None:
            names.append(f"`{name}`")
            continue
        if names and not line:
            out.append(f"* {', '.join(names)}: as [in several commands](#options-of-several-commands)")
            names.clear()
        out.append(line)
    return "\n".join([MADE, *out, "## Options of several commands", "", *sorted(shared.values())]) + "\n"


# ---- the figure of the README ----


def draw_recall(path: Path) -> None:
    """What a real model still recalls, and what its text loses, over the share of the tokens that stay."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [row for row in rows("witness") if (row["question"], row["length"]) == ("later", 1000)]
    dense = next(row for row in found if row["method"] == "dense")
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    shown = (("numbers", "Numbers recalled, asked after the cutting"), ("bits_over_dense", "Bits per token lost"))
    for axes, (field, title) in zip(panels, shown, strict=True):
        for method, label in DRAWN.items():
            of = [row for row in found if row["method"] == method and field in row]
            of.sort(key=lambda row: row["share"])
            axes.plot(
                [row["share"] for row in of], [row[field] for row in of], marker="o", label=label, **style(method)
            )
        axes.axhline(dense.get(field, 0.0), color="black", linestyle=":", linewidth=1, label="every token kept")
        axes.set_xscale("log", base=2)
        axes.set_xticks([1 / 8, 1 / 4, 1 / 2], ["1/8", "1/4", "1/2"])
        axes.set_xlabel("share of the tokens that stay")
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
    panels[0].set_ylim(-0.03, 1.0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    write_text(DOCS / "models.md", models_page())
    write_text(DOCS / "cli.md", cli_page())
    write_text(DOCS / "results/pruning.md", pruning_page())
    write_text(DOCS / "results/shapes.md", shapes_page())
    draw_recall(DOCS / "figures/recall.png")
