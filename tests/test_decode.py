import itertools

import numpy as np
import oracle
import pytest
import torch
from backends import BACKENDS
from decode_definition import check, int32
from helpers import DTYPES, covering, paged
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops

INF = float("inf")


SIZES = [
    (1, 1, 1, 1, 1, 16, 4), (2, 8, 2, 1, 300, 64, 64), (1, 8, 1, 3, 70, 128, 16), (2, 3, 3, 2, 33, 80, 8),
    (1, 4, 2, 3, 300, 33, 256), (1, 2, 1, 1, 20, 256, 32), (1, 5, 1, 1, 40, 7, 1),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "sizes", "backend"), covering(DTYPES, SIZES, BACKENDS), indirect=["backend"])
def test_paged_rows_as_the_reference(backend, dtype, sizes):
    B, Hq, Hkv, S, T, D, P = sizes
    R = B * Hkv
    queries = torch.randn(B, Hq, S, D).to(dtype)
    k, v = torch.randn(R, T, D).to(dtype), torch.randn(R, T, D).to(dtype)
    k_pages, v_pages, table = paged(k, v, P)
    end = torch.randint(1, T + 1, (R,), dtype=torch.int32)
    end[0] = T
    # free slots hold NaN: the reference reads exactly the rows' own tokens, so must the kernel
    for causal in (False, True):
        check(queries, k_pages, v_pages, end, block_table=table, causal=causal)


def test_contiguous_rows_equal_paged_rows(backend):
    queries, k, v = torch.randn(2, 4, 2, 32), torch.randn(4, 50, 32), torch.randn(4, 50, 32)
    end = int32(50, 1, 17, 33)
    k_pages, v_pages, table = paged(k, v, 8)
    there = ops.decode(queries, k_pages, v_pages, end, block_table=table)
    here = ops.decode(queries, k, v, end)
    assert torch.equal(here[0], there[0])
    assert torch.equal(here[1], there[1])


@pytest.mark.parametrize(
    ("dtype", "sizes", "backend"), covering(DTYPES, [(4, 1), (4, 10), (8, 20)], BACKENDS), indirect=["backend"]
)
def test_values_may_lie_elsewhere_than_keys(backend, dtype, sizes):
    Hq, S = sizes
    queries, (k, v) = torch.randn(2, Hq, S, 32).to(dtype), torch.randn(2, 4, 300, 32).to(dtype)
    begin, end = int32(0, 10, 69, 230), int32(300, 30, 70, 290)
    k_pages, v_pages, table = paged(k, v, 16)
    _, others, other = paged(k, v, 16, seed=1)
    other = torch.cat([other, other.new_full((4, 3), -1)], 1)
    others = torch.cat([others, others[:2]])  # another number of pages, and of blocks
    settings = {"begin": begin, "block_table": table, "causal": True}
    there = ops.decode(queries, k_pages, v_pages, end, **settings)
    here = ops.decode(queries, k_pages, others, end, value_table=other, **settings)
    assert torch.equal(here[0], there[0])
    assert torch.equal(here[1], there[1])
    check(queries, k_pages, others, end, value_table=other, **settings)


# before the range a page that the row does not have; pieces of 512 keys, so sinks of more than one
@pytest.mark.parametrize(
    ("dtype", "sizes", "sinks", "backend"),
    covering(DTYPES, [(4, 1), (4, 5), (8, 20)], [1, 16, 37, 600, 5000], BACKENDS),
    indirect=["backend"],
)
def test_first_keys_are_seen_with_a_range(backend, dtype, sizes, sinks):
    Hq, S = sizes
    queries, (k, v) = torch.randn(2, Hq, S, 32).to(dtype), torch.randn(2, 4, 730, 32).to(dtype)
    begin, end = int32(0, 10, 700, 720), int32(20, 30, 730, 720)
    k_pages, v_pages, table = paged(k, v, 16)
    _, others, other = paged(k, v, 16, seed=1)
    settings = {"begin": begin, "block_table": table, "sinks": sinks}
    check(queries, k_pages, v_pages, end, causal=True, **settings)
    check(queries, k_pages, others, end, value_table=other, **settings)
    dropped = table.clone()
    first = [min(sinks, int(b)) for b in begin]
    for row, (front, b) in enumerate(zip(first, begin.tolist(), strict=True)):
        dropped[row, -(-front // 16) : b // 16] = -1
    here, there = (
        ops.decode(queries, k_pages, v_pages, end, begin=begin, block_table=x, sinks=sinks) for x in (table, dropped)
    )
    assert torch.equal(here[0], there[0])


@pytest.mark.parametrize("sinks", [1, 37])
def test_a_missing_page_of_the_first_keys_is_refused(sinks):
    k_pages, v_pages, table = paged(torch.randn(1, 100, 16), torch.randn(1, 100, 16), 16)
    table[0, 0] = -1
    with pytest.raises(RuntimeError, match=r"block_table must name pages between 0 and 9, got -1 at \[0, 0\]"):
        ops.decode(
            torch.randn(1, 2, 1, 16), k_pages, v_pages, int32(100), begin=int32(90), block_table=table, sinks=sinks
        )


@pytest.mark.parametrize(
    ("dtype", "S", "backend"), covering([torch.float32, torch.bfloat16], [1, 2, 16], BACKENDS), indirect=["backend"]
)
def test_every_group_size_and_tile_of_queries(backend, dtype, S):
    for group in {1: range(1, 17), 2: (1, 3, 8, 16), 16: (1, 3)}[S]:
        queries, (k, v) = torch.randn(1, group, S, 16).to(dtype), torch.randn(2, 1, 300, 16).to(dtype)
        check(queries, k, v, int32(290), causal=True)


def test_query_and_cache_of_different_dtypes(backend):
    for query_dtype, cache_dtype in itertools.product(DTYPES, DTYPES):
        queries, (k, v) = torch.randn(1, 4, 1, 16).to(query_dtype), torch.randn(2, 2, 30, 16).to(cache_dtype)
        check(queries, k, v, int32(30, 17))


def test_ranges_begin_anywhere(backend):
    queries = torch.randn(2, 3, 4, 40).transpose(1, 2)[..., 8:]  # [B, S, Hq, D] storage
    k, v = torch.randn(4, 50, 32), torch.randn(4, 50, 32)
    for causal in (False, True):
        check(queries, k, v, int32(50, 50, 18, 20), begin=int32(0, 49, 17, 20), causal=causal)


@pytest.mark.parametrize(
    ("dtype", "sizes", "backend"),
    covering(DTYPES, [(4, 1, 64, 64), (2, 1, 128, 16), (2, 16, 32, 32), (18, 1, 72, 8), (2, 3, 33, 256)], BACKENDS),
    indirect=["backend"],
)
def test_one_long_row_among_short_ones(backend, dtype, sizes):
    """Rows of many pieces, of one, and of none; the pieces begin where the row does."""
    Hq, S, D, P = sizes
    queries, (k, v) = torch.randn(2, Hq, S, D).to(dtype), torch.randn(2, 4, 1100, D).to(dtype)
    k_pages, v_pages, table = paged(k, v, P)
    begin, end = int32(3, 0, 700, 40), int32(1099, 30, 700, 297)
    check(queries, k_pages, v_pages, end, begin=begin, block_table=table, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_and_queries_that_are_not_aligned(backend, dtype):
    queries = torch.randn(1, 2, 3, 67).to(dtype)[..., 3:]
    k, v = (torch.randn(90 * 64 + 1).to(dtype)[1:].view(1, 90, 64) for _ in range(2))
    check(queries, k, v, int32(77))
    check(queries, k.clone(), v.clone(), int32(77))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_query_depend_on_its_own_row_only(backend, dtype):
    queries, (k, v) = torch.randn(3, 4, 1, 64).to(dtype), torch.randn(2, 6, 700, 64).to(dtype)
    end = int32(700, 5, 300, 256, 257, 0)
    out, lse = ops.decode(queries, k, v, end)
    for b in range(3):
        rows = slice(2 * b, 2 * b + 2)
        alone = ops.decode(queries[b : b + 1], k[rows], v[rows], end[rows])
        assert torch.equal(alone[0], out[b : b + 1])
        assert torch.equal(alone[1], lse[b : b + 1])
    # neither on how much further the rows could reach
    k_pages, v_pages, table = paged(k, v, 64)
    wider = torch.cat([table, table.new_full((6, 40), -1)], 1)
    there = ops.decode(queries, k_pages, v_pages, end, block_table=wider)
    assert torch.equal(there[0], out)
    assert torch.equal(there[1], lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128])
def test_pieces_joined_where_they_are_made_have_the_bits_of_a_launch_of_its_own(cuda, dtype, D):
    """Few queries of a row are joined by the block that finishes its last piece, many by another kernel."""
    queries, (k, v) = torch.randn(3, 1, 1, D).to(dtype), torch.randn(2, 3, 4700, D).to(dtype)
    for longest, sink in ((4700, 0.3), (260, -INF), (260, float("nan"))):
        end, sinks = int32(longest, 0, 300), torch.tensor([sink])
        one = ops.decode(queries, k, v, end, sink_logits=sinks)
        many = ops.decode(
            queries.expand(3, 12, 1, D).contiguous(), k, v, end, sink_logits=sinks.expand(12).contiguous()
        )
        for x, y in zip(one, many, strict=True):
            assert torch.equal(x.expand_as(y).nan_to_num(7.0), y.nan_to_num(7.0))
        assert torch.equal(one[1][1].flatten().nan_to_num(7.0), sinks.nan_to_num(7.0))


def test_a_row_of_many_groups_of_pieces(backend):
    queries, (k, v) = torch.randn(1, 1, 1, 8), torch.randn(2, 1, 17_500, 8)
    check(queries, k, v, int32(17_500))
    check(queries, k, v, int32(17_500), begin=int32(1500), sinks=1100)


def test_query_that_sees_no_key_gives_zero_and_minus_infinity(backend):
    queries, k, v = torch.randn(1, 4, 3, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    end = int32(0, 2)
    for causal in (False, True):
        check(queries, k, v, end, causal=causal)
    out, lse = ops.decode(queries, k, v, end)
    assert not out[:, :2].any()
    assert (lse[:, :2] == -INF).all()
    out, lse = ops.decode(queries, k[:, :0], v[:, :0], 0 * end)  # no capacity at all
    assert not out.any()
    assert (lse == -INF).all()


def test_key_past_a_causal_query_may_hold_anything(backend):
    queries, k, v = torch.randn(1, 2, 2, 16), torch.randn(1, 9, 16), torch.randn(1, 9, 16)
    v[0, 8] = INF
    out, _ = ops.decode(queries, k, v, int32(9), causal=True)
    assert out[:, :, 0].isfinite().all()
    assert not out[:, :, 1].isfinite().any()


def test_keys_that_are_not_finite_reach_the_queries_that_see_them(backend):
    queries, k, v = (torch.randn(1, n, m, 32).to(torch.bfloat16) for n, m in ((2, 1), (1, 600), (1, 600)))
    k[0, 0, 300, 3] = float("nan")
    out, lse = ops.decode(queries, k[0], v[0], int32(600))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_large_logits_do_not_overflow(backend):
    queries, k, v = 300 * torch.randn(1, 2, 1, 16), 300 * torch.randn(1, 70, 16), torch.randn(1, 70, 16)
    check(queries, k, v, int32(70))


def test_ranges_and_pages_outside_are_clamped_and_skipped(cuda):
    queries, (k, v) = torch.randn(1, 2, 1, 16), torch.randn(2, 1, 16, 16)
    pages = k.reshape(2, 8, 16), v.reshape(2, 8, 16)
    ours = ops.decode(queries, *pages, int32(1000), block_table=int32(1, 2, 0, -1)[None], begin=int32(-5))
    expected = oracle.decode(queries.double(), k, v, int32(16))
    torch.testing.assert_close(ours[0].double(), expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[1].double(), expected[1], atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    P=st.sampled_from([1, 4, 64]),
    seed=st.integers(0, 2**31),
)
def test_rows_do_not_touch_each_other(lengths, P, seed):
    R, generator = len(lengths), torch.Generator().manual_seed(seed)
    queries = torch.randn(1, 2 * R, 1, 16, generator=generator)
    k, v = (torch.randn(R, 200, 16, generator=generator) for _ in range(2))
    k_pages, v_pages, table = paged(k, v, P, seed=seed % 1000)
    end = torch.tensor(lengths, dtype=torch.int32)
    together = ops.decode(queries, k_pages, v_pages, end, block_table=table)[0]
    for r in range(R):
        alone = ops.decode(queries[:, 2 * r : 2 * r + 2], k[r : r + 1], v[r : r + 1], end[r : r + 1])[0]
        assert torch.equal(together[:, 2 * r : 2 * r + 2], alone)


def test_rows_without_any_page(backend):
    end = torch.zeros(2, dtype=torch.int32)
    nothing, table = torch.empty(0, 4, 16), torch.empty(2, 0, dtype=torch.int32)
    out, lse = ops.decode(torch.randn(1, 4, 1, 16), nothing, nothing, end, block_table=table)
    assert not out.any()
    assert (lse == float("-inf")).all()


def test_strided_ends_are_taken(backend):
    queries, k, v = torch.randn(1, 4, 1, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    end = int32(7).expand(2)
    check(queries, k, v, end)


def test_thread_count_changes_no_bit(cpu):
    queries, k, v = torch.randn(1, 4, 1, 64), torch.randn(2, 5000, 64), torch.randn(2, 5000, 64)
    end = int32(5000, 4100)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.decode(queries, k, v, end)
        torch.set_num_threads(3)
        other = ops.decode(queries, k, v, end)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_opcheck():
    k_pages, v_pages, table = paged(torch.randn(2, 9, 16), torch.randn(2, 9, 16), 4)
    end = torch.tensor([9, 3], dtype=torch.int32)
    arguments = (torch.randn(1, 4, 2, 16), k_pages, v_pages, table, None, None, end, 0.25, True, 3)
    torch.library.opcheck(torch.ops.kvcompress.decode, arguments)
    state = (torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3))
    torch.library.opcheck(torch.ops.kvcompress.merge_states, (*state, *state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.randn(1, 4, 16)}, r"queries must be \[B, Hq, S, D\]"),
        ({"k_pages": torch.randn(6, 4, 8)}, "k_pages must have head dim 16"),
        ({"v_pages": torch.randn(6, 4, 8)}, "v_pages must be"),
        ({"end": torch.tensor([1, 2, 3], dtype=torch.int32)}, "end must have"),
        ({"end": torch.tensor([1, 2])}, "end must be int32"),
        ({"sinks": -1}, "sinks must be .* got -1"),
        ({"sinks": 2, "probabilities": torch.zeros(1, 4, 9)}, "sinks must be 0 where probabilities are written, got 2"),
        ({"k_pages": torch.randn(6, 3, 16), "v_pages": torch.randn(6, 3, 16)}, "power of two, got 3"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "queries": torch.randn(1, 4, 1, 16),
        "k_pages": torch.randn(6, 4, 16),
        "v_pages": torch.randn(6, 4, 16),
        "end": torch.tensor([5, 7], dtype=torch.int32),
        "block_table": torch.arange(4, dtype=torch.int32).reshape(2, 2),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        ops.decode(**arguments)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, np.asarray) for name in ("queries", "k_pages", "begin", "end", "block_table")]
    + [(name, torch.Tensor.tolist) for name in ("queries", "k_pages", "begin")],
)
def test_what_is_no_tensor_is_named(name, kind):
    arguments = {
        "queries": torch.randn(1, 2, 1, 16),
        "k_pages": torch.randn(2, 4, 16),
        "v_pages": torch.randn(2, 4, 16),
        "end": torch.tensor([2], dtype=torch.int32),
        "begin": torch.tensor([1], dtype=torch.int32),
        "block_table": torch.tensor([[1]], dtype=torch.int32),
    }
    arguments[name] = kind(arguments[name])
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got (list|ndarray)"):
        ops.decode(**arguments)


@pytest.mark.parametrize("D", [0, 513])
def test_head_dim_limits(D):
    pages, end = torch.randn(1, 4, D), torch.tensor([4], dtype=torch.int32)
    for heads in (1, 16):
        with pytest.raises(ValueError, match=f"queries must have a head dim between 1 and 512, got {D}"):
            ops.decode(torch.randn(1, heads, 1, D), pages, pages, end, scale=1.0)


@pytest.mark.parametrize(
    ("end", "page", "begin", "message"),
    [
        (9, 0, 0, r"^decode: end must be between 0 and 8 \(slots in a row of block_table\), got 9 at 1$"),
        (-1, 0, 0, "end must be between 0 and 8 .*, got -1 at 1"),
        (5, 6, 0, r"block_table must name pages between 0 and 5, got 6 at \[1, 1\]"),
        (5, -1, 0, r"block_table must name pages between 0 and 5, got -1 at \[1, 1\]"),
        (5, 0, 6, r"begin must be between 0 and 5 \(end\), got 6 at 1"),
        (5, 0, -1, r"begin must be between 0 and 5 \(end\), got -1 at 1"),
    ],
)
def test_rows_outside_the_pages_are_refused(end, page, begin, message):
    table = torch.tensor([[0, 1], [2, page]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        ops.decode(
            torch.randn(1, 4, 1, 16),
            torch.randn(6, 4, 16),
            torch.randn(6, 4, 16),
            torch.tensor([5, end], dtype=torch.int32),
            block_table=table,
            begin=torch.tensor([0, begin], dtype=torch.int32),
        )


def test_values_outside_their_pages_are_refused():
    k_pages, v_pages, table = paged(torch.randn(2, 9, 16), torch.randn(2, 9, 16), 4)
    queries, end = torch.randn(1, 4, 1, 16), torch.tensor([9, 3], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="slots in a row of value_table"):
        ops.decode(queries, k_pages, v_pages, end, block_table=table, value_table=table[:, :2])
    far = table.clone()
    far[0, 1] = len(v_pages)
    with pytest.raises(RuntimeError, match="must name pages between 0 and"):
        ops.decode(queries, k_pages, v_pages, end, block_table=table, value_table=far)
    with pytest.raises(RuntimeError, match="value_table must name pages between 0 and -1"):
        ops.decode(queries, k_pages, v_pages[:0], end, block_table=table, value_table=table)
    with pytest.raises(ValueError, match="value_table needs a block_table"):
        ops.decode(queries, k_pages, v_pages, end, value_table=table)


@pytest.mark.parametrize("tracked", ["queries", "k_pages", "v_pages"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_is_refused_when_it_comes_back(tracked, which):
    tensors = {"queries": torch.randn(1, 4, 1, 16), "k_pages": torch.randn(2, 9, 16), "v_pages": torch.randn(2, 9, 16)}
    end = torch.tensor([9, 3], dtype=torch.int32)
    plain = ops.decode(*tensors.values(), end)
    tensors[tracked].requires_grad_()
    state = ops.decode(*tensors.values(), end)
    for x, y in zip(state, plain, strict=True):
        assert torch.equal(x, y)
    with torch.no_grad():
        assert not ops.decode(*tensors.values(), end)[which].requires_grad
    with pytest.raises(NotImplementedError, match=r"decode has no gradient.* use attention"):
        state[which].sum().backward()
    joined = ops.merge_states(state, plain)
    with pytest.raises(NotImplementedError, match=r"decode has no gradient.* use attention"):
        joined[which].sum().backward()


def largest_allocation(call, *arguments) -> int:
    """Bytes, on the device of the arguments."""
    kinds = list(torch.profiler.supported_activities())
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        call(*arguments)
    usage = "device_memory_usage" if arguments[0].is_cuda else "cpu_memory_usage"
    return max(getattr(event, usage) for event in profile.events())


@pytest.mark.parametrize("S", [60, 200])
def test_many_new_tokens_over_a_long_row(backend, S):
    """In slabs of positions where their results would take too much memory, on CUDA."""
    B, Hq, Hkv, D, P, blocks = 1, 8, 2, 16, 16, 40
    ends = torch.tensor([600, 431], dtype=torch.int32)
    k, v = (torch.randn(Hkv * blocks, P, D) for _ in range(2))
    table = torch.randperm(Hkv * blocks).to(torch.int32).view(Hkv, blocks)
    q = torch.randn(B, Hq, S, D)
    options = {"block_table": table, "begin": ends // 3, "sinks": 5, "causal": True}
    found, expected = ops.decode(q, k, v, ends, **options), oracle.decode(
        q.double(), k.double(), v.double(), ends, **options
    )  # fmt: skip
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("S", "dtype"), [(64, torch.float32), (128, torch.float32), (128, torch.bfloat16)])
def test_scratch_of_many_new_tokens_does_not_grow_with_the_rows(backend, S, dtype):
    """Results of many new tokens over a long row wait for each other in bounded memory: 64 KiB in the emulation, 512 in
    16-bit types."""
    B, Hq, Hkv, P = 1, 8, 2, 16
    real = backend == "cuda"
    most = 1 << (26 if real else 16 if dtype == torch.float32 else 19)
    D, sizes = (128, (2048, 8192)) if real else (16, (16, 128))
    took = []
    for blocks in sizes:
        k, v = (torch.randn(Hkv * blocks, P, D).to(dtype) for _ in range(2))
        table = torch.arange(Hkv * blocks, dtype=torch.int32).view(Hkv, blocks)
        ends, q = torch.full((Hkv,), P * blocks, dtype=torch.int32), torch.randn(B, Hq, S, D).to(dtype)
        took.append(largest_allocation(lambda *x: ops.decode(*x, block_table=table, causal=True), q, k, v, ends))  # noqa: B023
    assert took[1] <= (most + (1 << 20) if real else took[0] + most), took
