"""A retrofit against transformers' Trainer on the same model and data: tokens per second, memory, two processes.

    python benchmarks/speed/retrofit.py [--quick] [--json FILE] [--model NAME]

LlamaForCausalLM with random weights, feed-forward layers 8/3 as wide as the rest, two query heads of 64 for each KV
head; Python's standard library as text, a token for a byte; AdamW, float32.

train/<method>/<rows>   an optimizer step of RetrofitTrainer, from the end of one to the end of the next: reading and
    collating rows is in it. ratio: our tokens per second over those of transformers' Trainer with the plain model
    (SDPA), same rows. Each trains a few steps in its turn, in an order of its own each time; medians of such turns.
    whole: a row is one document. packed: files as they are, several in a row, none of which sees another
memory/<method>         peak resident memory of such a run of 3 steps above what there was with model and data loaded, a
    fresh process for each. times: of the plain model's
ddp/<method>, fsdp2/<method>   a step of a loop in two processes over gloo, one thread each; with FSDP2 every layer is
    sharded. ratio: against the plain model in the same loop and processes, taking turns

--model: a pretrained one, such as smollm2, instead, in rows of 1,024 of its own tokens: its train rows, whole, alone.

dmc    decides in every step, with the loss on the ratio; dms  the same, dropping tokens that are a quarter of a row old
pod    every second layer follows; an eighth of a row is near
"""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import Row, load, parse_arguments, parser, write_json
from kvcompress import dmc, pod
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.retrofit.data import collate
from kvcompress.retrofit.packing import Packing
from kvcompress.retrofit.recipe import Recipe
from kvcompress.retrofit.sources import DataSource
from kvcompress.retrofit.trainer import RetrofitTrainer
from kvcompress.support.process_memory import PeakMemory

METHODS = ("dmc", "dms", "pod")
PLAIN = "plain"


@dataclass(frozen=True)
class Sizes:
    """turns: of each kind, half as many in two processes. steps: of a turn, whose first is not counted. length, rows:
    of a pass. measured: methods whose memory and distributed steps are measured. model: a pretrained one, None = of
    these sizes."""

    turns: int
    steps: int
    layers: int
    hidden: int
    length: int
    rows: int
    vocabulary: int
    measured: tuple[str, ...] = METHODS
    model: str | None = None


SIZES = {
    "full": Sizes(5, 3, 4, 512, 2048, 1, 4096),
    "quick": Sizes(3, 3, 2, 256, 1024, 1, 1024),
    "tiny": Sizes(1, 2, 2, 128, 128, 2, 256, METHODS[:1]),
}


@dataclass
class TrainRow(Row):
    """ours, peer: seconds of a step."""

    tokens_per_second: float = 0.0


@dataclass
class MemoryRow:
    name: str
    nbytes: int
    peer_nbytes: int
    times: float = field(init=False)

    def __post_init__(self) -> None:
        self.times = self.nbytes / self.peer_nbytes


def model_of(kind: str, sizes: Sizes) -> Any:
    model = random_model(sizes) if sizes.model is None else load(sizes.model, "cpu")[0].float()
    model.config.use_cache = False
    if kind == "pod":
        layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
        lead = [[layer - layer % 2] * heads for layer in range(layers)]
        pod.convert(model, pod.PoDConfig(lead, sinks=16, recent=sizes.length // 8 - 16 or 1))
    elif kind != PLAIN:
        dmc.convert(model, dmc.DMCConfig(mode=kind, dms_window=sizes.length // 4), anneal=False)
    return model


def random_model(sizes: Sizes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = sizes.hidden // 64
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=sizes.layers, num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=64,
            max_position_embeddings=sizes.length,
        )
    )  # fmt: skip


def recipe_of(kind: str, steps: int) -> Recipe:
    if kind == "pod":
        return pod.PoDRecipe(steps=steps)
    return dmc.DMCRecipe(target_ratio=2.0, anneal_steps=0, ramp_steps=0, solidify_steps=steps)


def data_of(sizes: Sizes, folder: str, *, whole: bool) -> Any:
    """Rows in memory-mapped files, as a run has them."""
    texts = sorted(Path(os.__file__).parent.glob("*.py"))[: 120 if sizes.length > 128 else 8]
    path = Path(folder, "text.jsonl")
    if not path.is_file():
        path.write_text("".join(json.dumps({"text": text.read_text(errors="replace")}) + "\n" for text in texts))
    tokenizer = byte_tokenizer() if sizes.model is None else load(sizes.model, "cpu")[1]
    return Packing(sizes.length, borders=not whole).rows([DataSource(str(path))], tokenizer)[0]


# ---- one process ----


class Ends(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


def run_of(kind: str, model: Any, data: Any, sizes: Sizes, folder: str) -> list[float]:
    """Trains some steps; the seconds of all but the first."""
    ends = Ends()
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=sizes.rows, max_steps=sizes.steps, learning_rate=1e-4,
        use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
        remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    given: dict[str, Any] = {"train_dataset": data, "data_collator": collate, "callbacks": [ends]}
    with redirect_stdout(io.StringIO()):
        if kind == PLAIN:
            Trainer(model, args, **given).train()
        else:
            RetrofitTrainer(model, args, recipe_of(kind, sizes.steps), **given).train()
    return [end - begin for begin, end in itertools.pairwise(ends.times)]


def turns(kinds: tuple[str, ...], count: int, work: Callable[[str], list[float]]) -> dict[str, float]:
    """Median over turns of the median seconds of each; work(kind) is a turn. The first turn of each is not counted."""
    order, found = random.Random(0), {kind: list[float]() for kind in kinds}
    for number in range(count + 1):
        for kind in order.sample(kinds, len(kinds)):
            seconds = statistics.median(work(kind))
            if number > 0:
                found[kind].append(seconds)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def train_rows(sizes: Sizes, folder: str) -> Iterator[Row]:
    kinds = (PLAIN, *METHODS)
    models = {kind: model_of(kind, sizes) for kind in kinds}
    for name, whole in (("whole", True), ("packed", False))[: 1 if sizes.model else 2]:
        data = data_of(sizes, folder, whole=whole)
        found = turns(kinds, sizes.turns, lambda kind: run_of(kind, models[kind], data, sizes, folder))  # noqa: B023
        yield from rows_of("train", found, sizes, f"/{name}", "Trainer")


def rows_of(group: str, found: dict[str, float], sizes: Sizes, suffix: str, peer: str) -> list[Row]:
    tokens = sizes.rows * sizes.length * (1 if group == "train" else 2)
    return [
        TrainRow(f"{group}/{kind}{suffix}", seconds, found[PLAIN], peer, tokens_per_second=tokens / seconds)
        for kind, seconds in found.items()
        if kind != PLAIN
    ]


# ---- memory ----


def peak_of(kind: str, sizes: Sizes, folder: str, send: Any) -> None:
    torch.set_num_threads(1)
    model, data = model_of(kind, sizes), data_of(sizes, folder, whole=True)
    run_of(
        kind, model_of(PLAIN if kind == PLAIN else kind, small(sizes)), data, small(sizes), folder
    )  # what is loaded late
    before, peak = resident(), PeakMemory(torch.device("cpu"))
    run_of(kind, model, data, replace(sizes, steps=3), folder)
    send.send((peak.nbytes() or 0) - before)


def small(sizes: Sizes) -> Sizes:
    return replace(sizes, layers=2, hidden=128, steps=2)


def resident() -> int:
    """Bytes, once what is free was given back (glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_rows(sizes: Sizes, folder: str) -> Iterator[MemoryRow]:
    peaks = {}
    for kind in (PLAIN, *sizes.measured):
        receive, send = CONTEXT.Pipe(duplex=False)
        in_processes(peak_of, [(kind, sizes, folder, send)])
        peaks[kind] = receive.recv()
        if kind != PLAIN:
            yield MemoryRow(f"memory/{kind}", peaks[kind], peaks[PLAIN])


CONTEXT = multiprocessing.get_context("forkserver")  # imports once


def in_processes(work: Callable[..., None], arguments: list[tuple[Any, ...]]) -> None:
    running = [CONTEXT.Process(target=work, args=given) for given in arguments]
    for process in running:
        process.start()
    for process in running:
        process.join()
    if any(process.exitcode for process in running):
        raise SystemExit(f"{work.__name__} ended with {[process.exitcode for process in running]}")


# ---- two processes ----


def rank_of(rank: int, sizes: Sizes, folder: str, send: Any) -> None:
    torch.set_num_threads(1)
    init = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    kinds, data = (PLAIN, *sizes.measured), data_of(sizes, folder, whole=True)
    found = {}
    for how, wrap in (("ddp", DistributedDataParallel), ("fsdp2", sharded)):
        models = {kind: wrap(model_of(kind, sizes)) for kind in kinds}
        optimizers = {kind: torch.optim.AdamW(models[kind].parameters(), lr=1e-4) for kind in kinds}
        batches, count = batches_of(data, sizes, rank), max(sizes.turns // 2, 1)
        found[how] = turns(
            kinds, count, lambda kind: loop(kind, models[kind], optimizers[kind], batches, sizes.steps)  # noqa: B023
        )  # fmt: skip
    if rank == 0:
        send.send(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def sharded(model: LlamaForCausalLM) -> nn.Module:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batches_of(data: Any, sizes: Sizes, rank: int) -> Iterator[dict[str, torch.Tensor]]:
    for i in itertools.count():
        first = (2 * i + rank) * sizes.rows
        yield collate([data[(first + row) % len(data)] for row in range(sizes.rows)])


def loop(
    kind: str, model: nn.Module, optimizer: Any, batches: Iterator[dict[str, torch.Tensor]], steps: int
) -> list[float]:
    recipe, times = None if kind == PLAIN else recipe_of(kind, steps), []
    model.train()
    for step in range(steps):
        batch = next(batches)
        if recipe is not None:
            recipe.begin_step(model, step, passes=1)
        loss = model(**batch).loss
        added = None if recipe is None else recipe.loss(model, step)[0]
        (loss if added is None else loss + added).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]


def distributed_rows(sizes: Sizes, folder: str) -> Iterator[Row]:
    receive, send = CONTEXT.Pipe(duplex=False)
    in_processes(rank_of, [(rank, sizes, folder, send) for rank in range(2)])
    for how, found in receive.recv().items():
        yield from rows_of(how, found, sizes, "", "the plain model")


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--model", help="a Hugging Face model by name or folder, or smollm2 (default: random weights)")
    choice = parse_arguments(parse)
    sizes = SIZES[choice.size]
    if choice.model is not None:
        sizes = replace(sizes, model=choice.model, length=1024, turns=min(sizes.turns, 3))
    parts = (train_rows, memory_rows, distributed_rows)[: 1 if sizes.model else 3]
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    rows: list[Row | MemoryRow] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in itertools.chain(*(part(sizes, folder) for part in parts)):
            rows.append(row)
            found = f"{row.times:.2f} times" if isinstance(row, MemoryRow) else f"{row.ratio:.2f}"
            print(f"{row.name}: {found}", flush=True)
            if choice.json is not None:
                write_json(choice.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
