"""Probabilities that decode writes, and attention by them over other values."""

import itertools
import math

import accuracy
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS
from helpers import DTYPES, covering, paged
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops

INF, NAN = math.inf, math.nan
SIZES = [
    (1, 1, 1, 1, 16, 4), (2, 8, 2, 300, 64, 64), (1, 5, 1, 520, 33, 16), (2, 3, 3, 33, 80, 8),
    (1, 18, 2, 270, 128, 256), (1, 5, 1, 40, 7, 4), (1, 12, 1, 90, 256, 256),
]  # fmt: skip


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def rows(R, T):
    """Rows of any part of T; the first is whole, the second of several is empty."""
    begin = torch.randint(0, T + 1, (R,), dtype=torch.int32)
    end = torch.maximum(begin, torch.randint(0, T + 1, (R,), dtype=torch.int32))
    begin[0], end[0] = 0, T
    end[1:2] = begin[1:2]
    return begin, end


def drawn(B, Hq, Hkv, T, D, P, seed=0):
    """Queries, keys, the follower's values, its near attention, ranges, all in pages."""
    torch.manual_seed(seed)
    R = B * Hkv
    queries, near = torch.randn(B, Hq, 1, D), (torch.randn(B, Hq, 1, D), torch.randn(B, Hq, 1) + math.log(T))
    return queries, near, *paged(*torch.randn(2, R, T, D), P), *rows(R, T)


def drawn_shared(B, Hq, Hkv, T, D, P, dtype=torch.float32):
    """near, probabilities, far_lse, v_pages, begin, end of decode_shared, and its table."""
    begin, end = rows(B * Hkv, T)
    near = torch.randn(B, Hq, 1, D).to(dtype), torch.randn(B, Hq, 1)
    v_pages, _, table = paged(*torch.randn(2, B * Hkv, T, D).to(dtype), P)
    return (near, torch.rand(B, Hq, T) / T, torch.randn(B, Hq, 1), v_pages, begin, end), table


def check_probabilities(queries, k, v, end, **options):
    """What decode gives, its probabilities which are the reference's."""
    columns = k.shape[0] * k.shape[1] + 3  # more than any row has keys
    ours = torch.full((*queries.shape[:2], columns), 7.0)
    exact = ours.double()
    found = ops.decode(queries, k, v, end, probabilities=ours, **options)
    oracle.decode(queries.double(), k, v, end, probabilities=exact, **options)
    assert_within(ours, exact, accuracy.probabilities(columns, queries, k, v, end, **options))
    assert torch.equal(ours == 7, exact == 7)  # columns behind a row's end keep what they had
    return found


def check_shared(given, table, tau=None, codes=None, scales=None):
    """What decode_shared gives, which is the reference's. codes, scales: that the values in given stand for."""
    near, weights, far_lse, v_pages, begin, end = given
    stored = v_pages if codes is None else codes
    ours = ops.decode_shared(
        near, weights, far_lse, stored, begin, end, block_table=table, tau=tau, value_scales=scales
    )
    doubles = (near[0].double(), near[1].double()), weights.double(), far_lse.double()
    exact = oracle.decode_shared(*doubles, v_pages.double(), begin, end, block_table=table, tau=tau)
    assert_within(ours[0], exact[0], torch.where(exact[1][..., None], 0, accuracy.shared(*given, table)))
    assert torch.equal(ours[1], exact[1])
    return ours


@pytest.mark.parametrize(
    ("format", "dtype", "sizes", "backend"), covering(["int8", "int4"], DTYPES, SIZES, BACKENDS), indirect=["backend"]
)
def test_values_that_are_codes_as_the_reference(backend, format, dtype, sizes):
    *sizes, D, P = sizes
    (near, weights, far_lse, v_pages, begin, end), table = drawn_shared(*sizes, D + D % 2, P, dtype)
    codes, scales = ops.quantize(v_pages, format)
    plain = oracle.dequantize(codes, scales, format, torch.float64)
    check_shared((near, weights, far_lse, plain, begin, end), table, 0.7, codes, scales)


# ---- decode writes probabilities ----


@pytest.mark.parametrize(("dtype", "sizes", "backend"), covering(DTYPES, SIZES, BACKENDS), indirect=["backend"])
def test_probabilities_as_the_reference(backend, dtype, sizes):
    B, Hq, Hkv, T, D, P = sizes
    queries, (k, v) = torch.randn(B, Hq, 1, D).to(dtype), torch.randn(2, B * Hkv, T, D).to(dtype)
    begin, end = rows(B * Hkv, T)
    k_pages, v_pages, table = paged(k, v, P)
    # CUDA adds up the same way whether it writes probabilities or not
    tolerance = 0 if backend in ("emulated", "cuda") else 1e-5 if dtype == torch.float32 else 1e-2
    for kv, options in (((k_pages, v_pages), {"begin": begin, "block_table": table}), ((k, v), {})):
        found = check_probabilities(queries, *kv, end, **options)
        without = ops.decode(queries, *kv, end, **options)
        torch.testing.assert_close(found, without, rtol=tolerance, atol=min(tolerance, 1e-5))


def test_probabilities_of_every_group_size(backend):
    for group, dtype in itertools.product(range(1, 19), (torch.float32, torch.bfloat16)):
        queries, (k, v) = torch.randn(1, group, 1, 16).to(dtype), torch.randn(2, 1, 270, 16).to(dtype)
        check_probabilities(queries, k, v, int32(269), begin=int32(3))


def test_probabilities_of_queries_and_caches_of_different_dtypes(backend):
    queries, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 2, 30, 16).to(torch.float16)
    check_probabilities(queries, k, v, int32(30, 17))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_lie_elsewhere_change_no_probability(backend, dtype):
    queries, (k, v) = torch.randn(1, 4, 1, 64).to(dtype), torch.randn(2, 2, 300, 64).to(dtype)
    k_pages, _, table = paged(k, v, 16)
    _, others, other = paged(k, v, 16, seed=1)
    options = {"begin": int32(3, 250), "block_table": table, "value_table": other}
    check_probabilities(queries, k_pages, others, int32(300, 280), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_probabilities_of_logits_that_are_not_finite(backend, dtype):
    queries, (k, v) = torch.ones(3, 2, 1, 16).to(dtype), torch.randn(2, 3, 20, 16).to(dtype)
    weights = torch.full((3, 2, 20), 7.0)
    k[0, 4, 3], k[1] = NAN, -INF
    ops.decode(queries, k, v, int32(20, 20, 20), probabilities=weights)
    assert weights[0].isnan().all()
    assert not weights[1].any()  # lse -inf
    torch.testing.assert_close(weights[2].sum(-1), torch.ones(2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_more_keys_than_columns_are_written_as_far_as_they_have_columns(cuda, dtype):
    queries, (k, v) = torch.randn(1, 6, 1, 32).to(dtype), torch.randn(2, 2, 600, 32).to(dtype)
    end = int32(600, 290)
    whole, cut, none = torch.full((1, 6, 600), 7.0), torch.full((1, 7, 300), 7.0), torch.empty(1, 6, 0)
    out = ops.decode(queries, k, v, end, probabilities=whole)
    found = ops.decode(queries, k, v, end, probabilities=cut[:, :6])
    assert torch.equal(cut[:, :6], whole[..., :300])
    assert (cut[:, 6] == 7).all()  # what lies behind the last head
    for other in (found, ops.decode(queries, k, v, end, probabilities=none)):
        assert torch.equal(other[0], out[0])
        assert torch.equal(other[1], out[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_on_no_page_have_probability_zero(cuda, dtype):
    queries, (k, v) = torch.randn(1, 2, 1, 16).to(dtype), torch.randn(2, 2, 8, 16).to(dtype)
    weights, expected = torch.full((1, 2, 40), 7.0), torch.empty(1, 2, 16, dtype=torch.float64)
    table = int32(1, 2, 0, -1)[None]
    ops.decode(queries, k, v, int32(1000), block_table=table, begin=int32(-5), probabilities=weights)
    both = {"block_table": int32(1, 0)[None], "probabilities": expected}
    oracle.decode(queries.double(), k, v, int32(16), **both)
    torch.testing.assert_close(weights[..., :8].double(), expected[..., :8], atol=1e-5, rtol=0)
    torch.testing.assert_close(weights[..., 16:24].double(), expected[..., 8:], atol=1e-5, rtol=0)
    assert not weights[..., 8:16].any()
    assert not weights[..., 24:32].any()
    assert (weights[..., 32:] == 7).all()  # behind the row's capacity
    ops.decode(queries, k, v, int32(32), block_table=torch.full_like(table, 2), probabilities=weights)
    assert not weights[..., :32].any()  # nothing is seen at all


# ---- decode_shared ----


@pytest.mark.parametrize(("dtype", "sizes", "backend"), covering(DTYPES, SIZES, BACKENDS), indirect=["backend"])
def test_shared_as_the_reference(backend, dtype, sizes):
    B, Hq, Hkv, T, D, P = sizes
    given, table = drawn_shared(B, Hq, Hkv, T, D, P, dtype)
    for tau in (None, 0.0, 0.4, 0.6, 1.0):
        out, skipped = check_shared(given, table, tau)
        if tau == 0.0:
            has = (given[5] > given[4]).view(B, Hkv, 1).repeat_interleave(Hq // Hkv, 1)
            assert torch.equal(skipped, has)
            assert torch.equal(out[skipped], given[0][0][skipped])
        if tau in (None, 1.0):
            assert not skipped.any()


def test_shared_of_every_group_size(backend):
    for group, dtype in itertools.product(range(1, 19), (torch.float32, torch.bfloat16)):
        check_shared(*drawn_shared(2, group, 1, 270, 16, 16, dtype), 0.6)


def test_near_and_cache_of_different_dtypes(backend):
    for near_dtype, cache_dtype in itertools.product(DTYPES, DTYPES):
        (near, weights, far_lse, v_pages, *rest), table = drawn_shared(1, 4, 2, 50, 40, 8, near_dtype)
        check_shared((near, weights, far_lse, v_pages.to(cache_dtype), *rest), table)


def test_values_that_are_not_aligned(backend):
    for D, dtype in itertools.product((16, 64), DTYPES):
        (near, weights, far_lse, v_pages, *rest), table = drawn_shared(1, 4, 2, 50, D, 8, dtype)
        moved = torch.empty(v_pages.numel() + 1, dtype=dtype)[1:].view(v_pages.shape)
        moved[:] = v_pages
        check_shared((near, weights, far_lse, moved, *rest), table)


def test_probabilities_may_have_any_strides_but_the_last(backend):
    (near, weights, *rest), table = drawn_shared(2, 6, 2, 90, 32, 8)
    columns = torch.empty(6, 2, 95).transpose(0, 1)[..., 2:92]
    columns[:] = weights
    for strided in (columns, weights[:, :1].expand(-1, 6, -1)):
        found, expected = (
            ops.decode_shared(near, x, *rest, block_table=table)[0] for x in (strided, strided.contiguous())
        )
        assert torch.equal(found, expected)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_values_of_a_skipped_row_are_not_read(backend, dtype):
    (near, weights, far_lse, v_pages, *_), table = drawn_shared(1, 20, 2, 600, 64, 16, dtype)
    near[1][0, :10], near[1][0, 10:] = far_lse[0, :10] + 3, far_lse[0, 10:] - 3
    v_pages[table[0].long()] = NAN  # of KV head 0, all of whose query heads are skipped
    out, skipped = check_shared((near, weights, far_lse, v_pages, int32(0, 5), int32(600, 590)), table, 0.7)
    assert skipped[0, :10].all()
    assert not skipped[0, 10:].any()
    assert torch.equal(out[:, :10], near[0][:, :10])
    assert out.isfinite().all()


def test_one_query_head_of_a_row_is_skipped(backend):
    (near, weights, far_lse, v_pages, *_), table = drawn_shared(1, 5, 1, 900, 32, 64)
    given = (near, weights, far_lse, v_pages, int32(0), int32(900))
    near[1][:] = far_lse + torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])[None, :, None]
    out, skipped = check_shared(given, table, 0.7)
    assert skipped.flatten().tolist() == [True, False, True, False, False]
    whole, _ = ops.decode_shared(*given, block_table=table)
    assert torch.equal(out[~skipped], whole[~skipped])
    assert torch.equal(out[skipped], near[0][skipped])


def test_a_gate_that_rounds_to_one_does_not_skip(backend):
    queries, near, k_pages, v_pages, table, begin, end = drawn(1, 2, 1, 50, 16, 8)
    weights = torch.zeros(1, 2, 50)
    far_lse = ops.decode(queries, k_pages, v_pages, end, begin=begin, block_table=table, probabilities=weights)[1]
    near[1][:] = torch.inf
    assert not ops.decode_shared(near, weights, far_lse, v_pages, begin, end, block_table=table, tau=1.0)[1].any()


@pytest.mark.parametrize("tau", [None, 0.0, 0.7])
def test_lse_that_are_not_finite(backend, tau):
    """Against the formula, written out."""
    table, threshold = int32(0)[None], {None: INF, 0.0: -INF, 0.7: math.log(0.7 / 0.3)}[tau]
    for near_lse, far_lse in itertools.product((-INF, 0.0, INF, NAN), repeat=2):
        out, (v, weights) = torch.randn(1, 2, 1, 16), (torch.randn(1, 4, 16), torch.rand(1, 2, 4))
        if near_lse == -INF:
            out[:] = NAN
        if far_lse == -INF:
            weights[:] = NAN
        near, far = (torch.full((1, 2, 1), x) for x in (near_lse, far_lse))
        given = (out, near), weights, far, v, int32(0), int32(4)
        found, skipped = ops.decode_shared(*given, block_table=table, tau=tau)
        skips = tau is not None and near_lse - far_lse >= threshold
        assert (skipped == skips).all()
        own = torch.zeros_like(out) if near_lse == -INF else out
        gate = 0.0 if near_lse == -INF else 1 / (1 + torch.tensor(far_lse - near_lse).exp())
        expected = own if skips or far_lse == -INF else gate * own + (1 - gate) * (weights @ v)[:, :, None]
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_values_that_are_not_finite_pass_on_to_the_heads_that_are_not_skipped(backend):
    (near, weights, far_lse, v_pages, *_), table = drawn_shared(1, 4, 2, 300, 32, 16)
    v_pages[table[0, 7], 3, 5] = NAN
    weights[0, 2, 280] = NAN
    near[1][0, :1] = far_lse[0, :1] + 5
    given = (near, weights, far_lse, v_pages, int32(0, 0), int32(300, 300))
    out, skipped = ops.decode_shared(*given, block_table=table, tau=0.99)
    assert skipped.flatten().tolist() == [True, False, False, False]
    assert torch.equal(out[0, 0], near[0][0, 0])
    assert out[0, 1].isnan().sum() == 1
    assert out[0, 1, 0, 5].isnan()
    assert out[0, 2].isnan().all()
    assert out[0, 3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_columns_and_pages_outside(cuda, dtype):
    near, far_lse = (torch.randn(1, 2, 1, 16).to(dtype), torch.randn(1, 2, 1)), torch.randn(1, 2, 1)
    v_pages, weights = torch.randn(2, 8, 16).to(dtype), torch.rand(1, 2, 40)
    table = int32(1, 2, 0, -1)[None]
    weights[..., 8:16] = weights[..., 24:] = NAN  # of no page, and behind the row's capacity
    seen, both = torch.cat([weights[..., :8], weights[..., 16:24]], -1), int32(1, 0)[None]

    def as_expected(found, columns, begin, end):
        exact = (near[0].double(), near[1].double()), columns.double(), far_lse.double()
        expected, _ = oracle.decode_shared(*exact, v_pages, int32(begin), int32(end), block_table=both)
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[0].double(), expected, rtol=tolerance, atol=tolerance)

    found = ops.decode_shared(near, weights, far_lse, v_pages, int32(-5), int32(1000), block_table=table)
    as_expected(found, seen, 0, 16)
    # no more than there are columns
    few = ops.decode_shared(near, weights[..., :5], far_lse, v_pages, int32(2), int32(1000), block_table=both)
    as_expected(few, weights, 2, 7)
    # a row without a value is none that is skipped
    for begin, end, columns in ((5, 5, 40), (9, 3, 40), (0, -1, 40), (40, 50, 40), (0, 9, 0)):
        given = (near, weights[..., :columns], far_lse, v_pages, int32(begin), int32(end))
        found, skipped = ops.decode_shared(*given, block_table=both, tau=0.0)
        assert torch.equal(found, near[0])
        assert not skipped.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_query_depend_on_its_own_row_only(backend, dtype):
    (near, weights, far_lse, v_pages, *_), table = drawn_shared(3, 4, 2, 700, 64, 64, dtype)
    begin, end = int32(0, 0, 9, 0, 3, 4), int32(700, 5, 300, 256, 260, 4)
    out, skipped = ops.decode_shared(near, weights, far_lse, v_pages, begin, end, block_table=table, tau=0.6)
    for b in range(3):
        pair, one = slice(2 * b, 2 * b + 2), slice(b, b + 1)
        given = ((near[0][one], near[1][one]), weights[one], far_lse[one], v_pages, begin[pair], end[pair])
        alone = ops.decode_shared(*given, block_table=table[pair], tau=0.6)
        assert torch.equal(alone[0], out[one])
        assert torch.equal(alone[1], skipped[one])
    # neither on how much further the rows could reach
    wider = torch.cat([table, table.new_full((6, 40), -1)], 1)
    there = ops.decode_shared(near, weights, far_lse, v_pages, begin, end, block_table=wider, tau=0.6)
    assert torch.equal(there[0], out)


def test_rows_without_any_page(backend):
    (near, weights, far_lse, v_pages, _, _), _ = drawn_shared(1, 4, 2, 20, 16, 8)
    none, table = int32(0, 0), torch.empty(2, 0, dtype=torch.int32)
    out, skipped = ops.decode_shared(near, weights, far_lse, v_pages, none, none, block_table=table, tau=0.0)
    assert torch.equal(out, near[0])
    assert not skipped.any()


def test_thread_count_changes_no_bit(cpu):
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
        ({"tau": 1.5}, "tau must be a number between 0 and 1, got 1.5"),
        ({"tau": math.nan}, "tau must be a number between 0 and 1, got nan"),
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
