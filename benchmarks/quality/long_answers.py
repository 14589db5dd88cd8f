"""Long answers of a real model: what caches that are cut while it writes lose of what it wrote seeing all of it.

    python benchmarks/quality/long_answers.py [--quick] [--json FILE] [--split tune|report] [--texts N]
                                              [--methods NAME ...] [--model NAME]

SmolLM2-135M-Instruct is given 400 tokens of an English book (parts/books.py) and goes on with them for 4,000 tokens
with a cache that keeps everything: drawn at temperature 1 from the likeliest 95 %, no end among them, with a seed for
each. Four numbers are then put into it, each behind a sentence, at 0.1, 0.3, 0.5 and 0.7 of it. Each cache reads the
same prompt, and the answer 128 tokens at a time, and PrunedCache compresses behind each 128, as in writing.py. What is
measured:

bits      per token of the answer; +bits: over the dense cache's, paired, with its standard error; over: as a share
greedy    tokens of which the likeliest is the dense cache's
numbers   of the four that are answered right, asked through the template when the answer has ended
held      bytes at the end, of the dense cache's

Rows hold 1,024, 512 and 256 tokens and what was written since. A run that was cut goes on: cells stand beside --json's
file, and the answers in FILE.answers.json. On busy cores set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, print_table, write_json
from benchmarks.quality.parts.cells import Cell, Cells, rows_of
from benchmarks.quality.parts.measures import number, sizes_of, tidy
from benchmarks.quality.witness import Books, books_and_origins
from benchmarks.quality.writing import METHODS, command, over_of
from kvcompress import CacheSpec, PrunedCache
from kvcompress.caches.spec import DENSE
from kvcompress.evaluate.measure import Outcome
from kvcompress.evaluate.prose import CITIES, Question, answer_ids, question_ids, stretch
from kvcompress.evaluate.reading import Following, Reader, held_nbytes
from kvcompress.hf.argument import CACHE
from kvcompress.reading.framing import Framing, framing_of
from kvcompress.support.files import write_text

DEPTHS = (0.1, 0.3, 0.5, 0.7)  # of the numbers in an answer
TEMPERATURE, NUCLEUS = 1.0, 0.95
ASKS = "Here is the beginning of a text. Go on with it for as long as you can.\n\n"
Sequences = list[list[int]]


@dataclass(frozen=True)
class Sizes:
    """given: tokens of a book; length: of an answer; block: of a call; kept: tokens of a row; batch: answers that are
    written at a time."""

    given: int = 400
    length: int = 4000
    block: int = 128
    kept: tuple[int, ...] = (1024, 512, 256)
    texts: int = 8
    batch: int = 8
    methods: tuple[str, ...] = (
        "StreamingLLM", "H2O", "R-KV", "TOVA", "ExpectedAttention", "KeyDiff, GlobalTopK", "H2O, GlobalTopK",
        "Gate, GlobalTopK", "Gate trained on, GlobalTopK",
    )  # fmt: skip


FEW = ("StreamingLLM", "H2O")
SIZES = {
    "full": Sizes(),
    "quick": Sizes(length=400, kept=(128,), texts=2, batch=2, methods=FEW),
    "tiny": Sizes(60, 160, 32, (64,), 2, 2, FEW),
}


@dataclass(frozen=True)
class Answer:
    """book: its name. prompt, written: tokens. cities, values: of the numbers that were put into it, in order."""

    book: str
    prompt: list[int]
    written: list[int]
    cities: list[str]
    values: list[str]

    def questions(self) -> list[Question]:
        return [
            Question("number", f"\n\nWhat is the special magic number for {city} mentioned in the text above?",
                     f"The special magic number for {city} is:", f" {value}", depth)
            for city, value, depth in zip(self.cities, self.values, DEPTHS, strict=True)
        ]  # fmt: skip


def begun(framing: Framing, books: Books, text: int, sizes: Sizes) -> Answer:
    """An answer of which nothing is written."""
    book, piece = stretch(Framing(framing.tokenizer), books, sizes.given + 1, text, sizes.given)
    before, behind = framing.parts(ASKS, "")
    rng = random.Random(f"answer {text}")
    cities = rng.sample(CITIES, len(DEPTHS))
    values = ["".join(rng.choice("123456789") for _ in range(5)) for _ in cities]
    return Answer(book, before + piece.read[len(framing.begin) :] + behind, [], cities, values)


def drawn(logits: torch.Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """A token of each row [B, V], of the likeliest whose chances come to NUCLEUS."""
    chances, order = (logits.float() / TEMPERATURE).softmax(-1).sort(-1, descending=True)
    chances = chances.masked_fill(chances.cumsum(-1) - chances > NUCLEUS, 0.0)
    places = [int(torch.multinomial(row, 1, generator=own)) for row, own in zip(chances, generators, strict=True)]
    return [int(row[place]) for row, place in zip(order, places, strict=True)]


@torch.no_grad()
def write(model: Any, framing: Framing, answers: Sequence[Answer], first: int, length: int) -> list[Answer]:
    """Answers of equally long prompts, written together. first: the number of the first of them."""
    generators = [torch.Generator().manual_seed(first + row) for row in range(len(answers))]
    ends = model.generation_config.eos_token_id
    never = sorted({*([ends] if isinstance(ends, int) else ends or []), *framing.tokenizer.all_special_ids})
    written: Sequences = [[] for _ in answers]
    cache, coming = PrunedCache(model.config, keep=1.0), torch.tensor([answer.prompt for answer in answers])
    for _ in range(length):
        logits = model(coming, logits_to_keep=1, **{CACHE: cache}).logits[:, -1]
        logits[:, never] = float("-inf")
        tokens = drawn(logits, generators)
        for own, token in zip(written, tokens, strict=True):
            own.append(token)
        coming = torch.tensor(tokens)[:, None]
    return [with_numbers(framing, old, own) for old, own in zip(answers, written, strict=True)]


def with_numbers(framing: Framing, answer: Answer, written: list[int]) -> Answer:
    """As long as what was written."""
    length, out, place = len(written), [], 0
    for depth, city, value in zip(DEPTHS, answer.cities, answer.values, strict=True):
        due = round(depth * length)
        ended = (i for i in range(due, length) if framing.tokenizer.decode(written[i]).rstrip()[-1:] in (".", "!", "?"))
        end = min(next(ended, due), due + length // 10) + 1
        out += written[place:end] + framing.bare(f" The special magic number for {city} is: {value}.")
        place = end
    return replace(answer, written=(out + written[place:])[:length])


def answers_of(
    model: Any, framing: Framing, books: Books, sizes: Sizes, path: Path | None, about: dict[str, Any]
) -> list[Answer]:
    """Written, or of the file that they were written into before."""
    found: list[Answer] = []
    if path is not None and path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["about"] != about:
            raise ValueError(f"json must be a file whose answers are of the same settings, got {path}: remove that")
        found = [Answer(**x) for x in saved["answers"]]
    while len(found) < sizes.texts:
        first = len(found)
        fresh = [begun(framing, books, first + row, sizes) for row in range(min(sizes.batch, sizes.texts - first))]
        found += write(model, framing, fresh, first, sizes.length)
        if path is not None:
            write_text(path, json.dumps({"about": about, "answers": [asdict(x) for x in found]}))
        print(f"{len(found)} answers are written", file=sys.stderr)
    return found


@torch.no_grad()
def measured(
    reader: Reader, framing: Framing, answer: Answer, block: int, dense: list[int]
) -> tuple[Outcome, list[int]]:
    """(what a cache loses, the likeliest token at each place of the answer). dense: those of the dense cache; none: it
    is this one."""
    begin, ids = time.perf_counter(), torch.tensor([answer.prompt + answer.written])
    before = len(answer.prompt)
    cache = reader.read(answer.prompt[:-1])
    nats, likeliest = 0.0, []
    for part in range(before - 1, ids.shape[1] - 1, block):
        end = min(part + block, ids.shape[1] - 1)
        logits = reader.model(ids[:, part:end], **{CACHE: cache}).logits[0].float()
        nats += float(torch.nn.functional.cross_entropy(logits, ids[0, part + 1 : end + 1], reduction="sum"))
        likeliest += logits.argmax(-1).tolist()
    last = answer.written[-1:]  # no cache has read it
    asked = []
    for question in answer.questions():
        asks, says = question_ids(framing, question), answer_ids(framing, question)
        turn = framing.later(question.words, question.prefix) if framing.chat else asks
        asked.append(Following("number", last + turn + says, ((1 + len(turn), 1 + len(turn) + len(says)),)))
    nbytes = held_nbytes(cache)
    said = [
        {"kind": "number", "score": float(right[0]), "depth": depth}
        for (_, right), depth in zip(reader.follow(cache, asked), DEPTHS, strict=True)
    ]
    same = [a == b for a, b in zip(likeliest, dense or likeliest, strict=True)]
    said.append({"kind": "greedy", "score": sum(same) / len(same)})
    bits = nats / len(answer.written) / torch.log(torch.tensor(2.0)).item()
    return Outcome(bits, nbytes, time.perf_counter() - begin, None, tuple(said)), likeliest


def run(
    model: Any, tokenizer: Any, framing: Framing, answers: Sequence[Answer], specs: Sequence[CacheSpec], sizes: Sizes,
    cells: Cells,
) -> None:  # fmt: skip
    for text, answer in enumerate(answers):
        begin, count = time.process_time(), 0
        keys = [
            (spec, kept, ("later", sizes.length, text, str(spec), None if kept is None else kept / sizes.length))
            for spec in specs for kept in ((None,) if spec.kind == DENSE else sizes.kept)
        ]  # fmt: skip
        if all(key in cells.found for _, _, key in keys):
            continue
        dense: list[int] = []
        for spec, kept, key in keys:
            if key in cells.found and spec.kind != DENSE:
                continue
            sized = spec if kept is None else spec.sized(kept)
            found, likeliest = measured(Reader(model, tokenizer, sized), framing, answer, sizes.block, dense)
            dense = dense or likeliest  # the first of them is the dense cache
            if key not in cells.found:
                cells.add(Cell.of(key, answer.book, found))
            count += 1
        print(f"answer {text} ({answer.book}): {count} cells in {time.process_time() - begin:.1f} s", file=sys.stderr)


def show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        row["bits_over_dense_share"] = over_of(row)
        kept = "" if row["share"] is None else f"{row['share'] * row['length']:.0f}"
        share = f"{row['bits_over_dense_share']:+.2%}"
        lines.append((row["method"], kept, number(row, "nbytes_share"), number(row, "bits_over_dense", "+"), share,
                      number(row, "greedy"), number(row, "numbers")))  # fmt: skip
    print_table(f"{rows[0]['length']:,} tokens, {len(rows[0]['texts'])} answers",
                ("method", "keeps", "held", "+bits", "over", "greedy", "numbers"), lines, left=("method",))  # fmt: skip


def main() -> None:
    choice = command(__doc__, "answers (default: 8)")
    sizes = sizes_of(choice, SIZES)
    books, origins = books_and_origins(choice)
    name = choice.model or ("example" if choice.size == "tiny" else "smollm2")
    model, tokenizer = load(name, "cpu")
    about = {"model": Path(name).name, "dtype": str(model.dtype), "split": choice.split, "given": sizes.given,
             "length": sizes.length, "block": sizes.block, "books": origins}  # fmt: skip
    cells = Cells(choice.json and choice.json.with_suffix(".jsonl"), about)
    framing = framing_of(tokenizer, raw=False)
    specs = {name: CacheSpec.parse(f"pruned,page_size=4,{METHODS[name]}") for name in sizes.methods}
    names = {DENSE: DENSE, **{str(spec): name for name, spec in specs.items()}}
    with kvcompress.attach(model):
        path = choice.json and choice.json.with_suffix(".answers.json")
        answers = answers_of(model, framing, books, sizes, path, about)
        run(model, tokenizer, framing, answers[: sizes.texts], [CacheSpec(DENSE, {}), *specs.values()], sizes, cells)
    asked = [cell for cell in cells.found.values() if cell.cache in names and cell.text < sizes.texts]
    rows = tidy(rows_of(asked, names, choice.split))
    for row in rows:
        row["name"] = row["name"].replace("witness/", "long_answers/", 1)
    show(rows)
    if choice.json is not None:
        write_json(choice.json, rows, **about)


if __name__ == "__main__":
    main()
