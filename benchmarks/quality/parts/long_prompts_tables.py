"""Tables of benchmarks/quality/long_prompts.py, one function per part, from its rows."""

from __future__ import annotations

from typing import Any

from benchmarks.common import print_table

Rows = list[dict[str, Any]]
STEPS = (0, 16, 32, 48, 64, 96, 128)  # sizes of memory that recall is told apart by


def _number(x: float | None, digits: int = 3, sign: str = "") -> str:
    return "" if x is None else f"{x:{sign}.{digits}f}"


def position(rows: Rows) -> None:
    lines = [
        (
            row["method"], f"{row['tokens']:,}", *(_number(row[x]) for x in ("bits_per_byte", "first", "last")),
            _number(row["last_over_windows"], 3, "+"), _number(row["ratio"]),
            _number(row["ratio_over_windows"]),
            "" if row["ratio"] is None else f"+-{row['ratio_over_windows_se']:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("method", "tokens", "bits", "first", "last", "last - ref", "ratio", "/ref", "+-")
    print_table("bits per byte over position", columns, lines, left=("method",))


def recall(rows: Rows) -> None:
    lengths = rows[0]["lengths"]
    lines = [
        (
            row["method"], "yes" if row["guided"] else "no", str(row["memory_size"] or "all"),
            *(_number(x, 2) for x in row["recall_by_length"]),
        )
        for row in rows
    ]  # fmt: skip
    title = f"recall, mean over {len(rows[0]['depths'])} depths, {rows[0]['trials']} prompts each"
    print_table(title, ("method", "guided", "memory", *(f"{n:,}" for n in lengths)), lines, left=("method", "guided"))
    recalled: dict[int, list[float]] = {}
    for row in rows:
        if row["guided"] and row["schedule"] != "fixed":
            for memory, right in zip(_flat(row["memory_at_fact"]), _flat(row["recall"]), strict=True):
                if right is not None:
                    recalled.setdefault(max(step for step in STEPS if step <= memory), []).append(right)
    lines = [
        (f"{step}+", str(len(found)), _number(sum(found) / len(found), 2)) for step, found in sorted(recalled.items())
    ]
    columns = ("memory when the fact is read", "facts", "recall")
    print_table("guided, growing memory: all methods, lengths and depths", columns, lines)


def _flat(cells: list[list[Any]]) -> list[Any]:
    return [x for line in cells for x in line]


def tracks(rows: Rows) -> None:
    seen = [row for row in rows if "retention" in row]
    lines = [
        (
            row["method"], f"{row['memory_probability'][-1]:.2e}", _number(row["retention"][-1]),
            _number(row["last_chunk_share"]), _number(row["first_half_share"]),
        )
        for row in seen
    ]  # fmt: skip
    columns = ("method", "attention per key at the end", "retention", "from last chunk", "from first half")
    print_table("what memory receives, keeps and comes from", columns, lines, left=("method",))
    lines = [
        (
            row["method"], str(row["memory_then"]),
            *(" ".join(_number(x, 1) for x in row[field]) for field in ("digits_held_then", "digits_held")),
        )
        for row in rows
        if "digits_held" in row
    ]  # fmt: skip
    columns = ("method", "memory then", "digits held then, by layer", "at the end")
    print_table("a fact at 5 % of the prompt, guided", columns, lines, left=("method",))
