"""Probabilities that decode writes, and attention by them over other values."""

import math

import pytest
import torch
from helpers import DTYPES, assert_as_accurate, paged
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops, reference

SIZES = [
    (1, 1, 1, 1, 16, 4), (2, 8, 2, 700, 64, 64), (1, 12, 1, 1100, 33, 16), (2, 3, 3, 33, 80, 8),
    (1, 18, 2, 520, 128, 256),
]  # fmt: skip


def rows(R, T, generator):
    begin = torch.randint(0, T + 1, (R,), generator=generator, dtype=torch.int32)
    end = torch.maximum(begin, torch.randint(0, T + 1, (R,), generator=generator, dtype=torch.int32))
    begin[0], end[0] = 0, T
    return begin, end


def drawn(B, Hq, Hkv, T, D, P, dtype=torch.float32, seed=0):
    """Queries, keys, the follower's values, its near attention, ranges, all in pages."""
    generator = torch.Generator().manual_seed(seed)
    R = B * Hkv
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    queries, near = randn(B, Hq, 1, D).to(dtype), (randn(B, Hq, 1, D).to(dtype), randn(B, Hq, 1) + math.log(T))
    k, v = randn(R, T, D).to(dtype), randn(R, T, D).to(dtype)
    return queries, near, *paged(k, v, P), *rows(R, T, generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "Hq", "Hkv", "T", "D", "P"), SIZES)
def test_probabilities_as_the_reference(simd, dtype, B, Hq, Hkv, T, D, P):
    queries, _, k_pages, v_pages, table, begin, end = drawn(B, Hq, Hkv, T, D, P, dtype)
    kinds = (torch.float32, torch.float32, torch.float64)
    ours, plain, exact = (torch.full((B, Hq, T + 3), 7.0, dtype=kind) for kind in kinds)
    given = {"begin": begin, "block_table": table}
    found = ops.decode(queries, k_pages, v_pages, end, probabilities=ours, **given)
    reference.decode(queries.float(), k_pages, v_pages, end, probabilities=plain, **given)
    reference.decode(queries.double(), k_pages, v_pages, end, probabilities=exact, **given)
    assert_as_accurate(ours, plain, exact)
    without = ops.decode(queries, k_pages, v_pages, end, **given)
    for a, b in zip(found, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    for r in range(B * Hkv):  # columns behind keep what they had
        heads = slice(r % Hkv * (Hq // Hkv), (r % Hkv + 1) * (Hq // Hkv))
        assert bool((ours[r // Hkv, heads, int(end[r] - begin[r]) :] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", [None, 0.0, 0.4, 0.6, 1.0])
@pytest.mark.parametrize(("B", "Hq", "Hkv", "T", "D", "P"), SIZES)
def test_shared_as_the_reference(simd, dtype, tau, B, Hq, Hkv, T, D, P):
    queries, near, k_pages, v_pages, table, begin, end = drawn(B, Hq, Hkv, T, D, P, dtype)
    weights = torch.zeros(B, Hq, T)
    far_lse = ops.decode(queries, k_pages, v_pages, end, begin=begin, block_table=table, probabilities=weights)[1]
    others, _, other = paged(torch.randn(B * Hkv, T, D).to(dtype), torch.zeros(B * Hkv, T, D).to(dtype), P, seed=1)
    given = (weights, far_lse, others, begin, end)
    ours = ops.decode_shared(near, *given, block_table=other, tau=tau)
    plain = reference.decode_shared(near, *given, block_table=other, tau=tau)
    near64 = (near[0].double(), near[1].double())
    given = (weights.double(), far_lse.double(), others.double(), begin, end)
    exact = reference.decode_shared(near64, *given, block_table=other, tau=tau)
    assert_as_accurate(ours[0], plain[0], exact[0])
    assert torch.equal(ours[1], exact[1])
    if tau in (None, 1.0):
        assert not ours[1].any()
    elif tau == 0:
        has = (end > begin).view(B, Hkv, 1).repeat_interleave(Hq // Hkv, 1)
        assert torch.equal(ours[1], has)
        assert torch.equal(torch.where(has[..., None], ours[0], 0), torch.where(has[..., None], near[0], 0))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 700), st.integers(0, 2**31), st.sampled_from([(1, 4, 1), (2, 4, 2), (1, 9, 1)]))
def test_near_and_shared_are_one_softmax(T, seed, heads):
    B, Hq, Hkv = heads
    queries, _, k_pages, v_pages, table, _, end = drawn(B, Hq, Hkv, T, 32, 16, seed=seed)
    middle = (end // 3).int()
    near = ops.decode(queries, k_pages, v_pages, end, begin=middle, block_table=table)
    weights = torch.empty(B, Hq, T)
    none = torch.zeros_like(end)
    far = ops.decode(queries, k_pages, v_pages, middle, begin=none, block_table=table, probabilities=weights)
    found, _ = ops.decode_shared(near, weights, far[1], v_pages, none, middle, block_table=table)
    torch.testing.assert_close(found, ops.decode(queries, k_pages, v_pages, end, block_table=table)[0])


def test_the_values_of_a_skipped_row_are_not_read(simd):
    queries, near, k_pages, v_pages, table, begin, end = drawn(1, 4, 2, 600, 64, 16)
    weights = torch.zeros(1, 4, 600)
    far_lse = ops.decode(queries, k_pages, v_pages, end, begin=begin, block_table=table, probabilities=weights)[1]
    near[1][0, :2], near[1][0, 2:] = far_lse[0, :2] + 3, far_lse[0, 2:] - 3
    v_pages[table[0].long()] = torch.nan  # of KV head 0, both of whose query heads are skipped
    out, skipped = ops.decode_shared(near, weights, far_lse, v_pages, begin, end, block_table=table, tau=0.7)
    assert skipped.flatten().tolist() == [True, True, False, False]
    assert torch.equal(out[:, :2], near[0][:, :2])
    assert bool(out.isfinite().all())


def test_one_query_head_of_a_row_is_skipped(simd):
    queries, near, k_pages, v_pages, table, begin, end = drawn(1, 5, 1, 900, 32, 64)
    weights = torch.zeros(1, 5, 900)
    far_lse = ops.decode(queries, k_pages, v_pages, end, begin=begin, block_table=table, probabilities=weights)[1]
    near[1][:] = far_lse + torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])[None, :, None]
    given = (weights, far_lse, v_pages, begin, end)
    out, skipped = ops.decode_shared(near, *given, block_table=table, tau=0.7)
    assert skipped.flatten().tolist() == [True, False, True, False, False]
    whole, _ = ops.decode_shared(near, *given, block_table=table)
    assert torch.equal(out[:, 1], whole[:, 1])
    assert torch.equal(out[:, 3:], whole[:, 3:])
    assert torch.equal(out[:, ::2][:, :2], near[0][:, ::2][:, :2])


def test_a_gate_that_rounds_to_one_does_not_skip():
    queries, near, k_pages, v_pages, table, begin, end = drawn(1, 2, 1, 50, 16, 8)
    weights = torch.zeros(1, 2, 50)
    far_lse = ops.decode(queries, k_pages, v_pages, end, begin=begin, block_table=table, probabilities=weights)[1]
    near[1][:] = torch.inf
    assert not ops.decode_shared(near, weights, far_lse, v_pages, begin, end, block_table=table, tau=1.0)[1].any()


@pytest.mark.parametrize(("near_lse", "far_lse"), [(-math.inf, 0.0), (0.0, -math.inf), (-math.inf, -math.inf)])
def test_an_empty_side_counts_nothing(simd, near_lse, far_lse):
    out, lse = torch.randn(1, 2, 1, 16), torch.full((1, 2, 1), near_lse)
    if near_lse == -math.inf:
        out[:] = torch.nan
    v, weights = torch.randn(1, 4, 16), torch.softmax(torch.randn(1, 2, 4), -1)
    begin, end = torch.zeros(1, dtype=torch.int32), torch.full((1,), 4, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    found, _ = ops.decode_shared((out, lse), weights, torch.full((1, 2, 1), far_lse), v, begin, end, block_table=table)
    expected = torch.zeros_like(out) if far_lse == near_lse else out if near_lse == 0 else (weights @ v)[:, :, None]
    torch.testing.assert_close(found, expected)


def test_thread_count_changes_no_bit(simd):
    queries, near, k_pages, v_pages, table, begin, end = drawn(2, 8, 2, 3000, 64, 16)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        weights = torch.zeros(2, 8, 3000)
        far_lse = ops.decode(queries, k_pages, v_pages, end, begin=begin, block_table=table, probabilities=weights)[1]
        found.append((weights, ops.decode_shared(near, weights, far_lse, v_pages, begin, end, block_table=table)[0]))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_opcheck():
    queries, near, k_pages, v_pages, table, begin, end = drawn(2, 4, 2, 40, 16, 8)
    weights = torch.zeros(2, 4, 40)
    arguments = (queries, k_pages, v_pages, table, None, begin, end, weights, 0.25)
    torch.library.opcheck(torch.ops.kvcompress.decode_probabilities.default, arguments)
    arguments = (*near, weights, near[1] - 1, v_pages, table, begin, end, 0.5)
    torch.library.opcheck(torch.ops.kvcompress.decode_shared.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probabilities": torch.zeros(1, 4, 20, dtype=torch.float64)}, "probabilities must be float32"),
        ({"probabilities": torch.zeros(1, 3, 20)}, r"probabilities must be float32 \[1, 4, columns\]"),
        ({"far_lse": torch.zeros(1, 4)}, "far_lse must be float32"),
        ({"near": (torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2))}, "one query per head"),
        ({"near": (torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 2))}, "lse of near must be float32"),
        ({"v_pages": torch.zeros(9, 8, 12)}, "v_pages must have head dim 16"),
        ({"v_pages": torch.zeros(9, 6, 16)}, "power of two"),
        ({"end": torch.zeros(3, dtype=torch.int32)}, "end must have B\\*Hkv entries"),
        ({"begin": torch.zeros(2)}, "begin must be int32"),
        ({"tau": 1.5}, "tau must be between 0 and 1 or None, got 1.5"),
        ({"tau": math.nan}, "tau must be between 0 and 1 or None, got nan"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    _, near, _, v_pages, table, begin, end = drawn(1, 4, 2, 20, 16, 8)
    given = {"near": near, "probabilities": torch.zeros(1, 4, 20), "far_lse": near[1], "v_pages": v_pages}
    given |= {"begin": begin, "end": end, "block_table": table}
    with pytest.raises(ValueError, match=message):
        ops.decode_shared(**(given | change))


@pytest.mark.parametrize(
    ("end", "columns", "page", "message"),
    [(25, 40, 0, "end must be between 0 and 24"), (20, 19, 0, "a column for each of 20 keys of row 0, got 19"),
     (20, 0, 0, "a column for each of 20 keys of row 0, got 0"), (20, 20, 99, "block_table must name pages")],
)  # fmt: skip
def test_rows_that_are_not_there_are_refused(end, columns, page, message):
    queries, near, k_pages, v_pages, table, _, _ = drawn(1, 4, 1, 20, 16, 8)
    table = table.clone()
    table[0, 1] = page if page else table[0, 1]
    begin, end = torch.zeros(1, dtype=torch.int32), torch.full((1,), end, dtype=torch.int32)
    weights = torch.full((1, 4, columns), 7.0)
    with pytest.raises(RuntimeError, match=message):
        ops.decode(queries, k_pages, v_pages, end, begin=begin, block_table=table, probabilities=weights)
    assert bool((weights == 7).all())
    with pytest.raises(RuntimeError, match=message):
        ops.decode_shared(near, weights, near[1], v_pages, begin, end, block_table=table)


def test_probabilities_are_of_one_query():
    queries, _, k_pages, v_pages, table, begin, end = drawn(1, 4, 2, 20, 16, 8)
    two, across = queries.expand(-1, -1, 2, -1), torch.zeros(1, 20, 4).mT
    with pytest.raises(ValueError, match="one query per head, got 2"):
        ops.decode(two, k_pages, v_pages, end, block_table=table, probabilities=torch.zeros(1, 4, 20))
    with pytest.raises(ValueError, match="probabilities must be contiguous"):
        ops.decode(queries, k_pages, v_pages, end, block_table=table, probabilities=across)


def test_a_gradient_is_refused():
    _, near, _, v_pages, table, begin, end = drawn(1, 4, 2, 20, 16, 8)
    near[0].requires_grad_()
    out, _ = ops.decode_shared(near, torch.zeros(1, 4, 20), near[1], v_pages, begin, end, block_table=table)
    with pytest.raises(NotImplementedError, match="decode_shared has no gradient"):
        out.sum().backward()
