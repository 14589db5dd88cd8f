"""layer_similarity: the divergence of the layers' attention rows."""

import accuracy
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS
from helpers import DTYPES, covering
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops


def states(L, Hq, Hkv, S, T, D, dtype=torch.float32, spread=1.0):
    return (spread * torch.randn(L, Hq, S, D)).to(dtype), torch.randn(L, Hkv, T, D).to(dtype)


def check(queries, keys, **options):
    exact, rows = oracle.layer_similarity(queries.double(), keys.double(), **options)
    sums, count = ops.layer_similarity(queries, keys, **options)
    assert sums.dtype == torch.float64 and count == rows
    assert_within(sums, exact, accuracy.layer_similarity(queries, keys, **options))
    return sums, count


SIZES = [
    (1, 2, 1, 3, 9, 16), (3, 4, 2, 8, 77, 64), (5, 6, 1, 5, 300, 128), (2, 3, 3, 5, 64, 33),
    (2, 2, 1, 65, 130, 256), (2, 1, 1, 1, 1, 16), (3, 2, 2, 7, 7, 20), (24, 1, 1, 1, 70, 8),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "sizes", "backend"), covering(DTYPES, SIZES, BACKENDS), indirect=["backend"])
def test_sums_as_the_reference(backend, dtype, sizes):
    L, Hq, Hkv, S, T, D = sizes
    sums, count = check(*states(L, Hq, Hkv, S, T, D, dtype))
    assert count == S
    assert torch.equal(sums, sums.mT)
    assert not sums.diagonal(dim1=1, dim2=2).any()
    assert sums.min() >= 0 and sums.max() <= S


@pytest.mark.parametrize(
    ("sinks", "recent"), [(0, 1), (1, 2), (64, 5), (70, 64), (3, 130), (10, 139), (200, 0), (0, 200)]
)
def test_distant_keys_alone(backend, sinks, recent):
    queries, keys = states(3, 4, 2, 12, 150, 32, spread=2.0)
    sums, count = check(queries, keys, sinks=sinks, recent=recent)
    assert count == max(0, min(12, 150 - sinks - recent))
    assert bool(sums.any()) == (count > 0 and sinks + recent != 149)


def test_a_masked_key_does_not_hide_small_logits(backend):
    queries, keys = torch.ones(2, 1, 2, 16), torch.randn(2, 1, 80, 16)
    keys[:, 0, 1] = 100.0
    sums, _ = check(queries, keys, sinks=2, scale=1.0)
    assert sums[0, 0, 1] > 0.1


def test_large_logits_do_not_overflow(backend):
    sums, count = check(*states(3, 2, 1, 4, 100, 64, spread=60.0))
    assert sums.isfinite().all() and sums.max() > 0.9 * count


def test_rows_without_a_common_key_differ_by_one_bit(backend):
    queries = torch.ones(2, 1, 1, 16)
    keys = torch.full((2, 1, 200, 16), -50.0)
    keys[0, 0, 3], keys[1, 0, 150] = 50.0, 50.0
    assert ops.layer_similarity(queries, keys)[0][0, 0, 1].item() == pytest.approx(1.0, abs=1e-6)


def test_equal_layers_do_not_differ_at_all(backend):
    queries, keys = states(1, 4, 2, 9, 500, 40)
    queries, keys = (torch.cat([x, x, torch.randn_like(x)]) for x in (queries, keys))
    sums, _ = ops.layer_similarity(queries, keys)
    assert not sums[:, 0, 1].any()
    assert torch.equal(sums[:, 0, 2], sums[:, 1, 2]) and (sums[:, 0, 2] > 0.1).all()


def test_sums_over_queries_add_up():
    queries, keys = states(3, 2, 1, 6, 90, 16)
    whole, _ = ops.layer_similarity(queries, keys)
    parts = [ops.layer_similarity(queries[:, :, s : s + 1], keys[:, :, : 85 + s])[0] for s in range(6)]
    torch.testing.assert_close(sum(parts), whole, atol=1e-6, rtol=0)


def test_the_order_of_the_keys_does_not_matter():
    queries, keys = states(3, 2, 1, 1, 200, 16)
    shuffled = keys[:, :, torch.randperm(200)]
    torch.testing.assert_close(
        ops.layer_similarity(queries, keys)[0], ops.layer_similarity(queries, shuffled)[0], atol=1e-6, rtol=0
    )


def test_heads_of_a_group_read_the_same_keys(backend):
    queries, keys = states(3, 6, 2, 5, 70, 16)
    together, _ = ops.layer_similarity(queries, keys)
    for h in range(6):
        alone, _ = ops.layer_similarity(queries[:, h : h + 1], keys[:, h // 3 : h // 3 + 1])
        torch.testing.assert_close(together[h : h + 1], alone, atol=1e-7, rtol=0)


def test_strided_states(backend):
    queries = torch.randn(3, 9, 4, 32).transpose(1, 2)[:, :, -5:]
    keys = torch.randn(3, 80, 2, 32).transpose(1, 2)
    check(queries, keys)
    check(queries, keys.to(torch.bfloat16))
    check(queries, torch.randn(3, 2, 80, 33)[..., 1:])  # not on 16 bytes


def test_long_rows_are_cut_into_slabs_without_a_difference():
    """More than 8 MiB of probabilities of a KV head, so that each tile's are made twice."""
    check(*states(4, 2, 1, 16, 20_000, 16))


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_nan_spoils_the_pairs_of_its_layer_and_head_only(backend, side):
    queries, keys = states(3, 4, 2, 3, 70, 16)
    if side == "keys":
        keys[1, 1, 10, 3] = float("nan")
    else:
        queries[1, 2:, 0, 3] = float("nan")
    sums, _ = ops.layer_similarity(queries, keys)
    assert sums[2:, 1, [0, 2]].isnan().all() and sums[2:, [0, 2], 1].isnan().all()
    assert sums[:2].isfinite().all() and sums[2:, 0, 2].isfinite().all()


def test_thread_count_changes_no_bit(cpu):
    queries, keys = states(4, 4, 2, 8, 1000, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, _ = ops.layer_similarity(queries, keys)
        torch.set_num_threads(3)
        assert torch.equal(one, ops.layer_similarity(queries, keys)[0])
    finally:
        torch.set_num_threads(threads)


@settings(deadline=None, max_examples=30)
@given(
    T=st.integers(1, 200),
    S=st.integers(1, 20),
    L=st.integers(1, 5),
    G=st.integers(1, 4),
    sinks=st.integers(0, 70),
    recent=st.integers(0, 70),
    seed=st.integers(0, 2**31),
)
def test_any_sizes_as_the_reference(T, S, L, G, sinks, recent, seed):
    generator = torch.Generator().manual_seed(seed)
    queries = 2 * torch.randn(L, G, min(S, T), 16, generator=generator)
    check(queries, torch.randn(L, 1, T, 16, generator=generator), sinks=sinks, recent=recent)


def test_memory_does_not_grow_with_the_probabilities():
    L, Hq, Hkv, S, T = 4, 8, 1, 16, 32_768
    given = states(L, Hq, Hkv, S, T, 16)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.layer_similarity(*given)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert L * Hq * S * T * 4 == 64 << 20
    assert 1 << 20 < largest < 12 << 20


def test_more_layers_or_larger_heads_than_fit_are_refused(cuda):
    for L, D, message in ((189, 4, "at most 188 layers"), (2, 513, "head dim of at most 512")):
        with pytest.raises((ValueError, RuntimeError), match=f"{message}|invalid argument"):
            ops.layer_similarity(torch.randn(L, 1, 1, D), torch.randn(L, 1, 2, D))


def test_opcheck():
    torch.library.opcheck(
        torch.ops.kvcompress.layer_similarity, (torch.randn(3, 4, 2, 16), torch.randn(3, 2, 20, 16), 0.25, 1, 2)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.randn(2, 2, 40, 16)}, r"keys must be \[3, Hkv, T, 16\]"),
        ({"keys": torch.randn(3, 2, 40, 8)}, "keys must be"),
        ({"keys": torch.randn(3, 3, 40, 16)}, "do not divide"),
        ({"keys": torch.randn(3, 2, 3, 16)}, "queries must be between 1 and the keys' 3 tokens, got 4"),
        ({"queries": torch.randn(3, 4, 0, 16)}, "queries must be between 1"),
        ({"queries": torch.randn(3, 4, 4, 16).double()}, "queries must be float32"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"recent": -2}, "recent must be at least 0, got -2"),
        ({"scale": 0.0}, "scale must be above 0, got 0.0"),
        ({"scale": float("nan")}, "scale must be finite in float32, got nan"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"queries": torch.randn(3, 4, 4, 16), "keys": torch.randn(3, 2, 40, 16), **change}
    with pytest.raises(ValueError, match=message):
        ops.layer_similarity(**arguments)
