"""What a trained cache costs in quality, beside pruning and fewer KV heads, at the same bytes.

    python benchmarks/dmc_quality.py [--quick] [--json FILE] [--figure FILE] [--models [KIND=]FOLDER ...]

FOLDER holds what `kvcompress retrofit` made of the original model: DMC, DMS or fixed memory pooling, measured with
DMCCache, or fewer KV heads (GQA), measured with transformers' DynamicCache as the original is. KIND names the line of
the table and the figure where the folder's config does not say enough (DMC-C=runs/equal). For each DMC model (each
converted one where there is none; with --quick the first alone) the original model is pruned to the same number of
bytes, task by task: COMPARED.

full      bits per byte of held-out source text in whole windows, without a cache; a converted model decides as it does
          with its cache. +full: over the original's, the mean of the differences on the same texts
bits      bits per byte after a prompt, +bits over the original's; facts, later, pairs: see quality.py. Pruners prune
          the prompt once and keep all that follows; a converted model goes on compressing. In rows named every1 the
          pruners do too: they read token by token and keep 1/CR of what they have seen, CR being the DMC model's on
          these prompts; the DMC model's own row of that kind says that one call and many give the same
CR        tokens per entry of the cache after the text prompts
bytes     cache.nbytes() after the text prompts, of what the original model's DynamicCache holds of them

Numbers after +- are standard errors over prompts. Tasks that the original itself answers less than 9 times in 10 are
left out. Rows have by task the share of bytes (..._nbytes_share), recall over depth (..._by_depth), and for converted
models the ratio by layer and head, by length (as the ratio of totals and as the mean over heads) and the mean decision
by position.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import parse_arguments, parser, tidy, write_json
from dmc_quality_tables import draw, show
from quality import FULL as QUALITY_FULL
from quality import MEASURES, PRUNERS, Sizes, answered, load, make_tasks, measures_of, over_dense
from quality import QUICK as QUALITY_QUICK
from quality_tasks import MakeCache, Result, Task, Writer, measure, standard_error
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from kvcompress import DMCCache, PrunedCache
from kvcompress.dmc.statistics import decision_over_position, ratio_over_length
from kvcompress.models import RETROFITTED
from kvcompress.pruners import Pruner

COMPARED = ("H2O", "TOVA", "SnapKV", "SnapKV31", "StreamingLLM")
POSITION_BINS = 32


@dataclass(frozen=True)
class DMCSizes(Sizes):
    """window, windows: of `full`. stepwise: how many of the texts are read token by token, 0 = none. matched: how many
    converted models' bytes the pruners get, one after the other; None = all."""

    window: int = 2048
    windows: int = 12
    stepwise: int = 4
    matched: int | None = None


FULL = DMCSizes(**vars(QUALITY_FULL))
QUICK = DMCSizes(**vars(QUALITY_QUICK) | {"texts": 2}, windows=2, stepwise=1, matched=1)


@dataclass(frozen=True)
class Subject:
    """A model to measure. kind: the line it belongs to."""

    name: str
    kind: str
    model: PreTrainedModel

    @property
    def converted(self) -> bool:
        return getattr(self.model.config, "kvcompress", None) is not None

    def cache(self, page_size: int, *, track: bool = False) -> DMCCache | DynamicCache:
        config = self.model.config
        return DMCCache(config, page_size=page_size, track=track) if self.converted else DynamicCache(config=config)


def kind_of(config: Any, kv_heads: int) -> str:
    """What a model is by its config. kv_heads: the original's."""
    saved = getattr(config, "kvcompress", None)
    if saved is None:
        return "GQA" if config.num_key_value_heads < kv_heads else "dense"
    if saved["mode"] == "dms":
        return "DMS"
    if saved["stride"] is not None:
        return "pooling"
    return "DMC" if saved["share_heads"] == "none" else "DMC-HardC"


@dataclass
class Target:
    """What pruners must match: bytes per prompt of each task, and the ratio on text (None: no such task)."""

    name: str
    nbytes: dict[str, float]
    ratio: float | None


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


def read(model: PreTrainedModel, prompts: list[list[int]], cache: kvcompress.CompressedCache) -> None:
    """All tokens of the prompts, as `measure` reads them."""
    ids = torch.tensor(prompts, device=model.device)
    kvcompress.prefill(model, torch.cat([ids, ids[:, -1:]], 1), cache)


def statistics_of(subject: Subject, task: Task, page_size: int, batch: int = 8) -> dict[str, Any]:
    """How a converted model compresses the prompts of a task."""
    entries: Any = 0
    tokens, decisions = 0, []
    for first in range(0, len(task.prompts), batch):
        prompts = task.prompts[first : first + batch]
        cache = subject.cache(page_size, track=True)
        assert isinstance(cache, DMCCache)
        read(subject.model, prompts, cache)
        entries = entries + np.array(cache.stored_lengths()).sum(1)  # [L, Hkv]
        tokens += sum(map(len, prompts))
        decisions.append(torch.stack([cache.decisions(layer) for layer in range(len(cache.layers))]))
    found: dict[str, Any] = {
        "compression_ratio": tokens * entries.size / int(entries.sum()),
        "compression_ratio_by_head": (tokens / entries).tolist(),
    }
    made = torch.cat(decisions, 1)
    if subject.model.config.kvcompress["mode"] == "dmc":  # of DMS decisions say nothing without the window
        lengths = [2**n for n in range(20) if 2**n < made.shape[3]] + [made.shape[3]]
        over = ratio_over_length(made, lengths)
        found["compression_ratio_over_length"] = {
            "lengths": lengths, "total": over.total.tolist(), "mean_over_heads": over.mean.tolist()
        }  # fmt: skip
    bins = decision_over_position(made).tensor_split(min(POSITION_BINS, made.shape[3]))
    found["decision_over_position"] = [float(part.mean()) for part in bins]
    return found


class MatchedBudget:
    """Budgets in tokens at which a pruner's cache holds given bytes: the bytes are a straight line over its pages."""

    def __init__(self, model: PreTrainedModel, page_size: int) -> None:
        self.model, self.page_size = model, page_size
        self.lines: dict[tuple[Pruner, str], tuple[float, float]] = {}

    def _held(self, pruner: Pruner, prompt: list[int], tokens: int) -> int:
        cache = PrunedCache(self.model.config, pruner, tokens, page_size=self.page_size)
        read(self.model, [prompt], cache)
        return cache.nbytes()

    def __call__(self, pruner: Pruner, task: Task, nbytes: float) -> int:
        """Tokens per row, a multiple of the page size, at most the prompt's: the nearest, above or below."""
        prompt, page = task.prompts[0], self.page_size
        if (pruner, task.name) not in self.lines:
            few, many = (max(len(prompt) // (part * page), 1) for part in (8, 2))
            many = max(many, few + 1)
            low, high = (self._held(pruner, prompt, pages * page) for pages in (few, many))
            slope = (high - low) / (many - few)
            self.lines[pruner, task.name] = (low - few * slope, slope)
        base, slope = self.lines[pruner, task.name]
        return min(max(round((nbytes - base) / slope), 1) * page, len(prompt))


@dataclass
class Comparison:
    """One run: the tasks, what the original does, and the rows so far."""

    original: Subject
    tokenizer: PreTrainedTokenizerBase
    sizes: DMCSizes
    page_size: int

    def __post_init__(self) -> None:
        write = Writer(self.tokenizer)
        self.tasks = make_tasks(self.tokenizer, self.sizes)
        self.write, self.windows = write, []
        if any(task.name == "text" for task in self.tasks):
            self.windows = write.source(self.sizes.windows, self.sizes.window)
        self.dense: dict[str, Result] = {}
        self.full: list[float] = []
        self.rows: list[dict[str, Any]] = []

    def _row(self, name: str, method: str, results: dict[str, Result], begin: float, **more: Any) -> None:
        """Rows of fewer texts are over the original's on the same."""
        dense = {
            task: _first(whole, len(results[task].samples)) for task, whole in self.dense.items() if task in results
        }
        row: dict[str, Any] = {"name": f"dmc_quality/{self.original.name}/{name}", "method": method, **more}
        row |= measures_of(results, dense, [task for task in self.tasks if task.name in results])
        for task, result in results.items():
            share = result.nbytes / dense[task].nbytes
            row |= {f"{MEASURES[task]}_nbytes": result.nbytes, f"{MEASURES[task]}_nbytes_share": share}
        row["nbytes_share"] = row[f"{MEASURES[next(iter(results))]}_nbytes_share"]
        row["seconds"] = time.perf_counter() - begin
        self.rows.append(tidy(row))
        print(f"{self.rows[-1]['name']} {row['seconds']:.1f} s", file=sys.stderr, flush=True)

    def _full(self, model: PreTrainedModel) -> dict[str, Any]:
        if not self.windows:
            return {}
        samples = full_bits(model, self.write, self.windows)
        self.full = self.full or samples
        field = "full_bits_per_byte"
        mean = {field: float(np.mean(samples)), f"{field}_se": standard_error(samples), f"{field}_samples": samples}
        return mean | over_dense(field, samples, self.full)

    def subject(self, subject: Subject) -> Target:
        """The original, first, or another model with its own cache."""
        begin, make = time.perf_counter(), lambda: subject.cache(self.page_size)
        results = {task.name: measure(subject.model, task, make) for task in self.tasks}
        if not self.dense:
            self.dense = results
            self.tasks = answered(self.tasks, results, subject.name)
            results = {task.name: results[task.name] for task in self.tasks}
        more: dict[str, Any] = self._full(subject.model)
        if subject.converted:
            found = {task.name: statistics_of(subject, task, self.page_size) for task in self.tasks}
            more |= found[self.tasks[0].name]
            more["compression_ratio_by_task"] = {task: x["compression_ratio"] for task, x in found.items()}
            more["config"] = dict(subject.model.config.kvcompress)
        else:
            more["kv_heads"] = subject.model.config.num_key_value_heads
        name = "dense" if subject is self.original else f"{subject.kind}/{subject.name}"
        self._row(name, subject.kind, results, begin, **more)
        nbytes = {task.name: results[task.name].nbytes / len(task.prompts) for task in self.tasks}
        ratio = more.get("compression_ratio") if self._texts() else None
        if subject.converted and ratio and (texts := self._texts()):
            begin = time.perf_counter()
            stepwise = {"text": measure(subject.model, texts, make, stepwise=True)}
            self._row(f"{name}/every1", subject.kind, stepwise, begin, stepwise=True, as_model=subject.name)
        return Target(subject.name, nbytes, ratio)

    def _texts(self) -> Task | None:
        """The texts that are read token by token."""
        n, first = self.sizes.stepwise, self.tasks[0]
        if first.name != "text" or n == 0:
            return None
        return replace(first, prompts=first.prompts[:n], following=first.following[:n], sizes=first.sizes[:n])

    def pruners(self, target: Target, budget: MatchedBudget, names: Iterable[str]) -> None:
        """The original model pruned to the bytes of a converted one; and to its share of tokens, token by token."""
        model, page = self.original.model, self.page_size
        for name in names:
            begin, pruner, results, kept = time.perf_counter(), PRUNERS[name], {}, {}
            for task in self.tasks:
                kept[task.name] = budget(pruner, task, target.nbytes[task.name])
                results[task.name] = measure(
                    model, task, _maker(model, pruner, kept[task.name], page_size=page)
                )  # fmt: skip
            row = {"as_model": target.name, "pruner": repr(pruner), "tokens_kept": kept}
            self._row(f"{name}/as_{target.name}", name, results, begin, **row)
            if target.ratio is not None and (texts := self._texts()):
                begin, share = time.perf_counter(), 1 - 1 / target.ratio
                make = _maker(model, pruner, share, page_size=page, every=1)
                stepwise = {"text": measure(model, texts, make, stepwise=True)}
                row = {"stepwise": True, "as_model": target.name, "pruner": repr(pruner), "share_removed": share}
                self._row(f"{name}/as_{target.name}/every1", name, stepwise, begin, **row)


def _first(whole: Result, count: int) -> Result:
    """Of the first prompts; those of a task are all of one length and so of as many bytes."""
    return replace(whole, samples=whole.samples[:count], nbytes=round(whole.nbytes * count / len(whole.samples)))


def _maker(model: PreTrainedModel, pruner: Pruner, budget: int | float, **settings: Any) -> MakeCache:
    return lambda: PrunedCache(model.config, pruner, budget, **settings)


def run(
    original: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    subjects: Iterable[Subject],
    sizes: DMCSizes,
    *,
    name: str = "example",
    page_size: int = 8,
    pruners: Iterable[str] = COMPARED,
) -> list[dict[str, Any]]:
    """All rows: the original's, each subject's, then the pruners'. subjects: read one after the other, so that a
    generator holds one model at a time."""
    first = Subject(name, "dense", original)
    comparison = Comparison(first, tokenizer, sizes, page_size)
    targets: list[tuple[str, Target]] = []
    with kvcompress.attach(original):
        comparison.subject(first)
        for subject in subjects:
            had, wanted = subject.model.config.vocab_size, original.config.vocab_size
            if had != wanted:
                raise ValueError(f"models must have the original's vocabulary of {wanted}, got {had} in {subject.name}")
            with kvcompress.attach(subject.model):
                target = comparison.subject(subject)
            if subject.converted:
                targets.append((subject.kind, target))
        budget = MatchedBudget(original, page_size)
        matched = [t for kind, t in targets if kind == "DMC"] or [t for _, t in targets]
        for target in matched[: sizes.matched]:
            comparison.pruners(target, budget, pruners)
    return comparison.rows


# ---- the command ----


def subjects_of(given: list[str], original: PreTrainedModel) -> Iterator[Subject]:
    """given: [KIND=]FOLDER each; in the original's dtype and on its device, as bytes are compared. Raises
    FileNotFoundError for what is no model's folder."""
    for text in given:
        kind, _, folder = text.rpartition("=")
        if not Path(folder, "config.json").is_file():
            raise FileNotFoundError(f"models must be folders with a config.json, got {folder!r}")
    for text in given:
        kind, _, folder = text.rpartition("=")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=original.dtype).to(original.device).eval()
        found = kind or kind_of(model.config, original.config.num_key_value_heads)
        yield Subject(Path(folder).resolve().name, found, model)


def options() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument(
        "--models", nargs="+", default=[str(RETROFITTED["dmc"])], metavar="[KIND=]FOLDER",
        help="what was made of the original (default: the shipped one)",
    )  # fmt: skip
    parse.add_argument("--figure", type=Path, help="draw the measures against the bytes into this file")
    parse.add_argument("--original", default="example", help="a model by name or folder (default: the example)")
    parse.add_argument("--length", type=int, default=FULL.length, help="tokens of a prompt")
    parse.add_argument("--window", type=int, default=FULL.window, help="tokens of a window of `full`")
    parse.add_argument("--stepwise", type=int, help="texts that are also read token by token, 0 = none")
    parse.add_argument("--page-size", type=int, default=8, help="entries of a page, in all caches but the dense")
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    choice = parse_arguments(parse)
    if choice.figure is not None and importlib.util.find_spec("matplotlib") is None:
        parse.error("--figure needs matplotlib: pip install 'kvcompress[eval]'")
    return choice


def main() -> None:
    choice = options()
    sizes = replace(QUICK if choice.quick else FULL, length=choice.length, window=choice.window)
    if choice.stepwise is not None:
        sizes = replace(sizes, stepwise=choice.stepwise)
    model, tokenizer = load(choice.original, choice.device)
    subjects, name = subjects_of(choice.models, model), Path(choice.original).name
    rows = run(model, tokenizer, subjects, sizes, name=name, page_size=choice.page_size)
    show(rows)
    if choice.json is not None:
        write_json(choice.json, rows)
    if choice.figure is not None:
        draw(rows, choice.figure)


if __name__ == "__main__":
    main()
