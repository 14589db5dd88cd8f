"""A decoded token in the layers of each cache: kernels, launches and bytes, without the model around them.

Layers as Llama 3 8B has them, filled with random keys and values. device: seconds that kernels run for in a pass over
all layers, by the profiler; the host has no part in it. recorded: the pass as a CUDA graph, where the cache can be
recorded. The peer is what a StaticCache does, in a CUDA graph too: rotation, index_copy_, and SDPA over its whole
length.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.common import COLD_NBYTES, Row
from benchmarks.gpu.measure.turns import Work, alternate, copy_bandwidth, device, kernels_of, on_gpu, recorded
from benchmarks.speed.parts.caches import deciding, dmc_cache, pod_cache, pruned_cache
from benchmarks.speed.parts.layers import (
    HKV,
    HQ,
    D,
    Drawn,
    adopt,
    attend,
    dense_cache,
    draw_queries,
    draw_rows,
    drawn_once,
    fill,
    layers_of,
)
from kvcompress import CompressedCache, PoDCache, QuestCache, StreamingCache
from kvcompress.dmc import DMCConfig
from kvcompress.hf.attach import base_model
from kvcompress.pod import PoDPlan
from kvcompress.pruners import SnapKV

OPENS = (0.6, 0.4, 0.3, 0.25, 0.2, 0.12, 0.08, 0.05)  # share of tokens that open an entry, per KV head; mean 1/4
PROFILED = 5  # passes
PAGE = 16  # slots of a page
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    repeats: int
    layers: int
    steps: tuple[tuple[int, int], ...]  # T, B


SIZES = {
    "full": Sizes(21, 4, ((4096, 1), (32768, 1), (32768, 8))),
    "quick": Sizes(11, 4, ((4096, 1),)),
    "tiny": Sizes(1, 2, ((512, 2),)),
}


@dataclass
class StepRow(Row):
    """ours, peer: seconds of a layer. device: seconds of a layer's kernels; launches: how many a layer has; kernels: of
    those that take longest, launches and microseconds of a layer; floor: seconds that the cache's bytes take."""

    device: float = 0.0
    launches: float = 0.0
    floor: float = 0.0
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)


def kinds_of(layers: int, B: int, T: int) -> dict[str, Callable[[], CompressedCache]]:
    def rows(_: int, S: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_rows(B, S, DTYPE)

    def filled(cache: CompressedCache) -> CompressedCache:
        adopt(cache, layers_of(layers, 2 * T))
        fill(cache, B, T, rows)
        return cache

    config = layers_of(layers, 2 * T).config
    near = T // 8
    plan = PoDPlan(((0,) * HKV,) * layers, 16, near - 16, query_heads=HQ, head_dim=D)
    dms = DMCConfig(mode="dms", shift=0.0, dms_window=64)
    return {
        "dense": lambda: dense_cache(layers, B, T, rows),
        "pruned4": lambda: pruned_cache(layers, B, T, DTYPE, pruner=SnapKV()),
        "quest": lambda: filled(QuestCache(config, token_budget=T // 4, dense_layers=0)),
        "dmc4": lambda: dmc_cache(layers, B, T, DTYPE, OPENS),
        "dms4": lambda: dmc_cache(layers, B, T, DTYPE, OPENS, dms),
        "streaming": lambda: filled(StreamingCache(config, window_size=near - 4)),
        "pod": lambda: pod_cache(B, T, DTYPE, plan),
    }


def static(layers: int, B: int, T: int, drawn: list[Drawn]) -> Work:
    """The layers of a StaticCache of T + 64 slots that holds T tokens."""
    model = layers_of(layers, 2 * T)
    decoder = base_model(model)
    held = [tuple(torch.zeros(B, HKV, T + 64, D, dtype=DTYPE) for _ in range(2)) for _ in range(layers)]
    for pair in held:
        for store, given in zip(pair, draw_rows(B, T, DTYPE), strict=True):
            store[:, :, :T] = given
    place = torch.tensor([T])
    mask = (torch.arange(T + 64) <= place)[None, None, None]

    @torch.no_grad()
    def work() -> None:
        tables = decoder.rotary_emb(drawn[0][0], place[None])
        for (q, k, v), (keys, values) in zip(drawn, held, strict=True):
            q, k = apply_rotary_pos_emb(q, k, *tables)
            keys.index_copy_(2, place, k)
            values.index_copy_(2, place, v)
            torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    return work


def stored_nbytes(cache: CompressedCache, T: int, B: int, layers: int) -> int:
    """Bytes that a pass over the layers must read."""
    if isinstance(cache, QuestCache) and cache.dense_layers == 0:
        pages = T // cache.pool_settings.page_size
        return layers * B * HKV * D * DTYPE.itemsize * (2 * cache.token_budget + 2 * pages)
    if isinstance(cache, PoDCache):
        return 0
    held = sum(count for layer in cache.stored_lengths() for row in layer for count in row)
    return 2 * held * D * DTYPE.itemsize


@torch.no_grad()
def step_rows(size: str) -> Iterator[Row]:
    chosen = SIZES[size]
    L = chosen.layers
    with torch.device(device()):
        bandwidth = copy_bandwidth(COLD_NBYTES[size])
        for T, B in chosen.steps:
            drawn = [(draw_queries(B, 1, DTYPE), *deciding(B, 1, DTYPE, OPENS)) for _ in range(L)]
            theirs = recorded(warmed(static(L, B, T, drawn)))
            for kind, make in kinds_of(L, B, T).items():
                cache = make()

                def work(cache: CompressedCache = cache, drawn: list[Drawn] = drawn, B: int = B) -> None:
                    attend(cache, B, 1, drawn)

                yield measured(kind, cache, work, theirs, T, B, L, chosen.repeats, bandwidth)
                del cache, work
                gc.collect()
            del theirs
            gc.collect()
            drawn_once.cache_clear()
            if on_gpu():
                torch.cuda.empty_cache()


def warmed(work: Work) -> Work:
    for _ in range(2):
        work()
    return work


def can_be_recorded(cache: CompressedCache) -> bool:
    """Whether its steps need nothing of the host; PoD's do, and are timed op by op."""
    try:
        cache.check_repeats()
    except NotImplementedError:
        return False
    return True


def measured(
    kind: str, cache: CompressedCache, work: Work, theirs: Work, T: int, B: int, L: int, repeats: int, bandwidth: float
) -> Row:
    warmed(work)
    found = kernels_of(work, PROFILED)
    ours, how, ahead = work, "op by op", 0
    if can_be_recorded(cache):
        for _ in range(2 * PAGE):  # until pages are there for as many steps as a page has slots, or nearly
            cache.prepare_steps()
            ahead = cache.steps_ahead()
            if ahead > PAGE - 4:
                break
            work()
    if ahead > 3:  # two warm it up
        ours, how = recorded(work), "recorded"
        repeats = min(repeats, ahead - 2) if on_gpu() else repeats
    took, peer = alternate(repeats, ours, theirs)
    launches, seconds = (sum(column) / L for column in zip(*found.values(), strict=True))
    longest = sorted(found.items(), key=lambda item: -item[1][1])
    kernels = {name[:120]: (count / L, 1e6 * s / L) for name, (count, s) in itertools.islice(longest, 12)}
    nbytes = stored_nbytes(cache, T, B, L)
    floor = nbytes / bandwidth / L
    note = f"kernels {seconds * 1e6:.1f} us, {launches:.1f} launches, floor {floor * 1e6:.1f} us a layer; {how}"
    return StepRow(
        f"step/{kind}/bfloat16/T{T}/B{B}", took / L, peer / L, "StaticCache's step, recorded", floor / seconds, nbytes,
        note, device=seconds, launches=launches, floor=floor, kernels=kernels,
    )  # fmt: skip
