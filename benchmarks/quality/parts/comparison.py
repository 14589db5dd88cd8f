"""Shared by dmc_quality.py and pod_quality.py: models beside their original, equal bytes for pruners, rows over it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from benchmarks.common import parser
from benchmarks.quality.parts.measures import MEASURES, Sizes, answered, make_tasks, measures_of, over_dense, tidy
from benchmarks.quality.parts.tasks import MakeCache, Result, Task, Writer, measure, standard_error
from kvcompress import CompressedCache, DMCCache, PoDCache, PrunedCache
from kvcompress.budgets import Budget
from kvcompress.models import RETROFITTED
from kvcompress.pruners import Pruner

CACHES: dict[str, type[DMCCache] | type[PoDCache]] = {"dmc": DMCCache, "pod": PoDCache}
POD_KINDS = {"pod": "PoD", "window": "window", "cla": "CLA"}  # by mode


# ---- models ----


@dataclass(frozen=True)
class Subject:
    """A model to measure. kind: the line it belongs to."""

    name: str
    kind: str
    model: PreTrainedModel

    @property
    def method(self) -> str | None:
        """What it was converted to; None = nothing."""
        saved = getattr(self.model.config, "kvcompress", None)
        return None if saved is None else saved["method"]

    @property
    def converted(self) -> bool:
        return self.method is not None

    def cache(self, page_size: int, **settings: Any) -> DMCCache | PoDCache | DynamicCache:
        """Its own; transformers' where it is not converted. settings: further ones of a converted model's."""
        config, method = self.model.config, self.method
        if method is None:
            return DynamicCache(config=config)
        return CACHES[method](config, page_size=page_size, **settings)

    def settings(self) -> dict[str, Any]:
        """What a row says of it."""
        config = self.model.config
        return {"config": dict(config.kvcompress)} if self.converted else {"kv_heads": config.num_key_value_heads}


def kind_of(config: Any, kv_heads: int) -> str:
    """What a model is by its config. kv_heads: the original's."""
    saved = getattr(config, "kvcompress", None)
    if saved is None:
        return "GQA" if config.num_key_value_heads < kv_heads else "dense"
    if saved["method"] == "pod":
        return POD_KINDS[saved["mode"]]
    if saved["mode"] == "dms":
        return "DMS"
    if saved["stride"] is not None:
        return "pooling"
    return "DMC" if saved["share_heads"] == "none" else "DMC-HardC"


def subjects_of(given: list[str], original: PreTrainedModel) -> Iterator[Subject]:
    """given: [KIND=]FOLDER each; in the original's dtype and on its device, as bytes are compared. Loaded one by one,
    as they are asked for. Raises FileNotFoundError at once for what is no model's folder."""
    named = [text.rpartition("=")[::2] for text in given]
    for _, folder in named:
        if not Path(folder, "config.json").is_file():
            raise FileNotFoundError(f"models must be folders with a config.json, got {folder!r}")

    def loaded() -> Iterator[Subject]:
        for kind, folder in named:
            shipped = next((name for name, path in RETROFITTED.items() if path == Path(folder)), None)
            if shipped is not None:
                model = kvcompress.load_example_model(dtype=original.dtype, device=original.device, retrofit=shipped)[0]
            else:
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=original.dtype).to(original.device).eval()
            found = kind or kind_of(model.config, original.config.num_key_value_heads)
            yield Subject(Path(folder).resolve().name, found, model)

    return loaded()


# ---- measuring ----


@torch.no_grad()
def full_bits(model: PreTrainedModel, write: Writer, windows: list[list[int]]) -> list[float]:
    """Bits per byte of each window but its first token, without a cache."""
    samples = []
    for window in windows:
        ids = torch.tensor([window], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        samples.append(nats / np.log(2) / len(write.tokenizer.decode(window[1:]).encode()))
    return samples


def read(model: PreTrainedModel, prompts: list[list[int]], cache: CompressedCache) -> None:
    """All tokens of the prompts, as `measure` reads them."""
    ids = torch.tensor(prompts, device=model.device)
    kvcompress.prefill(model, torch.cat([ids, ids[:, -1:]], 1), cache)


def pruned(
    model: PreTrainedModel, pruner: Pruner, keep: float, budget: Budget | None = None, **settings: Any
) -> MakeCache:
    """Makes a PrunedCache for each batch."""
    return lambda: PrunedCache(model.config, pruner, budget, keep=keep, **settings)


class MatchedBudget:
    """Tokens at which a pruner's cache holds given bytes: the bytes are a straight line over its pages."""

    def __init__(self, model: PreTrainedModel, page_size: int) -> None:
        self.model, self.page_size = model, page_size
        self.lines: dict[tuple[Pruner, Budget | None, str], tuple[float, float]] = {}

    def _held(self, pruner: Pruner, prompt: list[int], keep: int, budget: Budget | None) -> int:
        cache = PrunedCache(self.model.config, pruner, budget, keep=keep, page_size=self.page_size)
        read(self.model, [prompt], cache)
        return cache.nbytes()

    def __call__(self, pruner: Pruner, task: Task, nbytes: float, budget: Budget | None = None) -> int:
        """Tokens per row, a multiple of the page size, at most the prompt's: the nearest, above or below. budget: how
        they are divided over layers and heads."""
        prompt, page, line = task.prompts[0], self.page_size, (pruner, budget, task.name)
        if line not in self.lines:
            few, many = (max(len(prompt) // (part * page), 1) for part in (8, 2))
            many = max(many, few + 1)
            low, high = (self._held(pruner, prompt, pages * page, budget) for pages in (few, many))
            slope = (high - low) / (many - few)
            self.lines[line] = (low - few * slope, slope)
        base, slope = self.lines[line]
        return min(max(round((nbytes - base) / slope), 1) * page, len(prompt))


# ---- rows ----


@dataclass
class Target:
    """What pruners must match: bytes per prompt of each task; ratio: tokens per entry on text, None where unknown."""

    name: str
    nbytes: dict[str, float]
    ratio: float | None


@dataclass(frozen=True)
class ComparedSizes(Sizes):
    """window, windows: of `full`. matched: how many converted models' bytes the pruners get, one after the other; None
    = all."""

    window: int = 2048
    windows: int = 12
    matched: int | None = None


def first_of(whole: Result, count: int) -> Result:
    """Of the first prompts; those of a task are all of one length and so of as many bytes."""
    return replace(whole, samples=whole.samples[:count], nbytes=round(whole.nbytes * count / len(whole.samples)))


@dataclass
class Comparison:
    """One run: the tasks, what the original does, and the rows so far. title: the first part of every row's name."""

    original: Subject
    tokenizer: PreTrainedTokenizerBase
    sizes: ComparedSizes
    page_size: int
    title: ClassVar[str]

    def __post_init__(self) -> None:
        write = Writer(self.tokenizer)
        self.tasks = make_tasks(self.tokenizer, self.sizes)
        self.write, self.windows = write, []
        if any(task.name == "text" for task in self.tasks):
            self.windows = write.source(self.sizes.windows, self.sizes.window)
        self.dense: dict[str, Result] = {}
        self.full: list[float] = []
        self.rows: list[dict[str, Any]] = []

    def check_vocabulary(self, subject: Subject) -> None:
        had, wanted = subject.model.config.vocab_size, self.original.model.config.vocab_size
        if had != wanted:
            raise ValueError(f"models must have the original's vocabulary of {wanted}, got {had} in {subject.name}")

    def measured(self, subject: Subject, make: MakeCache, **settings: Any) -> dict[str, Result]:
        """All tasks that are left, read by an attached model. settings: of `measure`."""
        return {task.name: measure(subject.model, task, make, **settings) for task in self.tasks}

    def note_dense(self, results: dict[str, Result]) -> dict[str, Result]:
        """Takes what the first subject, the original, does; returns it without the tasks that it cannot do."""
        self.dense = results
        self.tasks = answered(self.tasks, results, self.original.name)
        return {task.name: results[task.name] for task in self.tasks}

    def dense_of(self, results: dict[str, Result]) -> dict[str, Result]:
        """The original's results on the same prompts."""
        return {task: first_of(whole, len(results[task].samples)) for task, whole in self.dense.items()
                if task in results}  # fmt: skip

    def target_of(self, name: str, results: dict[str, Result], ratio: float | None = None) -> Target:
        nbytes = {task.name: results[task.name].nbytes / len(task.prompts) for task in self.tasks}
        return Target(name, nbytes, ratio)

    def add_row(self, name: str, method: str, results: dict[str, Result], begin: float, **more: Any) -> None:
        """Rows of fewer texts are over the original's on the same."""
        dense = self.dense_of(results)
        row: dict[str, Any] = {"name": f"{self.title}/{self.original.name}/{name}", "method": method, **more}
        row |= measures_of(results, dense, [task for task in self.tasks if task.name in results])
        for task, result in results.items():
            share = result.nbytes / dense[task].nbytes
            row |= {f"{MEASURES[task]}_nbytes": result.nbytes, f"{MEASURES[task]}_nbytes_share": share}
        row["nbytes_share"] = row[f"{MEASURES[next(iter(results))]}_nbytes_share"]
        row["seconds"] = time.perf_counter() - begin
        self.rows.append(tidy(row))
        print(f"{self.rows[-1]['name']} {row['seconds']:.1f} s", file=sys.stderr, flush=True)

    def full_of(self, model: PreTrainedModel) -> dict[str, Any]:
        """What a row says of whole windows; over the original's, which comes first."""
        if not self.windows:
            return {}
        samples = full_bits(model, self.write, self.windows)
        self.full = self.full or samples
        field = "full_bits_per_byte"
        mean = {field: float(np.mean(samples)), f"{field}_se": standard_error(samples), f"{field}_samples": samples}
        return mean | over_dense(field, samples, self.full)


# ---- the command ----


def comparison_parser(description: str | None) -> argparse.ArgumentParser:
    """Everything but --models and the length of prompts."""
    parse = parser(description, figure="the measures against the bytes")
    parse.add_argument("--original", default="example", help="a model by name or folder (default: the example)")
    parse.add_argument("--window", type=int, help="tokens of a window of `full` (default: 2,048)")
    parse.add_argument("--page-size", type=int, default=8, help="entries of a page, in all caches but the dense")
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parse
