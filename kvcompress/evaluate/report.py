"""Rows as tables, as a file, and as a heat map."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..apps.info import facts
from ..caches.spec import DENSE
from ..support.files import write_text
from .run import PEER, Row

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOST_COLUMNS = 6  # caches


def print_rows(rows: Sequence[Row], console: Console, notes: Sequence[str] = ()) -> None:
    """A line per task with every cache's score and the best of those that compress, then what each cache took; where
    caches are many, a line per cache. notes: what else there is to say of the rows."""
    names = _letters(rows)
    for cache, name in names.items():
        sizes = list(dict.fromkeys(row.sized for row in rows if row.cache == cache))
        size = "" if sizes == [cache] else f"  held to {sizes[0] if len(sizes) == 1 else 'bytes'}"
        console.print(f"{name}  {cache}{size}", highlight=False, markup=False, soft_wrap=True)
    tasks = [_cells(found, names) for found in _by_task(rows)]
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    if len(names) <= _MOST_COLUMNS:
        table.add_column("task")
        table.add_column("tokens", justify="right")
        for name in names.values():
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("best")
        for cells in tasks:
            table.add_row(*cells)
    else:
        table.add_column("cache")
        for task, tokens, *_ in tasks:
            table.add_column(f"{task}\n{tokens}", justify="right")
        for line, label in enumerate(_labels(names).values()):
            table.add_row(label, *(cells[2 + line] for cells in tasks))
        table.add_row("best", *(cells[-1] for cells in tasks))
    console.print(table)
    console.print(_costs(rows, names))
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    for found in _by_task(rows):
        if hint := hint_of(found):
            console.print(f"{found[0].task}, {found[0].length:,} tokens: {hint}", highlight=False, markup=False)


def hint_of(rows: Sequence[Row]) -> str | None:
    """What to do where the scores of one task say nothing of its caches: all are 0, or the dense cache's is."""
    if not rows[0].higher_is_better:
        return None
    dense = [row for row in rows if row.cache == DENSE]
    if any(row.score == 0 for row in dense):
        return (
            "the dense cache scores 0, so this model cannot do the task, whatever the cache: take another model, "
            "shorter --lengths or an easier task"
        )
    if not dense and all(row.score == 0 for row in rows):
        return "every cache scores 0: add --cache dense to see whether the model can do the task at all"
    return None


def _letters(rows: Sequence[Row]) -> dict[str, str]:
    caches = dict.fromkeys(row.cache for row in rows)
    return {cache: LETTERS[number] if number < len(LETTERS) else str(number) for number, cache in enumerate(caches)}


def _labels(names: dict[str, str]) -> dict[str, str]:
    """Letters, and the names of peers, which are short."""
    return {cache: f"{name} {cache}" if cache.startswith(PEER) else name for cache, name in names.items()}


def _cells(found: Sequence[Row], names: dict[str, str]) -> list[str]:
    """Of a task: its name, tokens, each cache's score ("" = it has none), the best."""
    best, by_cache = {row.cache for row in best_of(found)}, {row.cache: row for row in found}
    scores = [_score(by_cache[cache]) if cache in by_cache else "" for cache in names]
    marked = " ".join(name for cache, name in names.items() if cache in best)
    arrow = "" if found[0].higher_is_better else f", {found[0].unit}, lower is better"
    bold = [f"[bold]{score}[/]" if cache in best else score for cache, score in zip(names, scores, strict=True)]
    return [f"{found[0].task}{arrow}", f"{found[0].length:,}", *bold, marked]


def best_of(rows: Sequence[Row]) -> list[Row]:
    """Of one task: the best of the caches that compress, or of all where none does; several where they are equal."""
    rivals = [row for row in rows if row.cache != DENSE] or list(rows)
    scores = [row.score for row in rivals]
    best = max(scores) if rivals[0].higher_is_better else min(scores)
    return [row for row in rivals if row.score == best]


def _by_task(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.task, row.length), []).append(row)
    return list(found.values())


def _score(row: Row) -> str:
    return f"{row.score:.3f}" + ("" if row.score_se is None else f" +-{row.score_se:.3f}")


def _costs(rows: Sequence[Row], names: dict[str, str]) -> Table:
    """Means over tasks."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("cache", no_wrap=True)
    for column in ("bytes held", "of dense", "first token, s", "a token, ms"):
        table.add_column(column, justify="right")
    for cache, label in _labels(names).items():
        found = [row for row in rows if row.cache == cache]
        shares = [row.share for row in found if row.share is not None]
        tokens = [row.token_seconds for row in found if row.token_seconds is not None]
        table.add_row(
            label,
            f"{_mean([row.nbytes for row in found]):,.0f}",
            f"{_mean(shares):.3f}" if shares else "",
            f"{_mean([row.first_token_seconds for row in found]):.3f}",
            f"{1e3 * _mean(tokens):.2f}" if tokens else "",
        )
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def write_rows(path: Path, rows: Sequence[Row], **settings: Any) -> None:
    """JSON: what was run, with which versions, and the rows."""
    found = [asdict(row) | {"nbytes_share": row.share} for row in rows]
    said = {"command": " ".join(["kvcompress", *sys.argv[1:]]), **settings, "installed": facts(None), "rows": found}
    write_text(path, json.dumps(said, indent=1) + "\n")


# ---- by depth ----


def by_depth(row: Row) -> dict[float, float]:
    """Mean score of the questions for facts of each depth, rising."""
    found: dict[float, list[float]] = {}
    for sample in row.said:
        for answer in sample:
            found.setdefault(answer["depth"], []).append(answer["score"])
    return {depth: _mean(scores) for depth, scores in sorted(found.items())}


def print_depths(rows: Sequence[Row], console: Console) -> None:
    """For each cache, what is recalled by length and depth."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title="by depth", title_justify="left")
    table.add_column("cache")
    table.add_column("tokens", justify="right")
    for depth in by_depth(rows[0]):
        table.add_column(f"{depth:.0%}", justify="right")
    for cache, label in _labels(_letters(rows)).items():
        for row in rows:
            if row.cache == cache:
                table.add_row(label, f"{row.length:,}", *(f"{score:.2f}" for score in by_depth(row).values()))
    console.print(table)


def draw_depths(rows: Sequence[Row], path: Path) -> None:
    """A heat map for each cache, side by side, four in a row. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    from ..plots import recall_map, save

    caches = list(dict.fromkeys(row.cache for row in rows))
    across, down = min(len(caches), 4), -(-len(caches) // 4)
    figure = Figure(figsize=(5.2 * across, 4.4 * down), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[len(caches) :]:
        axes.set_axis_off()
    for cache, axes in zip(caches, panels, strict=False):
        own = sorted((row for row in rows if row.cache == cache), key=lambda row: row.length)
        depths = [by_depth(row) for row in own]
        cells = [[found[depth] for found in depths] for depth in depths[0]]
        recall_map(cells, [row.length for row in own], [100 * depth for depth in depths[0]], axes=axes)
        axes.set_title(cache, fontsize=8, wrap=True)
    save(figure, path)
