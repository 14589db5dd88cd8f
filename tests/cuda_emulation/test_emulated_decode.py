"""csrc/cuda/decode.cu and merge.cu in the emulation, against kvcompress.reference."""

import emulated
import pytest
import torch
from helpers import DTYPES, assert_as_accurate, paged

INF = float("inf")


def check(kernels, reference, queries, k, v, end, **options):
    exact = reference.decode(queries.double(), k, v, end, **options)
    plain = reference.decode(queries, k, v, end, **options)
    ours = kernels.decode(queries, k, v, end, **options)
    assert_as_accurate(ours[0], plain[0], exact[0])
    assert_as_accurate(ours[1], plain[1].float(), exact[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "S", "T", "D", "P"),
    [(1, 1, 1, 1, 1, 16, 4), (2, 8, 2, 1, 100, 64, 64), (1, 8, 1, 3, 70, 128, 16), (2, 3, 3, 2, 33, 80, 8),
     (1, 4, 2, 3, 90, 33, 32), (1, 2, 1, 1, 20, 256, 32), (1, 5, 1, 1, 40, 7, 1)],
)  # fmt: skip
def test_paged_rows_as_the_reference(kernels, reference, dtype, B, Hq, Hkv, S, T, D, P):
    R = B * Hkv
    queries = torch.randn(B, Hq, S, D).to(dtype)
    k, v = torch.randn(R, T, D).to(dtype), torch.randn(R, T, D).to(dtype)
    k_pages, v_pages, table = paged(k, v, P)
    end = torch.randint(1, T + 1, (R,), dtype=torch.int32)
    end[0] = T
    for causal in (False, True):
        check(kernels, reference, queries, k_pages, v_pages, end, block_table=table, causal=causal)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size(kernels, reference, group):
    queries, k, v = torch.randn(1, group, 1, 16), torch.randn(1, 30, 16), torch.randn(1, 30, 16)
    check(kernels, reference, queries, k, v, torch.tensor([29], dtype=torch.int32))


@pytest.mark.parametrize("query_dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_query_and_cache_of_different_dtypes(kernels, reference, query_dtype, cache_dtype):
    queries = torch.randn(1, 4, 1, 16).to(query_dtype)
    k, v = torch.randn(2, 30, 16).to(cache_dtype), torch.randn(2, 30, 16).to(cache_dtype)
    check(kernels, reference, queries, k, v, torch.tensor([30, 17], dtype=torch.int32))


def test_ranges_begin_anywhere(kernels, reference):
    queries = torch.randn(2, 3, 4, 40).transpose(1, 2)[..., 8:]  # [B, S, Hq, D] storage
    k, v = torch.randn(4, 50, 32), torch.randn(4, 50, 32)
    begin, end = torch.tensor([0, 49, 17, 20], dtype=torch.int32), torch.tensor([50, 50, 18, 20], dtype=torch.int32)
    for causal in (False, True):
        check(kernels, reference, queries, k, v, end, begin=begin, causal=causal)


def test_contiguous_rows_equal_paged_rows(kernels):
    queries, k, v = torch.randn(2, 4, 2, 32), torch.randn(4, 50, 32), torch.randn(4, 50, 32)
    end = torch.tensor([50, 1, 17, 33], dtype=torch.int32)
    k_pages, v_pages, table = paged(k, v, 8)
    there = kernels.decode(queries, k_pages, v_pages, end, block_table=table)
    here = kernels.decode(queries, k, v, end)
    assert torch.equal(here[0], there[0])
    assert torch.equal(here[1], there[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 16])
def test_values_may_lie_elsewhere_than_keys(kernels, reference, dtype, S):
    queries, (k, v) = torch.randn(1, 4, S, 64).to(dtype), torch.randn(2, 2, 300, 64).to(dtype)
    k_pages, v_pages, table = paged(k, v, 16)
    _, others, other = paged(k, v, 16, seed=1)
    other, others = torch.cat([other, other.new_full((2, 3), -1)], 1), torch.cat([others, others[:2]])
    begin, end = torch.tensor([3, 250], dtype=torch.int32), torch.tensor([300, 280], dtype=torch.int32)
    settings = {"begin": begin, "block_table": table, "causal": True}
    there = kernels.decode(queries, k_pages, v_pages, end, **settings)
    here = kernels.decode(queries, k_pages, others, end, value_table=other, **settings)
    assert torch.equal(here[0], there[0])
    assert torch.equal(here[1], there[1])
    check(kernels, reference, queries, k_pages, others, end, value_table=other, **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 5])
@pytest.mark.parametrize("sinks", [1, 16, 300, 5000])
def test_first_keys_are_seen_with_a_range(kernels, reference, dtype, S, sinks):
    queries, (k, v) = torch.randn(1, 4, S, 64).to(dtype), torch.randn(2, 4, 600, 64).to(dtype)
    begin = torch.tensor([0, 10, 350, 40], dtype=torch.int32)
    end = torch.tensor([600, 30, 600, 40], dtype=torch.int32)
    k_pages, v_pages, table = paged(k, v, 16)
    for causal in (False, True):
        settings = {"begin": begin, "block_table": table, "causal": causal, "sinks": sinks}
        check(kernels, reference, queries, k_pages, v_pages, end, **settings)


def test_query_that_sees_no_key_gives_zero_and_minus_infinity(kernels, reference):
    queries, k, v = torch.randn(1, 4, 3, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    end = torch.tensor([0, 2], dtype=torch.int32)
    for causal in (False, True):
        check(kernels, reference, queries, k, v, end, causal=causal)
    out, lse = kernels.decode(queries, k[:, :0].contiguous(), v[:, :0].contiguous(), end)  # no capacity at all
    assert not out.any()
    assert (lse == -INF).all()


def test_key_past_a_causal_query_may_hold_anything(kernels, reference):
    queries, k, v = torch.randn(1, 2, 2, 16), torch.randn(1, 9, 16), torch.randn(1, 9, 16)
    v[0, 8] = INF
    out, _ = kernels.decode(queries, k, v, torch.tensor([9], dtype=torch.int32), causal=True)
    assert out[:, :, 0].isfinite().all()
    assert not out[:, :, 1].isfinite().any()


def test_ranges_and_pages_outside_are_clamped_and_skipped(kernels, reference):
    queries, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 16, 16), torch.randn(1, 16, 16)
    k_pages, v_pages = k.reshape(2, 8, 16), v.reshape(2, 8, 16)
    table = torch.tensor([[1, 2, 0, -1]], dtype=torch.int32)
    far, before = torch.tensor([1000], dtype=torch.int32), torch.tensor([-5], dtype=torch.int32)
    ours = kernels.decode(queries, k_pages, v_pages, far, block_table=table, begin=before)
    expected = reference.decode(queries.double(), k, v, torch.tensor([16]))
    torch.testing.assert_close(ours[0].double(), expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[1].double(), expected[1], atol=1e-5, rtol=0)


def test_large_logits_do_not_overflow(kernels, reference):
    queries, k, v = 300 * torch.randn(1, 2, 1, 16), 300 * torch.randn(1, 70, 16), torch.randn(1, 70, 16)
    check(kernels, reference, queries, k, v, torch.tensor([70], dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [16, 33, 80, 128])
def test_merge_as_the_reference(kernels, reference, dtype, D):
    states = [(torch.randn(2, 3, 5, D).to(dtype), 3 * torch.randn(2, 3, 5)) for _ in range(2)]
    states[0][1][0, 0, 0] = states[1][1][0, 0, 1] = -INF
    exact = reference.merge_states(*((out.double(), lse.double()) for out, lse in states))
    plain = reference.merge_states(*states)
    ours = kernels.merge_states(*states)
    assert_as_accurate(ours[0], plain[0].to(dtype), exact[0])
    assert_as_accurate(ours[1], plain[1], exact[1])
    in_place = kernels.merge_states(*states, out=states[0])
    assert torch.equal(in_place[0], ours[0])
    assert torch.equal(in_place[1], ours[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_with_nothing_changes_no_bit(kernels, dtype):
    state = torch.randn(1, 2, 3, 16).to(dtype), torch.randn(1, 2, 3)
    nothing = torch.full_like(state[0], float("nan")), torch.full_like(state[1], -INF)
    for merged in (kernels.merge_states(state, nothing), kernels.merge_states(nothing, state)):
        assert torch.equal(merged[0], state[0])
        assert torch.equal(merged[1], state[1])
    out, lse = kernels.merge_states(nothing, nothing)
    assert not out.any()
    assert (lse == -INF).all()


def test_invalid_sizes_and_empty_work(kernels):
    end = torch.tensor([3], dtype=torch.int32)
    assert (
        kernels.decode(torch.empty(0, 2, 1, 16), torch.empty(0, 4, 16), torch.empty(0, 4, 16), end[:0])[0].numel() == 0
    )
    k = torch.randn(2, 3, 16)
    with pytest.raises(emulated.LaunchError) as error:  # pages of three keys
        kernels.decode(torch.randn(1, 1, 1, 16), k, k, end, block_table=torch.zeros(1, 2, dtype=torch.int32))
    assert error.value.code == emulated.INVALID_VALUE
    with pytest.raises(emulated.LaunchError) as error:
        kernels.decode(torch.empty(1, 1, 1, 0), k[..., :0], k[..., :0], end, scale=1.0)
    assert error.value.code == emulated.INVALID_VALUE
    wide = torch.randn(1, 3, 513)
    with pytest.raises(emulated.LaunchError):
        kernels.decode(torch.randn(1, 1, 1, 513), wide, wide, end)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("Hq", "S", "D", "P"), [(4, 1, 64, 64), (2, 1, 128, 16), (2, 16, 32, 32), (32, 1, 72, 8), (2, 3, 33, 256)]
)
def test_one_long_row_among_short_ones(kernels, reference, dtype, Hq, S, D, P):
    """Rows of many pieces, of one, and of none; the pieces begin where the row does."""
    T = 1100
    queries = torch.randn(2, Hq, S, D).to(dtype)
    k, v = torch.randn(4, T, D).to(dtype), torch.randn(4, T, D).to(dtype)
    k_pages, v_pages, table = paged(k, v, P)
    begin = torch.tensor([3, 0, 700, 40], dtype=torch.int32)
    end = torch.tensor([T - 1, 30, 700, 297], dtype=torch.int32)
    check(kernels, reference, queries, k_pages, v_pages, end, begin=begin, block_table=table, causal=True)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("S", [1, 2, 16])
def test_every_tile_of_queries(kernels, reference, group, S):
    for dtype in (torch.bfloat16, torch.float32):
        queries = torch.randn(1, group, S, 16).to(dtype)
        k, v = torch.randn(1, 300, 16).to(dtype), torch.randn(1, 300, 16).to(dtype)
        check(kernels, reference, queries, k, v, torch.tensor([290], dtype=torch.int32), causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_query_depend_on_its_own_row_only(kernels, dtype):
    queries = torch.randn(3, 4, 1, 64).to(dtype)
    k, v = torch.randn(6, 700, 64).to(dtype), torch.randn(6, 700, 64).to(dtype)
    end = torch.tensor([700, 5, 300, 256, 257, 0], dtype=torch.int32)
    out, lse = kernels.decode(queries, k, v, end)
    for b in range(3):
        rows = slice(2 * b, 2 * b + 2)
        alone = kernels.decode(queries[b : b + 1], k[rows], v[rows], end[rows])
        assert torch.equal(alone[0], out[b : b + 1])
        assert torch.equal(alone[1], lse[b : b + 1])
    # neither on how much further the rows could reach
    k_pages, v_pages, table = paged(k, v, 64)
    wider = torch.cat([table, table.new_full((6, 40), -1)], 1)
    there = kernels.decode(queries, k_pages, v_pages, end, block_table=wider)
    assert torch.equal(there[0], out)
    assert torch.equal(there[1], lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_and_queries_that_are_not_aligned(kernels, reference, dtype):
    queries = torch.randn(1, 2, 3, 67).to(dtype)[..., 3:]
    k, v = (torch.randn(90 * 64 + 1).to(dtype)[1:].view(1, 90, 64) for _ in range(2))
    check(kernels, reference, queries, k, v, torch.tensor([77], dtype=torch.int32))
    check(kernels, reference, queries, k.clone(), v.clone(), torch.tensor([77], dtype=torch.int32))


def test_keys_that_are_not_finite_reach_the_queries_that_see_them(kernels):
    queries, k, v = (torch.randn(1, n, m, 32).to(torch.bfloat16) for n, m in ((2, 1), (1, 600), (1, 600)))
    k[0, 0, 300, 3] = float("nan")
    out, lse = kernels.decode(queries, k[0], v[0], torch.tensor([600], dtype=torch.int32))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_scratch_holds_the_partial_results_not_the_logits(kernels):
    def scratch_bytes(**sizes):
        sizes = {"B": 8, "Hq": 32, "Hkv": 8, "S": 1, "D": 128, "P": 64, "pages": 1, "blocks": 512} | sizes
        args = emulated.DecodeArgs(block_table=64, **sizes)
        return kernels.library.kvc_cuda_decode_scratch_bytes(emulated.byref(args))

    pieces = 64 * 32768 // 256
    assert scratch_bytes() < pieces * (4 * 130 * 4 + 16) + 1024
    assert scratch_bytes(pages=1000) == scratch_bytes()
    assert scratch_bytes(B=0) == scratch_bytes(D=513) == 0
