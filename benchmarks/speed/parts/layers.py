"""The layers of a cache without their model: queries, keys and values go in as the seam with transformers gives them.

A forward pass of a model is one pass of its cache (cache.open, attend for each layer, cache.end); what the model does
besides is the same for every cache, and not in the figures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvcompress
from kvcompress import CompressedCache, QuestCache, ops
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.ops.softmax import Softmax

HQ, HKV, D = 32, 8, 128  # of a layer of Llama 3 8B
CHUNK = 4096  # tokens of all sequences that are stored at once
BANK = CHUNK * HKV * D  # numbers of them
Drawn = tuple[Tensor, Tensor, Tensor]  # un-rotated queries [B, Hq, S, D], keys and values [B, Hkv, S, D]


def layers_of(count: int, length: int) -> LlamaForCausalLM:
    """Layers as Llama 3 8B has them, of positions up to `length`; narrow where attention does not look."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=64, num_hidden_layers=count, num_attention_heads=HQ,
        num_key_value_heads=HKV, head_dim=D, max_position_embeddings=length,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def adopt(cache: CompressedCache, model: LlamaForCausalLM) -> None:
    """The cache learns what the model's layers are, as in its first pass."""
    with kvcompress.attach(model):
        decoder = base_model(model)
        cache.adopt(decoder, facts_of(decoder))


@functools.cache
def drawn_once(dtype: torch.dtype) -> Tensor:
    """Numbers for every cache: to draw new ones takes longer than to store them."""
    return torch.randn(BANK).to(dtype)


def draw_rows(B: int, S: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, S, D]; from random places of the same numbers."""
    count, numbers = B * HKV * S * D, drawn_once(dtype)
    numbers = numbers.repeat(2 + count // BANK)
    k, v = (numbers[place : place + count].clone().view(B, HKV, S, D) for place in torch.randint(BANK, (2,)).tolist())
    return k, v


def draw_queries(B: int, S: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(B, HQ, S, D).to(dtype)


@torch.no_grad()
def attend(cache: CompressedCache, B: int, S: int, drawn: Iterable[Drawn]) -> None:
    """One pass of S tokens of each sequence over all layers."""
    assert cache.facts is not None
    step = cache.open(cache.facts, (S,) * B, S)
    for layer, given in enumerate(drawn):
        step.attend(layer, *given, Softmax(D**-0.5))
    cache.end(step, None)


@contextmanager
def unattended() -> Iterator[None]:
    """Passes of several tokens store them and answer 0: attending to them would take longer than all that is timed."""
    skipped = 0

    def nothing(queries: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        nonlocal skipped
        skipped += 1
        return torch.zeros_like(queries), torch.zeros(queries.shape[:3])

    def no_sdpa(queries: Tensor, *_: object, **__: object) -> Tensor:  # on a GPU
        return nothing(queries)[0]

    with (
        mock.patch.object(ops, "attention", nothing),
        mock.patch.object(ops, "decode", nothing),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", no_sdpa),
    ):
        yield
    if not skipped:
        raise RuntimeError("caches attend to a prompt by other ops than those that unattended() replaces")


def fill(
    cache: CompressedCache, B: int, T: int, rows: Callable[[int, int], tuple[Tensor, Tensor]], query_heads: int = HQ
) -> None:
    """Stores T tokens of each sequence in every layer. rows: of a place and a number of tokens from there on, their
    keys and values [B, Hkv, S, D]."""

    def drawn(begin: int, S: int) -> Iterator[Drawn]:
        for _ in cache.layers:
            k, v = rows(begin, S)
            yield k.new_zeros(B, query_heads, S, k.shape[3]), k, v

    with unattended():
        most = max(CHUNK // B, 1)
        for begin in range(0, T, most):
            S = min(most, T - begin)
            attend(cache, B, S, drawn(begin, S))


def dense_cache(layers: int, B: int, T: int, rows: Callable[[int, int], tuple[Tensor, Tensor]]) -> QuestCache:
    """What others are compared with: keeps and reads everything, with the same kernel; filled."""
    model = layers_of(layers, 2 * T)
    cache = QuestCache(model.config, page_size=64, dense_layers=layers)
    adopt(cache, model)
    fill(cache, B, T, rows)
    return cache


# ---- the same with transformers' cache ----


def dynamic_cache(model: LlamaForCausalLM, B: int, T: int, dtype: torch.dtype) -> DynamicCache:
    """With T tokens of each sequence in every layer of the model."""
    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(*draw_rows(B, T, dtype), layer)
    return cache


@torch.no_grad()
def attend_dynamic(model: LlamaForCausalLM, cache: DynamicCache, drawn: Iterable[Drawn]) -> None:
    """One pass of a token over all layers, as the model itself makes it: rotation, update, SDPA with enable_gqa."""
    decoder = base_model(model)
    tables = None
    for layer, (q, k, v) in enumerate(drawn):
        if tables is None:
            tables = decoder.rotary_emb(q, torch.tensor([[cache.get_seq_length()]]))
        q, k = apply_rotary_pos_emb(q, k, *tables)
        k, v = cache.update(k, v, layer)
        attention = decoder.layers[layer].self_attn
        sdpa_attention_forward(attention, q, k, v, None, scaling=attention.scaling)
