"""Long generation on a real model: what a cache of fixed size that is cut while a text is written loses.

    python benchmarks/quality/writing.py [--quick] [--json FILE] [--split tune|report] [--texts N] [--methods NAME ...]
                                         [--model NAME]

SmolLM2-135M-Instruct reads 500 tokens of an English book (parts/books.py); the next 1,500 come as if it wrote them, 128
at a time, and PrunedCache compresses behind each 128: what it does in decoding with every=128
(tests/test_evaluate.py), in a twentieth of the time. SnapKV and R-KV see the queries of such a call where in decoding
they see the latest.

bits      per token of those 1,500; +bits: over the dense cache's, paired, with its standard error; over: as a share
held      bytes at the end, of the dense cache's

Rows hold 512 and 256 tokens and what was written since. StreamingLLM keeps the first 4 and the newest. A run that was
cut goes on: cells stand beside --json's file. On busy cores set OMP_NUM_THREADS=1. Gates are those of examples/: run it
from the repository's folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.books import SPLITS
from benchmarks.quality.parts.cells import Cell, Cells, rows_of
from benchmarks.quality.parts.measures import number, sizes_of, tidy
from benchmarks.quality.witness import Books, books_and_origins
from kvcompress import CacheSpec
from kvcompress.caches.spec import DENSE
from kvcompress.evaluate.losses import Losses
from kvcompress.evaluate.prose import stretch
from kvcompress.evaluate.reading import Reader
from kvcompress.reading.framing import Framing

METHODS = {
    "StreamingLLM": "pruner=streamingllm",
    "H2O": "pruner=h2o",
    "TOVA": "pruner=tova",
    "R-KV": "pruner=rkv",
    "SnapKV": "pruner=snapkv",
    "KeyDiff": "pruner=keydiff",
    "ExpectedAttention": "pruner=expectedattention",
    "CGE": "pruner=centerofgravity",
    "LagKV": "pruner=lagkv",
    "H2O, GlobalTopK": "pruner=h2o,budget=globaltopk",
    "TOVA, GlobalTopK": "pruner=tova,budget=globaltopk",
    "KeyDiff, GlobalTopK": "pruner=keydiff,budget=globaltopk",
    "Successor, GlobalTopK": "pruner=successor,budget=globaltopk",
    "Gate, GlobalTopK": "pruner=gate:examples/smollm2_gates,budget=globaltopk",
    "Gate trained on, GlobalTopK": "pruner=gate:examples/smollm2_gates_trained,budget=globaltopk",
}


@dataclass(frozen=True)
class Sizes:
    """length: tokens in all; read: of a prompt; block: of a call behind it; kept: tokens of a row."""

    length: int = 2000
    read: int = 500
    block: int = 128
    kept: tuple[int, ...] = (512, 256)
    texts: int = 60
    methods: tuple[str, ...] = tuple(METHODS)


FEW = ("StreamingLLM", "H2O")
SIZES = {
    "full": Sizes(),
    "quick": Sizes(texts=2, methods=FEW),
    "tiny": Sizes(300, 80, 32, (96,), 2, FEW),
}


class Written(Losses):
    """What its texts call bytes are tokens."""

    unit: ClassVar[str] = "bits per token"


def run(model: Any, tokenizer: Any, books: Books, specs: Sequence[CacheSpec], sizes: Sizes, cells: Cells) -> None:
    framing = Framing(tokenizer)
    for text in range(sizes.texts):
        book, piece = stretch(framing, books, sizes.length, text, sizes.read)
        measure, begin, count = Written("writing", sizes.length, (piece,), sizes.block), time.process_time(), 0
        for spec in specs:
            for kept in (None,) if spec.kind == DENSE else sizes.kept:
                key = "later", sizes.length, text, str(spec), None if kept is None else kept / sizes.length
                if key not in cells.found:
                    sized = spec if kept is None else spec.sized(kept)
                    cells.add(Cell.of(key, book, measure.run(Reader(model, tokenizer, sized), 0)))
                    count += 1
        print(f"piece {text} ({book}): {count} cells in {time.process_time() - begin:.1f} s", file=sys.stderr)


def over_of(row: dict[str, Any]) -> float:
    """Bits over the dense cache's, as a share of those."""
    return float(row["bits_over_dense"] / (row["bits"] - row["bits_over_dense"]))


def show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        row["bits_over_dense_share"] = over_of(row)
        kept = "" if row["share"] is None else f"{row['share'] * row['length']:.0f}"
        lines.append((row["method"], kept, number(row, "nbytes_share"), number(row, "bits"),
                      number(row, "bits_over_dense", "+"), f"{row['bits_over_dense_share']:+.2%}"))  # fmt: skip
    print_table(f"{rows[0]['length']:,} tokens, {len(rows[0]['texts'])} pieces",
                ("method", "keeps", "held", "bits", "+bits", "over"), lines, left=("method",))  # fmt: skip


def command(description: str | None, texts: str) -> argparse.Namespace:
    """Arguments of a benchmark of long generation. texts: what --texts counts."""
    parse = parser(description)
    parse.add_argument("--model", help="a Hugging Face model by name or folder (default: smollm2, example with --tiny)")
    parse.add_argument("--split", choices=SPLITS, default="report", help="of the books (default: report)")
    parse.add_argument("--texts", type=int, help=texts)
    parse.add_argument("--methods", nargs="*", choices=METHODS, metavar="NAME", help=f"of: {'; '.join(METHODS)}")
    return parse_arguments(parse)


def main() -> None:
    choice = command(__doc__, "pieces of books (default: 60)")
    sizes = sizes_of(choice, SIZES)
    books, origins = books_and_origins(choice)
    name = choice.model or ("example" if choice.size == "tiny" else "smollm2")
    model, tokenizer = load(name, "cpu")
    about = {"model": Path(name).name, "dtype": str(model.dtype), "split": choice.split,
             "length": sizes.length, "read": sizes.read, "block": sizes.block, "books": origins}  # fmt: skip
    cells = Cells(choice.json and choice.json.with_suffix(".jsonl"), about)
    specs = {name: CacheSpec.parse(f"pruned,page_size=4,{METHODS[name]}") for name in sizes.methods}
    names = {DENSE: DENSE, **{str(spec): name for name, spec in specs.items()}}
    with kvcompress.attach(model):
        run(model, tokenizer, books, [CacheSpec(DENSE, {}), *specs.values()], sizes, cells)
    asked = [cell for cell in cells.found.values() if cell.cache in names and cell.text < sizes.texts]
    rows = tidy(rows_of(asked, names, choice.split))
    for row in rows:
        row["name"] = row["name"].replace("witness/", "writing/", 1)
    show(rows)
    if choice.json is not None:
        write_json(choice.json, rows, **about)


if __name__ == "__main__":
    main()
