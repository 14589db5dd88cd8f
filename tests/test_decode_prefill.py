"""ops.decode of a turn or a chunk of a prompt over a long row: on CUDA, in 16-bit types, flash attention over pages.

From 64 queries of a row (G*S) on. A tile has 128 queries, 64 above D = 128, and 32 keys. Where a device would not be
full, the keys are split; in the emulation from 128 slots on, into parts of 64 slots and more.
"""

import oracle
import pytest
import torch
from backends import BACKENDS
from decode_definition import check, int32
from helpers import covering, paged

from kvcompress import ops

INF = float("inf")
HALVES = (torch.bfloat16, torch.float16)
# Hkv, G, S, D, T, P: tiles that are full and that are not, one to eleven of them, one to four parts
SIZES = [
    (2, 4, 17, 64, 300, 16), (1, 1, 64, 128, 120, 4), (1, 3, 43, 80, 290, 64), (2, 7, 10, 128, 260, 16),
    (1, 1, 200, 128, 230, 16), (1, 4, 32, 256, 200, 32), (1, 3, 22, 72, 96, 1), (1, 7, 200, 64, 210, 256),
    (1, 2, 70, 200, 90, 8), (1, 1, 64, 16, 2600, 64),
]  # fmt: skip


def inputs(sizes, dtype, B=1):
    Hkv, G, S, D, T, P = sizes
    k, v = (torch.randn(B * Hkv, T, D).to(dtype) for _ in range(2))
    return torch.randn(B, Hkv * G, S, D).to(dtype), *paged(k, v, P)


@pytest.mark.parametrize(("sizes", "dtype", "backend"), covering(SIZES, HALVES, BACKENDS), indirect=["backend"])
def test_many_queries_as_the_reference(backend, sizes, dtype):
    queries, k_pages, v_pages, table = inputs(sizes, dtype)
    T = sizes[4]
    end = int32(T, T - 45)[: sizes[0]]
    for causal in (False, True):
        check(queries, k_pages, v_pages, end, block_table=table, causal=causal)


@pytest.mark.parametrize(
    ("sizes", "options", "backend"),
    covering(
        [(2, 4, 17, 64, 300, 16), (2, 1, 150, 32, 400, 8), (2, 7, 12, 136, 260, 64)],
        [
            {"begin": int32(0, 133)},
            {"begin": int32(130, 37), "sinks": 5},
            {"begin": int32(10, 70), "sinks": 64, "softcap": 3.0},
            {"begin": int32(31, 240), "sinks": 5000, "sink_logits": 1.0},
            {"sink_logits": -INF},
            {"softcap": 20.0, "sink_logits": 30.0, "scale": -0.3},
            {"scale": 0.0},
        ],
        BACKENDS,
    ),
    indirect=["backend"],
)
def test_ranges_first_keys_caps_and_sinks(backend, sizes, options):
    queries, k_pages, v_pages, table = inputs(sizes, torch.bfloat16)
    options = {name: x.to(queries.device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if "sink_logits" in options:
        options["sink_logits"] = options["sink_logits"] + torch.randn(queries.shape[1])
    for causal in (False, True):
        check(queries, k_pages, v_pages, int32(sizes[4], 241), block_table=table, causal=causal, **options)


@pytest.mark.parametrize(
    ("sizes", "sink", "backend"),
    covering([(2, 4, 20, 64, 300, 16), (2, 3, 50, 64, 100, 16)], [None, 0.7], BACKENDS),
    indirect=["backend"],
)
def test_rows_that_are_empty_or_shorter_than_the_queries(backend, sizes, sink):
    """A query that sees no key gives 0 and -inf, or its sink's own bits, among others and alone."""
    queries, k_pages, v_pages, table = inputs(sizes, torch.bfloat16, B=3)
    end = int32(0, sizes[2] - 7, 1, 64, 90, 20)
    sinks = None if sink is None else sink + torch.randn(queries.shape[1])
    for causal in (False, True):
        options = {"block_table": table, "causal": causal, "sink_logits": sinks, "begin": int32(0, 0, 0, 64, 33, 4)}
        check(queries, k_pages, v_pages, end, **options)
    out, lse = ops.decode(queries, k_pages, v_pages, 0 * end, block_table=table, sink_logits=sinks)
    assert not out.any()
    expected = torch.tensor(-INF) if sinks is None else sinks[:, None]
    assert torch.equal(lse, expected.expand_as(lse))


@pytest.mark.parametrize("dtype", HALVES)
def test_many_queries_and_pages_that_are_not_aligned_or_not_paged(backend, dtype):
    """Queries at odd addresses come by other loads, keys at odd addresses by other kernels. [B, S, Hq, D] too."""
    sizes = (2, 4, 20, 64, 200, 16)
    queries, k_pages, v_pages, table = inputs(sizes, dtype)
    odd = torch.empty(queries.numel() + 1, dtype=dtype)[1:].view(queries.shape).copy_(queries)
    turned = queries.transpose(1, 2).contiguous().transpose(1, 2)
    end, options = int32(200, 133), {"block_table": table, "causal": True}
    expected = ops.decode(queries, k_pages, v_pages, end, **options)
    for other in (odd, turned):
        found = ops.decode(other, k_pages, v_pages, end, **options)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    k, v = (torch.randn(2 * 200 * 64 + 1).to(dtype)[1:].view(2, 200, 64) for _ in range(2))
    check(queries, k, v, end, causal=True)
    check(queries, k.clone(), v.clone(), end, causal=True)


@pytest.mark.parametrize("sizes", [(2, 4, 32, 128, 300, 16), (2, 9, 60, 128, 300, 16), (2, 1, 70, 64, 90, 16)])
def test_bits_of_many_queries_depend_on_their_own_row_only(backend, sizes):
    queries, k_pages, v_pages, table = inputs(sizes, torch.bfloat16, B=3)
    end = torch.tensor([300, 5, 77, 256, 257, 0], dtype=torch.int32).clamp(max=sizes[4])
    out, lse = ops.decode(queries, k_pages, v_pages, end, block_table=table, causal=True)
    for b in range(3):
        rows = slice(2 * b, 2 * b + 2)
        alone = ops.decode(queries[b : b + 1], k_pages, v_pages, end[rows], block_table=table[rows], causal=True)
        assert torch.equal(alone[0], out[b : b + 1])
        assert torch.equal(alone[1], lse[b : b + 1])


def test_pages_of_many_queries_outside_are_skipped(cuda):
    sizes = (1, 4, 20, 32, 160, 16)
    queries, k_pages, v_pages, table = inputs(sizes, torch.bfloat16)
    missing = table.clone()
    missing[0, 2], missing[0, 7] = -1, len(k_pages)
    held = [*range(32), *range(48, 112), *range(128, 160)]
    k, v = (x[table[0].long()].flatten(0, 1)[held][None] for x in (k_pages, v_pages))
    found = ops.decode(queries, k_pages, v_pages, int32(1000), block_table=missing, begin=int32(-5))
    expected = oracle.decode(queries.double(), k, v, int32(len(held)))
    torch.testing.assert_close(found[0].double(), expected[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(found[1].double(), expected[1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("split", [False, True])
def test_numbers_that_are_not_finite_reach_the_queries_that_see_them(backend, split):
    T = 300 if split else 100
    queries, k, v = (torch.randn(1, n, m, 32).to(torch.bfloat16) for n, m in ((4, 20), (1, T), (1, T)))
    v[0, 0, T - 10, 3] = INF
    out, lse = ops.decode(queries, k[0], v[0], int32(T - 20), causal=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    k[0, 0, 50, 3] = float("nan")
    out, lse = ops.decode(queries, k[0], v[0], int32(T - 20), causal=True)
    sees = torch.arange(20) + T - 40 >= 50
    assert out[:, :, sees].isnan().all()
    assert lse[:, :, sees].isnan().all()
