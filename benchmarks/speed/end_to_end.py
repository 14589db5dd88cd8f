"""Whole models with each cache against DynamicCache: a decoded token, and reading a prompt.

    python benchmarks/speed/end_to_end.py [--quick] [--json FILE]

LlamaForCausalLM with random weights: 4 layers, hidden size 2,048, 32 query heads, 8 KV heads of 64, intermediate size
8,192, vocabulary 32,000. The peer is the same model, not attached, with DynamicCache and SDPA.

token/<cache>/<dtype>/T<T>     one token after T. ratio: DynamicCache's time over ours. of_floor: ours over the time of
    the same token without context (the plain model with a DynamicCache that began with one token: the weights alone)
    and what reading the cache's bytes takes at the bandwidth of a sum over 1 GiB, all measured in the same turns.
    bytes: those that attention reads. The caches are filled with random keys and values, without attention
prompt/<cache>/<dtype>/T<T>    T tokens, from the first to the logits of the last one: kvcompress.prefill and a token.
    ratio: DynamicCache's time (one forward pass, logits of the last token alone) over ours. Each is read once: they
    take a minute

dense       a PrunedCache that keeps everything
pruned      a PrunedCache that keeps a quarter (SnapKV, the same number in every head)
iterative   IMDC: chunks of 1,024, mean, and a memory that grows linearly to a quarter of the prompt
streaming   4 first tokens and a window of 1,020
dmc         DMC whose entries are a quarter of the tokens (of a prompt: as random weights decide, which is none merged)
pod         one block: a layer leads and three follow; a quarter of the tokens is near
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import COLD_NBYTES, Row, alternate, options, report
from benchmarks.speed.parts.caches import keep, pod_reads
from benchmarks.speed.parts.layers import adopt, fill
from kvcompress import (
    CompressedCache,
    DMCCache,
    IterativeCache,
    PoDCache,
    PrunedCache,
    StreamingCache,
    dmc,
    pod,
    prefill,
)
from kvcompress.dmc import DMCConfig
from kvcompress.pod import PoDConfig, PoDPlan

BOTH = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Sizes:
    """tokens: lengths of their rows, in each of the dtypes; prompts: in the first of them. chunk: of IMDC. window: of
    streaming."""

    repeats: int
    dtypes: tuple[torch.dtype, ...]
    tokens: tuple[int, ...]
    prompts: tuple[int, ...]
    hidden: int = 2048
    heads: tuple[int, int] = (32, 8)
    vocabulary: int = 32000
    chunk: int = 1024
    window: int = 1020


SIZES = {
    "full": Sizes(15, BOTH, (4096, 16384), (16384,)),
    "quick": Sizes(7, BOTH[:1], (4096,), ()),
    "tiny": Sizes(1, BOTH[:1], (256,), (256,), 128, (4, 2), 500, 32, 28),
}
LAYERS, SINKS = 4, 4


@dataclass
class TokenRow(Row):
    """of_floor: ours / (weights alone + bytes at the measured bandwidth)."""

    of_floor: float = 0.0


@dataclass
class Kind:
    """A cache, the model that it is for, and how it is filled with T tokens."""

    model: LlamaForCausalLM
    make: Callable[[], CompressedCache]
    fill: Callable[[CompressedCache], None]
    reads: Callable[[CompressedCache], int]  # bytes in a step


def model_of(sizes: Sizes, length: int, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    Hq, Hkv = sizes.heads
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=4 * sizes.hidden,
        num_hidden_layers=LAYERS, num_attention_heads=Hq, num_key_value_heads=Hkv, head_dim=sizes.hidden // Hq,
        max_position_embeddings=2 * length,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def kinds_of(plain: LlamaForCausalLM, T: int, dtype: torch.dtype, sizes: Sizes) -> dict[str, Kind]:
    model, merging, sharing = (copy.deepcopy(plain) for _ in range(3))
    (Hq, Hkv), D, quarter = sizes.heads, plain.config.head_dim, T // 4
    plan = PoDPlan(((0,) * Hkv,) * LAYERS, SINKS, quarter - SINKS, query_heads=Hq, head_dim=D)
    kvcompress.attach(model)
    dmc.convert(merging, DMCConfig(shift=0.0), anneal=False)
    pod.convert(sharing, PoDConfig.of(plan))
    token_nbytes = Hkv * D * dtype.itemsize

    def drawn(_: int, S: int) -> tuple[Tensor, Tensor]:
        k, v = (torch.randn(1, Hkv, S, D).to(dtype) for _ in range(2))
        return k, v

    def decided(_: int, S: int) -> tuple[Tensor, Tensor]:
        k, v = drawn(0, S)
        k[..., -1] = torch.where(torch.rand(1, Hkv, S) < 0.25, -5.0, 5.0).to(dtype)
        return k, v

    def filling(tokens: int, rows: Callable[[int, int], tuple[Tensor, Tensor]]) -> Callable[[CompressedCache], None]:
        return lambda cache: fill(cache, 1, tokens, rows, Hq)

    def keeping(tokens: int) -> Callable[[CompressedCache], None]:
        return lambda cache: keep(cache, 1, T, [tokens] * Hkv, drawn)

    def stored(cache: CompressedCache) -> int:
        held = sum(count for layer in cache.stored_lengths() for row in layer for count in row)
        return 2 * held * D * dtype.itemsize

    def shared(cache: CompressedCache) -> int:
        how = "reuse" if cache.compressing[0].reuses else "recompute"
        return pod_reads(LAYERS, T, plan.window, token_nbytes, 4 * Hq)[how]

    def iterative() -> IterativeCache:
        return IterativeCache(
            model.config, memory_size=quarter, chunk_size=sizes.chunk, schedule="linear", dynamic=True
        )  # fmt: skip

    def streaming() -> StreamingCache:
        return StreamingCache(model.config, window_size=sizes.window, num_sink_tokens=SINKS)

    return {
        "dense": Kind(model, lambda: PrunedCache(model.config, keep=1.0), keeping(T), stored),
        "pruned": Kind(model, lambda: PrunedCache(model.config, keep=0.25), keeping(quarter), stored),
        "iterative": Kind(model, iterative, filling(quarter, drawn), stored),
        "streaming": Kind(model, streaming, filling(T, drawn), stored),
        "dmc": Kind(merging, lambda: DMCCache(merging.config), filling(T, decided), stored),
        "pod": Kind(sharing, lambda: PoDCache(sharing.config), filling(T, drawn), shared),
    }


def dynamic_of(plain: LlamaForCausalLM, T: int, dtype: torch.dtype) -> DynamicCache:
    cache, config = DynamicCache(config=plain.config), plain.config
    for layer in range(LAYERS):
        k, v = (torch.randn(1, config.num_key_value_heads, T, config.head_dim).to(dtype) for _ in range(2))
        cache.update(k, v, layer)
    return cache


@torch.no_grad()
def token_rows(
    plain: LlamaForCausalLM, kinds: dict[str, Kind], name: str, T: int, dtype: torch.dtype, repeats: int, cold: int
) -> tuple[list[TokenRow], float]:
    ids, large = torch.zeros(1, 1, dtype=torch.int64), torch.ones(cold // 4)
    caches = {kind: own.make() for kind, own in kinds.items()}
    for kind, cache in caches.items():
        adopt(cache, kinds[kind].model)
        kinds[kind].fill(cache)

    def step(model: LlamaForCausalLM, cache: Any) -> Callable[[], object]:
        return lambda: model(ids, past_key_values=cache)

    works = [step(kinds[kind].model, cache) for kind, cache in caches.items()]
    for work in works:
        work()  # pages and tables grow
    theirs, bare = (step(plain, dynamic_of(plain, tokens, dtype)) for tokens in (T, 1))
    *seconds, peer, weights, reading = alternate(repeats, *works, theirs, bare, large.sum)
    bandwidth = cold / reading
    rows: list[TokenRow] = []
    for (kind, cache), took in zip(caches.items(), seconds, strict=True):
        nbytes = kinds[kind].reads(cache)
        floor = weights + nbytes / bandwidth
        note = f"{took / floor:.2f} of {floor * 1e3:.2f} ms, weights alone {weights * 1e3:.2f} ms"
        rows.append(
            TokenRow(f"token/{kind}/{name}", took, peer, "DynamicCache", None, nbytes, note, of_floor=took / floor)
        )
    return rows, bandwidth


@torch.no_grad()
def prompt_rows(plain: LlamaForCausalLM, kinds: dict[str, Kind], name: str, T: int) -> list[Row]:
    ids = torch.randint(0, plain.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(1))

    def timed(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def ours(kind: Kind) -> None:
        cache = kind.make()
        prefill(kind.model, ids, cache)
        kind.model(ids[:, -1:], past_key_values=cache)

    def theirs() -> None:
        plain(ids, past_key_values=DynamicCache(config=plain.config), logits_to_keep=1)

    peer = timed(theirs)
    rows: list[Row] = []
    for kind, own in kinds.items():
        took = timed(lambda own=own: ours(own))  # type: ignore[misc]
        rows.append(Row(f"prompt/{kind}/{name}", took, peer, "DynamicCache", note=f"{T / took:,.0f} tokens a second"))
        print(f"{rows[-1].name} {took:.1f} s, DynamicCache {peer:.1f} s", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    choice = options(__doc__)
    sizes, cold = SIZES[choice.size], COLD_NBYTES[choice.size]
    rows: list[Row] = []
    bandwidths: list[float] = []
    for dtype in sizes.dtypes:
        for T in sorted({*sizes.tokens, *sizes.prompts}):
            plain, name = model_of(sizes, T, dtype), f"{str(dtype).removeprefix('torch.')}/T{T}"
            kinds = kinds_of(plain, T, dtype, sizes)
            if T in sizes.tokens:
                found, bandwidth = token_rows(plain, kinds, name, T, dtype, sizes.repeats, cold)
                rows += found
                print(*(f"{row.name} {row.of_floor:.2f}" for row in found), sep=", ", file=sys.stderr, flush=True)
                bandwidths.append(bandwidth)
            if T in sizes.prompts and dtype == sizes.dtypes[0]:
                rows += prompt_rows(plain, kinds, name, T)
    report(rows, choice.json, read_bytes=max(bandwidths))


if __name__ == "__main__":
    main()
