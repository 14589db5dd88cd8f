"""How much gates let through of texts that hold much, and of texts that hold little.

    python benchmarks/quality/gates.py [--quick] [--json FILE] [--model NAME] [--gates FOLDER] [--keep S]

SmolLM2-135M and the gates of examples/smollm2_gates; GatedCache with a window of 64. 1,000 tokens of each: passages of
the books that nothing was tuned by (parts/books.py, seed 0), names with numbers of five digits, log lines that differ
by their time, one sentence again and again. stays: tokens held over tokens read, mean over layers and KV heads, window
and first tokens included.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.books import books_of
from kvcompress import GatedCache
from kvcompress.gates import fit_gates
from kvcompress.pruners import Gates

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"full": (1000, 8), "quick": (1000, 1), "tiny": (200, 0)}
SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank. "


def texts(passages: int) -> dict[str, list[str]]:
    """By kind."""
    draw = random.Random(0)
    names = [draw.choice(("Paris", "Rome", "Oslo", "Bern", "Lima")) for _ in range(500)]
    found = {
        "names with numbers": [" ".join(f"{name} {draw.randrange(10_000, 99_999)}," for name in names)],
        "log lines": [
            "".join(f"2026-11-{i % 28 + 1:02} 10:{i % 60:02}:00 INFO worker started, all is well\n" for i in range(300))
        ],
        "one sentence": [SENTENCE * 120],
    }
    if passages:
        books = [text for _, text, _ in books_of("report")]
        prose = []
        for i in range(passages):
            text = books[i % len(books)]
            begin = draw.randrange(len(text) - 12_000)
            prose.append(text[begin : begin + 12_000])
        found = {"prose": prose} | found
    return found


def stays(model: Any, tokenizer: Any, gates: Gates, keep: float, text: str, length: int) -> float:
    ids = torch.tensor([tokenizer(text)["input_ids"][: length + 1]])
    cache = GatedCache(model.config, gates, keep=keep)
    kvcompress.prefill(model, ids, cache)
    return cache.kept_share()


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--model", help="a Hugging Face model by name or folder (default: smollm2, example with --tiny)")
    parse.add_argument("--gates", type=Path, help="a folder (default: examples/smollm2_gates)")
    parse.add_argument("--keep", type=float, default=0.25, help="share that stays behind the window (default: 0.25)")
    choice = parse_arguments(parse)
    length, passages = SIZES[choice.size]
    model, tokenizer = load(choice.model or ("example" if choice.size == "tiny" else "smollm2"), "cpu")
    if choice.size == "tiny":
        some = [torch.tensor(list(SENTENCE.encode() * 4)[i : i + 200]) for i in range(4)]
        gates = fit_gates(model, some, kvcompress.KVzip(), held_out=1)
    else:
        gates = Gates.load(choice.gates or ROOT / "examples/smollm2_gates")
    rows = []
    with kvcompress.attach(model), torch.inference_mode():
        for kind, some in texts(passages).items():
            found = [stays(model, tokenizer, gates, choice.keep, text, length) for text in some]
            rows.append({"name": f"gates/{kind}", "share": choice.keep, "stays": sum(found) / len(found),
                         "least": min(found), "most": max(found), "texts": len(found)})  # fmt: skip
    lines = [[row["name"], *(f"{row[x]:.3f}" for x in ("stays", "least", "most")), str(row["texts"])] for row in rows]
    print_table(f"keep {choice.keep:g}", ("text", "stays", "least", "most", "texts"), lines, left=("text",))
    if choice.json is not None:
        write_json(choice.json, rows)


if __name__ == "__main__":
    main()
