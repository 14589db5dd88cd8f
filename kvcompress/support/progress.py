"""Progress of what takes long: how much is done, and how long the rest will take."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS = 60.0  # between two lines where there is no bar
Progress = Callable[[int, int | None], object]  # (tokens read, tokens in all or None where nobody knows)
T = TypeVar("T")


class Show(Protocol):
    def __call__(self, done: int, text: str = "") -> object:
        """done: so far. text: what comes next or has come of it; "" = what was said before."""


@contextmanager
def showing(
    progress: Progress | bool, total: int | None, *, label: str = "reading", unit: str = "tokens",
    console: Console | None = None,
) -> Iterator[Show]:  # fmt: skip
    """A function to call with how much is done. progress: True draws a bar, or where the console is no terminal prints
    a line to standard error every minute; a function is called instead."""
    if progress is not True:
        yield (lambda done, text="": progress(done, total)) if progress else (lambda done, text="": None)
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed:,} " + unit),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = console or Console()
    if not console.is_terminal:
        yield _lines(label, unit, total)
        return
    with Bar(*columns, console=console, transient=True) as bar:
        line = bar.add_task(label, total=total)
        yield lambda done, text="": bar.update(line, completed=done, description=text or None)


def counted(items: Sequence[T], *, label: str = "reading", unit: str = "texts", console: Console) -> Iterator[T]:
    """The items, and how many of them are done."""
    with showing(True, len(items), label=label, unit=unit, console=console) as show:
        for number, item in enumerate(items):
            yield item
            show(number + 1)


@contextmanager
def telling(total: int, *, unit: str, console: Console) -> Iterator[Callable[[str], object]]:
    """A function to call with what comes next, before each of so many."""
    with showing(True, total, unit=unit, console=console) as show:
        begun = itertools.count()
        yield lambda text: show(next(begun), text)


def _lines(label: str, unit: str, total: int | None) -> Show:
    begin = last = time.monotonic()

    def show(done: int, text: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS:
            last = now
            left = f", about {(now - begin) * (total - done) / done:.0f} s left" if total and done else ""
            of = "" if total is None else f" of {total:,}"
            print(f"{text or label}: {done:,}{of} {unit}, {now - begin:.0f} s{left}", file=sys.stderr, flush=True)

    return show
