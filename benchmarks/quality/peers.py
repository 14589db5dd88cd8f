"""kvpress's presses on the model, prompts and questions of quality.py, and who is ahead at equal bytes.

    python benchmarks/quality/peers.py [--quick] [--json FILE] [--ours FILE]
                                       [--python PATH] [--presses NAME ...] [--theirs FILE]

Every press of kvpress that needs no trained weights, no threshold of scores and no question removes 1/2, 3/4, 7/8 and
15/16 of a prompt, in kvpress's own settings and environment (kvcompress/evaluate/peers says which and how); the columns
are quality.py's. Where heads keep different numbers (AdaKV, KVzip), kvpress hides tokens and frees none: `bytes` are
then those of the tokens left, which is what a cache could hold; `frees_memory` says so. Its tables are counted as
nothing.

--python: one that has kvpress; without it an environment is made once in the user's cache folder, from PyPI.
--ours: rows of quality.py on the same prompts, as `quality.py --json FILE` of this Python writes. The file then has
rows besides: peers/<facts, later, pairs or bits>/<n>, the best press at 1/n of the bytes and the best of our methods
that know no question; lead is by how much ours is ahead (recall, or bits as a share of the dense cache's), lead_se the
standard error of that over prompts. --theirs: rows that an earlier run wrote; nothing is measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.measures import answered, make_tasks, measures_of, number, sizes_of, tidy
from benchmarks.quality.parts.tasks import Result, Task, result_of, standard_error
from benchmarks.quality.quality import RECALLS, SIZES, TOLERANCE
from kvcompress.evaluate.peers.environment import Peer, peer_of
from kvcompress.evaluate.peers.exchange import DENSE, answers, request_of

MEASURED = RECALLS | {"bits": "bits_per_byte"}


# ---- rows ----


def samples_of(task: Task) -> list[dict[str, Any]]:
    """What peers are asked: what follows a prompt, in one call."""
    return [{"read": read, "scored": behind} for read, behind in zip(task.prompts, task.following, strict=True)]


def result(task: Task, samples: list[dict[str, Any]]) -> Result:
    """Of a peer's answers: the likeliest tokens at the places of answers, or nats."""
    nbytes = sum(sample["nbytes"] for sample in samples)
    if not task.questions:
        return result_of(task, [sample["nats"] for sample in samples], [], nbytes)
    right = [
        [sample["greedy"][asked.place - 1 :][: len(asked.answer)] == list(asked.answer) for asked in questions]
        for sample, questions in zip(samples, task.questions, strict=True)
    ]
    return result_of(task, [], right, nbytes)


def lines_of(
    peer: Peer, model: Any, tokenizer: Any, name: str, tasks: list[Task], presses: list[str], parts: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """{"press", "part", "setting", "frees_memory", "seconds", "results": by task's name}, or with an error instead: of
    the dense cache, then of each part and press."""
    plan = [(DENSE, 1), *((press, part) for part in parts for press in presses)]
    runs = [(press, task, 1 / part) for press, part in plan for task in range(len(tasks))]
    request = request_of(model, name, [samples_of(task) for task in tasks], runs)
    coming = answers(peer, model, tokenizer, request)
    for press, part in plan:
        found = [next(coming) for _ in tasks]
        line: dict[str, Any] = {"press": press, "part": part}
        errors = [answer["error"] for answer in found if "error" in answer]
        if errors:
            yield line | {"error": errors[0]}
            continue
        yield line | {
            "setting": found[0]["setting"],
            "frees_memory": all(answer["frees_memory"] for answer in found),
            "seconds": sum(answer["seconds"] for answer in found),
            "results": {task.name: result(task, answer["samples"]) for task, answer in zip(tasks, found, strict=True)},
        }


def row_of(name: str, line: dict[str, Any], dense: dict[str, Result], tasks: list[Task]) -> dict[str, Any]:
    results = line["results"]
    row = {"name": name, "method": line["press"], "share_kept": 1 / line["part"], "setting": line["setting"]}
    row |= measures_of(results, dense, tasks)
    held = results[tasks[0].name].nbytes, dense[tasks[0].name].nbytes
    row |= {"nbytes": held[0], "dense_nbytes": held[1], "nbytes_share": held[0] / held[1]}
    row["frees_memory"] = line["frees_memory"]
    return tidy(row | {"seconds": line["seconds"]})


def peer_rows(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """peers/<measure>/<n>, see the head of the file; both lists with the dense cache's row first. Raises ValueError
    where those are of other prompts."""
    dense, found = ours[0], []
    fields = {asked: field for asked, field in MEASURED.items() if field in theirs[0]}
    for field in fields.values():
        samples = [row.get(f"{field}_samples", []) for row in (dense, theirs[0])]
        if not samples[0] or not np.allclose(*map(np.array, samples), rtol=0, atol=1e-4):
            raise ValueError("ours must be rows of the same model, prompts and sizes: write them again with quality.py")
    for part in sorted({round(1 / row["share_kept"]) for row in theirs} - {1}):
        most = (1 + TOLERANCE) / part
        for asked, field in fields.items():
            sign = -1 if asked == "bits" else 1
            unit = dense[field] if asked == "bits" else 1.0

            def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
                rivals = [row for row in rows if field in row and not row.get("guided")]  # noqa: B023
                fit = [row for row in rivals if most / 2 < row["nbytes_share"] <= most]  # noqa: B023
                return max(fit, key=lambda row: sign * row[field])  # noqa: B023

            our, press = best(ours), best(theirs)
            leads = [
                sign * (x - y) / unit for x, y in zip(our[f"{field}_samples"], press[f"{field}_samples"], strict=True)
            ]
            shown = "over_dense" if asked == "bits" else "recall"
            of = {key: row[f"{field}_over_dense"] / unit if asked == "bits" else row[field]
                  for key, row in (("ours", our), ("press", press))}  # fmt: skip
            found.append({
                "name": f"peers/{asked}/{part}", "method": our["method"], shown: of["ours"],
                "nbytes_share": our["nbytes_share"], "press": press["method"], f"press_{shown}": of["press"],
                "press_nbytes_share": press["nbytes_share"], "press_frees_memory": press["frees_memory"],
                "lead": sum(leads) / len(leads), "lead_se": standard_error(leads),
            })  # fmt: skip
    return tidy(found)


# ---- what is shown ----


def show(theirs: list[dict[str, Any]], peers: list[dict[str, Any]]) -> None:
    columns = ("press", "kept", "+bits", "facts", "later", "pairs", "bytes", "freed")
    fields = ("bits_per_byte_over_dense", *RECALLS.values())
    lines = [
        (
            row["method"],
            f"{row['share_kept']:g}",
            *(number(row, field, "+" if field == fields[0] else "") for field in fields),
            f"{row['nbytes_share']:.3f}",
            "yes" if row["frees_memory"] else "no",
        )
        for row in theirs
        if "method" in row
    ]
    print_table("kvpress", columns, lines, left=("press", "freed"))
    for row in theirs:
        if "error" in row:
            print(f"{row['name']}: {row['error']}")
    if peers:
        lines = [
            (
                row["name"],
                row["method"],
                f"{row.get('recall', row.get('over_dense')):.3f}",
                row["press"],
                f"{row.get('press_recall', row.get('press_over_dense')):.3f}",
                number(row, "lead", "+"),
            )
            for row in peers
        ]
        columns = ("name", "ours", "", "press", "", "lead")
        print_table("best of both; bits over dense, of dense's", columns, lines, left=("name", "ours", "press"))


def options() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument("--ours", type=Path, help="rows of quality.py on the same prompts")
    parse.add_argument("--theirs", type=Path, help="rows of an earlier run, to be compared with other ones of ours")
    parse.add_argument("--python", type=Path, help="a Python that has kvpress")
    parse.add_argument("--presses", nargs="+", default=[], metavar="NAME", help="these alone")
    parse.add_argument("--model", default="example", help="a Hugging Face model by name or folder")
    return parse_arguments(parse)


def main() -> None:
    choice = options()
    ours = [] if choice.ours is None else json.loads(choice.ours.read_text())["rows"]
    if choice.theirs is None:
        theirs, versions = measured(choice)
    else:
        written = json.loads(choice.theirs.read_text())
        theirs = [row for row in written["rows"] if not row["name"].startswith("peers/")]
        versions = {name: written["machine"][name] for name in ("kvpress", "transformers")}
    peers = peer_rows([row for row in theirs if "method" in row], ours) if ours else []
    show(theirs, peers)
    if choice.json is not None:
        write_json(choice.json, [*theirs, *peers], **versions)


def measured(choice: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(rows of the dense cache and all presses, then those that failed and those that were left out; versions)."""
    peer = peer_of(choice.python, lambda text: print(text, file=sys.stderr))
    model, tokenizer = load(choice.model, "cpu")
    sizes = sizes_of(choice, SIZES)
    tasks = make_tasks(tokenizer, sizes)
    presses = [press for press in peer.presses if not choice.presses or press in choice.presses]
    lines = list(told(lines_of(peer, model, tokenizer, choice.model, tasks, presses, sizes.parts)))
    dense = lines[0]["results"]
    tasks = answered(tasks, dense, choice.model)
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for line in lines:
        name = f"kvpress/{choice.model}/{line['press']}/keep{1 / line['part']:g}"
        if "error" in line:
            failed.append({"name": name, "error": line["error"]})
        else:
            rows.append(row_of(name, line, dense, tasks))
    left_out = [{"name": f"not_run/{name}", "reason": reason} for name, reason in peer.not_run.items()]
    return [*rows, *failed, *left_out], peer.versions


def told(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same, said on the way."""
    for line in lines:
        how = line.get("error") or f"{line['seconds']:.1f} s"
        print(f"{line['press']} 1/{line['part']} {how}", file=sys.stderr, flush=True)
        yield line


if __name__ == "__main__":
    main()
