"""Whole models: seconds of a decoded token and of a prompt, beside transformers' own caches.

Random weights in the sizes of Llama 3 8B (8 layers of them in a quick run), bfloat16. Caches hold random keys
and values. A token is timed on the clock of the wall, from an idle device to an idle device.

    token/<cache>/T/B    eager: op by op. recorded: by StepGraph, the mean of 48 tokens, with what the host does for
                         some of them. The peers: DynamicCache op by op, without cuDNN's attention, which plans anew for
                         every length (its time with that stands in the note), and StaticCache as a CUDA graph
    prompt/<cache>/T     reading T tokens, to the logits of the last one. The peer: DynamicCache
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvcompress
from benchmarks.common import Row
from benchmarks.gpu.measure.turns import Work, device, on_gpu, recorded, seconds
from benchmarks.speed.parts.caches import keep
from benchmarks.speed.parts.layers import adopt, fill
from kvcompress import CacheSpec, CompressedCache, DMCCache, PrunedCache, QuantizedCache, QuestCache, StepGraph, prefill
from kvcompress.caches.formats import FORMATS
from kvcompress.dmc import DMCConfig
from kvcompress.pruners import SnapKV

Result = TypeVar("Result")
DTYPE = torch.bfloat16
KINDS = ("dense", "int8", "k8v4", "pruned4", "quest", "dmc4")
SHARES = (1, 1 / 2, 1 / 8, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 8)  # of the tokens, as AdaKV divides them; mean 1/4
PROMPTS = {
    "dense": "pruned,pruner=snapkv,keep=1.0",
    "int8": "quantized,dtype=int8",
    "snapkv": "pruned,pruner=snapkv,keep=0.25",
    "replay": "pruned,pruner=replay,keep=0.25,budget=globaltopk",
    "kvzip": "pruned,pruner=kvzip,keep=0.25,budget=globaltopk",
    "iterative": "iterative,memory_size=QUARTER,chunk_size=EIGHTH,schedule=linear,dynamic=true",
    "streaming": "streaming,window_size=QUARTER",
}


@dataclass(frozen=True)
class Sizes:
    repeats: int
    layers: int
    hidden: int
    heads: tuple[int, int]
    vocabulary: int
    tokens: tuple[tuple[int, int], ...]  # T, B
    prompts: tuple[int, ...]


SIZES = {
    "full": Sizes(20, 32, 4096, (32, 8), 128256, ((4096, 1), (32768, 4)), (8192, 32768)),
    "quick": Sizes(10, 8, 4096, (32, 8), 32000, ((4096, 1), (32768, 8)), (8192, 32768)),
    "tiny": Sizes(2, 2, 64, (4, 2), 100, ((128, 2),), (256,)),
}


def model_of(size: Sizes, length: int) -> LlamaForCausalLM:
    """On the device, without the seconds that transformers' own initialisation takes."""
    Hq, Hkv = size.heads
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=7 * size.hidden // 2,
        num_hidden_layers=size.layers, num_attention_heads=Hq, num_key_value_heads=Hkv, head_dim=size.hidden // Hq,
        max_position_embeddings=2 * length, rope_theta=500000.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(DTYPE)
    model = model.to_empty(device=device())
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02) if parameter.ndim > 1 else parameter.data.fill_(1)
    with torch.device(device()):  # its frequencies are computed, not loaded
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def on_device(make: Callable[..., Result]) -> Callable[..., Result]:
    """What it makes lies there; as a default for what is timed, every call of Torch would look at the device."""

    def made(*arguments: Any) -> Result:
        with torch.device(device()):
            return make(*arguments)

    return made


@on_device
def filled(model: LlamaForCausalLM, kind: str, T: int, B: int) -> CompressedCache:
    Hq, Hkv, D = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim

    def drawn(_: int, S: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (torch.randn(B, Hkv, S, D, dtype=DTYPE) for _ in range(2))
        return k, v

    def decided(_: int, S: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = drawn(0, S)
        k[..., -1] = torch.where(torch.rand(B, Hkv, S) < 0.25, -5.0, 5.0).to(DTYPE)
        return k, v

    cache: CompressedCache
    if kind in ("dense", "pruned4"):
        cache = PrunedCache(model.config, SnapKV(), keep=1.0)
        adopt(cache, model)
        shares = SHARES if kind == "pruned4" else (1,)
        keep(cache, B, T, [int(T * shares[h % len(shares)]) for h in range(Hkv)], drawn)
        return cache
    if kind in FORMATS:
        cache = QuantizedCache(model.config, kind)
    elif kind == "dmc4":
        cache = DMCCache(model.config)
    else:
        cache = QuestCache(model.config, token_budget=T // 4, dense_layers=0)
    adopt(cache, model)
    fill(cache, B, T, decided if kind == "dmc4" else drawn, Hq)
    return cache


@on_device
def dynamic_of(model: LlamaForCausalLM, T: int, B: int) -> DynamicCache:
    cache, config = DynamicCache(config=model.config), model.config
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(B, config.num_key_value_heads, T, config.head_dim, dtype=DTYPE) for _ in range(2))
        cache.update(k, v, layer)
    return cache


@on_device
def static_of(model: LlamaForCausalLM, T: int, B: int) -> StaticCache:
    """T tokens in T + 64 slots, which every step reads."""
    cache, config = StaticCache(config=model.config, max_cache_len=T + 64), model.config
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(B, config.num_key_value_heads, T, config.head_dim, dtype=DTYPE) for _ in range(2))
        cache.update(k, v, layer)
    return cache


def token_seconds(step: Work, repeats: int) -> float:
    """Median."""
    for _ in range(4):
        step()
    return statistics.median(seconds(step) for _ in range(repeats))


def mean_seconds(step: Work, pages: int = 3) -> float:
    """Mean over some pages' slots of tokens: a step that takes pages is launched op by op."""
    for _ in range(4):
        step()
    return statistics.fmean(seconds(step) for _ in range(16 * pages))


def freed() -> None:
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def attempt(make: Callable[[], Result], what: str, failures: list[str]) -> Result | None:
    """What it gives; None, and why in `failures`, where it cannot be run."""
    try:
        return make()
    except Exception as error:
        failures.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
        return None
    finally:
        freed()


@torch.inference_mode()
def token_rows(size: str) -> Iterator[Row]:
    chosen = SIZES[size]
    model = model_of(chosen, max(T for T, _ in chosen.tokens))
    for T, B in chosen.tokens:
        ids = torch.zeros(B, 1, dtype=torch.int64, device=device())
        failures: list[str] = []

        def eager(cache: Any, ids: torch.Tensor = ids) -> Work:
            return lambda: model(ids, past_key_values=cache)

        def dynamic(T: int = T, B: int = B, cudnn: bool = False) -> float:
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            try:
                return token_seconds(eager(dynamic_of(model, T, B)), chosen.repeats)
            finally:
                torch.backends.cuda.enable_cudnn_sdp(True)

        def static(T: int = T, B: int = B) -> float:
            step = eager(static_of(model, T, B))
            step()
            return token_seconds(recorded(step), chosen.repeats)

        peer = attempt(dynamic, "DynamicCache", failures)
        planned = attempt(lambda: dynamic(cudnn=True), "DynamicCache with cuDNN", failures)
        fixed = attempt(static, "StaticCache, recorded", failures)
        others = {"StaticCache, recorded": fixed, "DynamicCache with cuDNN's attention": planned}
        note = "; ".join(f"{name}: {took * 1e3:.3f} ms" for name, took in others.items() if took)
        for kind in KINDS:

            def both(kind: str = kind, T: int = T, B: int = B, ids: torch.Tensor = ids) -> dict[str, float]:
                model.config.kvcompress = DMCConfig(shift=0.0).to_dict() if kind == "dmc4" else None
                with kvcompress.attach(model):
                    cache = filled(model, kind, T, B)
                    found = {"eager": token_seconds(eager(cache), chosen.repeats)}
                    if on_gpu():
                        graph = StepGraph(model, cache)
                        found["recorded"] = mean_seconds(lambda: graph(ids))
                return found

            for how, took in (attempt(both, kind, failures) or {}).items():
                name = f"token/{kind}/{how}/{model.config.num_hidden_layers}layers/T{T}/B{B}"
                yield Row(name, took, peer, "DynamicCache", note=note)
        if failures:
            yield Row(f"token/failed/T{T}/B{B}", 0.0, note="; ".join(failures))


@torch.inference_mode()
def prompt_rows(size: str) -> Iterator[Row]:
    chosen = SIZES[size]
    model = model_of(chosen, 2 * max(chosen.prompts))  # KVzip asks behind the prompt
    for T in chosen.prompts:
        ids = torch.randint(0, chosen.vocabulary, (1, T), device=device())
        failures: list[str] = []

        def theirs(ids: torch.Tensor = ids) -> object:
            return model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

        theirs()
        peer = attempt(lambda: seconds(theirs), "DynamicCache", failures)
        for kind, text in PROMPTS.items():
            spec = text.replace("QUARTER", str(T // 4)).replace("EIGHTH", str(T // 8))

            def ours(spec: str = spec, ids: torch.Tensor = ids) -> float:
                with kvcompress.attach(model):

                    def read() -> None:
                        cache = CacheSpec.parse(spec).make(model.config)
                        prefill(model, ids[:, :-1], cache)
                        model(ids[:, -1:], past_key_values=cache)

                    read()
                    return seconds(read)

            took = attempt(ours, kind, failures)
            if took is not None:
                yield Row(f"prompt/{kind}/T{T}", took, peer, "DynamicCache", note=f"{T / took:,.0f} tokens/s")
        if failures:
            yield Row(f"prompt/failed/T{T}", 0.0, note="; ".join(failures))
