"""Every cache and pruner on every task of `kvcompress eval` that the model itself can do, at equal bytes.

    python benchmarks/quality/table.py [--quick] [--json FILE] [--model NAME] [--length N] [--limit N]
                                       [--methods NAME ...] [--peers [--peers-python FILE] [--peers-press NAME ...]]

Each cache holds 1/4 and 1/16 of the dense cache's bytes after reading (pages of 8; kvcompress/evaluate/equal_bytes.py
says how). The tasks are those of `kvcompress eval`, their definitions in docs/evaluate.md: needle (the question in the
prompt), turns and recall (asked afterwards, when it is too late to keep for it), ppl, and one of each family of
RULER's, question at the end. Tasks of which the dense cache itself answers less than nine in ten are left out, and said
so: they would not measure a cache (after two prompts, where it answers neither); so is a task whose smallest prompt is
longer, and a cache on a task that it refuses. Rows are printed as they come. The file's rows have a score, its standard
error over prompts, the scores of the prompts, and the bytes held; best/<task>/<n> names the best at 1/n.

--limit: prompts of a task; ppl has twice as many, needle one for each of eight depths. --methods: these alone; rows of
the others stay as --json's file has them, which must be of the same prompts. --peers: kvpress's presses alone, on those
prompts and at those bytes, into that file (kvcompress/evaluate/peers): each as the cache "kvpress NAME".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.measures import LEAST_DENSE_RECALL, number, sizes_of, tidy
from kvcompress import CacheSpec
from kvcompress.checks import need
from kvcompress.evaluate.equal_bytes import EqualBytes
from kvcompress.evaluate.losses import loss_measure
from kvcompress.evaluate.measure import Measure
from kvcompress.evaluate.peers.environment import Peer, peer_of
from kvcompress.evaluate.peers.rows import chosen, peer_rows
from kvcompress.evaluate.questions import needle_measure, recall_measure, ruler_measure, turns_measure
from kvcompress.evaluate.reading import Reader
from kvcompress.evaluate.ruler.registry import MADE
from kvcompress.evaluate.run import Row, evaluate
from kvcompress.evaluate.texts import Library
from kvcompress.framing import Framing

DENSE = CacheSpec("dense", {})
CACHES = {
    "Replay, GlobalTopK": "pruned,pruner=replay,budget=globaltopk:1",
    "Replay, AdaKV": "pruned,pruner=replay,budget=adakv:1",
    "Replay": "pruned,pruner=replay",
    "Successor": "pruned,pruner=successor",
    "KeyDiff, GlobalTopK": "pruned,pruner=keydiff,budget=globaltopk:1",
    "KeyDiff": "pruned,pruner=keydiff",
    "KVzip": "pruned,pruner=kvzip,chunk=256",
    "SnapKV": "pruned,pruner=snapkv",
    "SnapKV, pooled over 31, AdaKV": "pruned,pruner=snapkv,kernel_size=31,pooling=max,budget=adakv:1",
    "SnapKV, PyramidKV": "pruned,pruner=snapkv,budget=pyramidkv:1",
    "CriticalKV": "pruned,pruner=criticalkv",
    "H2O": "pruned,pruner=h2o",
    "TOVA": "pruned,pruner=tova",
    "ExpectedAttention": "pruned,pruner=expectedattention",
    "CenterOfGravity": "pruned,pruner=centerofgravity",
    "LagKV": "pruned,pruner=lagkv",
    "ChunkKV": "pruned,pruner=chunkkv",
    "RKV": "pruned,pruner=rkv",
    "LeverageScore": "pruned,pruner=leveragescore",
    "Random": "pruned,pruner=random",
    "IterativeCache": "iterative,chunk_size=256,pruner=snapkv",
    "StreamingCache": "streaming,chunk_size=256",
}
RULER = ("niah_single_2", "niah_multikey_2", "vt", "fwe")  # cwe's smallest prompt is too long for the shipped model
FEW = ("Replay, GlobalTopK", "SnapKV", "StreamingCache")


@dataclass(frozen=True)
class Sizes:
    """length: of prompts; ruler_length: of RULER's, with room for what Replay asks behind them. limit: prompts of a
    task. ruler: its tasks. scored: tokens of ppl. methods: names of CACHES."""

    length: int = 1024
    ruler_length: int = 1780
    limit: int = 6
    ruler: tuple[str, ...] = RULER
    scored: int = 256
    questions: int = 8
    shares: tuple[int, ...] = (4, 16)
    methods: tuple[str, ...] = tuple(CACHES)


SIZES = {
    "full": Sizes(),
    "quick": Sizes(length=512, limit=2, ruler=(), shares=(4,), methods=FEW),
    "tiny": Sizes(length=160, limit=1, ruler=(), scored=16, questions=2, shares=(2,), methods=FEW[1:2]),
}


def measures_of(framing: Framing, sizes: Sizes) -> Iterator[Measure | tuple[str, ValueError]]:
    """A task whose smallest prompt is longer comes by its name, with the reason."""
    source, length, count = Library(), sizes.length, sizes.limit
    yield needle_measure(framing, length, source, sizes.questions, 1, 0, "end")
    yield turns_measure(framing, length, source, sizes.questions, count, 0)
    yield recall_measure(framing, length, sizes.questions, count, 0)
    yield loss_measure("ppl", framing, length, sizes.scored, source, 2 * count, 0)
    for name in sizes.ruler:
        try:
            yield ruler_measure(name, MADE[name], framing, sizes.ruler_length, source, count, 0, "end")
        except ValueError as error:
            yield name, error


def spec_of(name: str) -> CacheSpec:
    """In pages of 8, where there are pages."""
    spec = CacheSpec.parse(CACHES[name])
    return spec if spec.kind == "streaming" else CacheSpec(spec.kind, {**spec.given, "page_size": "8"})


def dense_row(reader: Reader, measure: Measure) -> tuple[Row, int]:
    """(of the dense cache, prompts that were read): two of them, where they show that it cannot do the task."""
    (few,) = evaluate(reader, [DENSE], [measure], most=2)
    if measure.higher_is_better and sum(few.samples) == 0 and 2 / measure.count > 1 - LEAST_DENSE_RECALL:
        return few, len(few.samples)
    (row,) = evaluate(reader, [DENSE], [measure])
    return row, len(row.samples)


def run(reader: Reader, sizes: Sizes, model: str, peer: Peer | None, presses: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of the dense cache, of all others (peer: of its presses instead), and of what is left out."""
    dense, measures, left_out = [], [], []
    for measure in measures_of(Framing(reader.tokenizer), sizes):
        if isinstance(measure, tuple):
            left_out.append({"name": f"left_out/{measure[0]}", "reason": str(measure[1])})
            continue
        row, count = dense_row(reader, measure)
        told("dense", row)
        if not row.higher_is_better or row.score >= LEAST_DENSE_RECALL:
            dense.append(row_of("dense", 1, row))
            measures.append(measure)
        else:
            reason = f"the dense cache answers {row.score:.2f} of {count} prompts, less than {LEAST_DENSE_RECALL}"
            left_out.append({"name": f"left_out/{measure.name}", "reason": reason})
    rows = []
    for part in sizes.shares:
        equal = EqualBytes(Fraction(1, part))
        if peer is not None:
            found = peer_rows(peer, presses, reader, model, measures, equal, lambda text: print(text, file=sys.stderr))
            need(found.refused is None and found.broken is None, f"peers must run through, got {found.notes()}")
            rows += [row_of(row.cache, part, row) | {"peer": str(peer)} for row in found.rows]
            left_out += [
                {"name": f"refused/{left['cache']}/{left['task']}/keep{1 / part:g}", "reason": left["reason"]}
                for left in found.left_out
            ]
            continue
        for name in sizes.methods:
            for measure in measures:
                try:
                    (row,) = evaluate(reader, [spec_of(name)], [measure], equal)
                except ValueError as error:  # such as positions beyond the trained length
                    left_out.append({"name": f"refused/{name}/{measure.name}/keep{1 / part:g}", "reason": str(error)})
                    continue
                rows.append(row_of(name, part, row))
                told(f"1/{part} {name}", row)
    return tidy([*dense, *rows, *left_out])


def told(what: str, row: Row) -> None:
    error = "" if row.score_se is None else f" +-{row.score_se:.3f}"
    print(f"{what}: {row.task} {row.score:.3f}{error}", file=sys.stderr, flush=True)


def best_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """best/<task>/<n>: of those that compress, several where they are equal."""
    of: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("part", 1) > 1:
            of.setdefault((row["task"], row["part"]), []).append(row)
    found = []
    for (task, part), rivals in of.items():
        best = (min if task == "ppl" else max)(row["score"] for row in rivals)
        chosen = [row for row in rivals if row["score"] == best]
        found.append({"name": f"best/{task}/{part}", "methods": [row["method"] for row in chosen], "score": best,
                      "score_se": chosen[0]["score_se"]})  # fmt: skip
    return found


def among(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Rows in the places of those of the same names in a file, new ones at its end. Raises ValueError where the file's
    dense cache read other prompts."""
    old = {row["name"]: row for row in json.loads(path.read_text())["rows"] if not row["name"].startswith("best/")}
    for row in rows:
        if row.get("method") != "dense":
            continue
        before = old.get(row["name"], {}).get("score_samples", ())
        if not np.shape(before) == np.shape(row["score_samples"]) or not np.allclose(
            before, row["score_samples"], 0, 1e-3
        ):
            raise ValueError(f"json must be of the same model, sizes and texts, got {path}")
    return list((old | {row["name"]: row for row in rows}).values())


def row_of(method: str, part: int, row: Row) -> dict[str, Any]:
    return {
        "name": f"table/{method}/{row.task}/keep{1 / part:g}", "method": method, "part": part, "task": row.task,
        "tokens": row.length, "cache": row.sized, "unit": row.unit, "score": row.score, "score_se": row.score_se,
        "score_samples": list(row.samples), "nbytes": row.nbytes, "nbytes_share": row.share,
        "first_token_seconds": row.first_token_seconds, "token_seconds": row.token_seconds,
    } | ({} if row.frees_memory else {"frees_memory": False})  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """A table for each share, the best of each column marked."""
    dense = [row for row in rows if row.get("method") == "dense"]
    tasks = [row["task"] for row in dense]
    best = {row["name"].removeprefix("best/"): row["methods"] for row in rows if row["name"].startswith("best/")}
    for part in dict.fromkeys(row["part"] for row in rows if "part" in row and row["part"] > 1):
        lines = []
        for method in dict.fromkeys(["dense", *(row["method"] for row in rows if row.get("part") == part)]):
            own = {row["task"]: row for row in rows if row.get("method") == method and row["part"] in (1, part)}
            marks = ["*" if method in best.get(f"{task}/{part}", ()) else "" for task in tasks]
            cells = [mark + number(own.get(task, {}), "score") for task, mark in zip(tasks, marks, strict=True)]
            lines.append((method, *cells, f"{next(iter(own.values()))['nbytes_share']:.3f}"))
        columns = ("method", *(f"{task}, bits" if task == "ppl" else task for task in tasks), "bytes")
        print_table(f"1/{part} of the bytes; *: best", columns, lines, left=("method",))
    for row in rows:
        if "reason" in row:
            print(f"{row['name']}: {row['reason']}")


def options() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument("--model", default="example", help="a Hugging Face model by name or folder")
    parse.add_argument("--length", type=int, help="tokens of a prompt (default: 1,024)")
    parse.add_argument("--limit", type=int, help="prompts of a task (default: 6)")
    parse.add_argument("--methods", nargs="+", choices=CACHES, metavar="NAME", help="these alone, into --json's file")
    parse.add_argument("--peers", action="store_true", help="kvpress's presses alone, into --json's file")
    parse.add_argument("--peers-python", type=Path, help="a Python that has kvpress")
    parse.add_argument("--peers-press", nargs="+", default=[], metavar="NAME", help="these presses alone")
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parse_arguments(parse)


def main() -> None:
    choice = options()
    model, tokenizer = load(choice.model, choice.device)
    with kvcompress.attach(model):
        peer = peer_of(choice.peers_python, lambda text: print(text, file=sys.stderr)) if choice.peers else None
        presses = () if peer is None else chosen(peer, choice.peers_press)
        rows = run(Reader(model, tokenizer, DENSE), sizes_of(choice, SIZES), choice.model, peer, presses)
    if (choice.methods or choice.peers) and choice.json is not None and choice.json.exists():
        rows = among(rows, choice.json)
    rows += best_rows(rows)
    show(rows)
    if choice.json is not None:
        write_json(choice.json, rows)


if __name__ == "__main__":
    main()
