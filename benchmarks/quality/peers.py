"""kvpress's presses on the model, prompts and questions of quality.py, and who is ahead at equal bytes.

    python benchmarks/quality/peers.py [--quick] [--json FILE] [--ours FILE]
                                       [--python PATH] [--presses NAME ...] [--theirs FILE]

Every press of kvpress that needs no trained weights, no threshold of scores and no question removes 1/2, 3/4, 7/8 and
15/16 of a prompt, in kvpress's own settings and environment (parts/kvpress_rows.py says which and how); the columns are
quality.py's. Where heads keep different numbers (AdaKV, KVzip), kvpress hides tokens and frees none: `bytes` are then
those of the tokens left, which is what a cache could hold; `frees_memory` says so. Its tables are counted as nothing.

--python: one that has kvpress; without it an environment is made once in the user's cache folder, from PyPI.
--ours: rows of quality.py on the same prompts, as `quality.py --json FILE` of this Python writes. The file then has
rows besides: peers/<facts, later, pairs or bits>/<n>, the best press at 1/n of the bytes and the best of our methods
that know no question; lead is by how much ours is ahead (recall, or bits as a share of the dense cache's), lead_se the
standard error of that over prompts. --theirs: rows that an earlier run wrote; nothing is measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.measures import answered, make_tasks, measures_of, number, sizes_of, tidy
from benchmarks.quality.parts.tasks import Result, Task, result_of, standard_error
from benchmarks.quality.quality import RECALLS, SIZES, TOLERANCE

PROGRAM = Path(__file__).parent / "parts" / "kvpress_rows.py"
KVPRESS = "0.5.5"
MEASURED = RECALLS | {"bits": "bits_per_byte"}


# ---- another environment ----


def environment(python: Path | None) -> Path:
    """A Python that has kvpress: the given one, or one of its own that is made once."""
    if python is not None:
        return python
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = caches / "kvcompress" / f"kvpress-{KVPRESS}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    has = python.exists() and subprocess.run([python, "-c", "import kvpress"], capture_output=True).returncode == 0
    if not has:
        venv.create(folder, with_pip=True, clear=True)
        for package in (f"torch=={torch.__version__.partition('+')[0]}", f"kvpress=={KVPRESS}"):
            subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    return python


def plan_of(tasks: list[Task], parts: tuple[int, ...], presses: list[str], dtype: torch.dtype) -> dict[str, Any]:
    """What parts/kvpress_rows.py is told. presses: empty = all."""
    return {
        "tasks": [
            {
                "name": task.name,
                "prompts": task.prompts,
                "following": task.following,
                "places": [[asked.place for asked in questions] for questions in task.questions],
                "answers": [[list(asked.answer) for asked in questions] for questions in task.questions],
            }
            for task in tasks
        ],
        "parts": parts,
        "presses": presses,
        "dtype": str(dtype).removeprefix("torch."),
    }


def lines_of(python: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
             plan: dict[str, Any]) -> Iterator[dict[str, Any]]:  # fmt: skip
    """What parts/kvpress_rows.py prints, line by line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        (folder / "tasks.json").write_text(json.dumps(plan))
        with subprocess.Popen([python, PROGRAM, folder], stdout=subprocess.PIPE, text=True, cwd=folder) as running:
            assert running.stdout is not None
            yield from map(json.loads, running.stdout)
        if running.returncode:
            raise RuntimeError(f"{PROGRAM.name} ended with status {running.returncode}; its message is above")


# ---- rows ----


def results_of(line: dict[str, Any], tasks: list[Task], token_nbytes: int) -> dict[str, Result]:
    """token_nbytes: of a token's key and value in one row."""
    return {
        task.name: result_of(task, found["nats"], found["right"], found["kept"] * token_nbytes)
        for task in tasks
        if (found := line["tasks"].get(task.name)) is not None
    }


def row_of(
    name: str, line: dict[str, Any], results: dict[str, Result], dense: dict[str, Result], tasks: list[Task]
) -> dict[str, Any]:
    row = {"name": name, "method": line["press"], "share_kept": 1 / line["part"], "setting": line["setting"]}
    row |= measures_of(results, dense, tasks)
    held = results[tasks[0].name].nbytes, dense[tasks[0].name].nbytes
    row |= {"nbytes": held[0], "dense_nbytes": held[1], "nbytes_share": held[0] / held[1]}
    row["frees_memory"] = all(found["freed"] for found in line["tasks"].values())
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
    model, tokenizer = load(choice.model, "cpu")
    sizes = sizes_of(choice, SIZES)
    tasks = make_tasks(tokenizer, sizes)
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    token_nbytes = 2 * head_dim * model.dtype.itemsize
    plan = plan_of(tasks, sizes.parts, choice.presses, model.dtype)
    first, *lines = told(lines_of(environment(choice.python), model, tokenizer, plan))
    dense = results_of(lines[0], tasks, token_nbytes)
    tasks = answered(tasks, dense, choice.model)
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for line in lines:
        name = f"kvpress/{choice.model}/{line['press']}/keep{1 / line['part']:g}"
        if "error" in line:
            failed.append({"name": name, "error": line["error"]})
        else:
            rows.append(row_of(name, line, results_of(line, tasks, token_nbytes), dense, tasks))
    left_out = [{"name": f"not_run/{name}", "reason": reason} for name, reason in first["not_run"].items()]
    return [*rows, *failed, *left_out], first["versions"]


def told(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same, said on the way."""
    for line in lines:
        if "press" in line:
            how = line.get("error") or f"{line['seconds']:.1f} s"
            print(f"{line['press']} 1/{line['part']} {how}", file=sys.stderr, flush=True)
        yield line


if __name__ == "__main__":
    main()
