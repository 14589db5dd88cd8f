"""Probabilities that csrc/cuda/decode.cu writes and csrc/cuda/decode_shared.cu in the emulation, against
kvcompress.reference."""

import math

import emulated
import pytest
import torch
from helpers import DTYPES, assert_as_accurate, paged

INF, NAN = float("inf"), float("nan")
SIZES = [
    (1, 1, 1, 1, 16, 4), (2, 8, 2, 100, 64, 64), (1, 8, 1, 270, 128, 16), (2, 3, 3, 33, 80, 8),
    (1, 4, 2, 300, 33, 32), (1, 12, 1, 90, 256, 256), (1, 18, 2, 520, 40, 128), (1, 5, 1, 40, 7, 4),
]  # fmt: skip


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def ranges(R, T):
    """Rows of any part of T; the first is whole, the second of several is empty."""
    begin = torch.randint(0, T + 1, (R,), dtype=torch.int32)
    end = torch.maximum(begin, torch.randint(0, T + 1, (R,), dtype=torch.int32))
    begin[0], end[0] = 0, T
    end[1:2] = begin[1:2]
    return begin, end


def drawn(B, Hq, Hkv, T, D, P, dtype=torch.float32):
    """near, probabilities, far_lse, v_pages, begin, end of decode_shared, and its table."""
    begin, end = ranges(B * Hkv, T)
    near = torch.randn(B, Hq, 1, D).to(dtype), torch.randn(B, Hq, 1)
    v_pages, _, table = paged(*torch.randn(2, B * Hkv, T, D).to(dtype), P)
    return (near, torch.rand(B, Hq, T) / T, torch.randn(B, Hq, 1), v_pages, begin, end), table


def check(kernels, reference, given, table, tau=None):
    """What decode_shared gives, found as accurate as the reference."""
    near, weights, far_lse, v_pages, begin, end = given
    ours = kernels.decode_shared(*given, block_table=table, tau=tau)
    plain = reference.decode_shared(*given, block_table=table, tau=tau)
    doubles = (near[0].double(), near[1].double()), weights.double(), far_lse.double()
    exact = reference.decode_shared(*doubles, v_pages, begin, end, block_table=table, tau=tau)
    assert_as_accurate(ours[0], plain[0], exact[0])
    assert torch.equal(ours[1], plain[1])
    return ours


# ---- decode writes probabilities ----


def check_probabilities(kernels, reference, queries, k, v, end, **options):
    columns = k.shape[0] * k.shape[1] + 3  # more than any row has keys
    ours, plain = (torch.full((*queries.shape[:2], columns), 7.0) for _ in range(2))
    exact = plain.double()
    out = kernels.decode(queries, k, v, end, probabilities=ours, **options)
    reference.decode(queries.float(), k, v, end, probabilities=plain, **options)
    reference.decode(queries.double(), k, v, end, probabilities=exact, **options)
    assert_as_accurate(ours, plain, exact)
    assert torch.equal(ours == 7, exact == 7)  # columns behind a row's end keep what they had
    without = kernels.decode(queries, k, v, end, **options)
    assert torch.equal(out[0], without[0])
    assert torch.equal(out[1], without[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "Hq", "Hkv", "T", "D", "P"), SIZES)
def test_probabilities_as_the_reference(kernels, reference, dtype, B, Hq, Hkv, T, D, P):
    R = B * Hkv
    queries, (k, v) = torch.randn(B, Hq, 1, D).to(dtype), torch.randn(2, R, T, D).to(dtype)
    begin, end = ranges(R, T)
    k_pages, v_pages, table = paged(k, v, P)
    check_probabilities(kernels, reference, queries, k_pages, v_pages, end, begin=begin, block_table=table)
    check_probabilities(kernels, reference, queries, k, v, end)


@pytest.mark.parametrize("group", range(1, 19))
def test_probabilities_of_every_group_size(kernels, reference, group):
    for dtype in (torch.float32, torch.bfloat16):
        queries, (k, v) = torch.randn(1, group, 1, 16).to(dtype), torch.randn(2, 1, 300, 16).to(dtype)
        check_probabilities(kernels, reference, queries, k, v, int32(290), begin=int32(3))


def test_probabilities_of_queries_and_caches_of_different_dtypes(kernels, reference):
    queries, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 2, 30, 16).to(torch.float16)
    check_probabilities(kernels, reference, queries, k, v, int32(30, 17))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_lie_elsewhere_change_no_probability(kernels, reference, dtype):
    queries, (k, v) = torch.randn(1, 4, 1, 64).to(dtype), torch.randn(2, 2, 300, 64).to(dtype)
    k_pages, _, table = paged(k, v, 16)
    _, others, other = paged(k, v, 16, seed=1)
    options = {"begin": int32(3, 250), "block_table": table, "value_table": other}
    check_probabilities(kernels, reference, queries, k_pages, others, int32(300, 280), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_more_keys_than_columns_are_written_as_far_as_they_have_columns(kernels, dtype):
    queries, (k, v) = torch.randn(1, 6, 1, 32).to(dtype), torch.randn(2, 2, 600, 32).to(dtype)
    end = int32(600, 290)
    whole, cut, none = torch.full((1, 6, 600), 7.0), torch.full((1, 7, 300), 7.0), torch.empty(1, 6, 0)
    out = kernels.decode(queries, k, v, end, probabilities=whole)
    found = kernels.decode(queries, k, v, end, probabilities=cut[:, :6])
    assert torch.equal(cut[:, :6], whole[..., :300])
    assert (cut[:, 6] == 7).all()  # what lies behind the last head
    for other in (found, kernels.decode(queries, k, v, end, probabilities=none)):
        assert torch.equal(other[0], out[0])
        assert torch.equal(other[1], out[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_on_no_page_have_probability_zero(kernels, reference, dtype):
    queries, (k, v) = torch.randn(1, 2, 1, 16).to(dtype), torch.randn(2, 2, 8, 16).to(dtype)
    weights, expected = torch.full((1, 2, 40), 7.0), torch.empty(1, 2, 16, dtype=torch.float64)
    table = int32(1, 2, 0, -1)[None]
    out, lse = kernels.decode(queries, k, v, int32(1000), block_table=table, begin=int32(-5), probabilities=weights)
    both = {"block_table": int32(1, 0)[None], "probabilities": expected}
    reference.decode(queries.double(), k, v, int32(16), **both)
    torch.testing.assert_close(weights[..., :8].double(), expected[..., :8], atol=1e-5, rtol=0)
    torch.testing.assert_close(weights[..., 16:24].double(), expected[..., 8:], atol=1e-5, rtol=0)
    assert not weights[..., 8:16].any()
    assert not weights[..., 24:32].any()
    assert (weights[..., 32:] == 7).all()  # behind the row's capacity
    kernels.decode(queries, k, v, int32(32), block_table=torch.full_like(table, 2), probabilities=weights)
    assert not weights[..., :32].any()  # nothing is seen at all


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_that_are_not_finite(kernels, dtype):
    queries, (k, v) = torch.ones(1, 2, 1, 16).to(dtype), torch.randn(2, 3, 20, 16).to(dtype)
    weights = torch.full((3, 2, 20), 7.0)
    k[0, 4, 3], k[1] = NAN, -INF
    _, lse = kernels.decode(queries.expand(3, -1, -1, -1), k, v, int32(20, 20, 20), probabilities=weights)
    assert weights[0].isnan().all()
    assert not weights[1].any()  # lse -inf
    torch.testing.assert_close(weights[2].sum(-1), torch.ones(2))


def test_probabilities_are_of_one_query(kernels):
    k = torch.randn(1, 9, 16)
    for S in (0, 2):
        with pytest.raises(emulated.LaunchError) as error:
            kernels.decode(torch.randn(1, 2, S, 16), k, k, int32(9), probabilities=torch.zeros(1, 2, 9))
        assert error.value.code == emulated.INVALID_VALUE


# ---- decode_shared ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "Hq", "Hkv", "T", "D", "P"), SIZES)
def test_shared_as_the_reference(kernels, reference, dtype, B, Hq, Hkv, T, D, P):
    given, table = drawn(B, Hq, Hkv, T, D, P, dtype)
    for tau in (None, 0.0, 0.5, 1.0):
        _, skipped = check(kernels, reference, given, table, tau)
        has_values = given[5] > given[4]
        if tau == 0.0:
            assert torch.equal(skipped.view(B * Hkv, -1), has_values[:, None].expand(-1, Hq // Hkv))
        if tau in (None, 1.0):
            assert not skipped.any()


@pytest.mark.parametrize("group", range(1, 19))
def test_every_group_size(kernels, reference, group):
    for dtype in (torch.float32, torch.bfloat16):
        given, table = drawn(2, group, 1, 300, 16, 16, dtype)
        check(kernels, reference, given, table, 0.6)


@pytest.mark.parametrize("near_dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_near_and_cache_of_different_dtypes(kernels, reference, near_dtype, cache_dtype):
    (near, weights, far_lse, v_pages, *rows), table = drawn(1, 4, 2, 50, 40, 8, near_dtype)
    check(kernels, reference, (near, weights, far_lse, v_pages.to(cache_dtype), *rows), table)


@pytest.mark.parametrize("D", [16, 64])
def test_caches_that_are_not_aligned(kernels, reference, D):
    for dtype in DTYPES:
        (near, weights, far_lse, v_pages, *rows), table = drawn(1, 4, 2, 50, D, 8, dtype)
        moved = torch.empty(v_pages.numel() + 1, dtype=dtype)[1:].view(v_pages.shape)
        moved[:] = v_pages
        check(kernels, reference, (near, weights, far_lse, moved, *rows), table)


def test_probabilities_may_have_any_strides_but_the_last(kernels):
    (near, weights, *rest), table = drawn(2, 6, 2, 90, 32, 8)
    found = kernels.decode_shared(near, weights, *rest, block_table=table)
    columns = torch.empty(6, 2, 95).transpose(0, 1)[..., 2:92]
    columns[:] = weights
    assert torch.equal(kernels.decode_shared(near, columns, *rest, block_table=table)[0], found[0])
    one = weights[:, :1].expand(-1, 6, -1)
    found = kernels.decode_shared(near, one.contiguous(), *rest, block_table=table)
    assert torch.equal(kernels.decode_shared(near, one, *rest, block_table=table)[0], found[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_and_shared_are_one_softmax(kernels, dtype):
    queries, (k, v) = torch.randn(2, 8, 1, 64).to(dtype), torch.randn(2, 4, 700, 64).to(dtype)
    k_pages, v_pages, table = paged(k, v, 16)
    none, middle, end = int32(0, 0, 0, 0), int32(600, 3, 256, 0), int32(700, 300, 256, 10)
    weights, given = torch.full((2, 8, 600), NAN), (queries, k_pages, v_pages)
    near = kernels.decode(*given, end, begin=middle, block_table=table)
    _, far_lse = kernels.decode(*given, middle, begin=none, block_table=table, probabilities=weights)
    found, skipped = kernels.decode_shared(near, weights, far_lse, v_pages, none, middle, block_table=table)
    whole, _ = kernels.decode(*given, end, block_table=table)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)
    assert not skipped.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_a_skipped_row_are_not_read(kernels, reference, dtype):
    (near, weights, far_lse, v_pages, _, _), table = drawn(1, 20, 2, 600, 64, 16, dtype)
    begin, end = int32(0, 5), int32(600, 590)
    near[1][0, :10], near[1][0, 10:] = far_lse[0, :10] + 3, far_lse[0, 10:] - 3
    v_pages[table[0].long()] = NAN
    out, skipped = check(kernels, reference, (near, weights, far_lse, v_pages, begin, end), table, 0.7)
    assert skipped[0, :10].all()
    assert not skipped[0, 10:].any()
    assert torch.equal(out[:, :10], near[0][:, :10])
    assert out.isfinite().all()


def test_one_query_head_of_a_row_is_skipped(kernels, reference):
    (near, weights, far_lse, v_pages, *_), table = drawn(1, 5, 1, 900, 32, 64)
    given = (near, weights, far_lse, v_pages, int32(0), int32(900))
    near[1][:] = far_lse + torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])[None, :, None]
    out, skipped = check(kernels, reference, given, table, 0.7)
    assert skipped.flatten().tolist() == [True, False, True, False, False]
    whole, _ = kernels.decode_shared(*given, block_table=table)
    assert torch.equal(out[~skipped[..., 0]], whole[~skipped[..., 0]])
    assert torch.equal(out[skipped[..., 0]], near[0][skipped[..., 0]])


@pytest.mark.parametrize("tau", [None, 0.0, 0.7])
@pytest.mark.parametrize("near_lse", [-INF, 0.0, INF, NAN])
@pytest.mark.parametrize("far_lse", [-INF, 0.0, INF, NAN])
def test_lse_that_are_not_finite_as_on_the_cpu(kernels, tau, near_lse, far_lse):
    """Against the formula of kvc.h, written out."""
    out, (v, weights) = torch.randn(1, 2, 1, 16), (torch.randn(1, 4, 16), torch.rand(1, 2, 4))
    if near_lse == -INF:
        out[:] = NAN
    if far_lse == -INF:
        weights[:] = NAN
    near, far = (torch.full((1, 2, 1), x) for x in (near_lse, far_lse))
    table = int32(0)[None]
    found, skipped = kernels.decode_shared((out, near), weights, far, v, int32(0), int32(4), block_table=table, tau=tau)
    threshold = {None: INF, 0.0: -INF, 0.7: math.log(0.7 / 0.3)}[tau]
    skips = tau is not None and near_lse - far_lse >= threshold
    assert (skipped == skips).all()
    own = torch.zeros_like(out) if near_lse == -INF else out
    gate = 0.0 if near_lse == -INF else 1 / (1 + torch.tensor(far_lse - near_lse).exp())
    expected = own if skips or far_lse == -INF else gate * own + (1 - gate) * (weights @ v)[:, :, None]
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_values_that_are_not_finite_pass_on_to_the_heads_that_are_not_skipped(kernels):
    (near, weights, far_lse, v_pages, *_), table = drawn(1, 4, 2, 300, 32, 16)
    v_pages[table[0, 7], 3, 5] = NAN
    weights[0, 2, 280] = NAN
    near[1][0, :1] = far_lse[0, :1] + 5
    given = (near, weights, far_lse, v_pages, int32(0, 0), int32(300, 300))
    out, skipped = kernels.decode_shared(*given, block_table=table, tau=0.99)
    assert skipped.flatten().tolist() == [True, False, False, False]
    assert torch.equal(out[0, 0], near[0][0, 0])
    assert out[0, 1].isnan().sum() == 1
    assert out[0, 1, 0, 5].isnan()
    assert out[0, 2].isnan().all()
    assert out[0, 3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_columns_and_pages_outside(kernels, reference, dtype):
    near, far_lse = (torch.randn(1, 2, 1, 16).to(dtype), torch.randn(1, 2, 1)), torch.randn(1, 2, 1)
    v_pages, weights = torch.randn(2, 8, 16).to(dtype), torch.rand(1, 2, 40)
    table = int32(1, 2, 0, -1)[None]
    weights[..., 8:16] = weights[..., 24:] = NAN  # of no page, and behind the row's capacity
    seen, both = torch.cat([weights[..., :8], weights[..., 16:24]], -1), int32(1, 0)[None]

    def as_expected(found, columns, begin, end):
        exact = (near[0].double(), near[1].double()), columns.double(), far_lse.double()
        expected, _ = reference.decode_shared(*exact, v_pages, int32(begin), int32(end), block_table=both)
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[0].double(), expected, rtol=tolerance, atol=tolerance)

    found = kernels.decode_shared(near, weights, far_lse, v_pages, int32(-5), int32(1000), block_table=table)
    as_expected(found, seen, 0, 16)
    # no more than there are columns
    few = kernels.decode_shared(near, weights[..., :5], far_lse, v_pages, int32(2), int32(1000), block_table=both)
    as_expected(few, weights, 2, 7)
    # a row without a value is none that is skipped
    for begin, end, columns in ((5, 5, 40), (9, 3, 40), (0, -1, 40), (40, 50, 40), (0, 9, 0)):
        given = (near, weights[..., :columns], far_lse, v_pages, int32(begin), int32(end))
        found, skipped = kernels.decode_shared(*given, block_table=both, tau=0.0)
        assert torch.equal(found, near[0])
        assert not skipped.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_query_depend_on_its_own_row_only(kernels, dtype):
    (near, weights, far_lse, v_pages, *_), table = drawn(3, 4, 2, 700, 64, 64, dtype)
    begin, end = int32(0, 0, 9, 0, 3, 4), int32(700, 5, 300, 256, 260, 4)
    out, skipped = kernels.decode_shared(near, weights, far_lse, v_pages, begin, end, block_table=table, tau=0.6)
    for b in range(3):
        rows, one = slice(2 * b, 2 * b + 2), slice(b, b + 1)
        given = ((near[0][one], near[1][one]), weights[one], far_lse[one], v_pages, begin[rows], end[rows])
        alone = kernels.decode_shared(*given, block_table=table[rows], tau=0.6)
        assert torch.equal(alone[0], out[one])
        assert torch.equal(alone[1], skipped[one])
    # neither on how much further the rows could reach
    wider = torch.cat([table, table.new_full((6, 40), -1)], 1)
    there = kernels.decode_shared(near, weights, far_lse, v_pages, begin, end, block_table=wider, tau=0.6)
    assert torch.equal(there[0], out)


def test_empty_work_and_invalid_sizes(kernels):
    (near, weights, far_lse, v_pages, begin, end), table = drawn(1, 4, 2, 20, 16, 8)
    nothing = torch.empty(0, 4, 1, 16), torch.empty(0, 4, 1)
    given = (nothing, weights[:0], nothing[1], v_pages, begin[:0], end[:0])
    assert kernels.decode_shared(*given, block_table=table[:0])[0].numel() == 0
    none = torch.zeros_like(end)
    out, _ = kernels.decode_shared(near, weights, far_lse, v_pages, none, none, block_table=int32()[None].expand(2, 0))
    assert torch.equal(out, near[0])
    given = {"near": near, "probabilities": weights, "far_lse": far_lse, "v_pages": v_pages, "begin": begin, "end": end}
    wide = torch.randn(1, 4, 1, 513)
    for change in (
        {"v_pages": torch.randn(4, 6, 16)}, {"tau": NAN}, {"near": (wide, near[1])}, {"far_lse": None},
        {"probabilities": torch.empty(1, 4, 0).expand(1, 4, 0), "begin": None}, {"end": torch.cat([end, end[:1]])},
    ):  # fmt: skip
        with pytest.raises(emulated.LaunchError) as error:
            kernels.decode_shared(**given | change, block_table=table)
        assert error.value.code == emulated.INVALID_VALUE


def test_scratch_holds_the_partial_sums(kernels):
    def scratch_bytes(**sizes):
        sizes = {"B": 8, "Hq": 32, "Hkv": 8, "D": 128, "P": 64, "pages": 1, "blocks": 512, "columns": 9} | sizes
        return kernels.library.kvc_cuda_decode_shared_scratch_bytes(emulated.byref(emulated.DecodeSharedArgs(**sizes)))

    assert scratch_bytes() == 64 * 32768 // 256 * 4 * 128 * 4
    assert scratch_bytes(pages=1000, columns=40_000) == scratch_bytes()
    assert scratch_bytes(B=0) == scratch_bytes(D=513) == scratch_bytes(P=6) == scratch_bytes(threshold=NAN) == 0
