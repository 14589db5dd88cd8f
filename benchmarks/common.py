"""Shared by the benchmarks: the command, alternating medians, the machine's own ceilings, tables, the JSON file."""

from __future__ import annotations

import argparse
import json
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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from kvcompress import ops
from kvcompress.support.extras import need_packages
from kvcompress.support.names import check_name

# bytes through which buffers take turns, so that no cache answers twice, and the size of the machine's own products
COLD_NBYTES = {"full": 1 << 30, "quick": 1 << 30, "tiny": 1 << 20}
PRODUCT = {"full": 2048, "quick": 2048, "tiny": 64}


def visible(
    T: int, window: int | None = None, sinks: int = 0, complement: bool = False, device: torch.device | None = None
) -> torch.Tensor:
    """The mask of causal attention, of it to sinks and a window, or to what is neither: bool [T, T]."""
    key = torch.arange(T, device=device)
    back = key[:, None] - key
    near = torch.ones_like(back, dtype=torch.bool) if window is None else (back < window) | (key < sinks)
    return (back >= 0) & (~near if complement else near)


# ---- the command ----


def parser(description: str | None, *, figure: str | None = None) -> argparse.ArgumentParser:
    """figure: what --figure draws, None = there is no such option."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    for name, help in (
        ("quick", "fewer sizes and repetitions; ends within 50 s"),
        ("tiny", "sizes for tests, of which no figure means anything; ends within seconds"),
    ):
        size.add_argument(f"--{name}", dest="size", action="store_const", const=name, help=help)
    parser.set_defaults(size="full")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    if figure is not None:
        parser.add_argument("--figure", type=Path, help=f"draw {figure} into this file")
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, once what --json and figures need is known to be there. size: full, quick or tiny."""
    choice = parser.parse_args()
    files = {name: getattr(choice, name, None) for name in ("json", "figure", "figures")}
    for name, path in files.items():
        if path is None:
            continue
        folder = path if name == "figures" else path.parent
        if not folder.is_dir():
            parser.error(f"argument --{name}: the directory {folder} does not exist")
        if name != "json":
            try:
                need_packages(f"--{name}", "matplotlib")
            except ImportError as error:
                parser.error(str(error))
    return choice


def options(description: str | None) -> argparse.Namespace:
    return parse_arguments(parser(description))


def load(name: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Hugging Face model by name or folder; "example" is the shipped one, "smollm2" that of the packages."""
    if name == "example":
        return kvcompress.load_example_model(device=device)
    located = check_name("model", name)
    model = AutoModelForCausalLM.from_pretrained(located, dtype="auto").to(device).eval()
    return model, AutoTokenizer.from_pretrained(located)


# ---- measuring ----


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


def read_bandwidth(size: str) -> float:
    """Bytes per second of summing a large float32 array with all threads. size: the command's."""
    nbytes = COLD_NBYTES[size]
    x = torch.ones(nbytes // 4)
    return nbytes / alternate(5, x.sum)[0]


def gemm_rate(size: str) -> float:
    """FLOP per second of a square float32 matrix product with all threads. size: the command's."""
    n = PRODUCT[size]
    a, b = torch.randn(n, n), torch.randn(n, n)
    return 2 * n**3 / alternate(5, lambda: a @ b)[0]


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


# ---- what comes of it ----


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


def write_json(path: Path, rows: list[dict[str, Any]], **more: object) -> None:
    """The file of a benchmark's rows, first under a temporary name. more: what else there is to know of the machine."""
    content = {"machine": machine() | more, "command": " ".join(["python", *sys.argv]), "rows": rows}
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(path)


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
    sys.exit("common.py is no benchmark but what they share; run one of the others, such as benchmarks/speed/decode.py")
