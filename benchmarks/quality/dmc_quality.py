"""What a trained cache costs in quality, beside pruning and fewer KV heads, at the same bytes.

    python benchmarks/quality/dmc_quality.py [--quick] [--json FILE] [--figure FILE] [--models [KIND=]FOLDER ...]

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
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments
from benchmarks.quality.parts.comparison import (
    ComparedSizes,
    Comparison,
    MatchedBudget,
    Subject,
    Target,
    comparison_parser,
    pruned,
    read,
    subjects_of,
)
from benchmarks.quality.parts.dmc_tables import draw, show
from benchmarks.quality.parts.measures import PRUNERS, deliver, sizes_of
from benchmarks.quality.parts.tasks import Task, measure
from kvcompress import DMCCache
from kvcompress.dmc.statistics import decision_over_position, ratio_over_length
from kvcompress.models import RETROFITTED

COMPARED = ("H2O", "TOVA", "SnapKV", "SnapKV31", "StreamingLLM")
POSITION_BINS = 32


@dataclass(frozen=True)
class DMCSizes(ComparedSizes):
    """stepwise: how many of the texts are read token by token, 0 = none."""

    stepwise: int = 4


SIZES = {
    "full": DMCSizes(),
    "quick": DMCSizes(texts=2, facts=4, later=2, pairs=2, windows=2, stepwise=1, matched=1),
    "tiny": DMCSizes(
        length=256, scored=32, texts=2, facts=2, later=1, pairs=1, per_prompt=2, pairs_per_prompt=4, window=256,
        windows=2, stepwise=1, matched=1,
    ),
}  # fmt: skip


# ---- measuring ----


def statistics_of(subject: Subject, task: Task, page_size: int, batch: int = 8) -> dict[str, Any]:
    """How a model converted to DMC compresses the prompts of a task."""
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


class DMCComparison(Comparison):
    title = "dmc_quality"
    sizes: DMCSizes

    def subject(self, subject: Subject) -> Target:
        """The original, first, or another model with its own cache."""
        begin, make = time.perf_counter(), lambda: subject.cache(self.page_size)
        results = self.measured(subject, make)
        if subject is self.original:
            results = self.note_dense(results)
        more: dict[str, Any] = self.full_of(subject.model)
        if subject.method == "dmc":
            found = {task.name: statistics_of(subject, task, self.page_size) for task in self.tasks}
            more |= found[self.tasks[0].name]
            more["compression_ratio_by_task"] = {task: x["compression_ratio"] for task, x in found.items()}
        more |= subject.settings()
        name = "dense" if subject is self.original else f"{subject.kind}/{subject.name}"
        self.add_row(name, subject.kind, results, begin, **more)
        ratio = more.get("compression_ratio") if self._texts() else None
        if ratio and (texts := self._texts()):
            begin = time.perf_counter()
            stepwise = {"text": measure(subject.model, texts, make, stepwise=True)}
            self.add_row(f"{name}/every1", subject.kind, stepwise, begin, stepwise=True, as_model=subject.name)
        return self.target_of(subject.name, results, ratio)

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
                results[task.name] = measure(model, task, pruned(model, pruner, kept[task.name], page_size=page))
            row = {"as_model": target.name, "pruner": repr(pruner), "tokens_kept": kept}
            self.add_row(f"{name}/as_{target.name}", name, results, begin, **row)
            if target.ratio is not None and (texts := self._texts()):
                begin, share = time.perf_counter(), 1 / target.ratio
                make = pruned(model, pruner, share, page_size=page, every=1)
                stepwise = {"text": measure(model, texts, make, stepwise=True)}
                row = {"stepwise": True, "as_model": target.name, "pruner": repr(pruner), "share_removed": 1 - share}
                self.add_row(f"{name}/as_{target.name}/every1", name, stepwise, begin, **row)


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
    comparison = DMCComparison(first, tokenizer, sizes, page_size)
    targets: list[tuple[str, Target]] = []
    with kvcompress.attach(original):
        comparison.subject(first)
        for subject in subjects:
            comparison.check_vocabulary(subject)
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


def options() -> argparse.Namespace:
    parse = comparison_parser(__doc__)
    parse.add_argument(
        "--models", nargs="+", default=[str(RETROFITTED["dmc"])], metavar="[KIND=]FOLDER",
        help="what was made of the original (default: the shipped one)",
    )  # fmt: skip
    parse.add_argument("--length", type=int, help="tokens of a prompt (default: 1,024)")
    parse.add_argument("--stepwise", type=int, help="texts that are also read token by token, 0 = none")
    return parse_arguments(parse)


def main() -> None:
    choice = options()
    model, tokenizer = load(choice.original, choice.device)
    subjects, name = subjects_of(choice.models, model), Path(choice.original).name
    sizes = sizes_of(choice, SIZES)
    rows = run(model, tokenizer, subjects, sizes, name=name, page_size=choice.page_size)
    deliver(choice, rows, show, draw)


if __name__ == "__main__":
    main()
