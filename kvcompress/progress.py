"""Progress of long readings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

Progress = Callable[[int, int | None], object]  # (tokens read, tokens in all or None where nobody knows)


@contextmanager
def showing(
    progress: Progress | bool, total: int | None, *, label: str = "reading", console: Console | None = None
) -> Iterator[Callable[[int], object]]:
    """A function to call with the tokens read so far. progress: True draws a bar, a function is called instead."""
    if progress is not True:
        yield (lambda read: progress(read, total)) if progress else (lambda read: None)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} tokens"), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=console, transient=True) as bar:
        line = bar.add_task(label, total=total)
        yield lambda read: bar.update(line, completed=read)
