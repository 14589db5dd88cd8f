"""Single ops: decode, of codes too, decode_shared, scores and attention, beside a peer, and how near the ceiling."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.common import COLD_NBYTES, Row, visible
from benchmarks.gpu.measure.turns import alternate, copy_bandwidth, device, product_rate
from kvcompress import ops
from kvcompress.caches.formats import FORMATS

HQ, HKV, D, PAGE, W = 32, 8, 128, 64, 64
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Sizes:
    """decode: dtype, B and T of its rows; turns: new tokens and T of its rows; scored: window and T of theirs;
    attended: mask, T and head dim of theirs."""

    repeats: int
    product: int
    decode: tuple[tuple[torch.dtype, int, int], ...]
    turns: tuple[tuple[int, int], ...]
    scored: tuple[tuple[int, int], ...]
    attended: tuple[tuple[str, int, int], ...]


SIZES = {
    "full": Sizes(
        41, 8192, tuple(itertools.product((BF16, F32), (1, 8), (4096, 32768))),
        ((64, 4096), (64, 32768), (512, 32768), (2048, 32768)), ((W, 4096), (W, 32768), (8192, 8192), (32768, 32768)),
        (("causal", 8192, 128), ("causal", 8192, 64), ("window", 8192, 128)),
    ),
    "quick": Sizes(
        11, 8192, ((BF16, 1, 4096), (BF16, 8, 32768)), ((512, 4096),), ((W, 4096),), (("causal", 4096, 128),),
    ),
    "tiny": Sizes(
        1, 64, ((BF16, 1, 128), (F32, 2, 256)), ((20, 128),), ((W, 256), (96, 96)),
        (("causal", 128, 64), ("window", 128, 64)),
    ),
}  # fmt: skip


def pages_of(k: torch.Tensor, v: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [R, T, D], T a multiple of page, as pages in random order and their table."""
    R, T, dim = k.shape
    order = torch.randperm(R * T // page, device=k.device)
    k_pages, v_pages = (torch.empty(R * T // page, page, dim, dtype=k.dtype, device=k.device) for _ in range(2))
    k_pages[order], v_pages[order] = k.reshape(-1, page, dim), v.reshape(-1, page, dim)
    return k_pages, v_pages, order.to(torch.int32).reshape(R, T // page)


def decode_rows(size: str) -> Iterator[Row]:
    bandwidth = copy_bandwidth(COLD_NBYTES[size])
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for dtype, B, T in SIZES[size].decode:
        R = B * HKV
        nbytes = 2 * R * T * D * dtype.itemsize
        copies = max(1, -(-COLD_NBYTES[size] // nbytes))
        caches = []
        for _ in range(copies):
            k, v = (torch.randn(R, T, D, device=device(), dtype=dtype) for _ in range(2))
            caches.append((k, v, *pages_of(k, v, PAGE)))
        queries = torch.randn(B, HQ, 1, D, device=device(), dtype=dtype)
        full = torch.full((R,), T, dtype=torch.int32, device=device())
        shares = torch.tensor([1.0, 1 / 2, 1 / 8, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 8])  # mean 1/4
        ragged = (T * shares).to(torch.int32).repeat(B).to(device())
        turn = itertools.cycle(range(copies))

        def contiguous(caches=caches, queries=queries, end=full, turn=turn):
            return ops.decode(queries, *caches[next(turn)][:2], end)

        def paged(caches=caches, queries=queries, end=full, turn=turn):
            _, _, k_pages, v_pages, table = caches[next(turn)]
            return ops.decode(queries, k_pages, v_pages, end, block_table=table)

        def compressed(paged=paged, ragged=ragged):
            return paged(end=ragged)

        def peer(caches=caches, queries=queries, turn=turn, B=B):
            k, v = (x.unflatten(0, (B, HKV)) for x in caches[next(turn)][:2])
            return sdpa(queries, k, v, enable_gqa=True)

        near = torch.randn_like(queries), torch.randn(B, HQ, 1, device=device())
        weights = torch.full((B, HQ, T), 1 / T, device=device())
        begin = torch.zeros_like(full)

        def leading(caches=caches, queries=queries, end=full, turn=turn, weights=weights):
            _, _, k_pages, v_pages, table = caches[next(turn)]
            return ops.decode(queries, k_pages, v_pages, end, block_table=table, probabilities=weights)

        def following(caches=caches, near=near, begin=begin, end=full, turn=turn, weights=weights):
            _, _, _, v_pages, table = caches[next(turn)]
            return ops.decode_shared(near, weights, near[1], v_pages, begin, end, block_table=table)

        times = alternate(SIZES[size].repeats, contiguous, paged, compressed, peer, leading, following)
        part = int(nbytes * ragged.sum() / full.sum())
        name = f"{str(dtype).removeprefix('torch.')}/T{T}/B{B}"
        for kind, seconds, moved, note in (
            ("decode", times[0], nbytes, "contiguous rows"),
            (f"decode/paged{PAGE}", times[1], nbytes, "ratio 1 through pages"),
            ("decode/ragged4", times[2], part, f"{times[1] / times[2]:.2f}x our own dense time at compression 4"),
        ):
            note = f"{moved / seconds / 1e9:.0f} GB/s; {note}"
            yield Row(f"{kind}/{name}", seconds, times[3], "SDPA, dense", moved / seconds / bandwidth, moved, note)
        for kind, seconds, moved in (
            ("decode/probabilities", times[4], nbytes + 12 * B * HQ * T),
            ("decode_shared", times[5], nbytes // 2 + 4 * B * HQ * T),
        ):
            note = f"{moved / seconds / 1e9:.0f} GB/s"
            peer_name = "decode, the same pages"
            yield Row(f"{kind}/{name}", seconds, times[1], peer_name, moved / seconds / bandwidth, moved, note)


def code_rows(size: str) -> Iterator[Row]:
    """Decoding over rows of codes, beside our own bfloat16 in pages; and tokens that become codes."""
    bandwidth = copy_bandwidth(COLD_NBYTES[size])
    for dtype, B, T in SIZES[size].decode:
        if dtype != BF16:
            continue
        R, drawn = B * HKV, [torch.randn(B * HKV, T, D, device=device(), dtype=BF16) for _ in range(2)]
        queries = torch.randn(B, HQ, 1, D, device=device(), dtype=BF16)
        end = torch.full((R,), T, dtype=torch.int32, device=device())
        plain = 2 * R * T * D * BF16.itemsize
        copies = max(1, -(-COLD_NBYTES[size] // plain) * 4)
        k_pages, v_pages, table = pages_of(*drawn, PAGE)
        pages: dict[str, list[tuple[torch.Tensor, ...]]] = {"bfloat16": [(k_pages, v_pages)]}
        for kind, (of_keys, of_values) in FORMATS.items():
            k, v = ops.quantize(k_pages, of_keys), ops.quantize(v_pages, of_values)
            pages[kind] = [(k[0], v[0], k[1], v[1])]
        for first in pages.values():  # so many that none is left in a cache when its turn comes
            first += [tuple(x.clone() for x in first[0]) for _ in range(copies - 1)]
        turn = itertools.cycle(range(copies))

        def over(kind, queries=queries, pages=pages, end=end, table=table, turn=turn):
            k_pages, v_pages, *scales = pages[kind][next(turn)]
            named = dict(zip(("key_scales", "value_scales"), scales, strict=False))
            return ops.decode(queries, k_pages, v_pages, end, block_table=table, **named)

        times = alternate(SIZES[size].repeats, *(functools.partial(over, kind) for kind in pages))
        for kind, seconds in zip(FORMATS, times[1:], strict=True):
            moved = sum(x.nbytes for x in pages[kind][0])
            note = f"{moved / seconds / 1e9:.0f} GB/s; {times[0] / seconds:.2f}x our bfloat16"
            name = f"decode/{kind}/T{T}/B{B}"
            yield Row(
                name, seconds, times[0], f"decode/paged{PAGE}, bfloat16", moved / seconds / bandwidth, moved, note
            )
        (seconds,) = alternate(SIZES[size].repeats, functools.partial(ops.quantize, k_pages, "int8"))
        moved = k_pages.nbytes + pages["int8"][0][0].nbytes + pages["int8"][0][2].nbytes
        note = f"{moved / seconds / 1e9:.0f} GB/s"
        yield Row(f"quantize/int8/T{T}/B{B}", seconds, None, None, moved / seconds / bandwidth, moved, note)


def turn_rows(size: str) -> Iterator[Row]:
    """Many new tokens over rows of pages that hold them and what came before."""
    rate = product_rate(SIZES[size].product)
    sdpa, lower_right = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.bias.causal_lower_right
    for S, T in SIZES[size].turns:
        k, v = (torch.randn(HKV, T, D, device=device(), dtype=BF16) for _ in range(2))
        k_pages, v_pages, table = pages_of(k, v, PAGE)
        queries = torch.randn(1, HQ, S, D, device=device(), dtype=BF16)
        end = torch.full((HKV,), T, dtype=torch.int32, device=device())
        repeated, bias = [x[None].repeat_interleave(HQ // HKV, 1) for x in (k, v)], lower_right(S, T)

        def ours(queries=queries, pages=(k_pages, v_pages), end=end, table=table):
            return ops.decode(queries, *pages, end, block_table=table, causal=True)

        def peer(queries=queries, repeated=repeated, bias=bias):
            return sdpa(queries, *repeated, attn_mask=bias)

        times = alternate(SIZES[size].repeats, ours, peer)
        done = 4 * D * HQ * (S * T - S * (S - 1) // 2)
        note = f"{done / times[0] / 1e12:.0f} TFLOP/s; SDPA {done / times[1] / 1e12:.0f}"
        name = f"decode/turn/bfloat16/S{S}/T{T}/Hq{HQ}/Hkv{HKV}/D{D}"
        yield Row(name, *times, "SDPA, causal, heads repeated, no pages", done / times[0] / rate, 2 * k.nbytes, note)


def score_rows(size: str) -> Iterator[Row]:
    """A window's scores as SnapKV has them, and those of all queries as Replay has them."""
    rate = product_rate(SIZES[size].product)
    for window, T in SIZES[size].scored:
        queries, keys = (torch.randn(1, H, n, D, device=device(), dtype=BF16) for H, n in ((HQ, window), (HKV, T)))
        every = window == T
        options = {"reduce": "max", "kernel_size": 1, "skip_last": 0} if every else {}

        def ours(queries=queries, keys=keys, options=options):
            return ops.window_scores(queries, keys, **options)

        def peer(queries=queries, keys=keys, every=every, T=T):
            found, each = [], min(queries.shape[2], 1024)  # queries at a time: their logits are held
            for first in range(0, queries.shape[2], each):
                part, end = queries[:, :, first : first + each], T - queries.shape[2] + first + each
                hidden = torch.ones(each, end, dtype=torch.bool, device=device()).triu(end - each + 1)
                logits = (part.reshape(1, HKV, -1, D) @ keys[:, :, :end].mT * D**-0.5).unflatten(2, (-1, each))
                votes = logits.masked_fill_(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
                votes = votes.amax((2, 3)) if every else votes.mean((2, 3))
                found.append(torch.nn.functional.pad(votes, (0, T - end)))
            if every:
                return torch.stack(found).amax(0)
            return torch.nn.functional.avg_pool1d(found[0][..., : T - queries.shape[2]], 5, 1, 2)

        times = alternate(min(SIZES[size].repeats, 5 if every else 41), ours, peer)
        pairs = T * (T + 1) // 2 if every else window * T
        done = 4 * D * HQ * pairs  # each logit twice
        note = f"{done / times[0] / 1e12:.0f} TFLOP/s"
        name = f"score/bfloat16/T{T}/Hq{HQ}/Hkv{HKV}/D{D}/W{window}"
        yield Row(name, *times, "matmul, mask, softmax, reduction", done / times[0] / rate, keys.nbytes, note)


def attention_rows(size: str) -> Iterator[Row]:
    rate = product_rate(SIZES[size].product)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for kind, T, dim in SIZES[size].attended:
        mask = {"window": T // 8, "sinks": 16} if kind == "window" else {}
        q = torch.randn(1, HQ, T, dim, device=device(), dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(1, HKV, T, dim, device=device(), dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        )
        seen = visible(T, **mask, device=q.device) if mask else None
        pairs = T * (T + 1) // 2 if seen is None else int(seen.sum())
        grad = torch.randn_like(q)

        def ours(q=q, k=k, v=v, mask=mask):
            return ops.attention(q, k, v, **mask)[0]

        def peer(q=q, k=k, v=v, seen=seen):
            return sdpa(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)

        def both(forward, grad=grad):
            forward().backward(grad)

        with torch.no_grad():
            forward = alternate(SIZES[size].repeats, ours, peer)
        backward = alternate(SIZES[size].repeats, lambda ours=ours: both(ours), lambda peer=peer: both(peer))
        for what, times, flops in (("forward", forward, 4), ("forward+backward", backward, 14)):
            done = flops * dim * HQ * pairs
            note = f"{done / times[0] / 1e12:.0f} TFLOP/s; SDPA {done / times[1] / 1e12:.0f}"
            name = f"attention/{kind}/{what}/bfloat16/T{T}/D{dim}/Hkv{HKV}"
            peer_name = "SDPA, causal" if seen is None else "SDPA, boolean mask"
            yield Row(name, *times, peer_name, done / times[0] / rate, None, note)
