"""Attention matching: fitted slots instead of chosen tokens, against choosing alone, at equal bytes.

    python benchmarks/quality/compaction.py [--quick] [--json FILE] [--model NAME] [--texts N]

A prompt is cut to 1/4, 1/8, 1/16 and 1/50 of its slots. All but `Replay` choose the same tokens: the most attention of
a second reading of the prompt, one top-k over layers and heads (`uniform`: as many in each head), and differ in what is
fitted and whose queries it is fitted to (parts/compaction.py has the formulas):

choosing                 nothing
values, own queries      the values, to the prompt's own queries turned behind it, as the pruner Replay has them
values, second reading   the values, to the queries of a second reading
values, another text     the values, to the queries of another text that is read behind the prompt
biases, biases and values   a bias per slot so that mass is kept, as in the paper; to a second reading
merged                   keys and values of what goes are merged into the most similar slot; its bias is what it gained
Replay                   PrunedCache with Replay and GlobalTopK, as it ships, bytes as held, in pages of 8
Replay, fit_values       the same with values that are fitted to the prompt's own queries, as it ships

A bias takes bytes: four for each slot of 2 D values of the model's dtype, for which slots fewer are kept; pages and
tables are counted for the caches alone. bits: bits per byte of held-out text behind the prompt. later, pairs: recall of
facts asked afterwards. Rows have the paired difference from choosing the same number of bytes with the same kind of
budget, its standard error over prompts, and the seconds that a prompt's choice and fit take, without reading.
The model must be of the Llama kind: rotary embedding of whole heads, in halves.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.compaction import Matching, References, Slots, chosen, compacted, merged
from benchmarks.quality.parts.measures import Sizes as TaskSizes
from benchmarks.quality.parts.measures import number, sizes_of, tidy
from benchmarks.quality.parts.tasks import (
    Result,
    Task,
    Writer,
    later_task,
    measure,
    pairs_task,
    result_of,
    standard_error,
    text_task,
)
from benchmarks.quality.quality import Method, run_method
from kvcompress import GlobalTopK, Replay


@dataclass(frozen=True)
class Variant:
    """queries: whose. fits: values; biases: a bias per slot; uniform: as many slots in each head."""

    name: str
    queries: str = "again"
    fits: bool = False
    biases: bool = False
    merges: bool = False
    uniform: bool = False


VARIANTS = (
    Variant("choosing"),
    Variant("values, own queries", "own", fits=True),
    Variant("values, second reading", fits=True),
    Variant("values, another text", "other", fits=True),
    Variant("biases", biases=True),
    Variant("biases and values", fits=True, biases=True),
    Variant("merged", merges=True),
    Variant("choosing, uniform", uniform=True),
    Variant("values, own queries, uniform", "own", fits=True, uniform=True),
)


@dataclass(frozen=True)
class Sizes(TaskSizes):
    texts: int = 24
    later: int = 6
    pairs: int = 6
    parts: tuple[int, ...] = (4, 8, 16, 50)


SIZES = {
    "full": Sizes(),
    "quick": Sizes(texts=3, later=1, pairs=1, length=512, parts=(16,)),
    "tiny": Sizes(texts=2, later=1, pairs=1, length=128, scored=32, per_prompt=1, pairs_per_prompt=2, parts=(4,)),
}


def score_of(task: Task, index: int, logits: torch.Tensor) -> float:
    """Of one prompt: bits per byte, or the share of its questions that are answered right."""
    nats, right = [], []
    if task.questions:
        right = [[logits[q.place - 1 : q.place - 1 + len(q.answer)].argmax(-1).tolist() == list(q.answer)
                  for q in task.questions[index]]]  # fmt: skip
    else:
        wanted = torch.tensor(task.following[index][1:])
        nats = [torch.nn.functional.cross_entropy(logits[: len(wanted)], wanted, reduction="sum").item()]
    one = Task(task.name, [], [], task.sizes[index : index + 1], task.questions[index : index + 1])
    return result_of(one, nats, right, 0).samples[0]


def measured(matching: Matching, task: Task, parts: tuple[int, ...], others: list[list[int]]
             ) -> dict[tuple[int, str], tuple[list[float], list[float], list[int]]]:  # fmt: skip
    """By part and variant: of each prompt its score, seconds and bytes; the whole prompt's by (1, "dense")."""
    found: dict[tuple[int, str], tuple[list[float], list[float], list[int]]] = {}

    def note(key: tuple[int, str], slots: list[list[Slots]], seconds: float, nbytes: int, index: int) -> None:
        logits = matching.logits(len(task.prompts[index]), task.following[index], slots)
        for values, value in zip(found.setdefault(key, ([], [], [])), (score_of(task, index, logits), seconds, nbytes),
                                 strict=True):  # fmt: skip
            values.append(value)  # type: ignore[arg-type]

    for index, prompt in enumerate(task.prompts):
        recorded = matching.record(prompt)
        H, P, D = recorded[0].keys.shape
        references = {
            "again": matching.second_reading(prompt, prompt),
            "own": matching.replayed(recorded),
            "other": matching.second_reading(prompt, others[index % len(others)]),
        }
        scores = torch.stack([layer.attention.amax(1) for layer in references["again"]])
        rows, slot = len(recorded) * H, 2 * D * matching.model.dtype.itemsize
        whole = [[Slots(one.keys[h], one.values[h], torch.zeros(P)) for h in range(H)] for one in recorded]
        note((1, "dense"), whole, 0.0, rows * P * slot, index)
        for part in parts:
            for variant in VARIANTS:
                begin = time.perf_counter()
                each = slot + (4 if variant.biases or variant.merges else 0)
                places = chosen(scores, max(rows * P * slot // part // each, 1), uniform=variant.uniform)
                queries = references[variant.queries]
                slots = [
                    [one_head(variant, one.keys[h], one.values[h], queries[layer], h, places[layer][h])
                     for h in range(H)]
                    for layer, one in enumerate(recorded)
                ]  # fmt: skip
                seconds = time.perf_counter() - begin
                held = sum(len(head.keys) for layer in slots for head in layer) * each
                note((part, variant.name), slots, seconds, held, index)
        print(f"{task.name} {index + 1}/{len(task.prompts)}", file=sys.stderr, flush=True)
    return found


def one_head(variant: Variant, keys: torch.Tensor, values: torch.Tensor, queries: References, head: int,
             places: torch.Tensor) -> Slots:  # fmt: skip
    if variant.merges:
        return merged(keys, values, queries, head, places)
    return compacted(keys, values, queries, head, places, biases=variant.biases, fits=variant.fits)


CACHES = {"Replay": False, "Replay, fit_values": True}


def shipped(model: Any, tasks: list[Task], parts: tuple[int, ...]) -> Iterator[tuple[int, str, Task, Result]]:
    """Replay with GlobalTopK in PrunedCache, at 1/n of the bytes as they are held."""
    with kvcompress.attach(model):
        dense = {task.name: measure(model, task, lambda: DynamicCache(config=model.config)) for task in tasks}
        for part in parts:
            for name, fits in CACHES.items():
                for task in tasks:
                    method = Method(name, Replay(), part, GlobalTopK, fit_values=fits)
                    yield part, name, task, run_method(model, method, [task], dense)[1][task.name]


def run(model: Any, tokenizer: Any, sizes: Sizes, name: str) -> list[dict[str, Any]]:
    write = Writer(tokenizer)
    others = [piece[-sizes.length // 2 :] for piece in write.source(37, 2 * sizes.length)][::5]
    tasks = [
        text_task(write, count=sizes.texts, length=sizes.length, following=sizes.scored),
        later_task(write, count=sizes.later, length=sizes.length, per_prompt=sizes.per_prompt),
        pairs_task(write, count=sizes.pairs, per_prompt=sizes.pairs_per_prompt),
    ]
    ours = {(part, cache, task.name): result for part, cache, task, result in shipped(model, tasks, sizes.parts)}
    matching, rows = Matching(model), []
    for task in tasks:
        found = measured(matching, task, sizes.parts, others)
        dense = sum(found[1, "dense"][2])
        for (part, variant), (scores, seconds, held) in found.items():
            base = "choosing, uniform" if variant.endswith("uniform") else "choosing"
            than = found[part, base][0] if part > 1 else scores
            rows.append(row_of(name, variant, task, part, scores, than, sum(held), dense)
                        | ({"seconds": sum(seconds) / len(seconds)} if part > 1 else {}))  # fmt: skip
        for part, cache in itertools.product(sizes.parts, CACHES):
            result = ours[part, cache, task.name]
            than = found[part, "choosing"][0]
            rows.append(row_of(name, cache, task, part, result.samples, than, result.nbytes, dense))
    return tidy(rows)


def row_of(name: str, method: str, task: Task, part: int, scores: list[float], than: list[float], nbytes: int,
           dense: int) -> dict[str, Any]:  # fmt: skip
    over = [a - b for a, b in zip(scores, than, strict=True)]
    return {
        "name": f"compaction/{name}/{method}/{task.name}/keep{1 / part:g}", "method": method, "part": part,
        "task": task.name, "score": sum(scores) / len(scores), "score_se": standard_error(scores),
        "over_choosing": sum(over) / len(over), "over_choosing_se": standard_error(over), "score_samples": scores,
        "nbytes": nbytes, "nbytes_share": nbytes / dense,
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for part in dict.fromkeys(row["part"] for row in rows):
        lines = []
        for method in dict.fromkeys(row["method"] for row in rows if row["part"] == part):
            own = {row["task"]: row for row in rows if row["method"] == method and row["part"] == part}
            cells = [x for t in tasks for x in (number(own[t], "score"), number(own[t], "over_choosing", "+"))]
            first = own[tasks[0]]
            seconds = f"{first['seconds']:.2f}" if "seconds" in first else ""
            lines.append((method, *cells, f"{first['nbytes_share']:.3f}", seconds))
        columns = ("method", *(x for task in tasks for x in (task, "over choosing")), "bytes", "seconds")
        print_table(f"1/{part} of the bytes; text: bits per byte", columns, lines, left=("method",))


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--model", default="example", help="a Hugging Face model by name or folder")
    parse.add_argument("--texts", type=int, help="texts of bits (default: 24)")
    choice = parse_arguments(parse)
    model, tokenizer = load(choice.model, "cpu")
    if not math.isclose(getattr(model.config, "partial_rotary_factor", None) or 1.0, 1.0):
        raise ValueError(f"model must rotate whole heads, got {choice.model}")
    rows = run(model, tokenizer, sizes_of(choice, SIZES), Path(choice.model).name)
    show(rows)
    if choice.json is not None:
        write_json(choice.json, rows)


if __name__ == "__main__":
    main()
