"""Shared by the benchmarks of quality: pruners by name, sizes, tasks that a model can do, what a row says of them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from benchmarks.common import write_json
from benchmarks.quality.parts.tasks import (
    Result,
    Task,
    Writer,
    facts_task,
    later_task,
    pairs_task,
    standard_error,
    text_task,
)
from kvcompress.pruners import H2O, TOVA, Pruner, SnapKV, StreamingLLM

LEAST_DENSE_RECALL = 0.9
MEASURES = {"text": "bits_per_byte", "facts": "fact_recall", "later": "later_recall", "pairs": "pair_recall"}
PRUNERS: dict[str, Pruner] = {
    "SnapKV": SnapKV(),
    "SnapKV31": SnapKV(kernel_size=31, pooling="max"),
    "H2O": H2O(),
    "TOVA": TOVA(),
    "StreamingLLM": StreamingLLM(),
}


@dataclass(frozen=True)
class Sizes:
    """Prompts of each task, and tokens. parts: n of 1/n of the dense bytes."""

    length: int = 1024
    scored: int = 256
    texts: int = 12
    facts: int = 24
    later: int = 6
    pairs: int = 6
    per_prompt: int = 8
    pairs_per_prompt: int = 20
    parts: tuple[int, ...] = (2, 4, 8, 16)


AnySizes = TypeVar("AnySizes", bound=Sizes)


def sizes_of(choice: argparse.Namespace, by_size: Mapping[str, AnySizes]) -> AnySizes:
    """Those of the command's size, with what the command says itself (--length, for one)."""
    sizes = by_size[choice.size]
    names = {field.name for field in fields(sizes)}
    return replace(sizes, **{name: x for name, x in vars(choice).items() if name in names and x is not None})


def make_tasks(tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> list[Task]:
    write, length, each = Writer(tokenizer), sizes.length, sizes.per_prompt
    tasks = [text_task(write, count=sizes.texts, length=length, following=sizes.scored)]
    if not write.gives_text_back():
        print("bits per byte are left out: this tokenizer does not give the text back", file=sys.stderr)
        tasks = []
    return [
        *tasks,
        facts_task(write, count=sizes.facts, length=length, per_prompt=each),
        later_task(write, count=sizes.later, length=length, per_prompt=each),
        pairs_task(write, count=sizes.pairs, per_prompt=sizes.pairs_per_prompt),
    ]


def answered(tasks: list[Task], dense: dict[str, Result], name: str) -> list[Task]:
    """The tasks that the dense cache itself can do."""
    weak = [t.name for t in tasks if t.questions and dense[t.name].mean < LEAST_DENSE_RECALL]
    for task in weak:
        print(f"{task} is left out: dense recall is {dense[task].mean:.2f}", file=sys.stderr)
    if len(weak) == len(tasks):
        raise ValueError(f"model must be able to do one of the tasks, got {name}")
    return [task for task in tasks if task.name not in weak]


def measures_of(results: dict[str, Result], dense: dict[str, Result], tasks: list[Task]) -> dict[str, Any]:
    """What a row says of the tasks that were measured."""
    row: dict[str, Any] = {}
    for task in tasks:
        if (result := results.get(task.name)) is None:
            continue
        field = MEASURES[task.name]
        row |= {field: result.mean, f"{field}_se": result.standard_error, f"{field}_samples": result.samples}
        if task.questions:
            row |= {f"{field}_questions": result.asked, f"{field}_by_depth": result.by_depth}
        else:
            row |= over_dense(field, result.samples, dense[task.name].samples)
    return row


def over_dense(field: str, samples: list[float], dense: list[float]) -> dict[str, float]:
    """Mean of the differences on the same texts, and its standard error."""
    over = [ours - theirs for ours, theirs in zip(samples, dense, strict=True)]
    return {f"{field}_over_dense": float(np.mean(over)), f"{field}_over_dense_se": standard_error(over)}


def number(row: dict[str, Any], field: str, sign: str = "") -> str:
    if row.get(field) is None:
        return ""
    error = row.get(f"{field}_se")
    return f"{row[field]:{sign}.3f}" + ("" if error is None else f" +-{error:.3f}")


def tidy(x: Any) -> Any:
    """Without nan, which JSON lacks, and with six decimals."""
    if isinstance(x, dict):
        return {name: tidy(value) for name, value in x.items()}
    if isinstance(x, list):
        return [tidy(value) for value in x]
    return (None if math.isnan(x) else round(x, 6)) if isinstance(x, float) else x


def deliver(
    choice: argparse.Namespace,
    rows: list[dict[str, Any]],
    show: Callable[[list[dict[str, Any]]], None],
    draw: Callable[[list[dict[str, Any]], Path], None],
    more: Sequence[dict[str, Any]] = (),
) -> None:
    """Prints the rows, and writes and draws them where the command (--json, --figure) asks for it. more: rows of the
    file alone."""
    show(rows)
    if choice.json is not None:
        write_json(choice.json, [*rows, *more])
    if choice.figure is not None:
        draw(rows, choice.figure)
