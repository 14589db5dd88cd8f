"""What iterative reading costs on prompts far longer than the model was trained on: loss over position, recall, memory.

    python benchmarks/quality/long_prompts.py [--position] [--recall] [--tracks] [--quick] [--json FILE]
                                              [--figures DIR] [--model NAME]

All three parts unless some are named. FM keeps a memory of fixed size, IM lets it grow, IMDC also shrinks the chunks.

position  bits per byte of held-out source text, 262,144 tokens in one reading, chunk 512 and memory 512. `first` are
          the first 16K tokens after a warm-up of 2K, `last` the last 16K, `ratio` is last / first. Source text is not
          evenly hard, so a reference without a long past scores the same tokens: dense windows of 2,048 tokens, each
          of which scores what follows its first 1,024. `/ref` is the ratio divided by that of the reference; +- its
          standard error, from the differences to the reference in blocks of 1,024. `dense` is one pass over the first
          8K, as transformers runs it.
recall    the share of five-digit facts answered right (all five digits, greedy) by prompt length, 10 depths each;
          chunk 512. guided: the question is the guide, so it chooses what is kept from the first chunk on; else the
          prompt alone ends with it, which is too late for what is gone by then. @4: memory starts at 4 tokens, which is
          what the paper's rule (memory / iterations) gives at 32K; else at the floor of IterativeCache. Facts and texts
          depend on length and depth alone: all methods read the same prompts.
          Methods that differ little are not read at the greatest lengths, which leaves blanks in the table.
tracks    one reading of 32K per method: what memory receives and retains, and where it comes from (figures 1, 6 and 7
          of the paper), and which layers hold the digits of an early fact over the iterations of a guided reading.

SnapKV here has 4 sink tokens, as in the demo; SnapKV31, for unguided recall, also pools its votes with a maximum over
31 neighbours: the example model's tokens are bytes, and a fact is 39 of them. The held-out text has 0.7 MB; none of
the text was trained on by the example model, which is all that can be said of other models.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import set_verbosity_error

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, write_json
from benchmarks.quality.parts import long_prompts_tables
from benchmarks.quality.parts.long_prompts_tasks import (
    BitsPerByte,
    dense_losses,
    depths,
    held,
    held_out_ids,
    iterative_losses,
    needle_places,
    needle_task,
    tracked,
    window_losses,
)
from benchmarks.quality.parts.measures import tidy
from benchmarks.quality.parts.tasks import MakeCache, Writer, measure, measure_guided, standard_error
from kvcompress import IterativeCache
from kvcompress.pruners import Pruner, SnapKV, StreamingLLM

PRUNERS: dict[str, Pruner] = {
    "SnapKV": SnapKV(num_sink_tokens=4),
    "SnapKV31": SnapKV(num_sink_tokens=4, kernel_size=31, pooling="max"),
    "StreamingLLM": StreamingLLM(),
}
READERS = ("SnapKV", "StreamingLLM")  # where nothing is asked
KINDS = (("FM", "fixed"), ("IM", "linear"), ("IMDC", "linear"))
SCHEDULES = ("linear", "sqrt", "square", "square-sqrt", "adaptive")
PARTS = ("position", "recall", "tracks")
BLOCK = 1024  # the standard error's


@dataclass(frozen=True)
class Sizes:
    """Tokens, except depths and trials (prompts per length and depth)."""

    chunk: int = 512
    position_memory: int = 512
    position: int = 262_144
    dense: int = 8192
    warm_up: int = 2048
    edge: int = 16_384
    window: int = 2048
    block: int = 4096
    recall_memory: int = 256
    lengths: tuple[int, ...] = (2048, 8192, 32_768, 131_072)
    depths: int = 10
    trials: int = 1
    tracked: int = 32_768
    schedules: tuple[str, ...] = SCHEDULES


SIZES = {
    "full": Sizes(),
    "quick": Sizes(
        position=8192, dense=4096, warm_up=1024, edge=2048, block=2048, lengths=(1024, 4096), depths=2, tracked=4096,
        schedules=("linear",),
    ),
    "tiny": Sizes(
        chunk=128, position_memory=128, position=1024, dense=512, warm_up=128, edge=256, window=256, block=256,
        recall_memory=128, lengths=(256, 384), depths=2, tracked=512, schedules=("linear",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A way to read. longest: prompts up to this length only."""

    kind: str  # FM, IM, IMDC
    memory: int
    schedule: str = "fixed"
    pruner: str = "SnapKV"
    guided: bool = False
    initial: int | None = None
    longest: float = math.inf

    @property
    def name(self) -> str:
        schedule = "" if self.kind == "FM" else f"/{self.schedule}"
        start = "" if self.initial is None else f"@{self.initial}"
        return f"{self.kind}{schedule}{start}/{self.pruner}"

    def cache(self, model: PreTrainedModel, chunk: int, track: bool = False) -> IterativeCache:
        return IterativeCache(
            model.config, memory_size=self.memory, chunk_size=chunk, pruner=PRUNERS[self.pruner],
            schedule=self.schedule, dynamic=self.kind == "IMDC", initial_memory=self.initial, track=track,
        )  # fmt: skip

    def fields(self, chunk: int) -> dict[str, Any]:
        return {
            "method": self.name, "schedule": self.schedule, "dynamic": self.kind == "IMDC",
            "pruner": repr(PRUNERS[self.pruner]), "memory_size": self.memory, "chunk_size": chunk,
            "initial_memory": self.initial,
        }  # fmt: skip


Found = Iterator[tuple[dict[str, Any], Any]]  # a row, and what is drawn of it


# ---- position ----


def position_methods(sizes: Sizes) -> Iterator[Method]:
    for pruner in READERS:
        yield Method("FM", sizes.position_memory, pruner=pruner)
        yield Method("IM", sizes.position_memory, "linear", pruner)
        for schedule in sizes.schedules:
            if not (pruner == "StreamingLLM" and schedule == "adaptive"):  # which is linear: all layers retain alike
                yield Method("IMDC", sizes.position_memory, schedule, pruner)


def position(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sizes: Sizes, name: str) -> Found:
    """Rows and losses [T - 1] of each method; the reference's and the dense pass first."""
    write = Writer(tokenizer)
    ids = held_out_ids(write, sizes.position)
    bits, path = BitsPerByte(tokenizer, ids), f"long_prompts/{name}/position"
    sizes = replace(sizes, edge=min(sizes.edge, (len(ids) - sizes.warm_up) // 2))
    windows = window_losses(model, ids, sizes.window, sizes.window // 2)
    row = {"name": f"{path}/windows{sizes.window}/T{len(ids)}", "method": "windows"}
    yield row | _bits(bits, windows, windows, sizes), windows
    dense = dense_losses(model, ids[: sizes.dense])
    row = {"name": f"{path}/dense/T{len(dense) + 1}", "method": "dense"}
    yield row | _bits(bits, dense, windows, sizes), dense
    for method in position_methods(sizes):
        with kvcompress.attach(model):
            cache = method.cache(model, sizes.chunk)
            losses = iterative_losses(model, ids, cache)
        row = {"name": f"{path}/{method.name}/M{method.memory}/T{len(ids)}"} | method.fields(sizes.chunk)
        yield row | {"largest_context": cache.largest_context} | _bits(bits, losses, windows, sizes), losses


def _bits(bits: BitsPerByte, losses: Tensor, reference: Tensor, sizes: Sizes) -> dict[str, Any]:
    """All in bits per byte; a stretch that was not read is None once written."""
    tokens, fields = len(losses) + 1, {}
    whole = len(losses) == len(reference)
    ranges = {"first": (sizes.warm_up, sizes.warm_up + sizes.edge), "last": (tokens - sizes.edge, tokens)}
    relative = []
    for place, (start, stop) in ranges.items():
        ours, theirs = (bits(x, start, stop) if whole else math.nan for x in (losses, reference))
        block = min(BLOCK, sizes.edge // 2)
        over = [a - b for a, b in zip(*(bits.blocks(x, block, start, stop) for x in (losses, reference)), strict=False)]
        fields |= {place: ours, f"{place}_over_windows": ours - theirs, f"{place}_windows": theirs}
        error = standard_error(over) if whole else math.nan
        fields[f"{place}_over_windows_se"] = error
        relative.append(error / theirs)
    fields["ratio"] = fields["last"] / fields["first"]
    fields["ratio_over_windows"] = fields["ratio"] / (fields["last_windows"] / fields["first_windows"])
    fields["ratio_over_windows_se"] = fields["ratio_over_windows"] * math.hypot(*relative)
    return {
        "tokens": tokens, "trained_text": False, "bits_per_byte": bits(losses, 1, tokens),
        "windows_bits_per_byte": bits(reference, 1, tokens), **fields,
        "block": sizes.block, "bits_by_block": bits.blocks(losses, sizes.block),
    }  # fmt: skip


# ---- recall ----


def recall_methods(sizes: Sizes) -> Iterator[Method]:
    """What differs little from its neighbours is not read at every length."""
    memory, lengths = sizes.recall_memory, sizes.lengths
    short, middle = lengths[min(1, len(lengths) - 1)], lengths[min(2, len(lengths) - 1)]
    yield Method("FM", memory, guided=True)
    for schedule in sizes.schedules:
        for kind in ("IM", "IMDC"):
            whole = schedule == "linear" or (kind == "IMDC" and schedule == "sqrt")
            yield Method(kind, memory, schedule, guided=True, longest=math.inf if whole else middle)
    yield Method("IMDC", memory, "linear", guided=True, initial=memory // 64)
    for kind, schedule in KINDS:
        yield Method(kind, 2 * memory, schedule, guided=True, longest=middle)
    yield Method("FM", memory, pruner="StreamingLLM")
    yield Method("FM", memory, pruner="SnapKV31", longest=middle)
    for schedule in sizes.schedules:
        for kind in ("IM", "IMDC"):
            yield Method(kind, memory, schedule, "SnapKV31", longest=middle if schedule == "linear" else short)


def recall(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sizes: Sizes, name: str) -> Found:
    """One row per method, all lengths in it; first the dense cache, read in one pass, at the shorter half of them."""
    write, at, path = Writer(tokenizer), depths(sizes.depths), f"long_prompts/{name}/recall"
    tasks = {length: needle_task(write, length, at, sizes.trials) for length in sizes.lengths}

    def row_of(make: MakeCache, guided: bool, longest: float) -> dict[str, Any]:
        cells = np.full((len(at), len(tasks)), math.nan)
        with kvcompress.attach(model):
            for column, (length, task) in enumerate(tasks.items()):
                if length <= longest:
                    read = measure_guided(model, task, make) if guided else measure(model, task, make, batch=len(at))
                    cells[:, column] = np.reshape(read.samples, (len(at), sizes.trials)).mean(1)
        shown = {"lengths": list(tasks), "depths": at, "recall_by_length": cells.mean(0).tolist()}
        return {"guided": guided, "memory_at_fact": None, "trials": sizes.trials, **shown, "recall": cells.tolist()}

    def memory_at_fact(method: Method) -> list[list[int]]:
        """[depths, lengths]: scheduled memory, mean over the layers, after the chunk with a fact's last digit."""
        sizes_then = []
        for length, task in tasks.items():
            tail = task.question_tokens[0] if method.guided else 0
            plan = method.cache(model, sizes.chunk).plan_prompt(length - 1 - tail)
            ends = np.cumsum(plan.chunks)
            sizes_then.append([plan.memory[int(np.searchsorted(ends, stop))] for stop in stops[length]])
        return np.array(sizes_then).T.tolist()

    stops = {
        length: [needle_places(write, task, row)[1] for row in range(0, len(task.prompts), sizes.trials)]
        for length, task in tasks.items()
    }
    short = sizes.lengths[(len(sizes.lengths) - 1) // 2]
    row = {"name": f"{path}/dense", "method": "dense", "memory_size": None}
    yield row | row_of(partial(DynamicCache, config=model.config), False, short), None
    for method in recall_methods(sizes):
        row = {"name": f"{path}/{method.name}/{'guided' if method.guided else 'unguided'}/M{method.memory}"}
        make = partial(method.cache, model, sizes.chunk)
        row |= method.fields(sizes.chunk) | row_of(make, method.guided, method.longest)
        yield row | {"memory_at_fact": memory_at_fact(method)}, None


# ---- tracks ----


def tracks(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sizes: Sizes, name: str) -> Found:
    """Rows with Tracks; then, of an early fact, rows with what each layer held [n, L]."""
    write, path = Writer(tokenizer), f"long_prompts/{name}/tracks"
    text = write.source(1, sizes.tracked)[0]
    for pruner in READERS:
        for kind, schedule in KINDS:
            method = Method(kind, sizes.position_memory, schedule, pruner)
            with kvcompress.attach(model):
                track = tracked(model, text, method.cache(model, sizes.chunk, track=True))
            sources = track.memory_map().mean(0)
            row = {"name": f"{path}/{method.name}/M{method.memory}/T{len(text)}"} | method.fields(sizes.chunk)
            row |= {
                "memory_probability": track.memory_probability()[1:].mean((1, 2)).tolist(),
                "retention": track.retention()[1:].mean((1, 2)).tolist(),
                "last_chunk_share": sources[-1].item(),
                "first_half_share": sources[: len(sources) // 2].sum().item(),
            }
            yield row, track
    task = needle_task(write, sizes.tracked, [0.05])
    first, stop = needle_places(write, task, 0)
    guide = task.questions[0][0].asked
    read = task.prompts[0][: len(task.prompts[0]) - task.question_tokens[0]]
    starts = [Method(kind, sizes.recall_memory, schedule, guided=True) for kind, schedule in KINDS]
    for method in (*starts, replace(starts[-1], initial=sizes.recall_memory // 64)):
        with kvcompress.attach(model):
            cache = method.cache(model, sizes.chunk, track=True)
            memory = cache.plan_prompt(len(read)).memory
            track = tracked(model, read, cache, guide)
        share = held(track, first, stop)
        at = next(i for i, reading in enumerate(track.readings[0]) if reading.start + reading.chunk > first)
        row = {"name": f"{path}/needle/{method.name}/M{method.memory}/T{sizes.tracked}"} | method.fields(sizes.chunk)
        row |= {
            "depth": 0.05, "iteration": at, "memory_then": memory[at],
            "digits_held_then": share[at].tolist(), "digits_held": share[-1].tolist(),
        }  # fmt: skip
        yield row, share


# ---- the command ----


def options() -> argparse.Namespace:
    parse = parser(__doc__)
    for part in PARTS:
        parse.add_argument(f"--{part}", action="store_true", help="this part, and others that are named; default: all")
    parse.add_argument("--figures", type=Path, help="draw into this folder: long_prompts_<part>.png")
    parse.add_argument(
        "--model", default="example", help="a Hugging Face model by name or folder (default: the example)"
    )
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parse_arguments(parse)


def main() -> None:
    choice = options()
    set_verbosity_error()  # texts are longer than the trained length on purpose
    warnings.filterwarnings("ignore", message=".*would be shorter than min_chunk")
    model, tokenizer = load(choice.model, choice.device)
    sizes, rows = SIZES[choice.size], []
    named = [part for part in PARTS if getattr(choice, part)]
    if not Writer(tokenizer).gives_text_back():
        raise SystemExit(f"{choice.model}: bits per byte need a tokenizer that gives the text back")
    work = {"position": position, "recall": recall, "tracks": tracks}
    for part in named or PARTS:
        found: dict[str, tuple[dict[str, Any], Any]] = {}
        begin = time.process_time()
        for row, seen in work[part](model, tokenizer, sizes, choice.model):
            rows.append(tidy(row))
            found[row["name"]] = rows[-1], seen
            print(f"{row['name']} {time.process_time() - begin:.0f} s", file=sys.stderr, flush=True)
            if choice.json is not None:
                write_json(choice.json, rows)
        getattr(long_prompts_tables, part)([row for row, _ in found.values()])
        if choice.figures is not None:
            from benchmarks.quality.parts import long_prompts_figures

            getattr(long_prompts_figures, part)(list(found.values()), choice.figures / f"long_prompts_{part}.png")


if __name__ == "__main__":
    main()
