"""DMC's speed: a training step against the vanilla model's, its averages, decoding and memory at a ratio of 4.

    python benchmarks/dmc.py [--quick] [--json FILE]

step        forward and backward of a decoder of 4 layers (--width, T = 2,048, soft decisions with noise) against the
            same model as transformers runs it (SDPA), and against the same kernels without decisions (the model half
            annealed), which is the cost of the machinery alone
accumulate  ops.dmc_accumulate: bytes that it must move (keys, values, gates in, averages and z out; backward: two
            gradients, keys, values, gates and states in, gradients out) per second over those of a copy of 256 MiB in
            the same turns; states are the averages before every 64th token
decode      one layer's whole step (decisions, append or merge, attention) over rows that kept a quarter of T tokens, at
            heads of very different ratios, against the dense cache's step (append, attention) with the same kernel
batch       sequences that fit where 16 dense ones do, from the bytes of real caches, tables and float32 tails included
"""

from __future__ import annotations

from typing import Any

import torch
from common import Row, alternate, options, report
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvcompress import DMCCache, dmc, ops
from kvcompress.caches.paged import PagedLayer
from kvcompress.caches.passes import CachePass
from kvcompress.dmc import CompressionLoss, DMCConfig
from kvcompress.dmc.merging import DMCLayer
from kvcompress.hf.facts import Facts, LayerFacts
from kvcompress.positions import RotaryTables
from kvcompress.softmax import Softmax

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of a Llama 3 8B layer
KEPT = (0.6, 0.4, 0.3, 0.25, 0.2, 0.12, 0.08, 0.05)  # share of tokens that open an entry, per KV head; mean 0.25
CHUNK = 4096  # tokens that are stored at once
COPIED = 256 << 20  # bytes of the array whose copy gives the bandwidth


# ---- training ----


def decoder(width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=4,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 128, 1), head_dim=64,
        max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def step_rows(width: int, autocast: bool, repeats: int) -> list[Row]:
    T = 2048
    ids = torch.randint(0, 256, (2, T), generator=torch.Generator().manual_seed(1))
    plain, bare, full = (decoder(width) for _ in range(3))
    dmc.convert(bare)
    dmc.set_neuron_scale(bare, 0.5)
    dmc.convert(full, DMCConfig(shift=-1.0), anneal=False)  # three in four tokens merge
    objective = CompressionLoss()

    def step(model: LlamaForCausalLM, compressed: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids).loss
        if compressed:
            loss = loss + objective(dmc.last_decisions(model), 4.0)
        loss.backward()
        model.zero_grad(set_to_none=True)

    seconds = alternate(repeats, lambda: step(full, True), lambda: step(plain, False), lambda: step(bare, False))
    name = f"step/width{width}/{'bfloat16' if autocast else 'float32'}/T{T}/B2"
    return [
        Row(f"{name}/vanilla", seconds[0], seconds[1], "transformers, SDPA", note=f"{seconds[0] / seconds[1]:.2f}x"),
        Row(f"{name}/kernels", seconds[0], seconds[2], "no decisions", note=f"{seconds[0] / seconds[2]:.2f}x"),
    ]


# ---- partial averages ----


def accumulate_rows(dtype: torch.dtype, repeats: int) -> list[Row]:
    # outputs of 8 MiB, for which the allocator reuses memory: larger ones would be fresh pages in every call
    B, H, T, D = 1, KV_HEADS, 8192 // dtype.itemsize, HEAD_DIM
    sets = []
    for _ in range(6):  # together more than the last-level cache holds
        keys, values = (torch.randn(B, H, T, D).to(dtype).requires_grad_() for _ in range(2))
        alpha = torch.rand(B, H, T).requires_grad_()
        omega = (torch.rand(B, H, T) + 0.01).requires_grad_()
        sets.append((keys, values, alpha, omega))
    turn = [0]

    def take() -> tuple[Tensor, ...]:
        turn[0] = (turn[0] + 1) % len(sets)
        return sets[turn[0]]

    def forward() -> None:
        with torch.no_grad():
            ops.dmc_accumulate(*take(), neuron=-1)

    outs = [ops.dmc_accumulate(*x, neuron=-1)[:2] for x in sets]
    grads = (torch.randn(B, H, T, D).to(dtype), torch.randn(B, H, T, D).to(dtype))

    def backward() -> None:
        inputs = take()
        torch.autograd.grad(outs[turn[0]], inputs, grads, retain_graph=True)

    size, gates = B * H * T * D * dtype.itemsize, B * H * T * 4
    states = 2 * gates // 64 * D  # float32 averages of keys and values before every 64th token
    moved = {"forward": 4 * size + 3 * gates + states, "backward": 6 * size + 5 * gates + states}
    # read + write bandwidth: arrays of which no cache holds a part worth speaking of
    source, target = (torch.ones(COPIED // 4) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    seconds = alternate(repeats, forward, backward, copy)
    rate = 2 * COPIED / seconds[2]
    name = f"accumulate/{str(dtype).removeprefix('torch.')}/T{T}"
    return [
        Row(
            f"{name}/{kind}",
            took,
            None,
            None,
            moved[kind] / took / rate,
            moved[kind],
            f"of {rate / 1e9:.0f} GB/s copied",
        )
        for kind, took in (("forward", seconds[0]), ("backward", seconds[1]))
    ]


# ---- decoding ----


def layer_config(T: int) -> LlamaConfig:
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM, num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, max_position_embeddings=2 * T,
    )  # fmt: skip
    config.kvcompress = DMCConfig(shift=0.0).to_dict()
    return config


def tokens(B: int, S: int, dtype: torch.dtype, kept: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Projections whose decisions open an entry with the probability of their head."""
    q = torch.randn(B, HEADS, S, HEAD_DIM).to(dtype)
    k, v = (torch.randn(B, KV_HEADS, S, HEAD_DIM).to(dtype) for _ in range(2))
    opens = torch.rand(B, KV_HEADS, S) < torch.tensor(kept)[:, None]
    k[..., -1] = torch.where(opens, -5.0, 5.0).to(dtype)
    return q, k, v


def filled(B: int, T: int, dtype: torch.dtype, kept: tuple[float, ...]) -> tuple[Any, Any, Any]:
    """(cache, DMC layer, dense layer) of T stored tokens a row; nothing is attended to meanwhile."""
    config = layer_config(T)
    cache = DMCCache(config)
    rotary = RotaryTables(LlamaRotaryEmbedding(config))
    cache.facts = Facts({0: LayerFacts(0, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, rotary, rotary)})
    compressed: Any = cache.layers[0]
    dense: Any = PagedLayer(0, 0, cache.pool_settings)
    for layer in (compressed, dense):
        layer.open_pool(B * KV_HEADS, HEAD_DIM, torch.empty(0, dtype=dtype), [T] * B)
    for begin in range(0, T, CHUNK):
        S = min(CHUNK, T - begin)
        q, k, v = tokens(B, S, dtype, kept)
        dense.pool.append((k, v), [S] * (B * KV_HEADS))
        dense.next = [begin + S] * B
        store(compressed, CachePass(cache.facts, cache.layers, [S] * B, S), q, k, v)
    return cache, compressed, dense


def store(layer: DMCLayer, step: CachePass, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The chunk's tokens go into the rows as attend_many stores them, without its attention."""
    attention, decode = ops.attention, layer._decode
    nothing = torch.zeros_like(q), torch.zeros(q.shape[:3])
    ops.attention, layer._decode = (lambda *_, **__: nothing), (lambda *_, **__: nothing)  # type: ignore[assignment]
    try:
        layer.attend(step, q, k, v, Softmax(1.0))
    finally:
        ops.attention = attention
        del layer._decode
    assert decode == layer._decode


@torch.no_grad()  # as a cache runs
def decode_rows(dtype: torch.dtype, B: int, T: int, kept: tuple[float, ...], kind: str, repeats: int) -> list[Row]:
    cache, compressed, dense = filled(B, T, dtype, kept)
    drawn = [tokens(B, 1, dtype, kept) for _ in range(61)]
    softmax, turn = Softmax(HEAD_DIM**-0.5), [0, 0]

    def step(number: int, layer: Any) -> None:
        turn[number] += 1
        one = CachePass(cache.facts, cache.layers, (1,) * B, 1)
        layer.attend(one, *drawn[turn[number] % len(drawn)], softmax)

    seconds = alternate(repeats, lambda: step(0, compressed), lambda: step(1, dense))
    ratio = cache.total_compression_ratio()
    name = f"decode/{str(dtype).removeprefix('torch.')}/T{T}/B{B}/{kind}"
    entries = sum(map(sum, compressed.stored_lengths()))
    nbytes = 2 * entries * HEAD_DIM * dtype.itemsize
    return [Row(name, seconds[0], seconds[1], "dense, same kernel", bytes=nbytes, note=f"ratio {ratio:.2f}")]


def batch_rows(dtype: torch.dtype, T: int, kept: tuple[float, ...]) -> list[Row]:
    cache, compressed, dense = filled(1, T, dtype, kept)
    memory = 16 * dense.nbytes()
    fits = memory // compressed.nbytes()
    _, several, _ = filled(int(fits), T, dtype, kept) if T <= 4096 else (None, None, None)
    checked = "" if several is None else f", held {several.nbytes() / memory:.3f} of the memory"
    note = f"{fits} sequences, ratio {cache.total_compression_ratio():.2f}{checked}"
    name = f"batch/{str(dtype).removeprefix('torch.')}/T{T}"
    row = Row(name, 1 / fits, 1 / 16, "dense", bytes=compressed.nbytes(), note=note)
    return [row]


def main() -> None:
    choice = options(__doc__)
    quick = choice.quick
    repeats = 3 if quick else 9
    rows: list[Row] = []
    for width in (256,) if quick else (256, 1024):
        for autocast in (False, True):
            rows += step_rows(width, autocast, 2 if quick else 5)
    for dtype in (torch.float32, torch.bfloat16):
        rows += accumulate_rows(dtype, 2 * repeats)
    T = 8192 if quick else 32768
    for dtype in (torch.bfloat16,) if quick else (torch.float32, torch.bfloat16):
        for B in (1,) if quick else (1, 8):
            rows += decode_rows(dtype, B, T, KEPT, "ragged", 5 * repeats)
            rows += decode_rows(dtype, B, T, (0.25,) * KV_HEADS, "even", 5 * repeats)
            rows += decode_rows(dtype, B, T, (1.0,) * KV_HEADS, "ratio1", 5 * repeats)
    for length in (4096,) if quick else (4096, 32768):
        rows += batch_rows(torch.bfloat16, length, KEPT)
    report(rows, choice.json)


if __name__ == "__main__":
    main()
