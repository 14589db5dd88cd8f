"""What pruning costs in quality: bits per byte, recall of facts and of key-value pairs, against the share kept.

    python benchmarks/quality/quality.py [--quick] [--json FILE] [--figure FILE] [--model NAME] [--ablations | --best]

Every pruner keeps 1/2, 1/4, 1/8 and 1/16 of a prompt (PrunedCache with the rest as the share to remove; some pruners
in the whole run alone); besides them AdaKV and PyramidKV with SnapKV, GlobalTopK with pruners that need no question,
SnapKV guided by a question that is known beforehand, IterativeCache of the same memory (chunks of a quarter of the
prompt), and CenterOfGravity's positions. How a task reads and scores: parts/tasks.py.

bits      bits per byte of held-out source text after a prompt of held-out source text; +bits: over the dense cache's,
          the mean of the differences on the same texts and its standard error, which is smaller than that of either
facts     recall of five-digit facts over depth in source text, 8 to a prompt, the prompt ends with the question for one
later     the same where all 8 are asked after the prompt was read and pruned: nothing says what to keep
pairs     recall of facts alone, one after the other, all asked afterwards: every token of an answer is wanted
bytes     cache.nbytes() after the text prompts, of what transformers' DynamicCache holds of them

SnapKV31 is SnapKV with maximum pooling over 31 neighbours: the example model's tokens are bytes, a fact is 39 of them,
and SnapKV's own 5 were chosen for words. Guided rows know each question beforehand, also in `pairs` (two questions a
prompt, one reading each); they have no `bits` and no `later`, which are about what nobody knows beforehand. Numbers
after +- are standard errors over prompts; 0 where all prompts agree. Tasks that the dense cache itself answers less
than 9 times in 10 are left out: they would not measure pruning. Seeds are fixed; text is that of the Python that runs
this. On busy cores set OMP_NUM_THREADS=1: threads that wait for each other take longer than one.

--ablations: CenterOfGravity at 1/8: head gravity x order x keep_head, gap x order, window x order.
--best: what to take where no question is known, at 1/4, 1/8 and 1/16 of the dense cache's bytes as they are held,
tables included, in pages of 8. The file then has rows besides: best/<later, pairs or bits>/<n>, the best method at 1/n
(recall, or over_dense as a share of the dense cache's bits), and both/<n>, the one with the lowest bits among those
whose facts, later facts and pairs are the dense cache's to within 2 %; missing where there is none.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table
from benchmarks.quality.parts.figures import legend_below
from benchmarks.quality.parts.measures import (
    NAMED,
    PRUNERS,
    Sizes,
    answered,
    deliver,
    make_tasks,
    measures_of,
    number,
    sizes_of,
    tidy,
)
from benchmarks.quality.parts.tasks import Result, Task, measure, measure_guided
from kvcompress import AdaKV, CompressedCache, GlobalTopK, IterativeCache, PrunedCache, PyramidKV, RemoteGap
from kvcompress.budgets import Budget
from kvcompress.pruners import CenterOfGravity, Pruner

FIXED = 0.875  # removed in the ablations
PARTS = (4, 8, 16)  # of the dense cache's bytes, in --best
TABLES = 0.006  # of them, for the tables of pages of 8 and what row ends leave free


@dataclass(frozen=True)
class Method:
    """A cache to measure. removed: share of the prompt; None = the dense cache of transformers."""

    name: str
    pruner: Pruner
    removed: float | None
    budget: Callable[[float], float | Budget] = float
    positions: str | RemoteGap = "original"
    guided: bool = False
    iterative: bool = False
    page_size: int = 64

    def cache(self, model: PreTrainedModel, prompt_tokens: int) -> CompressedCache | DynamicCache:
        if self.removed is None:
            return DynamicCache(config=model.config)
        if self.iterative:
            kept = max(round(prompt_tokens * (1 - self.removed)), 1)
            return IterativeCache(model.config, memory_size=kept, chunk_size=prompt_tokens // 4, pruner=self.pruner)
        return PrunedCache(
            model.config, self.pruner, self.budget(self.removed), positions=self.positions, page_size=self.page_size
        )


SIZES = {
    "full": Sizes(),
    "quick": Sizes(texts=3, facts=4, later=2, pairs=2, removed=(0.75,), named=False),
    "tiny": Sizes(
        named=False,
        length=256,
        scored=32,
        texts=2,
        facts=2,
        later=2,
        pairs=2,
        per_prompt=2,
        pairs_per_prompt=4,
        removed=(0.5,),
    ),
}


# ---- what is measured ----


def methods(removed: tuple[float, ...], headroom: int, *, named: bool) -> Iterator[Method]:
    """named: with the pruners of NAMED."""
    snap, gravity = PRUNERS["SnapKV"], PRUNERS["CenterOfGravity"]
    for share in removed:
        for name, pruner in (PRUNERS | (NAMED if named else {})).items():
            yield Method(name, pruner, share)
        for name in ("SnapKV", "SnapKV31"):
            yield Method(f"{name}/AdaKV", PRUNERS[name], share, AdaKV)
            yield Method(f"{name}/PyramidKV", PRUNERS[name], share, PyramidKV)
        for name in ("Replay", "Successor", "KeyDiff"):
            yield Method(f"{name}/GlobalTopK", PRUNERS[name], share, GlobalTopK, page_size=16)
        yield Method("Replay/AdaKV", PRUNERS["Replay"], share, AdaKV, page_size=16)
        yield Method("SnapKV/guided", snap, share, guided=True)
        yield Method("IterativeCache/SnapKV", snap, share, iterative=True)
        yield Method("IterativeCache/SnapKV/guided", snap, share, iterative=True, guided=True)
        yield Method("CenterOfGravity/contiguous", gravity, share, positions="contiguous")
        yield Method("CenterOfGravity/RemoteGap", gravity, share, positions=RemoteGap(headroom=headroom))


def unguided() -> Iterator[Method]:
    for part in PARTS:
        share = round(1 - 1 / part + TABLES, 4)
        for name in ("Replay", "Successor", "KeyDiff", "SnapKV31"):
            yield Method(f"{name}/GlobalTopK", PRUNERS[name], share, GlobalTopK, page_size=8)
        for name in ("Replay", "SnapKV31"):
            yield Method(f"{name}/AdaKV", PRUNERS[name], share, AdaKV, page_size=8)


def best_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """best/<measure>/<n> and both/<n>, see the head of the file. rows: those of the dense cache and of `unguided`."""
    dense, found = rows[0], []
    recalls = {"facts": "fact_recall", "later": "later_recall", "pairs": "pair_recall"}
    bits = "bits_per_byte_over_dense"

    def best(name: str, row: dict[str, Any], **measures: float) -> dict[str, Any]:
        return {"name": name, "method": row["method"], "nbytes_share": row["nbytes_share"]} | measures

    for part in PARTS:
        share = 1 - round(1 - 1 / part + TABLES, 4)
        rivals = [row for row in rows if abs(row["share_kept"] - share) < 1e-9]
        for asked in ("later", "pairs"):
            field = recalls[asked]
            if some := [row for row in rivals if field in row]:
                row = max(some, key=lambda row: row[field])
                found.append(best(f"best/{asked}/{part}", row, recall=row[field]))
        if not (some := [row for row in rivals if bits in row]):
            continue
        row = min(some, key=lambda row: row[bits])
        found.append(best(f"best/bits/{part}", row, over_dense=row[bits] / dense["bits_per_byte"]))
        kept = {asked: field for asked, field in recalls.items() if field in dense}
        if whole := [row for row in some if all(row.get(x, 0.0) >= 0.98 * dense[x] for x in kept.values())]:
            row = min(whole, key=lambda row: row[bits])
            recalled = {asked: row[field] for asked, field in kept.items()}
            found.append(best(f"both/{part}", row, over_dense=row[bits] / dense["bits_per_byte"], **recalled))
    return found


def ablations(headroom: int) -> Iterator[Method]:
    """The paper's grid at a fixed total; what equals the default setting is measured once."""
    default = CenterOfGravity()
    seen: set[tuple[Pruner, str | RemoteGap]] = set()

    def method(name: str, positions: str | RemoteGap = "original", **changes: Any) -> Iterator[Method]:
        pruner = replace(default, **changes)
        if (pruner, positions) not in seen:
            seen.add((pruner, positions))
            yield Method(name, pruner, FIXED, positions=positions)

    for order in ("local", "global"):
        for head in (0, 4, 6, 16):
            for keep in (True, False) if head else (True,):
                name = f"head{head}/{order}/{'kept' if keep else 'lost'}" if head else f"head0/{order}"
                yield from method(name, order=order, head_length=head, keep_head=keep)
    for order in ("local", "global"):
        for gap in ("original", 0, 64, 128, "auto"):
            positions = gap if gap == "original" else RemoteGap(gap=gap, headroom=headroom)
            yield from method(f"gap_{gap}/{order}", positions, order=order)
    for order in ("local", "global"):
        for window in (1, 16, 64):
            yield from method(f"window{window}/{order}", order=order, window=window)


def run_method(model: PreTrainedModel, method: Method, tasks: list[Task]) -> dict[str, Result]:
    results = {}
    for task in tasks:

        def make(tokens: int = len(task.prompts[0])) -> CompressedCache | DynamicCache:
            return method.cache(model, tokens)

        if not method.guided:
            results[task.name] = measure(model, task, make)
        elif task.name in ("facts", "pairs"):
            results[task.name] = measure_guided(model, task, make)
    return results


def row_of(method: Method, model_name: str, results: dict[str, Result], dense: dict[str, Result],
           tasks: list[Task], seconds: float) -> dict[str, Any]:  # fmt: skip
    """One row of the file; a measure that does not apply is missing or null. Samples, one per prompt, are of the same
    prompts in every row, so that two rows can be compared by their differences."""
    kept = 1.0 if method.removed is None else 1 - method.removed
    row: dict[str, Any] = {
        "name": f"quality/{model_name}/{method.name}/keep{kept:g}",
        "method": method.name,
        "share_kept": kept,
        "pruner": None if method.removed is None else repr(method.pruner),
        "budget": None if method.removed is None else repr(method.budget(method.removed)),
        "positions": "contiguous" if method.iterative else str(method.positions),
        "guided": method.guided,
    }
    row |= measures_of(results, dense, tasks)
    first = next(task.name for task in tasks if task.name in results)
    held = results[first].nbytes, dense[first].nbytes
    row |= {"nbytes": held[0], "dense_nbytes": held[1], "nbytes_share": held[0] / held[1], "seconds": seconds}
    return tidy(row)


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sizes,
    *,
    name: str = "example",
    ablation: bool = False,
    best: bool = False,
    only: Callable[[Method], bool] = lambda method: True,
) -> list[dict[str, Any]]:
    """All rows; the dense cache's and the whole PrunedCache's first. only: which methods besides them."""
    tasks = make_tasks(tokenizer, sizes)
    headroom = max(len(following) for task in tasks for following in task.following)
    snap = PRUNERS["SnapKV"]
    whole = [Method("dense", snap, None), Method("PrunedCache/whole", snap, 0.0)]
    every = ablations(headroom) if ablation else methods(sizes.removed, headroom, named=sizes.named)
    if best:
        every = unguided()
    chosen = [m for m in every if only(m)]
    rows: list[dict[str, Any]] = []
    dense: dict[str, Result] = {}
    with kvcompress.attach(model):
        for number, method in enumerate(whole + chosen):
            begin = time.perf_counter()
            results = run_method(model, method, tasks)
            if not dense:
                dense = results
                tasks = answered(tasks, results, name)
            seconds = time.perf_counter() - begin
            rows.append(row_of(method, name, results, dense, tasks, seconds))
            count = len(whole) + len(chosen)
            print(f"{number + 1}/{count} {rows[-1]['name']} {seconds:.1f} s", file=sys.stderr, flush=True)
    return rows


# ---- what is shown ----


def show(rows: list[dict[str, Any]]) -> None:
    lines = [
        (
            row["method"],
            f"{row['share_kept']:g}",
            number(row, "bits_per_byte"),
            number(row, "bits_per_byte_over_dense", "+"),
            *(number(row, field) for field in ("fact_recall", "later_recall", "pair_recall")),
            f"{row['nbytes_share']:.3f}",
        )
        for row in rows
    ]
    texts = [f"{len(rows[0]['bits_per_byte_samples'])} texts"] if "bits_per_byte_samples" in rows[0] else []
    counts = [f"{rows[0][field]} {name}" for name, field in (
        ("facts", "fact_recall_questions"),
        ("later facts", "later_recall_questions"), ("pairs", "pair_recall_questions")) if field in rows[0]]  # fmt: skip
    columns = ("method", "kept", "bits", "+bits", "facts", "later", "pairs", "bytes")
    print_table(", ".join(texts + counts), columns, lines, left=("method",))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Each measure against the share kept, one line per method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "bits_per_byte_over_dense": "bits per byte over dense, held-out text",
        "fact_recall": "recall of a fact, question at the prompt's end",
        "later_recall": "recall of facts, questions after the pruning",
        "pair_recall": "recall of key-value pairs, questions after the pruning",
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), sharex=True)
    shown = [row for row in rows if row["share_kept"] < 1]
    names = list(dict.fromkeys(row["method"] for row in shown))
    colors = pyplot.get_cmap("tab20").colors
    for axis, (field, title) in zip(axes.flat, panels.items(), strict=True):
        for place, name in enumerate(names):
            line = [row for row in shown if row["method"] == name and row.get(field) is not None]
            if line:
                axis.errorbar(
                    [row["share_kept"] for row in line], [row[field] for row in line],
                    [row[f"{field}_se"] or 0 for row in line], label=name, color=colors[place % len(colors)],
                    marker="o", markersize=4, capsize=2, linestyle="-" if name in PRUNERS else "--",
                )  # fmt: skip
        if field != "bits_per_byte_over_dense" and rows[0].get(field) is not None:
            axis.axhline(rows[0][field], color="black", linewidth=0.8, linestyle=":", label="dense")
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        shares = sorted({row["share_kept"] for row in shown})
        axis.set_xticks(shares, [f"1/{round(1 / share)}" for share in shares])
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("share of the prompt kept")
    legend_below(figure, axes.flat, 5, 0.1)
    figure.savefig(path, dpi=110)


def options() -> argparse.Namespace:
    parse = parser(__doc__, figure="the measures against the share kept")
    which = parse.add_mutually_exclusive_group()
    which.add_argument("--ablations", action="store_true", help="the settings of CenterOfGravity at a fixed total")
    which.add_argument("--best", action="store_true", help="what to take where no question is known, at equal bytes")
    parse.add_argument(
        "--model", default="example", help="a Hugging Face model by name or folder (default: the example)"
    )
    parse.add_argument("--length", type=int, help="tokens of a prompt (default: 1,024)")
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parse_arguments(parse)


def main() -> None:
    choice = options()
    model, tokenizer = load(choice.model, choice.device)
    rows = run(
        model, tokenizer, sizes_of(choice, SIZES), name=choice.model, ablation=choice.ablations, best=choice.best
    )
    deliver(choice, rows, show, draw, best_rows(rows) if choice.best else [])


if __name__ == "__main__":
    main()
