"""Shared by the benchmarks: alternating medians, the machine's own ceilings, the table and the JSON file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvcompress import ops


@dataclass
class Row:
    """name: a path of settings. ours, peer: seconds. ratio: peer / ours. ceiling: fraction of the machine's limit."""

    name: str
    ours: float
    peer: float | None = None
    peer_name: str | None = None
    ceiling: float | None = None
    bytes: int | None = None
    note: str = ""
    ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.ratio = None if self.peer is None else self.peer / self.ours


def parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; ends within 50 s")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, once the directory of --json is known to be there."""
    choice = parser.parse_args()
    if choice.json is not None and not choice.json.parent.is_dir():
        parser.error(f"argument --json: the directory {choice.json.parent} does not exist")
    return choice


def options(description: str | None) -> argparse.Namespace:
    return parse_arguments(parser(description))


def alternate(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Median seconds of each work; they take turns, so that a noisy moment hits all of them.

    Each round has its own order (seed 0): what ran just before leaves caches and threads in a state of its own.
    """
    order, numbers = random.Random(0), list(range(len(works)))
    seconds: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(repeats):
        order.shuffle(numbers)
        for number in numbers:
            begin = time.perf_counter()
            works[number]()
            seconds[number].append(time.perf_counter() - begin)
    return [statistics.median(times) for times in seconds]


def read_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes per second of summing a large float32 array with all threads."""
    x = torch.ones(nbytes // 4)
    return nbytes / alternate(5, x.sum)[0]


def gemm_rate(dtype: torch.dtype = torch.float32, size: int = 2048) -> float:
    """FLOP per second of a square matrix product with all threads."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / alternate(5, lambda: a @ b)[0]


def machine() -> dict[str, object]:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "simd": ops.simd(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def print_table(
    title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], *, left: Sequence[str] = ()
) -> None:
    """left: columns of words; the others are numbers."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def tidy(x: Any) -> Any:
    """Without nan, which JSON lacks, and with six decimals."""
    if isinstance(x, dict):
        return {name: tidy(value) for name, value in x.items()}
    if isinstance(x, list):
        return [tidy(value) for value in x]
    return (None if math.isnan(x) else round(x, 6)) if isinstance(x, float) else x


def write_json(path: Path, rows: list[dict[str, Any]], **more: object) -> None:
    """The file of a benchmark's rows, first under a temporary name. more: what else there is to know of the machine."""
    content = {"machine": machine() | more, "command": " ".join(["python", *sys.argv]), "rows": rows}
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(path)


def deliver(
    choice: argparse.Namespace,
    rows: list[dict[str, Any]],
    show: Callable[[list[dict[str, Any]]], None],
    draw: Callable[[list[dict[str, Any]], Path], None],
) -> None:
    """Prints the rows, and writes and draws them where the command (--json, --figure) asks for it."""
    show(rows)
    if choice.json is not None:
        write_json(choice.json, rows)
    if choice.figure is not None:
        draw(rows, choice.figure)


def report(rows: list[Row], path: Path | None, **ceilings: float) -> None:
    """Prints the table and writes the file."""
    lines = [
        (
            row.name,
            f"{row.ours * 1e3:.3f}",
            "" if row.peer is None else f"{row.peer * 1e3:.3f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.ceiling is None else f"{row.ceiling:.2f}",
            row.peer_name or "",
            row.note,
        )
        for row in rows
    ]
    title = ", ".join(f"{name} {value / 1e9:.1f} G/s" for name, value in ceilings.items())
    columns = ("name", "ours ms", "peer ms", "ratio", "ceiling", "peer", "note")
    print_table(title, columns, lines, left=("name", "peer", "note"))
    if path is not None:
        per_second = {f"{name}_per_second": value for name, value in ceilings.items()}
        write_json(path, [asdict(row) for row in rows], **per_second)


if __name__ == "__main__":
    sys.exit("common.py is no benchmark but what they share; run one of the others, such as benchmarks/decode.py")
