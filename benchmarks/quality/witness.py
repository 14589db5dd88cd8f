"""Compressed caches on a real model, with text that people read: what is still known of a text after the cutting.

    python benchmarks/quality/witness.py [--quick] [--json FILE] [--split tune|report] [--texts N] [--lengths N,N]
                                         [--keep 1/2,1/4] [--question later,end] [--methods NAME ...]
                                         [--cache TEXT ...] [--against NAME] [--model NAME] [--converted FOLDER ...]
                                         [--presses NAME ... [--peers-python FILE]]

SmolLM2-135M-Instruct reads passages of 1,000, 3,000 and 7,500 tokens of English books and manuals (parts/books.py
makes them of Debian's packages when they are first wanted), as a user's turn of its chat template, with four numbers
("The special magic number for Paris is: 48213.") and one sentence planted at depths of 0.1 to 0.9. Each cache reads the
passage in one pass and keeps 1/2, 1/4 or 1/8 of its tokens (PrunedCache in pages of 4). What is measured then
(kvcompress/evaluate/prose.py):

bits      per token of how the passage goes on, 96 tokens; +bits: over the dense cache's
numbers   of the four that are answered right, asked through the template after the cutting, each of a copy
sentence  of the planted sentences whose next three tokens are right
turns     two of the numbers, one question after the other in one conversation: of both
end       (a table of its own) one number whose question ends the prompt, and is read with it
guide     (one more) the same where the question is known while the text is read, as PrunedCache's guide; caches that
          look at none are left out
held      bytes, of what transformers' cache holds: tables, room in pages, and the scores that PrunedCache holds with
          later="keep" included

Numbers after +- are standard errors over passages, of a difference those of the paired differences. --against: the
differences from that method at the same share too. Which books tell what a method is tuned by, and which what is
reported, is fixed (--split). --cache: further caches, as `kvcompress eval` has them: their size is set by --keep.
--converted: folders of models made of this one by DMC or DMS, each with its own cache, beside the model as it is.
--presses: of kvpress, on the same passages in an environment of its own (kvcompress/evaluate/peers): `held` is then
what a cache without the tokens that they hide would hold. They know no guide.

A run that was cut goes on: cells stand beside --json's file, in one of JSON lines. All caches share the layers' inputs
of one reading of a passage, and those of one pruner its scores (kvcompress/evaluate/sharing.py), which changes no bit.
On busy cores set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.books import SPLITS, books_of, text_of
from benchmarks.quality.parts.cells import FIELDS, Cell, Cells, over, rows_of
from benchmarks.quality.parts.measures import number, sizes_of, tidy
from kvcompress import CacheSpec
from kvcompress.caches.spec import DENSE
from kvcompress.evaluate.measure import Measure
from kvcompress.evaluate.peers.environment import Peer, peer_of
from kvcompress.evaluate.peers.exchange import answers, request_of
from kvcompress.evaluate.peers.rows import chosen
from kvcompress.evaluate.prose import Passage, Prose, asked_once, passage
from kvcompress.evaluate.run import PEER
from kvcompress.evaluate.sharing import LayerInputs, SharedReader
from kvcompress.reading.framing import Framing, framing_of
from kvcompress.support.checks import need
from kvcompress.support.units import Keep

METHODS = {  # those of one pruner stand together: they share its reading
    "SnapKV": "pruned,pruner=snapkv",
    "SnapKV31, AdaKV": "pruned,pruner=snapkv,kernel_size=31,pooling=max,budget=adakv",
    "StreamingLLM": "pruned,pruner=streamingllm",
    "Replay, GlobalTopK": "pruned,pruner=replay,budget=globaltopk",
    # the second reading stands behind the text: with chunks of 2,000 it would reach beyond the model's 8,192
    "KVzip with mass, GlobalTopK": "pruned,pruner=kvzip,chunk=512,mass=true,budget=globaltopk",
    "KVzip, GlobalTopK": "pruned,pruner=kvzip,chunk=512,budget=globaltopk",
    "KVzip, AdaKV": "pruned,pruner=kvzip,chunk=512,budget=adakv",
    "ExpectedAttention": "pruned,pruner=expectedattention",
    "KeyDiff": "pruned,pruner=keydiff",
}
QUESTIONS = ("later", "end", "guide")
CONVERTED = "dmc,page_size=4"
Books = list[tuple[str, str]]


@dataclass(frozen=True)
class Sizes:
    """lengths: tokens of a passage. texts: passages. scored: tokens behind each. shares: of its tokens that stay."""

    lengths: tuple[int, ...] = (1000, 3000, 7500)
    texts: int = 60
    scored: int = 96
    shares: tuple[float, ...] = (1 / 2, 1 / 4, 1 / 8)
    question: tuple[str, ...] = QUESTIONS
    methods: tuple[str, ...] = tuple(METHODS)


FEW = ("SnapKV", "Replay, GlobalTopK")
SIZES = {
    "full": Sizes(),
    "quick": Sizes(lengths=(1000,), texts=2, shares=(1 / 4,), question=("later",), methods=FEW),
    "tiny": Sizes(lengths=(1200,), texts=2, scored=16, shares=(1 / 2,), methods=FEW),
}


def spec_of(text: str) -> CacheSpec:
    """In pages of 4, what follows kept whole, where nothing else is said."""
    spec = CacheSpec.parse(text)
    return CacheSpec(spec.kind, {"page_size": "4", "later": "keep", **spec.given}) if spec.kind == "pruned" else spec


def measured(
    reader: SharedReader, measure: Measure, specs: Sequence[CacheSpec], question: str, read: Passage, text: int,
    shares: Sequence[float], cells: Cells, of: str = "",
) -> Iterator[Cell]:  # fmt: skip
    """Cells of a passage that are not there yet. of: stands before a cache's text in them."""
    for spec in specs:
        for share in shares if spec.size_key is not None else (None,):
            key = question, measure.length, text, of + str(spec), share
            if key in cells.found:
                continue
            sized = spec if share is None else spec.sized(max(round(share * measure.tokens), 1))
            try:
                yield Cell.of(key, read.book, measure.run(replace(reader, spec=sized), 0))
            except ValueError as error:  # what this cache cannot do
                yield Cell(*key, read.book, reason=str(error))


def measure_of(framing: Framing, read: Passage, length: int, text: int, question: str) -> Measure:
    if question == "later":
        return Prose("later", length, (read,), framing)
    return asked_once(framing, length, read, text, question)


def run(
    model: Any, tokenizer: Any, books: Books, specs: Sequence[CacheSpec], sizes: Sizes, cells: Cells, of: str = ""
) -> None:
    framing = framing_of(tokenizer, raw=False)
    reader = SharedReader(model, tokenizer, specs[0], inputs=LayerInputs(model))
    for length in sizes.lengths:
        for text in range(sizes.texts):
            read = passage(framing, books, length, text, sizes.scored)
            for question in sizes.question:
                begin, count = time.process_time(), 0
                measure = measure_of(framing, read, length, text, question)
                for cell in measured(reader, measure, specs, question, read, text, sizes.shares, cells, of):
                    cells.add(cell)
                    count += 1
                told = f"{count} cells in {time.process_time() - begin:.1f} s of the processor"
                print(f"{question}, {length:,} tokens, passage {text} ({read.book}): {told}", file=sys.stderr)


def run_presses(
    peer: Peer, presses: Sequence[str], name: str, model: Any, tokenizer: Any, books: Books, sizes: Sizes, cells: Cells
) -> None:
    """Raises Refused or PeerError; what came before is in cells."""
    framing, measures, keys = framing_of(tokenizer, raw=False), [], []
    asked = [question for question in sizes.question if question != "guide"]  # they know none
    for length, text, question in itertools.product(sizes.lengths, range(sizes.texts), asked):
        own = [(question, length, text, PEER + press, share) for press in presses for share in sizes.shares]
        own = [key for key in own if key not in cells.found]
        if own:
            read = passage(framing, books, length, text, sizes.scored)
            measures.append((measure_of(framing, read, length, text, question), read.book))
            keys += [(len(measures) - 1, key) for key in own]
    if not keys:
        return
    runs = [(key[3].removeprefix(PEER), task, key[4]) for task, key in keys]
    request = request_of(model, name, [[measure.sample(0)] for measure, _ in measures], runs)
    for (task, key), answer in zip(keys, answers(peer, model, tokenizer, request), strict=True):
        measure, book = measures[task]
        if "error" in answer:
            cells.add(Cell(*key, book, reason=answer["error"]))
        else:
            cells.add(Cell.of(key, book, measure.outcome(tokenizer, 0, answer["samples"][0])))
        print(f"{key[0]}, {key[1]:,} tokens, passage {key[2]}: {key[3]} at {key[4]:g}", file=sys.stderr)


def show(rows: list[dict[str, Any]], against: str | None) -> None:
    measured_rows = [row for row in rows if "reason" not in row]
    for question, length in dict.fromkeys((row["question"], row["length"]) for row in measured_rows):
        own = [row for row in measured_rows if (row["question"], row["length"]) == (question, length)]
        fields = [field for field in FIELDS if field in own[0]]
        lines = []
        for row in own:
            cells = [number(row, field) for field in fields]
            cells[1:1] = [number(row, "bits_over_dense", "+")] if "bits" in fields else []
            if against is not None:
                same = [x for x in own if x["method"] == against and x["share"] in (None, row["share"])]
                found = over(row, same[0], "against") if same else {}
                cells += [number(found, f"{field}_against", "+") for field in fields]
            share = "" if row["share"] is None else f"{row['share']:g}"
            lines.append((row["method"], share, number(row, "nbytes_share"), *cells))
        heads = [*fields]
        heads[1:1] = ["over dense"] if "bits" in fields else []
        heads += [f"{field} over {against}" for field in fields] if against is not None else []
        title = f"{length:,} tokens, {len(own[0]['texts'])} passages, asked {question}"
        print_table(title, ("method", "keeps", "held", *heads), lines, left=("method",))
    for row in rows:
        if "reason" in row:
            print(f"{row['name']} is left out: {row['reason']}")


# ---- the command ----


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _lengths(text: str) -> tuple[int, ...]:
    found = tuple(map(int, _parts(text)))
    need(min(found) > 0, f"lengths must be whole numbers above 0, got {text!r}")
    return found


def _shares(text: str) -> tuple[float, ...]:
    found = [Keep.of(part).share for part in _parts(text)]
    shares = tuple(float(share) for share in found if share is not None)
    need(len(shares) == len(found), f"keep must be shares such as 1/2,1/4, got {text!r}")
    return shares


def _questions(text: str) -> tuple[str, ...]:
    found = _parts(text)
    need(set(found) <= {*QUESTIONS}, f"question must be of {', '.join(QUESTIONS)}, got {text!r}")
    return found


def command() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument("--model", help="a Hugging Face model by name or folder (default: smollm2, example with --tiny)")
    parse.add_argument("--split", choices=SPLITS, default="report", help="of the books (default: report)")
    parse.add_argument("--texts", type=int, help="passages of each length (default: 60)")
    parse.add_argument("--lengths", type=_lengths, help="tokens of a passage (default: 1000,3000,7500)")
    parse.add_argument("--keep", dest="shares", type=_shares, help="shares that stay (default: 1/2,1/4,1/8)")
    parse.add_argument("--question", type=_questions, help="of later, end, guide (default: all)")
    parse.add_argument("--methods", nargs="*", choices=METHODS, metavar="NAME", help=f"of: {'; '.join(METHODS)}")
    parse.add_argument("--cache", action="append", default=[], help="a further cache, as text; several")
    parse.add_argument("--converted", nargs="+", type=Path, default=[], metavar="FOLDER", help="models made of it")
    parse.add_argument("--presses", nargs="+", default=[], metavar="NAME", help="of kvpress")
    parse.add_argument("--peers-python", type=Path, help="a Python that has kvpress (default: one is made)")
    parse.add_argument("--against", help="a method that is measured, from which differences are shown")
    return parse_arguments(parse)


def names_of(choice: argparse.Namespace, sizes: Sizes) -> dict[str, str]:
    """Of the caches that are measured, by their text: dense first. Further caches are named by what was given."""
    named = {str(spec_of(METHODS[name])): name for name in sizes.methods}
    further = {str(spec_of(text)): text for text in choice.cache}
    converted = {_of(folder) + CONVERTED: folder.name for folder in choice.converted}
    return {DENSE: DENSE, **further, **named, **converted, **{PEER + press: PEER + press for press in choice.presses}}


@functools.cache
def _of(folder: Path) -> str:
    """Stands before its cells: they are of these weights, whatever the folder holds later."""
    files = (x for x in sorted(folder.glob("*")) if x.name == "config.json" or x.suffix == ".safetensors")
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files))
    return f"{folder.name} {digest.hexdigest()[:8]}: "


def books_and_origins(choice: argparse.Namespace) -> tuple[Books, dict[str, Any]]:
    """--tiny reads this repository's own pages, which need no package."""
    if choice.size == "tiny":
        pages = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
        return [("docs", text_of(pages))], {}
    found = list(books_of(choice.split))
    return [(name, text) for name, text, _ in found], {name: asdict(origin) for name, _, origin in found}


def main() -> None:
    choice = command()
    sizes = sizes_of(choice, SIZES)
    names = names_of(choice, sizes)
    against = choice.against
    need(against is None or against in names.values(),
         f"against must be one of {'; '.join(names.values())}, got {against!r}")  # fmt: skip
    peer = peer_of(choice.peers_python, lambda text: print(text, file=sys.stderr)) if choice.presses else None
    if peer is not None:
        chosen(peer, choice.presses)
    books, origins = books_and_origins(choice)
    name = choice.model or ("example" if choice.size == "tiny" else "smollm2")
    model, tokenizer = load(name, "cpu")
    about = {"model": Path(name).name, "dtype": str(model.dtype), "split": choice.split, "scored": sizes.scored,
             "books": origins}  # fmt: skip
    cells = Cells(choice.json and choice.json.with_suffix(".jsonl"), about)
    others = {_of(folder) + CONVERTED for folder in choice.converted}
    own = [CacheSpec.parse(text) for text in names if not text.startswith(PEER) and text not in others]
    if peer is not None:
        run_presses(peer, choice.presses, name, model, tokenizer, books, sizes, cells)
    with kvcompress.attach(model):
        run(model, tokenizer, books, own, sizes, cells)
    for folder in choice.converted:
        converted = kvcompress.from_pretrained(folder, dtype=model.dtype).eval()
        run(converted, tokenizer, books, [CacheSpec.parse(CONVERTED)], sizes, cells, _of(folder))
    asked = [
        cell
        for cell in cells.found.values()
        if cell.cache in names and cell.length in sizes.lengths and cell.question in sizes.question
        and cell.text < sizes.texts and (cell.share is None or cell.share in sizes.shares)
    ]  # fmt: skip
    rows = tidy(rows_of(asked, names, choice.split))
    show(rows, against)
    if choice.json is not None:
        write_json(choice.json, rows, **about, **({} if peer is None else {"kvpress": peer.versions}))


if __name__ == "__main__":
    main()
