"""Calls at the ends of what a GPU may be asked: 2^20 tokens, 512 sequences, 1 to 128 heads, head dims up to 512.

The emulation notes launches and touches no memory, but an allocator may refuse what could never be there: inputs are
one row that stands for all where an op takes any strides, a table's rows share their pages, and no size below makes an
array of more than 4.3 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvcompress import ops

from .arrays import floats, ints

MILLION, MOST_B, MOST_HEADS, MOST_D, PAGE = 1 << 20, 512, 128, 512, 16
# B, Hkv, Hq, T, D: each of them at its end, beside the others as large as the bytes allow
SHAPES = (
    (1, 1, 1, MILLION, MOST_D),
    (1, 8, 8, MILLION, 64),
    (1, 1, 16, MILLION, 64),
    (MOST_B, 8, 32, 128, 128),
    (MOST_B, 1, MOST_HEADS, 24, MOST_D),
    (4, MOST_HEADS, MOST_HEADS, 1000, MOST_D),
    (4, 1, MOST_HEADS, 1000, MOST_D),
)
# B, Hkv, most tokens of a row of pages; the last but one has 2^20 rows
TABLES = ((1, 1, MILLION), (1, MOST_HEADS, MILLION), (MOST_B, 8, 4096), (MILLION // MOST_HEADS, MOST_HEADS, PAGE),
          (MOST_B, 8, MILLION))  # fmt: skip
READ = 1 << 27  # tokens of all rows that attention is asked for: each piece of them has results in scratch
ELEMENTS = 1 << 30  # of one array
DTYPES = (torch.float32, torch.bfloat16)
Call = tuple[str, Callable[[], object]]


def alike(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One row that is all of them."""
    return torch.empty(shape[-1], dtype=dtype).expand(shape)


def table_of(rows: int, T: int, pages: int = 64) -> ops.PageTable:
    return ops.PageTable(ints(rows, T // PAGE), ints(rows), ints(pages), ints(pages), ints(2))


def without_pages(B: int, Hkv: int, Hq: int, T: int, D: int, dtype: torch.dtype) -> Iterator[Call]:
    native = torch.ops.kvcompress
    tail = f"{str(dtype)[6:]}/{B}x{Hkv}x{Hq}x{T}x{D}"
    q, k, half = alike(B, Hq, T, D, dtype=dtype), alike(B, Hkv, T, D, dtype=dtype), floats(T, D // 2)
    dense, lse, mask = torch.empty(B, Hq, T, D, dtype=dtype), floats(B, Hq, T), (0.1, True, 0, 0, False, None, 0.0)
    yield f"rope/{tail}", lambda: ops.rope(q, half, half)
    yield f"quantize/{tail}", lambda: ops.dequantize(*ops.quantize(k, "int8"), "int8", dtype)
    yield f"merge_states/{tail}", lambda: ops.merge_states((dense, lse), (dense, lse))
    yield f"attention/{tail}", lambda: native.attention(q, k, k, None, None, *mask)
    yield (
        f"attention_backward/{tail}",
        lambda: native.attention_backward(dense, lse, q, k, k, None, None, dense, lse, *mask),
    )
    window = q[:, :, -min(T // 2, 64) :]
    yield f"window_scores/{tail}", lambda: ops.window_scores(window, k)
    if B <= 188:
        yield f"layer_similarity/{tail}", lambda: ops.layer_similarity(window[:, :, -1:], k)
    gates, states = floats(B, Hkv, T), floats(B, Hkv, -(-T // 64), 2, D)
    keys, none = torch.empty(B, Hkv, T, D, dtype=dtype), floats(B, Hkv, 0, 2, D)
    for window_size in (0, min(T - 1, ops.MAX_DMC_WINDOW)):
        held = none if window_size else states
        yield (
            f"dmc_accumulate/{tail}",
            lambda w=window_size: native.dmc_accumulate(keys, keys, gates, gates, None, None, None, -1, w),
        )
        yield (
            f"dmc_accumulate_backward/{tail}",
            lambda w=window_size, s=held: native.dmc_accumulate_backward(
                keys, keys, keys, keys, gates, gates, None, gates, s, -1, w
            ),
        )
    logits = torch.empty(B, Hq, T, dtype=dtype)
    yield f"dmc_decisions/{tail}", lambda: ops.dmc_decisions(logits)
    yield f"dmc_importance/{tail}", lambda: ops.dmc_importance(logits, Hkv)
    yield f"dmc_mask/{tail}", lambda: ops.dmc_mask(gates)


def with_pages(B: int, Hkv: int, T: int, D: int, dtype: torch.dtype) -> Iterator[Call]:
    rows, table = B * Hkv, table_of(B * Hkv, T)
    tail = f"{str(dtype)[6:]}/{B}x{Hkv}x{T}x{D}"
    pages = [torch.empty(table.refs.shape[0], PAGE, D, dtype=dtype) for _ in range(2)]
    counts, kept = ints(rows), ints(rows, min(T, ELEMENTS // rows))
    new = torch.empty(1, rows, max(1, min(T, ELEMENTS // 2 // rows // D)), D, dtype=dtype)
    yield f"append_tokens/{tail}", lambda: ops.append_tokens_(pages, [new, new], table)
    yield f"truncate_rows/{tail}", lambda: ops.truncate_rows_(table, counts, PAGE)
    yield f"compact_pages/{tail}", lambda: ops.compact_pages_(pages, table, kept, kept=counts)
    tails = ops.Tail(floats(rows, 1, D), floats(rows, 1, D), floats(rows, 1), ints(rows))
    gates = floats(1, rows, new.shape[2])
    yield f"dmc_append/{tail}", lambda: ops.dmc_append_(*pages, table, tails, new, new, gates, gates)
    if rows * T <= READ:
        for heads in sorted({Hkv, MOST_HEADS}):
            yield from steps(f"{tail}/{heads}", torch.empty(B, heads, 1, D, dtype=dtype), pages, table, tails, T)


def steps(name: str, q: Tensor, pages: list[Tensor], table: ops.PageTable, tails: ops.Tail, T: int) -> Iterator[Call]:
    """What a decoded token of q [B, heads, 1, D] asks."""
    B, heads, _, D = q.shape
    rows, blocks = table.block_table.shape
    one, places, turns = q.new_empty(B, rows // B, 1, D), ints(B, 1), floats(T, D // 2)
    given, rotated = (q, one, one, *pages, table), {"cos": turns, "sin": turns}
    yield f"paged_step/{name}", lambda: ops.paged_step_(*given, **rotated)
    yield f"dmc_step/{name}", lambda: ops.dmc_step_(*given, tails, places, neuron=-1, **rotated)
    lead = table_of(rows, T)
    yield (
        f"pod_step/{name}",
        lambda: ops.pod_step_(*given, lead, places, sinks=4, recent=min(64, T // 2), first=1, **rotated),
    )
    if rows * blocks * 2 * D <= ELEMENTS:
        ranges = q.new_empty(rows, blocks, 2 * D)
        yield f"quest_step/{name}", lambda: ops.quest_step_(*given[:5], ranges, table, pages_read=blocks, **rotated)
    if (slots := min(T, ELEMENTS // (2 * rows * D))) > 4:
        ring = q.new_empty(2, rows, slots, D)
        yield (
            f"ring_step/{name}",
            lambda: ops.ring_step_(q, one, one, *ring, places, window=slots - 4, sinks=4, **rotated),
        )
    listed = {"block_table": table.block_table}
    yield f"decode/{name}", lambda: ops.decode(q, *pages, table.lengths, **listed)
    if q.dtype == torch.bfloat16 and D <= 256:  # elsewhere by slabs, of which the emulation has more than a GPU
        many = alike(B, heads, min(T, ELEMENTS // (B * heads * D)), D, dtype=q.dtype)
        yield f"decode/{name}/tokens", lambda: ops.decode(many, *pages, table.lengths, causal=True, **listed)
    if B * heads * T <= ELEMENTS:
        columns, lse = floats(B, heads, T), floats(B, heads, 1)
        yield (
            f"decode/{name}/probabilities",
            lambda: ops.decode(q, *pages, table.lengths, probabilities=columns, **listed),
        )
        yield (
            f"decode_shared/{name}",
            lambda: ops.decode_shared((q, lse), columns, lse, pages[1], table.lengths, table.lengths, **listed),
        )


def extremes() -> Iterator[Call]:
    """Name and call, as launches.calls gives them."""
    for T, rows in ((MILLION, MOST_B), (1000, MILLION), (1, MILLION)):
        yield f"select_topk/{rows}x{T}", lambda T=T, rows=rows: ops.select_topk(floats(rows, T), T // 2)
    for dtype in DTYPES:
        for shape in SHAPES:
            yield from without_pages(*shape, dtype)
        for B, Hkv, T in TABLES:
            for D in (64, MOST_D):
                yield from with_pages(B, Hkv, T, D, dtype)
