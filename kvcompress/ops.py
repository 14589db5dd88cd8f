"""Every native op as a Python function: shapes, dtypes, errors. The only file that touches torch.ops.

Dims: B sequences, Hq query heads, Hkv key-value heads, G = Hq/Hkv, S queries, T keys, D head dim, W observation window,
R rows (one row = one KV head of one sequence, r = b*Hkv + h), P page size. Tensors are float32, bfloat16 or float16 on
the CPU or CUDA; scores, LSE and rotation tables are float32, indices and lengths int32. All arguments of a call are on
one device. Queries and keys may have any strides as long as the last dimension is contiguous. `rope`,
`attention` and `merge_states` are differentiable; a backward pass that reaches another op raises NotImplementedError.
`kvcompress.reference` has the same functions in plain PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import (
    dense,
    dense_last,
    need,
    need_choice,
    need_device,
    need_float,
    need_int32,
    need_integer,
    need_integers,
)
from .no_gradient import change_without_gradient, without_gradient

try:
    from . import _C  # type: ignore[attr-defined]  # noqa: F401  registers torch.ops.kvcompress
except ImportError as error:
    if error.name != __package__:  # the file is there but does not load: its own message says why
        raise
    raise ImportError(
        f"kvcompress was imported from {os.path.dirname(__file__)}, where its extension (_C.abi3.so) is not built. If "
        "this is a clone, run `pip install --no-build-isolation -e .` in it; if kvcompress is installed elsewhere, run "
        "Python in another directory"
    ) from None

_ops = torch.ops.kvcompress
REDUCTIONS = ("mean", "sum", "max")
POOLINGS = ("avg", "max")
_wish = os.environ.get("KVC_SIMD")
if _wish and _ops.simd("") != _wish:
    raise ValueError(
        f"KVC_SIMD must name inner loops that this CPU can run (portable, avx2, avx512, avx512_bf16), got {_wish!r}"
    )
MAX_HEAD_DIM = 256  # of attention and decode
SCHEDULES = ("fixed", "linear", "square", "sqrt", "square-sqrt", "adaptive")


# ---- rope ---------------------------------------------------------------------------------------------------------


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, inverse: bool = False) -> Tensor:
    """Rotates queries or keys by the angles of their positions; differentiable in x.

    x: [B, H, T, D]. cos, sin: float32 [P, rotary_dim/2], one row per position, rotary_dim <= D even; the rest of D
    passes through. positions: int32 [B, T], rows of the tables; None = 0..T-1. inverse: rotate back.
    Returns [B, H, T, D], contiguous, dtype of x, computed in float32. R(a)R(b) = R(a+b): keys move from one position to
    another by a second call with the rows of the difference (inverse=True for a negative one).
    Raises ValueError for wrong shapes or dtypes, RuntimeError for a position outside the tables (on CUDA such a
    token becomes NaN instead: checking would wait for the device).
    Source: RoFormer, equation 34, with halves paired as transformers' rotate_half.
    """
    need_float("x", x, 4, "[B, H, T, D]")
    B, _, T, D = x.shape
    for name, table in (("cos", cos), ("sin", sin)):
        need(table.dtype == torch.float32, f"{name} must be float32, got {table.dtype}")
    need(cos.ndim == 2 and cos.shape == sin.shape, f"cos and sin must be [P, rotary_dim/2], got {tuple(cos.shape)}")
    need(2 * cos.shape[1] <= D, f"cos and sin rotate {2 * cos.shape[1]} dimensions, but x has only {D}")
    need_int32("positions", positions, (B, T))
    need(positions is not None or T <= cos.shape[0], f"cos and sin need {T} rows, got {cos.shape[0]}")
    need_device(x, cos=cos, sin=sin, positions=positions)
    return _ops.rope(dense_last(x), cos.contiguous(), sin.contiguous(), dense(positions), inverse)


@torch.library.register_fake("kvcompress::rope")
def _(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _rope_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, cos, sin, positions, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _rope_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    # a rotation's transpose is the rotation back
    cos, sin, positions = ctx.saved_tensors
    return _ops.rope(dense_last(grad), cos, sin, positions, not ctx.inverse), None, None, None, None


torch.library.register_autograd("kvcompress::rope", _rope_backward, setup_context=_rope_setup)


# ---- window_scores ------------------------------------------------------------------------------------------------


def window_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float | None = None,
    reduce: str = "mean",
    pooling: str = "avg",
    kernel_size: int = 5,
    lengths: Tensor | None = None,
    skip_last: int | None = None,
    mask_first: int = 0,
    mask_last: int = 0,
) -> Tensor:
    """Attention that a window of queries pays to each key: SnapKV, CGE, H2O and TOVA are settings of it.

    queries: [B, Hq, W, D] rotated, the last W tokens. keys: [B, Hkv, T, D] rotated, T >= W. lengths: int32 [B], keys
    per sequence, at least W and skip_last, at most T; None = all T. scale: factor of the logits, None =
    1/sqrt(D). skip_last: keys at the end that get no score, None = W. mask_first, mask_last: keys at the start and at
    the end that are left out of the softmax; their scores are 0.
    Returns float32 [B, Hkv, T - skip_last]: softmax over all keys that a query sees (causal inside the window), mean,
    sum or max over the W queries and the G query heads of a KV head, then pooled over kernel_size neighbours (avg:
    zeros count at the edges; max: neighbours that exist). Entries past lengths - skip_last are 0.
    Raises ValueError for wrong shapes, T <= skip_last or an even kernel_size; RuntimeError for lengths out of range;
    NotImplementedError if a backward pass comes here (reference.window_scores is differentiable).
    Memory: at most 10 MiB more than linear in T; the [W, T] matrix is never held.
    Source: SnapKV, section 4; IntelLLM, Algorithm 1; H2O (all queries, sum, skip_last 0); TOVA (W 1, skip_last 0).
    """
    need_float("queries", queries, 4, "[B, Hq, W, D]")
    need_float("keys", keys, 4, "[B, Hkv, T, D]")
    B, Hq, W, D = queries.shape
    Hkv, T = keys.shape[1:3]
    need(keys.shape[0] == B and keys.shape[3] == D, f"keys must be [{B}, Hkv, T, {D}], got shape {tuple(keys.shape)}")
    need(Hkv > 0 and Hq % Hkv == 0, f"queries have {Hq} heads, which the keys' {Hkv} heads do not divide")
    need(W >= 1, f"queries must hold at least 1 token, got {W}")
    skip_last = W if skip_last is None else skip_last
    need(T >= W, f"keys must be at least as many as the window's {W} queries, got {T}")
    need(0 <= skip_last < T, f"keys must be longer than skip_last = {skip_last} (default: the window), got {T}")
    for name, masked in (("mask_first", mask_first), ("mask_last", mask_last)):
        need(masked >= 0, f"{name} must be at least 0, got {masked}")
    need(kernel_size >= 1 and kernel_size % 2 == 1, f"kernel_size must be odd and at least 1, got {kernel_size}")
    need_int32("lengths", lengths, (B,))
    need_device(queries, keys=keys, lengths=lengths)
    return without_gradient(
        "window_scores has no gradient; use kvcompress.reference.window_scores, or detach the scores",
        (queries, keys),
        _ops.window_scores,
        dense_last(queries),
        dense_last(keys),
        dense(lengths),
        D**-0.5 if scale is None else scale,
        need_choice("reduce", reduce, REDUCTIONS),
        need_choice("pooling", pooling, POOLINGS),
        kernel_size,
        skip_last,
        mask_first,
        mask_last,
    )


@torch.library.register_fake("kvcompress::window_scores")
def _(queries, keys, lengths, scale, reduce, pool, kernel_size, skip, first, last):  # type: ignore[no-untyped-def]
    shape = (queries.shape[0], keys.shape[1], keys.shape[2] - skip)
    return queries.new_empty(shape, dtype=torch.float32)


# ---- select_topk, compact_rows_ -----------------------------------------------------------------------------------


def select_topk(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> Tensor:
    """Places of the k largest scores of each row, in rising order.

    scores: float32 [R, T]. k: 0..T. lengths: int32 [R], candidates per row (the first ones), each at least k; None = T.
    Returns int32 [R, k]. Ties go to the lower index; NaN is never chosen; infinities are ordinary values.
    Raises ValueError for wrong shapes; RuntimeError if a row has fewer than k candidates that are not NaN (on CUDA the
    missing places are -1 instead: checking would wait for the device).
    """
    need(scores.dtype == torch.float32, f"scores must be float32, got {scores.dtype}")
    need(scores.ndim == 2, f"scores must be [R, T], got shape {tuple(scores.shape)}")
    need(0 <= k <= scores.shape[1], f"k must be between 0 and T = {scores.shape[1]}, got {k}")
    need_int32("lengths", lengths, (scores.shape[0],))
    need_device(scores, lengths=lengths)
    return _ops.select_topk(scores.contiguous(), k, dense(lengths))


@torch.library.register_fake("kvcompress::select_topk")
def _(scores: Tensor, k: int, lengths: Tensor | None) -> Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


def compact_rows_(rows: Tensor, indices: Tensor) -> None:
    """Moves the chosen tokens of each row to its front, in place: rows[r, j] = rows[r, indices[r, j]].

    rows: [R, T, D], any stride between rows, otherwise contiguous. indices: int32 [R, k], strictly rising within
    [0, T). Tokens from k on keep what they had. Raises ValueError for wrong shapes and for rows that are a leaf that
    requires grad, RuntimeError for indices that do not rise or lie outside (nothing is moved then; on CUDA indices
    outside are skipped), NotImplementedError if a backward pass comes here (torch.gather is differentiable).
    """
    need_float("rows", rows, 3, "[R, T, D]")
    need(indices.ndim == 2, f"indices must be [R, k], got shape {tuple(indices.shape)}")
    need_int32("indices", indices, (rows.shape[0], indices.shape[1]))
    need(indices.shape[1] <= rows.shape[1], f"indices holds {indices.shape[1]} places for rows of {rows.shape[1]}")
    need_device(rows, indices=indices)
    message = "compact_rows_ has no gradient; use torch.gather"
    change_without_gradient(message, "rows", (rows,), (), _ops.compact_rows_, rows, indices.contiguous())


@torch.library.register_fake("kvcompress::compact_rows_")
def _(rows: Tensor, indices: Tensor) -> None:
    return None


# ---- append_tokens_, truncate_rows_, compact_pages_ ----------------------------------------------------------------


class PageTable(NamedTuple):
    """Which pages hold the slots of R rows, and which pages are free; int32 tensors on one device, changed in place.

    block_table: [R, blocks]: slot t of row r lies at [block_table[r, t // P], t % P] of every array. lengths: [R],
    slots per row. refs: [pages], how many rows name a page, those of other tables over the same pages included.
    free_pages: [pages], of which the first free_count[0] are free. free_count: [2]; free_count[1] counts calls that
    were refused on CUDA.
    """

    block_table: Tensor
    lengths: Tensor
    refs: Tensor
    free_pages: Tensor
    free_count: Tensor


_PAGES = "{} has no gradient: pages are what caches store; for training give attention the keys and values themselves"


def _need_table(table: PageTable) -> None:
    lines, pages = table.block_table, table.refs.shape
    need(lines.ndim == 2, "block_table must be [R, blocks]")
    shapes = (lines.shape, lines.shape[:1], pages, pages, (2,))
    # messages only where they are needed: a decode step comes by for every layer
    for name, x, shape in zip(table._fields, table, shapes, strict=True):
        if x.dtype != torch.int32 or x.shape != shape or x.device != lines.device or not x.is_contiguous():
            need_int32(name, x, tuple(shape))
            need_device(lines, **{name: x})
            raise ValueError(f"{name} must be contiguous")


def _need_arrays(arrays: Sequence[Tensor], table: PageTable) -> None:
    need(1 <= len(arrays) <= 8, f"arrays must hold 1 to 8 tensors, got {len(arrays)}")
    pages, device = table.refs.shape[0], table.refs.device
    P = arrays[0].shape[1] if arrays[0].ndim > 1 else 0
    for i, array in enumerate(arrays):
        if P == 0 or array.shape[:2] != (pages, P):
            raise ValueError(f"arrays must be [{pages}, P, ...] with one P, got shape {tuple(array.shape)} at {i}")
        if array.device != device or not array.is_contiguous():
            raise ValueError(f"arrays must be contiguous and on {device}, which number {i} is not")


def append_tokens_(
    arrays: Sequence[Tensor], tokens: Sequence[Tensor], table: PageTable, *, counts: Tensor | None = None
) -> None:
    """Appends new tokens to all rows in place, taking pages from the free list; shared pages are copied first.

    arrays: up to 8 contiguous [pages, P, ...] of any dtype, one for keys, one for values, others that move with them.
    tokens: for each array, in its dtype, [B, H, S, ...] with B*H = R, any strides in the first three dimensions.
    counts: int32 [R], 0..S: row r gets its last counts[r] tokens; None = all S.
    Waits for nothing on CUDA. Raises ValueError for wrong shapes and for arrays that are leaves that require grad,
    RuntimeError if the free list is too short or a row outgrows its line of the table; nothing is changed then (on CUDA
    free_count[1] grows instead of an error). Tokens in pages have no gradient: NotImplementedError if a backward pass
    comes here.
    """
    _need_table(table)
    _need_arrays(arrays, table)
    R = table.block_table.shape[0]
    need(len(tokens) == len(arrays), f"tokens must hold {len(arrays)} tensors, one for each array, got {len(tokens)}")
    first = tokens[0].shape[:3]
    need(len(first) == 3 and first[0] * first[1] == R, f"tokens must be [B, H, S, ...] with B*H = {R}")
    readable = []
    for array, x in zip(arrays, tokens, strict=True):
        if x.shape[:3] != first or x.shape[3:] != array.shape[2:]:
            shape = (*first, *array.shape[2:])
            raise ValueError(f"tokens must be {shape} for their array, got {tuple(x.shape)}")
        if x.dtype != array.dtype or x.device != array.device:
            raise ValueError(
                f"tokens must be {array.dtype} on {array.device} as their array, got {x.dtype}, {x.device}"
            )
        plain = x.ndim == 4 and x.stride(3) == 1
        readable.append(x if plain or x[:1, :1, :1].is_contiguous() else x.contiguous())
    need_int32("counts", counts, (R,))
    need_device(table.refs, counts=counts)
    op, message = _ops.append_tokens_, _PAGES.format("append_tokens_")
    change_without_gradient(message, "arrays", arrays, tokens, op, list(arrays), readable, *table, dense(counts))


@torch.library.register_fake("kvcompress::append_tokens_")
def _(arrays, tokens, block_table, lengths, refs, free_pages, free_count, counts):  # type: ignore[no-untyped-def]
    return None


def truncate_rows_(table: PageTable, new_lengths: Tensor, page_size: int) -> None:
    """Shortens rows in place; pages that nobody names any more return to the free list.

    new_lengths: int32 [R], each at most the row's length. Raises ValueError for wrong shapes, RuntimeError for a length
    out of range (nothing is changed then; on CUDA it is clamped).
    """
    _need_table(table)
    need_int32("new_lengths", new_lengths, (table.block_table.shape[0],))
    need_device(table.refs, new_lengths=new_lengths)
    need(page_size >= 1, f"page_size must be at least 1, got {page_size}")
    _ops.truncate_rows_(*table, new_lengths.contiguous(), page_size)


@torch.library.register_fake("kvcompress::truncate_rows_")
def _(block_table, lengths, refs, free_pages, free_count, new_lengths, page_size):  # type: ignore[no-untyped-def]
    return None


def compact_pages_(arrays: Sequence[Tensor], table: PageTable, indices: Tensor, *, kept: Tensor | None = None) -> None:
    """Keeps the chosen slots of every row, in place and in all arrays, and frees the pages that become empty.

    arrays: as for append_tokens_. indices: int32 [R, K]: slot j of row r becomes its slot indices[r, j] for
    j < kept[r]; those rise strictly within the row. kept: int32 [R], 0..K; negative leaves a row as it is; None = K.
    Pages that other rows share are copied, not written. Raises ValueError for wrong shapes, RuntimeError for indices
    that do not rise or lie outside, or if the copies find no free page; nothing is changed then (on CUDA bad indices
    leave their places unwritten, and free_count[1] grows where pages run out). ValueError for arrays that are leaves
    that require grad, NotImplementedError if a backward pass comes here.
    """
    _need_table(table)
    _need_arrays(arrays, table)
    R = table.block_table.shape[0]
    need(indices.ndim == 2, f"indices must be [R, K], got shape {tuple(indices.shape)}")
    need_int32("indices", indices, (R, indices.shape[1]))
    need_int32("kept", kept, (R,))
    need_device(table.refs, indices=indices, kept=kept)
    op, message = _ops.compact_pages_, _PAGES.format("compact_pages_")
    change_without_gradient(message, "arrays", arrays, (), op, list(arrays), *table, indices.contiguous(), dense(kept))


@torch.library.register_fake("kvcompress::compact_pages_")
def _(arrays, block_table, lengths, refs, free_pages, free_count, indices, kept):  # type: ignore[no-untyped-def]
    return None


# ---- decode, merge_states -----------------------------------------------------------------------------------------


def decode(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    end: Tensor,
    *,
    block_table: Tensor | None = None,
    begin: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of a few queries over rows of any length kept in pages.

    queries: [B, Hq, S, D], D 1..256. k_pages, v_pages: contiguous [pages, P, D], P a power of two. block_table: int32
    [R, blocks], R = B*Hkv: key t of row r lies at [block_table[r, t // P], t % P]; None = row r is page r, whatever
    P. begin, end: int32 [R]: a query sees keys begin_r <= t < end_r; causal: the row's last S keys are the queries' own
    tokens, query s sees t < end_r - (S-1-s). scale: factor of the logits, None = 1/sqrt(D).
    Returns (out [B, Hq, S, D] in the queries' dtype, lse float32 [B, Hq, S], natural logarithm). A query that sees no
    key gets out 0 and lse -inf. Raises ValueError for wrong shapes, RuntimeError for rows outside the pages,
    NotImplementedError if a backward pass comes here (attention is differentiable).
    """
    need_float("queries", queries, 4, "[B, Hq, S, D]")
    need_float("k_pages", k_pages, 3, "[pages, P, D]")
    B, Hq, _, D = queries.shape
    need(k_pages.shape[2] == D, f"k_pages must have head dim {D}, got {k_pages.shape[2]}")
    need(1 <= D <= MAX_HEAD_DIM, f"queries must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need(
        v_pages.shape == k_pages.shape and v_pages.dtype == k_pages.dtype,
        f"v_pages must be {k_pages.dtype} {tuple(k_pages.shape)}, got {v_pages.dtype} {tuple(v_pages.shape)}",
    )
    need(end.ndim == 1, f"end must be [R], got shape {tuple(end.shape)}")
    R = end.shape[0]
    need(
        B > 0 and R > 0 and R % B == 0 and Hq % (R // B) == 0,
        f"end must have B*Hkv entries with B = {B} and Hkv dividing Hq = {Hq}, got {R}",
    )
    need_int32("end", end, (R,))
    need_int32("begin", begin, (R,))
    P = k_pages.shape[1]
    if block_table is None:
        need(k_pages.shape[0] >= R, f"k_pages must hold one page for each of {R} rows, got {k_pages.shape[0]}")
    else:
        need(block_table.ndim == 2, f"block_table must be [R, blocks], got shape {tuple(block_table.shape)}")
        need_int32("block_table", block_table, (R, block_table.shape[1]))
        need(P > 0 and P & (P - 1) == 0, f"k_pages must have a page size that is a power of two, got {P}")
    need_device(queries, k_pages=k_pages, v_pages=v_pages, block_table=block_table, begin=begin, end=end)
    need(k_pages.is_contiguous() and v_pages.is_contiguous(), "k_pages and v_pages must be contiguous")
    return without_gradient(
        "decode has no gradient: it is for generation; use attention, which is differentiable, or torch.no_grad()",
        (queries, k_pages, v_pages),
        _ops.decode,
        dense_last(queries),
        k_pages,
        v_pages,
        dense(block_table),
        dense(begin),
        end.contiguous(),
        D**-0.5 if scale is None else scale,
        causal,
    )


@torch.library.register_fake("kvcompress::decode")
def _(queries, k_pages, v_pages, block_table, begin, end, scale, causal):  # type: ignore[no-untyped-def]
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)


def merge_states(*states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint sets of keys from their (out, lse).

    states: one or more (out [B, Hq, S, D], lse float32 [B, Hq, S]). Returns (out, lse) of attention over all the sets
    together. A set with lse -inf (no keys) changes nothing. Differentiable in every out and lse.
    Raises ValueError for no states or unequal shapes.
    """
    need(len(states) > 0, "states must hold at least one (out, lse) pair, got none")
    out, lse = states[0]
    need_float("out", out, 4, "[B, Hq, S, D]")
    need(lse.dtype == torch.float32, f"lse must be float32, got {lse.dtype}")
    need(lse.shape == out.shape[:3], f"lse must be {tuple(out.shape[:3])}, got {tuple(lse.shape)}")
    for other, other_lse in states[1:]:
        need(
            other.shape == out.shape and other.dtype == out.dtype,
            f"every out must be {out.dtype} {tuple(out.shape)}, got {other.dtype} {tuple(other.shape)}",
        )
        need(other_lse.dtype == torch.float32, f"lse must be float32, got {other_lse.dtype}")
        need(other_lse.shape == lse.shape, f"every lse must be {tuple(lse.shape)}, got {tuple(other_lse.shape)}")
        out, lse = _ops.merge_states(out.contiguous(), lse.contiguous(), other.contiguous(), other_lse.contiguous())
    return out, lse


@torch.library.register_fake("kvcompress::merge_states")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _merge_backward(ctx, dout: Tensor | None, dlse: Tensor | None):  # type: ignore[no-untyped-def]
    # with w = exp(lse_x - lse): d out_x = w dout, d lse_x = w (dlse + <dout, out_x - out>)
    out_a, lse_a, out_b, lse_b, out, lse = ctx.saved_tensors
    grads: list[Tensor] = []
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(part_lse == float("-inf"), 0.0, torch.exp(part_lse - lse))
        share = torch.zeros_like(lse) if dlse is None else dlse
        if dout is not None:
            share = share + (dout.float() * (part.float() - out.float())).sum(-1)
        # what has no weight has no gradient, whatever dout and dlse hold there: 0 * NaN would be NaN
        none = weight == 0
        of_out = torch.zeros_like(part)
        if dout is not None:
            of_out = torch.where(none[..., None], 0.0, weight[..., None] * dout).to(part.dtype)
        grads += [of_out, torch.where(none, 0.0, weight * share)]
    return tuple(grads)


torch.library.register_autograd("kvcompress::merge_states", _merge_backward, setup_context=_merge_setup)


# ---- attention ----------------------------------------------------------------------------------------------------


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    complement: bool = False,
    key_bias: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of many queries, with the masks of the methods; memory linear in S and T, differentiable.

    queries: [B, Hq, S, D], the last S tokens of the keys. keys, values: [B, Hkv, T, D], S <= T, D 1..256, the queries'
    dtype. lengths: int32 [B], keys that exist in each sequence, its last S being the queries' own tokens; None = all T.
    Query s stands at position i = lengths - S + s; where that is negative it is padding and sees nothing. It sees key
    t <= i (causal), all keys (causal=False); with window: t < sinks or t > i - window; with complement: what window
    leaves out, sinks <= t <= i - window. key_bias: float32 [B, Hkv, T], finite or -inf, added to the logit of a key for
    every query but the key's own position (DMC's mask). scale: factor of the logits, None = 1/sqrt(D).
    Returns (out [B, Hq, S, D], lse float32 [B, Hq, S], natural logarithm). A query that sees no key gets out 0 and lse
    -inf, and its gradients are 0, whatever comes back for its out and lse. Gradients flow to queries, keys, values and
    key_bias, from out and from lse, so that merge_states of several branches differentiates exactly; the same bits for
    any number of threads.
    Raises ValueError for wrong shapes, dtypes, window, sinks or complement; RuntimeError for lengths out of range.
    """
    need_float("queries", queries, 4, "[B, Hq, S, D]")
    need_float("keys", keys, 4, "[B, Hkv, T, D]")
    B, Hq, S, D = queries.shape
    Hkv, T = keys.shape[1:3]
    need(keys.shape[0] == B and keys.shape[3] == D, f"keys must be [{B}, Hkv, T, {D}], got shape {tuple(keys.shape)}")
    need(values.shape == keys.shape, f"values must be {tuple(keys.shape)} as keys, got {tuple(values.shape)}")
    for name, x in (("keys", keys), ("values", values)):
        need(x.dtype == queries.dtype, f"{name} must be {queries.dtype} as queries, got {x.dtype}")
    need(Hkv > 0 and Hq % Hkv == 0, f"queries have {Hq} heads, which the keys' {Hkv} heads do not divide")
    need(1 <= D <= MAX_HEAD_DIM, f"queries must have a head dim between 1 and {MAX_HEAD_DIM}, got {D}")
    need(S <= T, f"queries must be the last of the keys' tokens, got {S} queries and {T} keys")
    need(window is None or window >= 1, f"window must be at least 1 or None, got {window}")
    need(window is None or causal, "window needs causal=True")
    need(window is not None or not complement, "complement needs a window")
    need(sinks >= 0, f"sinks must be at least 0, got {sinks}")
    if key_bias is not None:
        need(key_bias.dtype == torch.float32, f"key_bias must be float32, got {key_bias.dtype}")
        need(tuple(key_bias.shape) == (B, Hkv, T), f"key_bias must be {(B, Hkv, T)}, got shape {tuple(key_bias.shape)}")
    need_int32("lengths", lengths, (B,))
    need_device(queries, keys=keys, values=values, key_bias=key_bias, lengths=lengths)
    return _ops.attention(
        dense_last(queries),
        dense_last(keys),
        dense_last(values),
        dense(key_bias),
        dense(lengths),
        D**-0.5 if scale is None else scale,
        causal,
        window or 0,
        sinks,
        complement,
    )


@torch.library.register_fake("kvcompress::attention")
def _(queries, keys, values, key_bias, lengths, scale, causal, window, sinks, complement):  # type: ignore[no-untyped-def]
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)


@torch.library.register_fake("kvcompress::attention_backward")
def _(dout, dlse, queries, keys, values, key_bias, *rest):  # type: ignore[no-untyped-def]
    bias = keys.new_empty((*keys.shape[:2], 0 if key_bias is None else keys.shape[2]), dtype=torch.float32)
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape), keys.new_empty(keys.shape), bias


def _attention_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    queries, keys, values, key_bias, lengths, *ctx.settings = inputs
    ctx.save_for_backward(queries, keys, values, key_bias, lengths, *output)
    ctx.set_materialize_grads(False)


def _attention_backward(ctx, dout: Tensor | None, dlse: Tensor | None):  # type: ignore[no-untyped-def]
    queries, keys, values, key_bias, lengths, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dense_last(dout)
    grads = _ops.attention_backward(
        dout, dense(dlse), queries, keys, values, key_bias, lengths, out, lse, *ctx.settings
    )
    return *grads[:3], grads[3] if key_bias is not None else None, None, *(None for _ in ctx.settings)


def _attention_no_second(ctx, *grads):  # type: ignore[no-untyped-def]
    raise NotImplementedError("attention is differentiable once; second derivatives are not supported")


torch.library.register_autograd("kvcompress::attention", _attention_backward, setup_context=_attention_setup)
torch.library.register_autograd(
    "kvcompress::attention_backward", _attention_no_second, setup_context=lambda ctx, inputs, output: None
)


# ---- planner, inner loops -----------------------------------------------------------------------------------------


def plan(
    prompt_length: int, chunk_size: int, memory_size: int, *, initial_memory: int = -1, schedule: str = "fixed",
    dynamic: bool = False, layers: int = 1, min_chunk: int = 1,
) -> Tensor:  # fmt: skip
    """Chunk and memory sizes of reading a prompt iteratively; see kvcompress.planner for the friendly face.

    prompt_length: at least 0. chunk_size, memory_size, layers, min_chunk: at least 1. initial_memory: memory after the
    first iteration, 0..memory_size, or -1: memory_size/n, rounded, at least 1. schedule: one of SCHEDULES. dynamic:
    chunks shrink as memory grows (those below min_chunk are set to it), else all but the last are chunk_size.
    Returns int64 [3 + 2*layers, n] on the CPU, n = ceil(prompt_length / chunk_size). Rows: 0 chunks; 1 scheduled
    memory, mean over the layers, rounded; 2 whether the chunk was clamped to min_chunk (0 or 1); then `layers` rows of
    scheduled memory, and as many of what can really be held.
    Raises ValueError for sizes out of range and for those with which the integers would reach 2**63 (see kvc_plan in
    csrc/kvc.h), or a plan 2**28 numbers.
    Source: IMDC ("Memorize Step by Step"), eq 1, 5-9; rounding is ours.
    """
    number = need_choice("schedule", schedule, SCHEDULES)
    need_integer("prompt_length", prompt_length, 0)
    for name, size in (("chunk_size", chunk_size), ("memory_size", memory_size), ("layers", layers),
                       ("min_chunk", min_chunk)):  # fmt: skip
        need_integer(name, size, 1)
    need(
        isinstance(initial_memory, int) and -1 <= initial_memory <= memory_size,
        f"initial_memory must be between 0 and memory_size = {memory_size}, or -1 (default), got {initial_memory!r}",
    )
    n = -(-prompt_length // chunk_size)
    need(
        (3 + 2 * layers) * n < 1 << 28,
        f"chunk_size must be larger for {prompt_length} tokens and {layers} layers, whose plan would have "
        f"{(3 + 2 * layers) * n} numbers, more than 2**28 - 1, got {chunk_size}",
    )
    try:
        return _ops.plan(prompt_length, chunk_size, memory_size, initial_memory, number, dynamic, layers, min_chunk)
    except RuntimeError as error:
        need(
            "2**63" not in str(error),
            f"memory_size must be smaller for {n} iterations of schedule {schedule!r} in {layers} layers, where a "
            f"product of sizes reaches 2**63, got {memory_size}",
        )
        raise


def divide_memory(
    total: int, kept: Sequence[int], stored: Sequence[int], *, lowest: Sequence[int], highest: Sequence[int]
) -> Tensor:
    """Sizes of all layers' memory in one iteration of the schedule "adaptive", from retention ratios.

    total: tokens to divide, L times the base size, at least 0. kept, stored: [L] each, ratios kept/stored of the
    iteration before: entries of the old memory that stayed, and all entries then, 0 <= kept <= stored < 2**31 (0/0 is
    0); another weight of 0..1 is a numerator over a common denominator. lowest, highest: [L], bounds of the sizes.
    Returns int64 [L] on the CPU: total * ratio / sum of ratios, within the bounds, in whole tokens that sum to
    min(total, sum of highest). Equal shares where all ratios are 0; no lower bounds where they sum to more than total.
    The result is the same on every machine: integers only, exact where the ratios have a common denominator of up to
    2**31 (less for a total*L above 2**32), else with weights rounded to that many parts; see csrc/kvc.h.
    Raises ValueError for sizes out of range, or total*L of 2**47 or more.
    Source: IMDC ("Memorize Step by Step"), eq 2 and 3, which leave the iteration, bounds and rounding open.
    """
    need_integer("total", total, 0)
    L, limit = len(kept), 1 << 31
    need(total * L < 1 << 47, f"total must be below 2**47 / {L} layers, got {total}")
    rows = [need_integers(name, values, L) for name, values in (
        ("kept", kept), ("stored", stored), ("lowest", lowest), ("highest", highest))]  # fmt: skip
    for j in range(L):
        need_integer(f"stored[{j}]", stored[j], 0, limit - 1)
        need(kept[j] <= stored[j], f"kept[{j}] must be at most stored[{j}] = {stored[j]}, got {kept[j]}")
        need(lowest[j] <= highest[j], f"lowest[{j}] must be at most highest[{j}] = {highest[j]}, got {lowest[j]}")
    return _ops.divide_memory(total, *rows)


def simd(name: str = "") -> str:
    """Name of the CPU's inner loops in use: portable, avx2, avx512 or avx512_bf16; a name switches to those first.

    Raises RuntimeError if the CPU cannot run it. For tests and bug reports; KVC_SIMD sets it for a whole process.
    """
    return _ops.simd(name)
