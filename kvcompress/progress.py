"""Progress of long readings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS = 5.0  # between two lines where there is no bar
Progress = Callable[[int, int | None], object]  # (tokens read, tokens in all or None where nobody knows)


@contextmanager
def showing(
    progress: Progress | bool, total: int | None, *, label: str = "reading", console: Console | None = None
) -> Iterator[Callable[[int], object]]:
    """A function to call with the tokens read so far. progress: True draws a bar, or where the console is no terminal
    prints a line to standard error every few seconds; a function is called instead."""
    if progress is not True:
        yield (lambda read: progress(read, total)) if progress else (lambda read: None)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} tokens"), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = console or Console()
    if not console.is_terminal:
        yield _lines(label, total)
        return
    with Bar(*columns, console=console, transient=True) as bar:
        line = bar.add_task(label, total=total)
        yield lambda read: bar.update(line, completed=read)


def _lines(label: str, total: int | None) -> Callable[[int], object]:
    begin = last = time.monotonic()

    def show(read: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS:
            last = now
            of = "" if total is None else f" of {total:,}"
            print(f"{label}: {read:,}{of} tokens, {now - begin:.0f} s", file=sys.stderr, flush=True)

    return show
