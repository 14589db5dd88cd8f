"""What sharing distant keys (PoD) costs in quality, beside its baselines: the comparison of the paper by one command.

    python benchmarks/quality/pod_quality.py --models [KIND=]FOLDER ... [--quick] [--json FILE] [--figure FILE]

FOLDER holds what `kvcompress retrofit pod` made of the original model: PoD or, with --mode, one of its baselines,
window (near tokens alone in every layer) and CLA (followers use their lead's keys and values); all with PoDCache. KIND
names the line of the table and the figure where the folder's config does not say enough (control=FOLDER: a plain model
that was trained on the same tokens). Models that are not converted have transformers' DynamicCache, as the original
does. W: the near window, sinks and recent tokens, of the first PoD model, of which there are also

untrained     the original model converted to the same plan, as PoD and as window, without training
PoD+SnapKV    of the prompt's distant tokens only those that SnapKV chooses at the leads; W near ones beside them
tau           followers skip distant values where near tokens have at least this probability, which needs decoding:
              what follows is read token by token. tau1 skips nothing. Shares of (query head, token) pairs that are
              skipped, of the followers' distant ones and of all distant ones, and of attention's multiply-adds of
              tau1; on the texts

and of the original model

as_NAME       SnapKV, PyramidKV and H2O with the bytes that the PoD model, and PoD+SnapKV, hold, task by task
nearW         the same with W tokens; StreamingLLM and LM-Infinite with the sinks and recent tokens of PoD; Quest, which
              keeps all tokens and reads W of them in each step: what follows is read token by token

phi           share of (layer, KV head) that follow; their distant keys are not stored
bytes         cache.nbytes() after the text prompts, of what the original model's DynamicCache holds of them
full          bits per byte of held-out source text in whole windows, without a cache. +full: over the original's, the
              mean of the differences on the same texts
bits          bits per byte after a prompt, +bits over the original's; facts, later, pairs: see quality.py. Pruners
              prune the prompt once and keep all that follows; near windows move on
kept          recall, of the original's, mean over facts, later and pairs; recall over depth is their mean too

SnapKV31 and PyramidKV31 pool over 31 tokens, as a fact is long (see quality.py), the others over 5. Prompts are as long
as --window leaves room for what follows, so that nothing is read beyond it; those of pairs are shorter. Numbers after
+- are standard errors over prompts. Tasks that the original itself answers less than 9 times in 10 are left out. Rows
have by task the share of bytes (..._nbytes_share) and recall over depth (..._by_depth).
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments
from benchmarks.quality.parts.comparison import (
    POD_KINDS,
    ComparedSizes,
    Comparison,
    MatchedBudget,
    Subject,
    Target,
    comparison_parser,
    pruned,
    subjects_of,
)
from benchmarks.quality.parts.measures import PRUNERS, deliver, make_tasks, sizes_of
from benchmarks.quality.parts.pod_tables import draw, show
from benchmarks.quality.parts.tasks import MakeCache, Result, measure
from kvcompress import PoDCache, PyramidKV, QuestCache, StreamingCache
from kvcompress.budgets import Budget
from kvcompress.models import RETROFITTED
from kvcompress.pod import PoDConfig, convert
from kvcompress.pruners import Pruner

UNTRAINED = ("pod", "window")
DISTANT = ("SnapKV", "SnapKV31")  # pruners of distant tokens
PRUNED: dict[str, tuple[Pruner, Budget | None]] = {
    "SnapKV": (PRUNERS["SnapKV"], None),
    "SnapKV31": (PRUNERS["SnapKV31"], None),
    "PyramidKV": (PRUNERS["SnapKV"], PyramidKV()),
    "PyramidKV31": (PRUNERS["SnapKV31"], PyramidKV()),
    "H2O": (PRUNERS["H2O"], None),
}


@dataclass(frozen=True)
class PoDSizes(ComparedSizes):
    """length: 0 = what `window` leaves. distant: tokens that a pruner leaves, in near windows. taus: those of PoD."""

    length: int = 0
    pairs_per_prompt: int = 24
    distant: tuple[float, ...] = (1.0, 0.5)
    taus: tuple[float, ...] = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.0)


SIZES = {
    "full": PoDSizes(),
    "quick": PoDSizes(
        length=1024, scored=128, texts=2, facts=4, later=2, pairs=2, per_prompt=4, pairs_per_prompt=12, windows=2,
        matched=1, distant=(1.0,), taus=(1.0, 0.7),
    ),
    "tiny": PoDSizes(
        length=256, scored=32, texts=2, facts=2, later=1, pairs=1, per_prompt=2, pairs_per_prompt=3, window=512,
        windows=1, matched=1, distant=(1.0,), taus=(1.0, 0.5),
    ),
}  # fmt: skip


def fitted(tokenizer: PreTrainedTokenizerBase, sizes: PoDSizes) -> PoDSizes:
    """With a length of prompts for 0. Raises ValueError where a prompt and what follows are more than a window."""
    given = sizes if sizes.length else replace(sizes, length=sizes.window // 2)
    tasks = make_tasks(tokenizer, given)
    if not sizes.length:
        # what follows does not depend on the length
        longest = max(len(tokens) for task in tasks if task.name != "pairs" for tokens in task.following)
        return fitted(tokenizer, replace(sizes, length=sizes.window - longest))
    for task in tasks:
        prompt, following = len(task.prompts[0]), max(map(len, task.following))
        if prompt + following > sizes.window:
            raise ValueError(
                f"window must hold prompts and what follows, got {sizes.window} for {prompt} + {following} tokens of "
                f"{task.name}"
            )
    return sizes


class PoDComparison(Comparison):
    title = "pod_quality"
    sizes: PoDSizes

    def add_row(self, name: str, method: str, results: dict[str, Result], begin: float, **more: Any) -> None:
        """With the recall of all tasks that have questions."""
        dense, asked = self.dense_of(results), [task.name for task in self.tasks if task.questions]
        if asked:
            by_depth = np.array([results[task].by_depth for task in asked])
            known = ~np.isnan(by_depth)
            with np.errstate(invalid="ignore"):
                depths = np.where(known, by_depth, 0).sum(0) / known.sum(0)
            more |= {
                "recall_kept": float(np.mean([results[task].mean / dense[task].mean for task in asked])),
                "recall_by_depth": depths.tolist(),
                "recall_nbytes_share": float(np.mean([results[task].nbytes / dense[task].nbytes for task in asked])),
            }
        super().add_row(name, method, results, begin, **more)

    def subject(self, subject: Subject, *, untrained: bool = False) -> Target:
        """The original, first, or another model with its own cache."""
        begin = time.perf_counter()
        with kvcompress.attach(subject.model):
            results = self.measured(subject, lambda: subject.cache(self.page_size))
            more = self.full_of(subject.model)
        more |= subject.settings()
        if subject is self.original:
            results = self.note_dense(results)
            more["prompt_tokens"] = {task.name: len(task.prompts[0]) for task in self.tasks}
        if (config := pod_config(subject)) is not None and config.mode != "window":
            more["phi"] = config.share
        name = "dense" if subject is self.original else f"{subject.kind}/{subject.name}"
        self.add_row(name, subject.kind, results, begin, untrained=untrained, **more)
        return self.target_of(subject.name, results)

    def with_cache(self, name: str, method: str, subject: Subject, make: MakeCache, *, stepwise: bool = False,
                   **more: Any) -> dict[str, Result]:  # fmt: skip
        """A row of an attached model with another cache than its own."""
        begin = time.perf_counter()
        results = self.measured(subject, make, stepwise=stepwise)
        self.add_row(name, method, results, begin, stepwise=stepwise, **more)
        return results

    # ---- of a PoD model ----

    def distant(self, subject: Subject, config: PoDConfig) -> list[Target]:
        """Of its distant tokens only those that a pruner chooses. Returns what this holds, by their number."""
        targets = {}
        with kvcompress.attach(subject.model):
            for part in self.sizes.distant:
                keep = round(part * config.window)
                for name in DISTANT:
                    kind, pruner = f"{subject.kind}+{name}", PRUNERS[name]
                    row: dict[str, Any] = {"distant": keep, "pruner": repr(pruner), "phi": config.share}
                    make = cache_maker(subject, self.page_size, pruner=pruner, distant=keep)
                    results = self.with_cache(f"{kind}/distant{keep}", kind, subject, make, **row)
                    targets[keep] = self.target_of(f"{subject.kind}+distant{keep}", results)
        return list(targets.values())

    def tau(self, subject: Subject, config: PoDConfig) -> None:
        """Token by token, with and without skipping."""
        with kvcompress.attach(subject.model):
            for tau in self.sizes.taus:
                begin, results, skipped = time.perf_counter(), {}, {}
                for task in self.tasks:
                    made: list[PoDCache] = []
                    make = cache_maker(subject, self.page_size, made, tau=tau)
                    results[task.name] = measure(subject.model, task, make, stepwise=True)
                    skipped[task.name] = skip_shares(made)
                first = skipped[self.tasks[0].name]
                row = {"stepwise": True, "tau": tau, "phi": config.share, "skipped_by_task": skipped}
                self.add_row(f"{subject.kind}/{subject.name}/tau{tau:g}", "tau", results, begin, **row, **first)

    # ---- of the original ----

    def untrained(self, config: PoDConfig) -> None:
        """The original as it is, converted."""
        for mode in UNTRAINED:
            model = copy.deepcopy(self.original.model)
            convert(model, replace(config, mode=mode))
            self.subject(Subject("untrained", POD_KINDS[mode], model), untrained=True)

    def pruned_as(self, target: Target, budget: MatchedBudget) -> None:
        """Pruned to the bytes of a target."""
        model = self.original.model
        for name, (pruner, divide) in PRUNED.items():
            begin, results, kept = time.perf_counter(), {}, {}
            for task in self.tasks:
                kept[task.name] = tokens = budget(pruner, task, target.nbytes[task.name], divide)
                make = pruned(model, pruner, tokens, divide, page_size=self.page_size)
                results[task.name] = measure(model, task, make)
            row = {"as_model": target.name, "pruner": repr(pruner), "tokens_kept": kept}
            self.add_row(f"{name}/as_{target.name}", name, results, begin, **row)

    def near(self, config: PoDConfig) -> None:
        """With as many tokens as are near in a PoD model."""
        model, W, layers = self.original.model, config.window, self.original.model.config.num_hidden_layers
        streaming: dict[str, Any] = {"window_size": config.recent, "num_sink_tokens": config.sinks}
        caches: dict[str, Callable[[], Any]] = {
            "StreamingLLM": lambda: StreamingCache(model.config, **streaming),
            "LM-Infinite": lambda: StreamingCache(model.config, **streaming, sink_distance="window"),
        } | {
            name: pruned(model, pruner, W, divide, page_size=self.page_size)
            for name, (pruner, divide) in PRUNED.items()
        }  # fmt: skip
        for name, make in caches.items():
            self.with_cache(f"{name}/near{W}", name, self.original, make, near=W)
        dense = layers // 16  # its authors' two of 32
        quest = {"token_budget": W, "dense_layers": dense}
        self.with_cache(f"Quest/near{W}", "Quest", self.original, lambda: QuestCache(model.config, **quest),
                        stepwise=True, near=W, dense_layers=dense)  # fmt: skip


def pod_config(subject: Subject) -> PoDConfig | None:
    """What a model is, if it was converted to PoD or one of its baselines."""
    return PoDConfig.from_dict(subject.model.config.kvcompress) if subject.method == "pod" else None


def cache_maker(
    subject: Subject, page_size: int, made: list[PoDCache] | None = None, **settings: Any
) -> Callable[[], PoDCache]:
    """Makes a converted model's cache for each batch, and notes it in `made`."""

    def make() -> PoDCache:
        cache = subject.cache(page_size, **settings)
        assert isinstance(cache, PoDCache)
        if made is not None:
            made.append(cache)
        return cache

    return make


def skip_shares(caches: list[PoDCache]) -> dict[str, float]:
    """What tau has saved in several batches of prompts of one length, mean over the prompts."""
    if not caches[0].skips:
        return {"skipped_of_followers": 0.0, "skipped_of_distant": 0.0, "attention_work": 1.0}
    weights = [len(cache.seen_lengths()) for cache in caches]
    shares = np.average([list(vars(cache.skip_shares()).values()) for cache in caches], axis=0, weights=weights)
    return dict(zip(("skipped_of_followers", "skipped_of_distant", "attention_work"), shares.tolist(), strict=True))


def run(
    original: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    subjects: Iterable[Subject],
    sizes: PoDSizes,
    *,
    name: str = "example",
    page_size: int = 8,
) -> list[dict[str, Any]]:
    """All rows: the original's, each subject's, those of the first PoD model besides, then what else the original does.
    subjects: read one after the other, so that a generator holds one model at a time.

    Raises ValueError for models of another vocabulary, and for a window that the original does not reach or that is too
    short for the prompts."""
    reach = original.config.max_position_embeddings
    if sizes.window > reach:
        raise ValueError(f"window must be at most {reach} tokens, the original's positions, got {sizes.window}")
    first, shared = Subject(name, "dense", original), None
    comparison, targets = PoDComparison(first, tokenizer, fitted(tokenizer, sizes), page_size), []
    comparison.subject(first)
    for subject in subjects:
        comparison.check_vocabulary(subject)
        target, config = comparison.subject(subject), pod_config(subject)
        if shared is None and config is not None and config.mode == "pod":
            shared = config
            targets = [target, *comparison.distant(subject, config)]
            comparison.tau(subject, config)
    if shared is not None:
        comparison.untrained(shared)
        with kvcompress.attach(original):
            budget = MatchedBudget(original, page_size)
            for target in targets[: sizes.matched]:
                comparison.pruned_as(target, budget)
            comparison.near(shared)
    return comparison.rows


# ---- the command ----


def options() -> argparse.Namespace:
    shipped = RETROFITTED.get("pod")
    parse = comparison_parser(__doc__)
    parse.add_argument(
        "--models", nargs="+", required=shipped is None, default=[str(shipped)], metavar="[KIND=]FOLDER",
        help="what was made of the original" + ("" if shipped is None else " (default: the shipped one)"),
    )  # fmt: skip
    parse.add_argument(
        "--length", type=int, help="tokens of a prompt (default, and 0: what a window leaves; 1,024 with --quick)"
    )
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
