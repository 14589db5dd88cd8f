"""The demo: a fact in a text far longer than the model was trained on, read by three caches and asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from .caches import CompressedCache, IterativeCache, StreamingCache
from .hf import attach
from .models import load_example_model
from .models.text import fact, long_text, plant, question, random_name, random_pass_key
from .prefill import prefill
from .process_memory import PeakMemory
from .progress import showing
from .pruners import SnapKV


@dataclass(frozen=True)
class Outcome:
    """One row of the demo's table."""

    name: str
    tokens: int
    seconds: float
    cache_nbytes: int
    dense_nbytes: int
    peak_nbytes: int | None
    answer: str
    right: bool
    note: str


@dataclass(frozen=True)
class Task:
    """A text with a planted fact and the question for it."""

    ids: torch.Tensor  # [1, T], text and question
    guide: torch.Tensor  # [g], the question
    answer: str


def make_task(tokens: int, depth: float, seed: int, device: torch.device) -> Task:
    """`tokens` bytes of source with a fact planted at depth (0 = start, 1 = end), the question last."""
    rng = np.random.default_rng(seed)
    name, pass_key = random_name(rng), random_pass_key(rng)
    sentence, asked = fact(name, pass_key), question(name)
    body = tokens - len(sentence) - len(asked)
    if body < 0:
        raise ValueError(f"tokens must be at least {len(sentence) + len(asked)}, got {tokens}")
    planted = plant(long_text(body), sentence, depth)
    guide = torch.tensor(list(asked), device=device)
    ids = torch.cat([torch.from_numpy(np.frombuffer(planted, dtype=np.uint8).astype(np.int64)).to(device), guide])
    return Task(ids[None], guide, pass_key.decode())


def dense_nbytes(model: LlamaForCausalLM, tokens: int) -> int:
    """Bytes of a dense cache of that many tokens."""
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * tokens * model.dtype.itemsize


@torch.no_grad()
def ask(model: LlamaForCausalLM, task: Task, name: str, cache: CompressedCache | None, guided: bool, note: str,
        console: Console) -> Outcome:  # fmt: skip
    """Reads the text with the given cache (None: dense) and lets the model answer, greedily."""
    peak, begin = PeakMemory(model.device), time.perf_counter()
    total = task.ids.shape[1]
    with showing(True, total, label=f"{name}: reading {total:,} tokens", console=console) as show:
        if cache is not None:
            prefill(
                model, task.ids, cache,
                guide=task.guide if guided else None,
                progress=lambda read, of: show(read),
            )  # fmt: skip
            held: CompressedCache | DynamicCache = cache
        else:
            held = DynamicCache(config=model.config)
            model(task.ids[:, :-1], past_key_values=held, logits_to_keep=1)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds = time.perf_counter() - begin
    nbytes = cache.nbytes() if cache is not None else dense_nbytes(model, total - 1)
    out = model.generate(
        task.ids, attention_mask=torch.ones_like(task.ids), past_key_values=held, max_new_tokens=5, do_sample=False
    )
    answer = bytes(out[0, total:].tolist()).decode("latin-1")
    return Outcome(
        name, total, seconds, nbytes, dense_nbytes(model, total - 1), peak.nbytes(), answer, answer == task.answer, note
    )


def run_demo(
    *, tokens: int, depth: float, chunk_size: int, memory_size: int, dense_tokens: int, seed: int, device: str,
    console: Console,
) -> bool:  # fmt: skip
    """Runs the three readings and prints the table; True if the compressed one answered right."""
    disable_progress_bar()
    set_verbosity_error()  # the text is longer than the model's trained length on purpose
    model, _ = load_example_model(device=device)
    task = make_task(tokens, depth, seed, model.device)
    place = f"{depth:.0%} of {tokens:,} bytes of Python source"
    console.print(f"A fact at {place}; the model was trained on {model.config.max_position_embeddings:,}.")
    console.print(f"Question: {bytes(task.guide.tolist()).decode().strip()!r}, right answer: {task.answer}\n")
    outcomes = []
    with attach(model):
        pruner = SnapKV(num_sink_tokens=4)
        iterative = IterativeCache(model.config, memory_size=memory_size, chunk_size=chunk_size, pruner=pruner)
        outcomes.append(
            ask(model, task, "iterative", iterative, True, "guided, the question chose what is kept", console)
        )
        streaming = StreamingCache(model.config, window_size=memory_size - 4, chunk_size=chunk_size)
        distance = round((1 - depth) * tokens)
        left = distance > memory_size
        note = (
            f"the fact left its window {distance - memory_size:,} tokens ago" if left else "the fact is in its window"
        )
        outcomes.append(ask(model, task, "StreamingLLM", streaming, False, note, console))
    short = min(tokens, dense_tokens)
    if short > 0:
        dense_task = task if short == tokens else make_task(short, depth, seed, model.device)
        beyond = short / model.config.max_position_embeddings
        note = "every token kept" if beyond <= 1 else f"{beyond:.0f} times its trained length"
        if short < tokens:
            note += "; a shorter text, the whole would take too long"
        outcomes.append(ask(model, dense_task, "dense", None, False, note, console))
    console.print(_table(outcomes))
    for row in outcomes:
        console.print(f"{row.name}: {row.note}.")
    return outcomes[0].right


def _mebibytes(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**20:,.1f}"


def _table(outcomes: list[Outcome]) -> Table:
    """Fits 80 columns."""
    table = Table(
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        caption="MiB now: the cache after reading; if dense: a cache of every token, in MiB",
    )
    for column in ("cache", "tokens", "MiB now", "if dense", "peak MiB", "tok/s", "answer", "right"):
        table.add_column(column, justify="left" if column in ("cache", "answer", "right") else "right", no_wrap=True)
    for row in outcomes:
        table.add_row(
            row.name,
            f"{row.tokens:,}",
            _mebibytes(row.cache_nbytes),
            _mebibytes(row.dense_nbytes),
            _mebibytes(row.peak_nbytes),
            f"{row.tokens / row.seconds:,.0f}",
            repr(row.answer)[1:-1],
            "yes" if row.right else "no",
        )
    return table
