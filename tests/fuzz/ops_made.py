"""Random good arguments of every op: sizes, dtypes, strides, empty dimensions, tables with shared pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from helpers import DTYPES, shared_table
from torch import Tensor

from kvcompress import ops
from kvcompress.ops import Lead, Noise, PageTable, Tail

Arguments = dict[str, Any]


class Maker:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.random = torch.Generator().manual_seed(chance.randrange(1 << 30))
        self.dtype = chance.choice(DTYPES)

    def between(self, least: int, most: int) -> int:
        return self.chance.randint(least, most)

    def once_in(self, many: int) -> bool:
        return self.chance.randrange(many) == 0

    def maybe(self, value: Any) -> Any:
        """The value, or None."""
        return value if self.chance.random() < 0.5 else None

    def heads(self) -> tuple[int, int, int]:
        """B, Hq, Hkv."""
        Hkv = self.between(1, 2)
        return self.between(1, 3), Hkv * self.between(1, 4), Hkv

    def head_dim(self) -> int:
        return (
            self.chance.choice([1, 2, 3, 4, 8, 15, 16, 17, 32, 64, 130]) if self.once_in(3) else 2 * self.between(1, 8)
        )

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Of any strides whose last one is 1."""
        dtype = dtype or self.dtype
        order = list(range(len(shape) - 1))
        if self.once_in(3):
            self.chance.shuffle(order)
        order.append(len(shape) - 1)
        room = [shape[d] for d in order]
        if self.once_in(4):
            room[-1] += self.between(0, 3)
        x = torch.randn(room, generator=self.random).to(dtype)[..., : shape[-1]]
        return x.permute([order.index(d) for d in range(len(shape))])

    def plain(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.random).to(dtype)

    def shares(self, *shape: int) -> Tensor:
        """float32 between 0 and 1."""
        return torch.rand(shape, generator=self.random)

    def ints(self, least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, max(most, least) + 1, shape, generator=self.random, dtype=torch.int32)

    def table(self, rows: int, page_size: int, longest: int, spare: int, shortest: int = 0) -> PageTable:
        return PageTable(*shared_table(self.between(0, 1 << 30), rows, page_size, longest, spare, shortest))

    def pages(self, table: PageTable, page_size: int, D: int) -> Tensor:
        return self.plain(table.refs.shape[0], page_size, D, dtype=self.dtype)

    def page_size(self) -> int:
        return 1 << self.between(0, 4)

    def angles(self, rows: int, D: int) -> Arguments:
        if self.once_in(4):
            return {"cos": None, "sin": None}
        half = self.between(0, D // 2)
        turned = self.plain(rows, half)
        return {"cos": turned.cos(), "sin": turned.sin()}

    def softmax(self, heads: int, *, sinks: bool = True) -> Arguments:
        made = {"scale": self.maybe(self.chance.uniform(0.01, 2)), "softcap": self.maybe(self.chance.uniform(0.5, 30))}
        return {**made, "sink_logits": self.maybe(self.plain(heads))} if sinks else made


def rope(make: Maker) -> Arguments:
    B, H, T, D = make.between(0, 3), make.between(0, 3), make.between(0, 9), make.head_dim()
    angles = make.plain(T + make.between(1, 9), make.between(0, D // 2))
    positions = make.maybe(make.ints(0, len(angles) - 1, B, T))
    return {
        "x": make.floats(B, H, T, D), "cos": angles.cos(), "sin": angles.sin(), "positions": positions,
        "inverse": make.once_in(2),
    }  # fmt: skip


def attention(make: Maker) -> Arguments:
    (B, Hq, Hkv), S, D = make.heads(), make.between(0, 20), make.head_dim()
    T, causal = S + make.between(0, 30), make.between(0, 3) > 0
    window = make.maybe(make.between(1, 20)) if causal else None
    return {
        "queries": make.floats(B, Hq, S, D), "keys": make.floats(B, Hkv, T, D), "values": make.floats(B, Hkv, T, D),
        "causal": causal, "window": window, "sinks": make.between(0, 3) if window else 0,
        "complement": window is not None and make.once_in(4), "key_bias": make.maybe(make.plain(B, Hkv, T)),
        "lengths": make.maybe(make.ints(0, T, B)), **make.softmax(Hq),
    }  # fmt: skip


def decode(make: Maker) -> Arguments:
    (B, Hq, Hkv), S, D, P = make.heads(), make.between(0, 3), make.head_dim(), make.page_size()
    longest, R, blocks = make.between(0, 70), B * Hkv, 0
    end = make.ints(0, longest, R)
    begin = torch.minimum(make.ints(0, longest, R), end)
    probabilities = make.plain(B, Hq, longest + 1) if S == 1 and make.once_in(3) else None
    made = {
        "queries": make.floats(B, Hq, S, D), "end": end, "begin": make.maybe(begin), "causal": make.once_in(2),
        "sinks": 0 if probabilities is not None else make.between(0, 3), "probabilities": probabilities,
        **make.softmax(Hq),
    }  # fmt: skip
    if probabilities is not None:
        made["causal"] = False
    if make.once_in(4):
        shape = (R + make.between(0, 1), longest, D)
        return {
            **made,
            "k_pages": make.plain(*shape, dtype=make.dtype),
            "v_pages": make.plain(*shape, dtype=make.dtype),
        }
    blocks, pages = -(-longest // P) + make.between(0, 2), make.between(1, 9)
    value_pages = make.between(1, 9)
    values = make.maybe(make.ints(0, value_pages - 1, R, blocks))
    return {
        **made, "block_table": make.ints(0, pages - 1, R, blocks), "value_table": values,
        "k_pages": make.plain(pages, P, D, dtype=make.dtype),
        "v_pages": make.plain(pages if values is None else value_pages, P, D, dtype=make.dtype),
    }  # fmt: skip


def quantize(make: Maker) -> Arguments:
    D = make.head_dim()
    x = make.floats(make.between(0, 3), make.between(0, 3), make.between(0, 9), D)
    return {"x": x, "format": "int4" if D % 2 == 0 and make.once_in(2) else "int8"}


def dequantize(make: Maker) -> Arguments:
    D, rows = make.head_dim(), (make.between(0, 3), make.between(0, 9))
    four = D % 2 == 0 and make.once_in(2)
    codes = make.ints(0, 255, *rows, D // 2).to(torch.uint8) if four else make.ints(-127, 127, *rows, D).to(torch.int8)
    scales = make.plain(*rows).half()
    return {"codes": codes, "scales": scales, "format": "int4" if four else "int8", "dtype": make.dtype}


def decode_shared(make: Maker) -> Arguments:
    (B, Hq, Hkv), D, P = make.heads(), make.head_dim(), make.page_size()
    longest, pages, R = make.between(0, 60), make.between(1, 9), B * Hkv
    end = make.ints(0, longest, R)
    return {
        "near": (make.plain(B, Hq, 1, D, dtype=make.dtype), make.plain(B, Hq, 1)),
        "probabilities": make.shares(B, Hq, longest + make.between(0, 3)), "far_lse": make.plain(B, Hq, 1),
        "v_pages": make.plain(pages, P, D, dtype=make.dtype), "begin": torch.minimum(make.ints(0, longest, R), end),
        "end": end, "block_table": make.ints(0, pages - 1, R, -(-longest // P) + make.between(0, 1)),
        "tau": make.maybe(make.chance.uniform(0, 1)),
    }  # fmt: skip


def merge_states(make: Maker) -> Arguments:
    shape = (make.between(0, 2), make.between(0, 3), make.between(0, 3), make.head_dim())
    return {"states": [(make.floats(*shape), make.plain(*shape[:3])) for _ in range(make.between(1, 3))]}


def window_scores(make: Maker) -> Arguments:
    (B, Hq, Hkv), W, D = make.heads(), make.between(1, 9), make.head_dim()
    T = W + make.between(1, 40)
    skip = make.maybe(make.between(0, T - 1))
    least = max(W, (W if skip is None else skip) + 1)
    return {
        "queries": make.floats(B, Hq, W, D), "keys": make.floats(B, Hkv, T, D),
        "reduce": make.chance.choice(ops.REDUCTIONS), "pooling": make.chance.choice(ops.POOLINGS),
        "kernel_size": 2 * make.between(0, 3) + 1, "lengths": make.maybe(make.ints(least, T, B)),
        "skip_last": skip, "mask_first": make.between(0, 5), "mask_last": make.between(0, 5), **make.softmax(Hq),
    }  # fmt: skip


def layer_similarity(make: Maker) -> Arguments:
    (L, Hq, Hkv), S, D = make.heads(), make.between(1, 9), make.head_dim()
    return {
        "queries": make.floats(L, Hq, S, D), "keys": make.floats(L, Hkv, S + make.between(0, 30), D),
        "sinks": make.between(0, 3), "recent": make.between(0, 9), **make.softmax(Hq, sinks=False),
    }  # fmt: skip


def select_topk(make: Maker) -> Arguments:
    R, T = make.between(0, 4), make.between(0, 60)
    k = make.between(0, T)
    scores = make.plain(R, T) if make.once_in(2) else make.ints(0, 4, R, T).float()  # ties
    return {"scores": scores, "k": k, "lengths": make.maybe(make.ints(k, T, R))}


def plan(make: Maker) -> Arguments:
    memory = make.between(1, 90)
    return {
        "prompt_length": make.between(0, 400), "chunk_size": make.between(1, 60), "memory_size": memory,
        "initial_memory": make.between(-1, memory), "schedule": make.chance.choice(ops.SCHEDULES),
        "dynamic": make.once_in(2), "layers": make.between(1, 4), "min_chunk": make.between(1, 9),
    }  # fmt: skip


def divide_memory(make: Maker) -> Arguments:
    L = make.between(0, 5)
    stored, highest = [make.between(0, 40) for _ in range(L)], [make.between(0, 60) for _ in range(L)]
    return {
        "total": make.between(0, 200), "kept": [make.between(0, n) for n in stored], "stored": stored,
        "lowest": [make.between(0, min(n, 9)) for n in highest], "highest": highest,
    }  # fmt: skip


def append_tokens(make: Maker) -> Arguments:
    B, H, S, P = make.between(0, 3), make.between(1, 3), make.between(0, 3), make.page_size()
    table = make.table(B * H, P, make.between(0, 20), B * H * (1 + -(-S // P)))
    shapes = [tuple(make.between(1, 4) for _ in range(make.between(0, 2))) for _ in range(make.between(1, 3))]
    dtypes = [make.chance.choice([*DTYPES, torch.int32]) for _ in shapes]
    pages = table.refs.shape[0]
    return {
        "arrays": [make.plain(pages, P, *shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)],
        "tokens": [make.plain(B, H, S, *shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)],
        "table": table, "counts": make.maybe(make.ints(0, S, B * H)),
    }  # fmt: skip


def truncate_rows(make: Maker) -> Arguments:
    P = make.page_size()
    table = make.table(make.between(1, 5), P, make.between(0, 40), make.between(0, 4))
    return {"table": table, "new_lengths": torch.minimum(make.ints(0, 40, len(table.lengths)), table.lengths),
            "page_size": P}  # fmt: skip


def compact_pages(make: Maker) -> Arguments:
    P, R = make.page_size(), make.between(1, 4)
    table = make.table(R, P, make.between(0, 30), 3 * R)
    chosen = [sorted(make.chance.sample(range(n), make.between(0, n))) for n in table.lengths.tolist()]
    K = max(map(len, chosen))
    indices = torch.zeros(R, K, dtype=torch.int32)
    for r, places in enumerate(chosen):
        indices[r, : len(places)] = torch.tensor(places, dtype=torch.int32)
    kept = [-1 if make.once_in(5) else len(places) for places in chosen]
    arrays = [make.plain(table.refs.shape[0], P, *([3] * make.between(0, 2))) for _ in range(make.between(1, 3))]
    return {"arrays": arrays, "table": table, "indices": indices, "kept": torch.tensor(kept, dtype=torch.int32)}


def dmc_decisions(make: Maker) -> Arguments:
    shape = (make.between(0, 2), make.between(0, 3), make.between(0, 9))
    drawn = Noise(make.between(0, 1 << 62), *(make.between(0, 1 << 40) for _ in range(4)))
    return {
        "logits": make.floats(*shape), "shift": make.chance.uniform(-2, 6), "temperature": make.chance.uniform(0.05, 2),
        "scale": make.chance.uniform(0.1, 2), "margin": make.chance.uniform(-1, 1),
        "noise": make.chance.choice([None, drawn, make.plain(*shape)]), "hard": make.once_in(3),
    }  # fmt: skip


def dmc_importance(make: Maker) -> Arguments:
    B, Hq, Hkv = make.heads()
    return {
        "logits": make.floats(B, Hq, make.between(0, 9)), "kv_heads": Hkv, "shift": make.chance.uniform(-2, 6),
        "eps": make.chance.uniform(0, 1), "reduce": make.chance.choice(ops.IMPORTANCES),
    }  # fmt: skip


def dmc_mask(make: Maker) -> Arguments:
    return {"tempered": make.plain(make.between(0, 2), make.between(0, 3), make.between(0, 9))}


def gates(make: Maker, *shape: int) -> Arguments:
    return {"alpha": make.shares(*shape), "omega": make.shares(*shape) + 0.1}


def dmc_accumulate(make: Maker) -> Arguments:
    B, H, T, D = make.between(0, 2), make.between(1, 2), make.between(1, 20), make.head_dim()
    window = make.maybe(make.between(1, 9))
    initial = None if window else make.maybe((make.plain(B, H, D), make.plain(B, H, D), make.shares(B, H)))
    return {
        "keys": make.floats(B, H, T, D), "values": make.floats(B, H, T, D), **gates(make, B, H, T),
        "neuron": make.maybe(make.between(-D, D - 1)), "window": window, "initial": initial,
    }  # fmt: skip


def dmc_rows(make: Maker, B: int, H: int, D: int, S: int, neuron: int | None) -> Arguments:
    """Pages, table and tail that fit each other."""
    P, R, window = make.page_size(), B * H, make.maybe(make.between(1, 5))
    table, N = make.table(R, P, make.between(0, 20), R * (2 + S // P)), window or 1
    counts = torch.where(table.lengths > 0, make.ints(1, 6, R), 0).to(torch.int32)
    tail = Tail(make.plain(R, N, D), make.plain(R, N, D), make.shares(R, N) + 0.1, counts)
    if neuron is not None:
        tail.keys[..., neuron] = 0
    return {
        "k_pages": make.pages(table, P, D), "v_pages": make.pages(table, P, D), "table": table, "tail": tail,
        "window": window,
    }  # fmt: skip


def dmc_append(make: Maker) -> Arguments:
    B, H, S, D = make.between(1, 2), make.between(1, 2), make.between(0, 3), make.head_dim()
    neuron = make.maybe(make.between(-D, D - 1))
    return {
        **dmc_rows(make, B, H, D, S, neuron), "keys": make.floats(B, H, S, D), "values": make.floats(B, H, S, D),
        **gates(make, B, H, S), **make.angles(30, D), "positions": make.maybe(make.ints(0, 29, B, S)),
        "counts": make.maybe(make.ints(0, S, B * H)), "neuron": neuron,
    }  # fmt: skip


def dmc_step(make: Maker) -> Arguments:
    (B, Hq, Hkv), D = make.heads(), make.head_dim()
    neuron = make.between(-D, D - 1)
    decided = gates(make, B, Hkv, 1) if make.once_in(2) else {"alpha": None, "omega": None}
    return {
        "queries": make.floats(B, Hq, 1, D), "keys": make.floats(B, Hkv, 1, D), "values": make.floats(B, Hkv, 1, D),
        **dmc_rows(make, B, Hkv, D, 1, neuron), "places": make.ints(0, 20, B, 1), "neuron": neuron,
        "offsets": make.maybe(make.ints(0, 9, B, 1)), **decided, **make.angles(40, D), **make.softmax(Hq),
        "shift": make.chance.uniform(-1, 1), "reduce": make.chance.choice(ops.IMPORTANCES),
    }  # fmt: skip


def step_rows(make: Maker, B: int, Hkv: int, D: int, S: int, shortest: int = 0) -> Arguments:
    P, R = make.page_size(), B * Hkv
    table = make.table(R, P, make.between(shortest, 30), R * (1 + -(-S // P)), shortest)
    return {"k_pages": make.pages(table, P, D), "v_pages": make.pages(table, P, D), "table": table}


def paged_step(make: Maker) -> Arguments:
    (B, Hq, Hkv), S, D = make.heads(), make.between(1, 3), make.head_dim()
    rows = step_rows(make, B, Hkv, D, S)
    table, R = rows["table"], B * Hkv
    shift = make.maybe(torch.full((R,), 40, dtype=torch.int32) - table.lengths)
    if shift is None:  # all heads of a sequence stand at one place
        shift = (
            table.lengths.view(B, Hkv).amax(1, keepdim=True).expand(B, Hkv).flatten().to(torch.int32) - table.lengths
        )
    begin = torch.minimum(make.ints(0, 30, R), table.lengths)
    return {
        "queries": make.floats(B, Hq, S, D), "keys": make.floats(B, Hkv, S, D), "values": make.floats(B, Hkv, S, D),
        **rows, "shift": shift, "begin": make.maybe(begin), **make.angles(50, D), **make.softmax(Hq),
    }  # fmt: skip


def quest_step(make: Maker) -> Arguments:
    make.dtype = torch.float32  # which pages are read follows from sums that a coarser type rounds together
    (B, Hq, _), D = make.heads(), make.head_dim()
    rows = step_rows(make, B, 1, D, 1, 1)
    table, P = rows["table"], rows["k_pages"].shape[1]
    ranges = torch.zeros(B, table.block_table.shape[1], 2 * D)
    for r, n in enumerate(table.lengths.tolist()):
        for i in range(-(-n // P)):
            held = rows["k_pages"][table.block_table[r, i], : min(P, n - i * P)]
            ranges[r, i] = torch.cat([held.amax(0), (-held).amax(0)])
    return {
        "queries": make.floats(B, Hq, 1, D), "keys": make.floats(B, 1, 1, D), "values": make.floats(B, 1, 1, D), **rows,
        "ranges": ranges, "pages_read": make.between(1, 5), **make.angles(50, D), **make.softmax(Hq),
    }  # fmt: skip


def ring_step(make: Maker) -> Arguments:
    (B, Hq, Hkv), D, R = make.heads(), make.head_dim(), 0
    R, window, kind = B * Hkv, make.between(1, 6), make.chance.choice(["plain", "chunked", "sinks", "far", "pages"])
    sinks = make.between(1, 3) if kind in ("sinks", "far") else 0
    capacity = window + sinks
    made = {
        "queries": make.floats(B, Hq, 1, D), "keys": make.floats(B, Hkv, 1, D), "values": make.floats(B, Hkv, 1, D),
        "k_ring": make.plain(R, capacity, D, dtype=make.dtype), "v_ring": make.plain(R, capacity, D, dtype=make.dtype),
        "places": make.ints(0, 20, B, 1), "window": window, "sinks": sinks, "chunked": kind == "chunked",
        "base": None, **make.angles(40, D), **make.softmax(Hq),
    }  # fmt: skip
    if kind == "far":
        made |= {name: make.plain(R, sinks, D, dtype=make.dtype) for name in ("k_far", "v_far")}
    if kind == "pages":
        made |= step_rows(make, B, Hkv, D, 1) | {
            "marks": make.ints(0, 1, R, capacity).bool(), "alpha": make.maybe(make.shares(B, Hkv, 1)),
            "neuron": make.between(0, D - 1), "own": bool(make.between(0, 1)),
        }  # fmt: skip
    return made


def pod_attention(make: Maker) -> Arguments:
    (B, Hq, Hkv), S, D = make.heads(), make.between(0, 12), make.head_dim()
    T = S + make.between(0, 20)
    return {
        "queries": make.floats(B, Hq, S, D), "keys": make.floats(B, Hkv, T, D), "values": make.floats(B, Hkv, T, D),
        "lead_queries": make.floats(B, Hq, S, D), "lead_keys": make.floats(B, Hkv, T, D), "sinks": make.between(0, 3),
        "recent": make.between(1, 9), "lengths": make.maybe(make.ints(0, T, B)), **make.softmax(Hq),
    }  # fmt: skip


def pod_step(make: Maker) -> Arguments:
    (B, Hq, Hkv), D, P = make.heads(), make.head_dim(), make.page_size()
    R, n, far = B * Hkv, make.between(0, 30), make.chance.choice(["none", "own", "led", "shared"])
    # rows of one length, as the layers of a model have them, whose keys and values have tables of their own
    tables = [make.table(R, P, n, 2 * R, n) for _ in range(2)]
    sinks, recent = make.between(0, 3), make.between(1, 9)
    made = {
        "queries": make.floats(B, Hq, 1, D), "keys": make.floats(B, Hkv, 1, D), "values": make.floats(B, Hkv, 1, D),
        "k_pages": make.pages(tables[0], P, D), "v_pages": make.pages(tables[1], P, D), "table": tables[0],
        "value_table": tables[1], "places": torch.full((B, 1), n, dtype=torch.int32), "sinks": sinks, "recent": recent,
        "first": make.between(0, 3), "far": far, **make.angles(40, D), **make.softmax(Hq),
    }  # fmt: skip
    columns = n + 1
    if far == "own":
        made |= {"far_lse": torch.zeros(B, Hq, 1), "probabilities": make.maybe(torch.zeros(B, Hq, columns))}
    if far == "shared":
        made |= {"far_lse": make.plain(B, Hq, 1), "probabilities": make.shares(B, Hq, columns),
                 "tau": make.maybe(make.chance.uniform(0, 1))}  # fmt: skip
    if far == "led":
        pages, blocks = make.between(1, 6), tables[0].block_table.shape[1]
        made["lead"] = Lead(
            make.floats(B, Hq, 1, D), make.plain(pages, P, D, dtype=make.dtype), make.ints(0, pages - 1, R, blocks)
        )
    return made


MADE: dict[str, Callable[[Maker], Arguments]] = {
    "rope": rope, "attention": attention, "decode": decode, "decode_shared": decode_shared,
    "quantize": quantize, "dequantize": dequantize,
    "merge_states": merge_states, "window_scores": window_scores, "layer_similarity": layer_similarity,
    "select_topk": select_topk, "plan": plan, "divide_memory": divide_memory, "append_tokens_": append_tokens,
    "truncate_rows_": truncate_rows, "compact_pages_": compact_pages, "dmc_decisions": dmc_decisions,
    "dmc_importance": dmc_importance, "dmc_mask": dmc_mask, "dmc_accumulate": dmc_accumulate,
    "dmc_append_": dmc_append, "dmc_step_": dmc_step, "paged_step_": paged_step, "quest_step_": quest_step,
    "ring_step_": ring_step, "pod_attention": pod_attention, "pod_step_": pod_step,
}  # fmt: skip
