"""The demo: a fact in a text far longer than the model was trained on, read by three caches and asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers.utils.logging import set_verbosity_error

from .apps.write_text import held_nbytes, load
from .caches import CompressedCache, IterativeCache, StreamingCache
from .caches.base import trained_length_of
from .caches.spec import CacheSpec
from .hf.argument import CACHE
from .models import EXAMPLE_NAME
from .models.text import fact, long_text, plant, question, random_name, random_pass_key
from .needle import needle
from .pruners import SnapKV
from .reading.prefilling import prefill
from .support.process_memory import PeakMemory
from .support.progress import showing
from .support.units import size


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


@torch.no_grad()
def ask(model: Any, tokenizer: Any, task: Task, name: str, cache: CompressedCache | None, guided: bool, note: str,
        console: Console) -> Outcome:  # fmt: skip
    """Reads the text with the given cache (None: dense) and lets the model answer, greedily."""
    peak, begin = PeakMemory(model.device), time.perf_counter()
    total = task.ids.shape[1]
    with showing(True, total, label=f"{name}: reading", console=console) as show:
        if cache is not None:
            prefill(
                model, task.ids, cache,
                guide=task.guide if guided else None,
                progress=lambda read, of: show(read),
            )  # fmt: skip
            held: CompressedCache | DynamicCache = cache
        else:
            held = DynamicCache(config=model.config)
            model(task.ids[:, :-1], logits_to_keep=1, **{CACHE: held})
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds = time.perf_counter() - begin
    nbytes = held_nbytes(held)
    dense = nbytes if cache is None else cache.dense_nbytes()
    digits = tokenizer(task.answer, add_special_tokens=False, return_tensors="pt").input_ids.shape[1]
    out = model.generate(
        task.ids, attention_mask=torch.ones_like(task.ids), max_new_tokens=digits, do_sample=False, **{CACHE: held}
    )
    answer = tokenizer.decode(out[0, total:]).strip()
    return Outcome(name, total, seconds, nbytes, dense, peak.nbytes(), answer, answer == task.answer, note)


def run_demo(
    *, tokens: int, depth: float, chunk_size: int, memory_size: int, dense_tokens: int, seed: int, model: str,
    device: str, dtype: str, console: Console,
) -> bool:  # fmt: skip
    """Runs the three readings and prints the table; True if the compressed one answered right."""
    set_verbosity_error()  # the text is longer than the model's trained length on purpose
    loaded, tokenizer = load(model, device, dtype)
    if (kind := CacheSpec.kind_of(loaded.config)) is not None:
        raise ValueError(f"model must not be converted, got one of {kind}, which needs its own cache")

    def new_task(length: int) -> Task:
        if model == EXAMPLE_NAME:
            return make_task(length, depth, seed, loaded.device)
        ids, asked, answer = needle(tokenizer, length, depth, seed)
        return Task(ids.to(loaded.device), asked.to(loaded.device), answer)

    task, trained = new_task(tokens), trained_length_of(loaded.config)
    unit = "bytes" if model == EXAMPLE_NAME else "tokens"
    console.print(f"A fact at {depth:.0%} of {tokens:,} {unit} of Python source; the model was trained on {trained:,}.")
    console.print(f"Question: {tokenizer.decode(task.guide).strip()!r}, right answer: {task.answer}\n")
    outcomes = []
    pruner = SnapKV(num_sink_tokens=4)
    iterative = IterativeCache(loaded.config, memory_size=memory_size, chunk_size=chunk_size, pruner=pruner)
    note = "guided, the question chose what is kept"
    outcomes.append(ask(loaded, tokenizer, task, "iterative", iterative, True, note, console))
    streaming = StreamingCache(loaded.config, window_size=memory_size - 4, chunk_size=chunk_size)
    distance = round((1 - depth) * tokens)
    left = distance > memory_size
    note = f"the fact left its window {distance - memory_size:,} tokens ago" if left else "the fact is in its window"
    outcomes.append(ask(loaded, tokenizer, task, "StreamingLLM", streaming, False, note, console))
    short = min(tokens, dense_tokens)
    if short > 0:
        dense_task = task if short == tokens else new_task(short)
        beyond = short / trained
        note = "every token kept" if beyond <= 1 else f"{beyond:.0f} times its trained length"
        if short < tokens:
            note += "; a shorter text, the whole would take too long"
        outcomes.append(ask(loaded, tokenizer, dense_task, "dense", None, False, note, console))
    console.print(_table(outcomes))
    for row in outcomes:
        console.print(f"{row.name}: {row.note}.")
    peak = max((row.peak_nbytes for row in outcomes if row.peak_nbytes is not None), default=None)
    if peak is not None:
        console.print(f"The process held {size(peak)} at most, PyTorch and the model included.")
    return outcomes[0].right


def _table(outcomes: list[Outcome]) -> Table:
    """Fits 80 columns."""
    table = Table(
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        caption="cache: after reading; if dense: with every token kept",
    )
    for column in ("", "tokens", "cache", "if dense", "times less", "tok/s", "answer", "right"):
        table.add_column(column, justify="left" if column in ("", "answer", "right") else "right", no_wrap=True)
    for row in outcomes:
        table.add_row(
            row.name,
            f"{row.tokens:,}",
            size(row.cache_nbytes),
            size(row.dense_nbytes),
            f"{row.dense_nbytes / row.cache_nbytes:,.0f}",
            f"{row.tokens / row.seconds:,.0f}",
            repr(row.answer)[1:-1],
            "yes" if row.right else "no",
        )
    return table
