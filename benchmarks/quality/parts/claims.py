"""The figure of quality.py: one claim a panel, four to six lines, each named where it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Claim:
    """What a panel shows. methods: with the names of their lines. best: of the numbers at the fewest bytes."""

    field: str
    y: str
    says: str
    methods: dict[str, str]
    best: Callable[[list[float]], float]

    def measured(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if row.get("method") in self.methods and row.get(self.field) is not None]

    def title(self, rows: list[dict[str, Any]]) -> str:
        measured = self.measured(rows)
        least = min(row["share_kept"] for row in measured)
        fewest = {row["method"]: row[self.field] for row in measured if row["share_kept"] == least}
        value = self.best(list(fewest.values()))
        who = next(self.methods[method] for method, found in fewest.items() if found == value)
        return self.says.format(who=who, value=value, part=round(1 / least))


CLAIMS = (
    Claim(
        "bits_per_byte_over_dense",
        "bits per byte over dense, held-out text",
        "At 1/{part} of the bytes a text is kept best by\n{who}: {value:+.3f} bits per byte",
        {
            "Replay/GlobalTopK": "Replay, one budget for all",
            "KeyDiff/GlobalTopK": "KeyDiff, one budget for all",
            "SnapKV31/AdaKV": "SnapKV over 31, by layer",
            "SnapKV": "SnapKV",
            "H2O": "H2O",
            "Random": "chance",
        },
        min,
    ),
    Claim(
        "fact_recall",
        "facts recalled, question at the prompt's end",
        "At 1/{part} of the bytes answers are kept best by\n{who}: {value:.2f}",
        {
            "SnapKV/guided": "a question known while reading",
            "Replay/GlobalTopK": "Replay, one budget for all",
            "SnapKV31/AdaKV": "SnapKV over 31, by layer",
            "Replay": "Replay",
            "SnapKV": "SnapKV",
        },
        max,
    ),
)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each of CLAIMS: its methods against the bytes held, each named at its line; the title says what
    came of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    claims = [claim for claim in CLAIMS if claim.measured(rows)]
    if not claims:
        raise ValueError("figure needs rows of a method of CLAIMS, got none")
    figure, panels = pyplot.subplots(1, len(claims), figsize=(6.8 * len(claims), 4.2), squeeze=False)
    for axis, claim in zip(panels[0], claims, strict=True):
        ends = []
        for number_, (method, label) in enumerate(claim.methods.items()):
            line = sorted(
                (row for row in claim.measured(rows) if row["method"] == method),
                key=lambda row: row["nbytes_share"],
            )
            if not line:
                continue
            x, y = ([row[field] for row in line] for field in ("nbytes_share", claim.field))
            errors = [row[f"{claim.field}_se"] or 0 for row in line]
            color = f"C{number_}"
            axis.errorbar(x, y, errors, color=color, marker="osD^vP"[number_], markersize=5, capsize=2, linewidth=1.8)
            ends.append((y[0], x[0], label, color))
        name_lines(axis, ends)
        axis.set_title(claim.title(rows), fontsize=11, loc="left")
        axis.set_ylabel(claim.y)
        axis.set_xscale("log", base=2)
        shares = sorted({row["share_kept"] for row in rows if row.get("share_kept", 1) < 1})
        axis.set_xticks(shares, [f"1/{round(1 / share)}" for share in shares])
        axis.set_xlabel("bytes held, of the dense cache's")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def name_lines(axis: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Names lines at their left ends, (y, x, name, color) each, moved apart where they would overlap."""
    if not ends:
        return
    low, high = axis.get_ylim()
    apart, last = 0.065 * (high - low), -float("inf")
    for y, x, name, color in sorted(ends):
        last = max(y, last + apart)
        axis.annotate(name, (x, y), xytext=(x / 1.12, last), color=color, fontsize=9, ha="right", va="center")
    left, right = axis.get_xlim()
    axis.set_xlim(left / 5, right)
    axis.set_ylim(low, max(high, last + apart))
