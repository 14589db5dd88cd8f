"""Which kernels our launchers start, in blocks of how many threads, with how much dynamic shared memory.

The ops run in the tests' emulation of CUDA, which tells each launch to a function here in place of running it. No
tensor is read or written, so that they may be as large as on a GPU; sizes below are those that make blocks largest (a
block of 1,024 threads wherever a launcher chooses) and that lead through every branch of every launcher. Those of
extremes.py come behind them: what a launcher makes of them may be refused, or ask for more than a block may have.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvcompress import ops

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "cuda_emulation"))
import emulated

from .arrays import floats, ints
from .extremes import extremes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256, 512)  # the last one of each set of kernels
Taker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t)


@dataclass(frozen=True)
class Launch:
    """kernel: as c++filt writes it, without its result type. call: op, dtype, head dim, e.g. decode/bfloat16/128."""

    kernel: str
    blocks: int
    threads: int
    shared: int
    call: str


def plain_name(demangled: str) -> str:
    """A kernel's name without its result type, which only templates have."""
    return demangled.removeprefix("void ")


def _symbols(library: Path) -> list[tuple[int, str]]:
    listing = subprocess.run(["nm", "-C", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    fields = (line.split(" ", 2) for line in listing.stdout.splitlines())
    return [(int(address, 16), plain_name(name)) for address, kind, name in fields if kind in "tT"]


def table_of(rows: int, blocks: int) -> ops.PageTable:
    pages = rows * blocks
    return ops.PageTable(ints(rows, blocks), ints(rows), ints(pages), ints(pages), ints(2))


def pages_of(table: ops.PageTable, page: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(table.refs.shape[0], page, D, dtype=dtype) for _ in range(2)]


def codes_of(table: ops.PageTable, page: int, D: int, values: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Pages of codes, of 8 bits and `values`, and their scales."""
    pages = table.refs.shape[0]
    keys = torch.empty(pages, page, D, dtype=torch.int8)
    kind = torch.int8 if values == 8 else torch.uint8
    scales = {name: torch.empty(pages, page, dtype=torch.float16) for name in ("key_scales", "value_scales")}
    return [keys, torch.empty(pages, page, D * values // 8, dtype=kind)], scales


def code_calls(dtype: torch.dtype, D: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Of rows of codes; D is even."""
    tail, half = f"{str(dtype)[6:]}/{D}", floats(4096, D // 2)
    new = torch.empty(1, 2, 100, D, dtype=dtype)
    for kind in ("int8", "int4"):
        yield f"quantize/{tail}", lambda k=kind: ops.dequantize(*ops.quantize(new, k), k, dtype)
    for bits, batch in itertools.product((8, 4), (1, 200)):
        table = table_of(2 * batch, 8)
        pages, scales = codes_of(table, 16, D, bits)
        x, one = torch.empty(batch, 2, 1, D, dtype=dtype), torch.empty(batch, 8, 1, D, dtype=dtype)
        yield (
            f"paged_step/codes/{tail}",
            lambda p=pages, s=scales, t=table, x=x, q=one: ops.paged_step_(q, x, x, *p, t, cos=half, sin=half, **s),
        )
        ranges = torch.empty(2 * batch, 8, 2 * D, dtype=dtype)
        yield (
            f"quest_step/codes/{tail}",
            lambda p=pages, s=scales, t=table, x=x, q=one, r=ranges: ops.quest_step_(
                q, x, x, *p, r, t, pages_read=3, cos=half, sin=half, **s
            ),
        )
        yield (
            f"pod_step/codes/{tail}",
            lambda p=pages, s=scales, t=table, x=x, q=one, b=batch: ops.pod_step_(
                q, x, x, *p, t, table_of(*t.block_table.shape), ints(b, 1), sinks=4, recent=64, first=1, cos=half,
                sin=half, **s,
            ),
        )  # fmt: skip
        for cap, heads, columns in itertools.product((None, 20.0), (2, 16), (None, 128)):
            queries = torch.empty(batch, heads, 1, D, dtype=dtype)
            probabilities = None if columns is None else floats(batch, heads, columns)
            yield (
                f"decode/codes/{tail}",
                lambda p=pages, s=scales, t=table, q=queries, c=cap, x=probabilities: ops.decode(
                    q, *p, t.lengths, block_table=t.block_table, softcap=c, probabilities=x, **s
                ),
            )
        for heads in (2, 4, 16):  # one, two and eight query heads per KV head
            near = torch.empty(batch, heads, 1, D, dtype=dtype), floats(batch, heads, 1)
            for values in (pages[1], odd(pages[1])):
                yield (
                    f"decode_shared/codes/{tail}",
                    lambda n=near, v=values, s=scales, t=table: ops.decode_shared(
                        n, floats(*n[1].shape[:2], 128), n[1], v, t.lengths, t.lengths, block_table=t.block_table,
                        value_scales=s["value_scales"],
                    ),
                )  # fmt: skip


def odd(x: Tensor) -> Tensor:
    """The same shape at an address that is no multiple of 16."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call; a name says 16 bytes wide where rows lie so that wide loads can be made, else odd."""
    native = torch.ops.kvcompress
    for rows in (8, 200, 600):
        table = table_of(rows, 8)
        counts = ints(rows)
        for dtype, D in ((torch.bfloat16, 128), (torch.float32, 3), (torch.bfloat16, 3), (torch.uint8, 5)):
            name = f"{str(dtype)[6:]}/{D}"
            arrays, tokens = pages_of(table, 16, D, dtype), [torch.empty(1, rows, 100, D, dtype=dtype)] * 2
            yield f"append_tokens/{name}", lambda a=arrays, x=tokens, t=table: ops.append_tokens_(a, x, t)
            for K in (100, 4):
                indices = ints(rows, K)
                yield (
                    f"compact_pages/{name}",
                    lambda a=arrays, t=table, i=indices, c=counts: ops.compact_pages_(a, t, i, kept=c),
                )
        yield "truncate_rows", lambda t=table, c=counts: ops.truncate_rows_(t, c, 16)
    for T in (100, 1000, 5000):
        yield f"select_topk/{T}", lambda T=T: ops.select_topk(floats(2, T), 50)
    for dtype in FLOATS:
        name, B, Hkv, Hq, T = str(dtype)[6:], 2, 2, 16, 4096
        gates = [floats(B, Hkv, T) for _ in range(2)]
        logits = torch.empty(B, Hkv * 4, T, dtype=dtype)
        yield f"dmc_decisions/{name}", lambda x=logits: ops.dmc_decisions(x)
        yield f"dmc_importance/{name}", lambda x=logits: ops.dmc_importance(x, 2)
        yield "dmc_mask", lambda x=gates[0]: ops.dmc_mask(x)
        yield from code_calls(dtype, 302)  # of heads beyond 256 that are no whole bytes of 16
        for D in (*HEAD_DIMS, 33, 300):
            wide = "" if D in HEAD_DIMS else "/odd"
            tail = f"{name}/{D}{wide}"
            yield from code_calls(dtype, D + D % 2)

            def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
                return torch.empty(shape, dtype=dtype)

            q, k, v = make(B, Hq, T, D), make(B, Hkv, T, D), make(B, Hkv, T, D)
            half = floats(T, D // 2)
            yield f"rope/{tail}", lambda q=q, x=half: ops.rope(q, x, x)
            yield (
                f"merge_states/{tail}",
                lambda q=q: ops.merge_states((q, floats(*q.shape[:3])), (q, floats(*q.shape[:3]))),
            )
            for cap in (0.0, 20.0):
                mask = (0.1, True, 0, 0, False, floats(Hq), cap)
                yield f"attention/{tail}", lambda q=q, k=k, v=v, m=mask: native.attention(q, k, v, None, None, *m)
                lse = floats(B, Hq, T)
                yield (
                    f"attention_backward/{tail}",
                    lambda q=q, k=k, v=v, x=lse, m=mask: native.attention_backward(q, x, q, k, v, None, None, q, x, *m),
                )
            window = q[:, :, -64:]
            for cap in (None, 20.0):
                yield f"window_scores/{tail}", lambda w=window, k=k, c=cap: ops.window_scores(w, k, softcap=c)
            yield f"layer_similarity/{tail}", lambda w=window, k=k: ops.layer_similarity(w, k)
            yield (
                f"layer_similarity/188/{tail}",
                lambda D=D, new=make: ops.layer_similarity(new(188, 2, 1, D), new(188, 2, 100, D)),
            )
            for length in (100, T):
                x, g = k[:, :, :length], [a[:, :, :length].contiguous() for a in (floats(B, Hkv, T), floats(B, Hkv, T))]
                for window, chunks in ((0, -(-length // 64)), (12, 0)):
                    states = floats(B, Hkv, chunks, 2, D)
                    yield (
                        f"dmc_accumulate/{tail}",
                        lambda x=x, g=g, w=window: native.dmc_accumulate(x, x, *g, None, None, None, -1, w),
                    )
                    yield (
                        f"dmc_accumulate_backward/{tail}",
                        lambda x=x, g=g, w=window, s=states: native.dmc_accumulate_backward(
                            x, x, x, x, *g, None, g[0], s, -1, w
                        ),
                    )
            for rows in (4, 600):
                table = table_of(rows, 8)
                k_pages, v_pages = pages_of(table, 16, D, dtype)
                for S in (1, 1000):
                    new = [make(1, rows, S, D), make(1, rows, S, D), floats(1, rows, S), floats(1, rows, S)]
                    state = ops.Tail(floats(rows, 1, D), floats(rows, 1, D), floats(rows, 1), ints(rows))
                    yield (
                        f"dmc_append/{tail}",
                        lambda kp=k_pages, vp=v_pages, t=table, s=state, n=new: ops.dmc_append_(kp, vp, t, s, *n),
                    )
            turns = {"cos": half, "sin": half}
            for batch in (1, 200):  # one block, or a launch of their own for the heads
                table, places = table_of(batch * 2, 8), ints(batch, 1)
                k_pages, v_pages = pages_of(table, 16, D, dtype)
                x, one = make(batch, 2, 1, D), make(batch, 8, 1, D)
                state = ops.Tail(
                    floats(2 * batch, 1, D), floats(2 * batch, 1, D), floats(2 * batch, 1), ints(2 * batch)
                )
                given = (one, x, x, k_pages, v_pages, table)
                yield f"paged_step/{tail}", lambda g=given, c=turns: ops.paged_step_(*g, **c)
                ranges = make(2 * batch, 8, 2 * D)
                yield (
                    f"quest_step/{tail}",
                    lambda g=given, r=ranges, c=turns: ops.quest_step_(*g[:5], r, g[5], pages_read=3, **c),
                )
                yield (
                    f"dmc_step/{tail}",
                    lambda g=given, s=state, p=places, c=turns: ops.dmc_step_(*g, s, p, neuron=-1, **c),
                )
                yield (
                    f"pod_step/{tail}",
                    lambda g=given, p=places, c=turns: ops.pod_step_(
                        *g, table_of(*g[5].block_table.shape), p, sinks=4, recent=64, first=1, **c
                    ),
                )
                ring = [make(2 * batch, 68, D) for _ in range(2)]
                yield (
                    f"ring_step/{tail}",
                    lambda g=given, r=ring, p=places, c=turns: ops.ring_step_(*g[:3], *r, p, window=64, sinks=4, **c),
                )
            table = table_of(B * Hkv, 256)
            k_pages, v_pages = pages_of(table, 16, D, dtype)
            for heads in (2, 4, 16):  # one, two and eight query heads per KV head
                one, chunk = make(B, heads, 1, D), make(B, heads, 100, D)
                end, columns = table.lengths, floats(B, heads, T)
                for cap in (None, 20.0):
                    yield (
                        f"decode/{tail}",
                        lambda q=chunk, k=k_pages, v=v_pages, e=end, t=table, c=cap: ops.decode(
                            q, k, v, e, block_table=t.block_table, softcap=c, causal=True
                        ),
                    )
                    for probabilities in (None, columns):
                        yield (
                            f"decode/{tail}",
                            lambda q=one, k=k_pages, v=v_pages, e=end, t=table, c=cap, p=probabilities: ops.decode(
                                q, k, v, e, block_table=t.block_table, softcap=c, probabilities=p
                            ),
                        )
                # queries of another dtype than the cache, or pages at odd addresses: without tensor cores
                other = one.to(torch.float32) if dtype != torch.float32 else one
                for probabilities in (None, columns):
                    for pages in ([k_pages, v_pages], [odd(k_pages), odd(v_pages)]):
                        yield (
                            f"decode/{tail}/mixed",
                            lambda q=other, kv=pages, e=end, t=table, p=probabilities: ops.decode(
                                q, *kv, e, block_table=t.block_table, probabilities=p
                            ),
                        )
                for pages in (v_pages, odd(v_pages)):
                    near = (one, floats(B, heads, 1))
                    yield (
                        f"decode_shared/{tail}",
                        lambda n=near, c=columns, v=pages, e=end, t=table: ops.decode_shared(
                            n, c, n[1], v, e, e, block_table=t.block_table
                        ),
                    )


@dataclass(frozen=True)
class Noted:
    """refused: call and error of what a launcher, or CUDA's limits on grids and blocks, refused."""

    launches: list[Launch]
    refused: list[str]


def note_launches(shared_limit: int, calls: Iterable[tuple[str, Callable[[], object]]]) -> Noted:
    """What these calls launch on a device whose blocks may have that many bytes of shared memory. A launch that asks
    for more is noted like any other."""
    path = emulated.library()
    library = ctypes.CDLL(str(path))
    note = library.kvc_emulation_note_launches
    symbols = _symbols(path)
    own = next(address for address, name in symbols if name == "kvc_emulation_note_launches")
    base = ctypes.cast(note, ctypes.c_void_p).value - own  # type: ignore[operator]
    kernels = {base + address: name for address, name in symbols}
    found, refused = dict[Launch, None](), list[str]()
    call = ""

    def take(kernel: int, blocks: int, threads: int, shared: int) -> None:
        found[Launch(kernels[kernel], blocks, threads, shared, call)] = None

    taker = Taker(take)
    before = os.environ.get("KVC_EMULATION_SHARED")
    os.environ["KVC_EMULATION_SHARED"] = str(shared_limit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden
        served = emulated.serve()
    note(taker)
    try:
        with torch.no_grad():
            for call, run in calls:
                try:
                    run()
                except (RuntimeError, ValueError) as error:
                    refused.append(f"{call}: {error}")
    finally:
        note(None)
        served._destroy()
        os.environ.pop("KVC_EMULATION_SHARED")
        if before is not None:
            os.environ["KVC_EMULATION_SHARED"] = before
    return Noted(list(found), refused)


@functools.cache
def launches(shared_limit: int) -> Noted:
    """Of all calls, those at the ends too."""
    return note_launches(shared_limit, itertools.chain(calls(), extremes()))
