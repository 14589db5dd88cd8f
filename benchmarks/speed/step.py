"""A decoded token in one call per layer: each cache against the dense one, what is not kernel, and short contexts.

    python benchmarks/speed/step.py [--quick] [--json FILE]

Random keys and values in layers as Llama 3 8B has them (32 query heads, 8 KV heads of 128), without their model: a pass
of the cache over its layers is timed, with rotation, append or merge, and attention. A pass has as many layers as take
a quarter of a GiB in the dense cache, and at least one; times are of a whole pass. All kinds take turns, and several
caches of each kind, over at least 1 GiB, so that no keys or values come from a processor's cache. A pool sets pages
aside for 64 steps at a time: the medians are of the 63 steps between.

step/<cache>/<dtype>/T<T>/B<B>
    T tokens of each of B sequences. ratio: time of the dense cache, which keeps everything and reads it with the same
    kernel, over ours. transformers: seconds of DynamicCache, where a token is rotated, joined to the others (update)
    and attended from (SDPA with enable_gqa) by the functions of transformers' own attention layer.
    dmc4       DMC, of whose tokens a quarter opened entries, at heads of very different ratios
    pruned4    a PrunedCache that kept a quarter, as AdaKV divides it over heads: all of the tokens, 1/2, 1/8, 1/16,
               1/16, 1/16, 1/16 and 1/8
    pod        a block of 5 layers: one leads and four follow, with 16 + 4,080 near tokens. Its peers: 5 layers. At most
               two sequences of 32,768 tokens or eight of 8,192, so that the three caches fit into 16 GiB
    dense      a PrunedCache that kept everything: the cost of the machinery
dispatch/<cache>
    microseconds: time per layer that a step spends outside of the ops that attend (paged_step_, quest_step_, dmc_step_,
    pod_step_, ring_step_, decode, decode_shared). A pass over 30 layers with 128 tokens each, from its opening to its
    end, less the time within those ops, which is taken in the same pass, over 30. Everything else counts, rotation and
    append by ops of their own too.
    float32, one sequence. dense keeps everything, as does iterative after its prompt; pruned: a quarter, and dmc, as
    above; dms drops three in four tokens behind 32; pod has blocks of 5 layers and 4 + 28 near tokens; streaming has
    4 + 60 tokens, so that the first ones are far; quest reads 4 of 8 pages
short/<cache>
    one token of the shipped model, all of it, after a prompt of 64 tokens and those that were decoded since. ratio:
    DynamicCache's time over ours, the two in turns alone: the weights of both models fit into a processor's cache, as
    those of all would not. dmc and pod: the shipped converted models, against the DynamicCache of the shipped
    model. dense is a PrunedCache that keeps everything, pruned keeps 32 tokens of the prompt, quest reads 3 pages of
    16; other sizes are the defaults
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from transformers import DynamicCache

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import COLD_NBYTES, Row, alternate, options, report
from benchmarks.speed.parts.caches import deciding, dmc_cache, pod_cache, pruned_cache
from benchmarks.speed.parts.layers import (
    HKV,
    HQ,
    D,
    Drawn,
    adopt,
    attend,
    attend_dynamic,
    dense_cache,
    draw_queries,
    draw_rows,
    dynamic_cache,
    fill,
    layers_of,
)
from kvcompress import (
    CompressedCache,
    DMCCache,
    IterativeCache,
    PoDCache,
    PrunedCache,
    QuestCache,
    StreamingCache,
    prefill,
)
from kvcompress.dmc import DMCConfig
from kvcompress.pod import PoDPlan

OPENS = (0.6, 0.4, 0.3, 0.25, 0.2, 0.12, 0.08, 0.05)  # share of tokens that open an entry, per KV head; mean 1/4
BLOCK = 5  # layers of PoD with one lead
BLOCK_TOKENS = 1 << 16  # of all sequences at most
PASS_NBYTES = 1 << 28  # that the dense cache reads in a pass
# as PyTorch knows them
ATTENDING = (
    "paged_step_", "quest_step_", "dmc_step_", "pod_step_", "ring_step_", "decode", "decode_probabilities",
    "decode_shared",
)  # fmt: skip
TOKENS = 8  # drawn passes, which take turns
Work = Callable[[], object]
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Sizes:
    """steps: dtype, T and B of their rows. near: PoD's sinks and recent tokens. layers, short: repetitions of those."""

    repeats: int
    steps: tuple[tuple[torch.dtype, int, int], ...]
    near: tuple[int, int] = (16, 4080)
    layers: int = 30
    dispatched: int = 200
    short: int = 100


SIZES = {
    "full": Sizes(
        9,
        (
            *((torch.bfloat16, T, B) for T in (8192, 32768) for B in (1, 8)),
            *((torch.float32, T, 1) for T in (8192, 32768)),
        ),
    ),
    "quick": Sizes(7, ((torch.bfloat16, 8192, 1),), dispatched=50, short=50),
    "tiny": Sizes(1, ((torch.bfloat16, 512, 2),), (4, 60), BLOCK, 1, 1),
}


# ---- rows ----


@dataclass
class StepRow(Row):
    """transformers: seconds of DynamicCache's step."""

    transformers: float = 0.0


@dataclass
class DispatchRow(Row):
    """microseconds: per layer."""

    microseconds: float = 0.0


# ---- steps ----


def plan_of(layers: int, near: tuple[int, int]) -> PoDPlan:
    lead = tuple((layer - layer % BLOCK,) * HKV for layer in range(layers))
    return PoDPlan(lead, *near, query_heads=HQ, head_dim=D)


def passes(layers: int, B: int, dtype: torch.dtype) -> list[list[Drawn]]:
    """A token of each sequence for all layers, of which DMC's heads open entries at their ratio."""
    return [[(draw_queries(B, 1, dtype), *deciding(B, 1, dtype, OPENS)) for _ in range(layers)] for _ in range(TOKENS)]


def turns(make: Callable[[], Kept], count: int, step: Callable[[Kept], object]) -> Work:
    """A step of another of so many caches each time; their pages and tables have grown before."""
    caches = [make() for _ in range(count)]
    for cache in caches:
        for _ in range(2):
            step(cache)
    turn = itertools.cycle(caches)
    return lambda: step(next(turn))


def step_rows(dtype: torch.dtype, T: int, B: int, near: tuple[int, int], repeats: int, cold: int) -> list[Row]:
    several = max(PASS_NBYTES // (2 * B * HKV * T * D * dtype.itemsize), 1)

    def measure(layers: int, B: int, kinds: dict[str, Callable[[], CompressedCache]]) -> list[Row]:
        name, layer_nbytes = f"{str(dtype).removeprefix('torch.')}/T{T}/B{B}", 2 * B * HKV * T * D * dtype.itemsize
        tokens, model = itertools.cycle(passes(layers, B, dtype)), layers_of(layers, 2 * T)
        nbytes = layers * layer_nbytes

        def ours(cache: CompressedCache) -> None:
            attend(cache, B, 1, next(tokens))

        def theirs(cache: DynamicCache) -> None:
            attend_dynamic(model, cache, next(tokens))

        def dense() -> QuestCache:
            return dense_cache(layers, B, T, lambda _, S: draw_rows(B, S, dtype))

        # the two that keep everything read twice nbytes in each round
        count = min(repeats + 1, -(-cold // (2 * nbytes)))
        works = [turns(make, count, ours) for make in (*kinds.values(), dense)]
        works.append(turns(lambda: dynamic_cache(model, B, T, dtype), count, theirs))
        *seconds, peer, transformers = alternate(repeats, *works)
        return [
            StepRow(
                f"step/{kind}/{name}", took, peer, "dense, same kernel", transformers=transformers,
                note=f"{layers} layers; DynamicCache {transformers * 1e3:.3f} ms, {transformers / took:.2f}x",
            )
            for kind, took in zip(kinds, seconds, strict=True)
        ]  # fmt: skip

    rows = measure(
        several,
        B,
        {
            "dmc4": lambda: dmc_cache(several, B, T, dtype, OPENS),
            "pruned4": lambda: pruned_cache(several, B, T, dtype),
            "dense": lambda: pruned_cache(several, B, T, dtype, (1,) * HKV),
        },
    )
    B = min(B, BLOCK_TOKENS // T)
    return rows + measure(BLOCK, B, {"pod": lambda: pod_cache(B, T, dtype, plan_of(BLOCK, near))})


# ---- what is not kernel ----


class OpClock:
    """Seconds within some native ops since it was set to 0."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            results = op(*arguments)
            self.seconds += time.perf_counter() - begin
            return results

        return call


def dispatch_caches(layers: int, T: int) -> dict[str, CompressedCache]:
    dtype, model = torch.float32, layers_of(layers, 2 * T)

    def rows(_: int, S: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_rows(1, S, dtype)

    def filled(cache: CompressedCache) -> CompressedCache:
        adopt(cache, model)
        fill(cache, 1, T, rows)
        return cache

    dms = DMCConfig(mode="dms", shift=0.0, dms_window=T // 4)
    return {
        "dense": dense_cache(layers, 1, T, rows),
        "pruned": pruned_cache(layers, 1, T, dtype),
        "dmc": dmc_cache(layers, 1, T, dtype, OPENS),
        "dms": dmc_cache(layers, 1, T, dtype, OPENS, dms),
        "pod": pod_cache(1, T, dtype, plan_of(layers, (4, T // 4 - 4))),
        "streaming": filled(StreamingCache(model.config, window_size=T // 2 - 4)),
        "iterative": filled(IterativeCache(model.config)),
        "quest": filled(QuestCache(model.config, token_budget=T // 2, dense_layers=0)),
    }


def dispatch_rows(layers: int, repeats: int) -> list[Row]:
    T, clock = 128, OpClock()
    caches, tokens = dispatch_caches(layers, T), itertools.cycle(passes(layers, 1, torch.float32))
    outside: dict[str, list[float]] = {name: [] for name in caches}

    def step(name: str, cache: CompressedCache) -> None:
        drawn = next(tokens)
        clock.seconds, begin = 0.0, time.perf_counter()
        attend(cache, 1, 1, drawn)
        seconds = time.perf_counter() - begin
        if not 0 < clock.seconds < seconds:
            raise RuntimeError(f"a step of {name} attends by other ops than {', '.join(ATTENDING)}")
        outside[name].append(seconds - clock.seconds)

    works = [lambda name=name, cache=cache: step(name, cache) for name, cache in caches.items()]  # type: ignore[misc]
    native = torch.ops.kvcompress
    with mock.patch.multiple(native, **{name: clock.timed(getattr(native, name)) for name in ATTENDING}):
        whole = alternate(repeats, *works)
    rows: list[Row] = []
    for (name, found), seconds in zip(outside.items(), whole, strict=True):
        took = statistics.median(found[1:]) / layers
        note = f"{took * 1e6:.1f} us of {seconds / layers * 1e6:.1f} per layer"
        rows.append(DispatchRow(f"dispatch/{name}", took, note=note, microseconds=took * 1e6))
    return rows


# ---- short contexts ----


@torch.no_grad()
def short_rows(repeats: int) -> list[Row]:
    plain, model = (kvcompress.load_example_model()[0] for _ in range(2))
    dmc, pod = (kvcompress.load_example_model(retrofit=method)[0] for method in ("dmc", "pod"))
    ids = torch.randint(32, 127, (1, 65), generator=torch.Generator().manual_seed(0))
    caches: dict[str, tuple[Any, CompressedCache]] = {
        "dense": (model, PrunedCache(model.config, keep=1.0)),
        "pruned": (model, PrunedCache(model.config, keep=32)),
        "iterative": (model, IterativeCache(model.config)),
        "streaming": (model, StreamingCache(model.config)),
        "quest": (model, QuestCache(model.config, token_budget=48)),
        "dmc": (dmc, DMCCache(dmc.config)),
        "pod": (pod, PoDCache(pod.config)),
    }
    for attached in (model, dmc, pod):
        kvcompress.attach(attached)
    for attached, cache in caches.values():
        prefill(attached, ids, cache)
    dynamic = DynamicCache(config=plain.config)
    plain(ids[:, :-1], past_key_values=dynamic)

    def step(whose: Any, cache: Any) -> Work:
        return lambda: whose(ids[:, -1:], past_key_values=cache)

    rows = []
    for name, own in caches.items():
        took, peer = alternate(repeats, step(*own), step(plain, dynamic))
        rows.append(Row(f"short/{name}", took, peer, "DynamicCache"))
    return rows


def main() -> None:
    choice = options(__doc__)
    torch.manual_seed(0)
    sizes, rows = SIZES[choice.size], []
    for dtype, T, B in sizes.steps:
        rows += step_rows(dtype, T, B, sizes.near, sizes.repeats, COLD_NBYTES[choice.size])
        print(*(f"{row.name} {row.ratio:.2f}" for row in rows[-4:]), sep=", ", file=sys.stderr, flush=True)
    rows += dispatch_rows(sizes.layers, sizes.dispatched)
    rows += short_rows(sizes.short)
    report(rows, choice.json)


if __name__ == "__main__":
    main()
