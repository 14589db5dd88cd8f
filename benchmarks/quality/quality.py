"""What pruning costs in quality: bits per byte, recall of facts and of key-value pairs, against the bytes held.

    python benchmarks/quality/quality.py [--quick] [--json FILE] [--figure FILE] [--model NAME]
                                         [--methods NAME ... | --ablations]

Every pruner holds 1/2, 1/4, 1/8 and 1/16 of the dense cache's bytes after a prompt (PrunedCache in pages of 8; some
pruners in the whole run alone); besides them AdaKV, PyramidKV and GlobalTopK with some of them, SnapKV guided by a
question that is known beforehand, IterativeCache of the same memory
(chunks of a quarter of the prompt), CenterOfGravity's positions, and DuoAttention, whose heads are those that lose most
by streaming (measure_heads, "mass", 4 texts): as many retrieve as bytes allow, and the others have the rest of the
bytes as their window. How a task reads and scores: parts/tasks.py.

bits      bits per byte of held-out source text after a prompt of held-out source text; +bits: over the dense cache's,
          the mean of the differences on the same texts and its standard error, which is smaller than that of either
facts     recall of five-digit facts over depth in source text, 8 to a prompt, the prompt ends with the question for one
later     the same where all 8 are asked after the prompt was read and pruned: nothing says what to keep
pairs     recall of facts alone, one after the other, all asked afterwards: every token of an answer is wanted
bytes     cache.nbytes() after the prompts of text, of what transformers' DynamicCache holds of them: tables, running
          scores and what pages leave free included. The share to remove (`budget`) is raised until it is 1/n or less,
          to within 0.2 %, which is what the tables of a page come to.

SnapKV31 is SnapKV with maximum pooling over 31 neighbours: the example model's tokens are bytes, a fact is 39 of them,
and SnapKV's own 5 were chosen for words. Guided rows know each question beforehand, also in `pairs` (two questions a
prompt, one reading each); they have no `bits` and no `later`, which are about what nobody knows beforehand. Numbers
after +- are standard errors over prompts; 0 where all prompts agree. Tasks that the dense cache itself answers less
than 9 times in 10 are left out: they would not measure pruning. Seeds are fixed; text is that of the Python that runs
this. On busy cores set OMP_NUM_THREADS=1: threads that wait for each other take longer than one.

The file has rows besides, of what to take where no question is known: best/<facts, later, pairs or bits>/<n>, the best
method at 1/n of the bytes (recall; or over_dense, bits over the dense cache's as a share of those), and both/<n>, the
one with the lowest bits among those whose facts, later facts and pairs are the dense cache's to within 2 %; missing
where there is none.

--methods: these alone; their rows take the places of those that --json's file has, which must be of this command.
--ablations: CenterOfGravity at 1/8: head gravity x order x keep_head, gap x order, window x order.
"""

from __future__ import annotations

import argparse
import json
import math
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
from benchmarks.quality.parts.claims import draw
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
from benchmarks.quality.parts.tasks import Result, Task, Writer, measure, measure_guided
from kvcompress import (
    AdaKV,
    Budget,
    CenterOfGravity,
    CompressedCache,
    DuoAttention,
    GlobalTopK,
    HeadProfile,
    IterativeCache,
    PrunedCache,
    Pruner,
    PyramidKV,
    RemoteGap,
)
from kvcompress.analysis import measure_heads, pass_keys

FIXED = 8  # in the ablations: an eighth
TOLERANCE = 0.002  # of the bytes that a cache may hold
FEW = 2  # prompts by which the share to remove is found, before all of them are read
NEAR_DENSE = 0.98  # of the dense cache's recall
RECALLS = {"facts": "fact_recall", "later": "later_recall", "pairs": "pair_recall"}


@dataclass(frozen=True)
class Method:
    """A cache to measure. part: it holds 1/part of the dense cache's bytes, 1 = all of them; None = that cache itself,
    transformers'. removed: the share of a prompt to remove for that, found by `run_method`. heads: of a pruner that
    brings its own budget."""

    name: str
    pruner: Pruner
    part: int | None
    budget: Callable[[float], float | Budget] = float
    positions: str | RemoteGap = "original"
    guided: bool = False
    iterative: bool = False
    removed: float = 0.0
    heads: HeadProfile | None = None

    @property
    def share(self) -> float:
        return 1.0 if self.part is None else 1 / self.part

    def cache(self, model: PreTrainedModel, prompt_tokens: int) -> CompressedCache | DynamicCache:
        if self.part is None:
            return DynamicCache(config=model.config)
        if self.iterative:
            kept = max(round(prompt_tokens * (1 - self.removed)), 1)
            return IterativeCache(
                model.config, memory_size=kept, chunk_size=prompt_tokens // 4, pruner=self.pruner, page_size=8
            )
        if self.heads is not None:
            return PrunedCache(model.config, duo_attention(self.heads, self.removed, prompt_tokens), page_size=8)
        return PrunedCache(model.config, self.pruner, self.budget(self.removed), positions=self.positions, page_size=8)


def duo_attention(heads: HeadProfile, removed: float, tokens: int) -> DuoAttention:
    """Of a prompt of so many tokens: less than the share that stays of the heads retrieve, and the window of the others
    takes what is left of it."""
    count = sum(map(len, heads.gates))
    retrieve = max(math.ceil(count * (1 - removed)) - 1, 0)
    window = int((count * (1 - removed) - retrieve) / (count - retrieve) * tokens)
    return DuoAttention(heads, 1 - retrieve / count, sinks=4, recent_tokens=max(window - 4, 1))


SIZES = {
    "full": Sizes(),
    "quick": Sizes(texts=3, facts=4, later=2, pairs=2, parts=(4,), named=False),
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
        parts=(2,),
    ),
}


# ---- what is measured ----


def measured_heads(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> HeadProfile:
    """How much each KV head loses by streaming, in text with facts planted, of other places than the tasks'."""
    write = Writer(tokenizer)
    chosen = [torch.tensor(piece) for piece in write.source(4, sizes.length)]
    planted = pass_keys(tokenizer, chosen, facts=2, seed=0)
    return measure_heads(model, planted, method="mass", sinks=4, recent=sizes.length // 8)


def methods(
    parts: tuple[int, ...], headroom: int, *, named: bool, heads: HeadProfile | None = None
) -> Iterator[Method]:
    """named: with the pruners of NAMED. heads: DuoAttention's."""
    snap, gravity = PRUNERS["SnapKV"], PRUNERS["CenterOfGravity"]
    for part in parts:
        for name, pruner in (PRUNERS | (NAMED if named else {})).items():
            yield Method(name, pruner, part)
        for name in ("SnapKV", "SnapKV31"):
            yield Method(f"{name}/PyramidKV", PRUNERS[name], part, PyramidKV)
        for name in ("SnapKV", "SnapKV31", "Replay"):
            yield Method(f"{name}/AdaKV", PRUNERS[name], part, AdaKV)
        for name in ("Replay", "Successor", "KeyDiff", "SnapKV31", *(["KVzip"] if named else [])):
            yield Method(f"{name}/GlobalTopK", (PRUNERS | NAMED)[name], part, GlobalTopK)
        if named and heads is not None:
            yield Method("DuoAttention", duo_attention(heads, 1 - 1 / part, 1024), part, heads=heads)
        yield Method("SnapKV/guided", snap, part, guided=True)
        yield Method("IterativeCache/SnapKV", snap, part, iterative=True)
        yield Method("IterativeCache/SnapKV/guided", snap, part, iterative=True, guided=True)
        yield Method("CenterOfGravity/contiguous", gravity, part, positions="contiguous")
        yield Method("CenterOfGravity/RemoteGap", gravity, part, positions=RemoteGap(headroom=headroom))


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


def run_method(
    model: PreTrainedModel, method: Method, tasks: list[Task], dense: dict[str, Result]
) -> tuple[Method, dict[str, Result]]:
    """(the method with the share to remove at which it holds no more than its part of the bytes, its results). dense:
    the dense cache's, empty if this is it."""
    tasks = [task for task in tasks if not method.guided or task.name in ("facts", "pairs")]
    of = measure_guided if method.guided else measure

    def measured(task: Task) -> Result:
        return of(model, task, lambda: method.cache(model, len(task.prompts[0])))

    first, *others = tasks
    if method.part in (None, 1):
        return method, {task.name: measured(task) for task in tasks}
    method, few = replace(method, removed=1 - method.share), first.first(FEW)
    while True:
        result, share = measured(few), len(few.prompts) / len(first.prompts)
        excess = result.nbytes / (share * dense[first.name].nbytes) - method.share
        if excess <= TOLERANCE * method.share:
            if len(few.prompts) == len(first.prompts):
                break
            few = first
            continue
        removed = round(method.removed + max(excess, 1 / len(first.prompts[0])), 6)
        if removed >= 1:
            raise ValueError(f"parts must leave room for {method.name}, got {method.part} of {first.name}'s prompts")
        method = replace(method, removed=removed)
    return method, {first.name: result} | {task.name: measured(task) for task in others}


def row_of(method: Method, model_name: str, results: dict[str, Result], dense: dict[str, Result],
           tasks: list[Task], seconds: float) -> dict[str, Any]:  # fmt: skip
    """One row of the file; a measure that does not apply is missing or null. Samples, one per prompt, are of the same
    prompts in every row, so that two rows can be compared by their differences."""
    row: dict[str, Any] = {
        "name": f"quality/{model_name}/{method.name}/keep{method.share:g}",
        "method": method.name,
        "share_kept": method.share,
        "pruner": None if method.part is None else repr(method.pruner),
        "budget": None if method.part is None else repr(method.budget(method.removed)),
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
    only: Callable[[Method], bool] = lambda method: True,
) -> list[dict[str, Any]]:
    """All rows; the dense cache's and the whole PrunedCache's first. only: which methods besides them."""
    tasks = make_tasks(tokenizer, sizes)
    headroom = max(len(following) for task in tasks for following in task.following)
    snap = PRUNERS["SnapKV"]
    whole = [Method("dense", snap, None), Method("PrunedCache/whole", snap, 1)]
    heads = measured_heads(model, tokenizer, sizes) if sizes.named and not ablation else None
    every = ablations(headroom) if ablation else methods(sizes.parts, headroom, named=sizes.named, heads=heads)
    chosen = [m for m in every if only(m)]
    rows: list[dict[str, Any]] = []
    dense: dict[str, Result] = {}
    with kvcompress.attach(model):
        for number, method in enumerate(whole + chosen):
            begin = time.perf_counter()
            method, results = run_method(model, method, tasks, dense)
            if not dense:
                dense = results
                tasks = answered(tasks, results, name)
            seconds = time.perf_counter() - begin
            rows.append(row_of(method, name, results, dense, tasks, seconds))
            count = len(whole) + len(chosen)
            print(f"{number + 1}/{count} {rows[-1]['name']} {seconds:.1f} s", file=sys.stderr, flush=True)
    return rows


def best_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """best/<measure>/<n> and both/<n>, see the head of the file. rows: the dense cache's first; ties go to the row with
    the lower bits."""
    dense, found = rows[0], []
    recalls = {asked: field for asked, field in RECALLS.items() if field in dense}
    bits = "bits_per_byte_over_dense"
    for part in sorted({round(1 / row["share_kept"]) for row in rows} - {1}):
        rivals = [row for row in rows if round(1 / row["share_kept"]) == part and not row["guided"]]
        rivals.sort(key=lambda row: row.get(bits, 0.0))

        def best(name: str, row: dict[str, Any], **measures: float) -> dict[str, Any]:
            name = f"{name}/{part}"  # noqa: B023
            return {"name": name, "method": row["method"], "nbytes_share": row["nbytes_share"]} | measures

        def over_dense(row: dict[str, Any]) -> dict[str, float]:
            return {"over_dense": row[bits] / dense["bits_per_byte"]} if bits in row else {}

        for asked, field in recalls.items():
            row = max(rivals, key=lambda row: row[field])
            found.append(best(f"best/{asked}", row, recall=row[field]))
        if bits in dense:
            found.append(best("best/bits", rivals[0], **over_dense(rivals[0])))
        whole = [row for row in rivals if all(row[x] >= NEAR_DENSE * dense[x] for x in recalls.values())]
        if whole:
            recalled = {asked: whole[0][field] for asked, field in recalls.items()}
            found.append(best("both", whole[0], **over_dense(whole[0]), **recalled))
    return tidy(found)


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


def options() -> argparse.Namespace:
    parse = parser(__doc__, figure="the measures against the share kept")
    which = parse.add_mutually_exclusive_group()
    which.add_argument("--ablations", action="store_true", help="the settings of CenterOfGravity at a fixed total")
    which.add_argument("--methods", nargs="+", metavar="NAME", help="these alone, into the file that --json has")
    parse.add_argument(
        "--model", default="example", help="a Hugging Face model by name or folder (default: the example)"
    )
    parse.add_argument("--length", type=int, help="tokens of a prompt (default: 1,024)")
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    choice = parse_arguments(parse)
    if choice.ablations and choice.figure is not None:
        parse.error("--figure must not be given with --ablations, which it does not draw")
    return choice


def among(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Rows in the places of those of the same names in a file, new ones at its end; without the best ones, which follow
    from all of them. Raises ValueError if the file's dense cache read other prompts."""
    old = [row for row in json.loads(path.read_text())["rows"] if row["name"].startswith("quality/")]
    new = {row["name"]: row for row in rows}
    dense, again = old[0], new.get(old[0]["name"], {})
    if any(again.get(field) != value for field, value in dense.items() if field.endswith("_samples")):
        raise ValueError(f"json must be of the same model, sizes and texts, got {path}")
    kept = {row["name"]: row for row in old}
    return list((kept | new).values())


def main() -> None:
    choice = options()
    model, tokenizer = load(choice.model, choice.device)
    sizes = sizes_of(choice, SIZES)
    known = {method.name for method in methods(sizes.parts, 1, named=sizes.named)}
    known |= {"DuoAttention"} if sizes.named else set()
    if unknown := set(choice.methods or ()) - known:
        raise ValueError(f"methods must be among {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    chosen = set(choice.methods or known)
    rows = run(model, tokenizer, sizes, name=choice.model, ablation=choice.ablations,
               only=lambda method: choice.ablations or method.name in chosen)  # fmt: skip
    if choice.methods and choice.json is not None and choice.json.exists():
        rows = among(rows, choice.json)
    deliver(choice, rows, show, draw, [] if choice.ablations else best_rows(rows))


if __name__ == "__main__":
    main()
