"""Softcap, sink logits and head dims above 256 of csrc/cuda but attention, in the emulation."""

import emulated
import pytest
import torch
from helpers import DTYPES, MASKED_RANGES, assert_as_accurate, paged

INF = float("inf")


def check_decode(kernels, reference, queries, k, v, end, **options):
    """out, lse and, of one query, the probabilities."""
    found = []
    for op, x in ((kernels.decode, queries), (reference.decode, queries), (reference.decode, queries.double())):
        weights = None
        if queries.shape[2] == 1 and not options.get("sinks"):
            weights = torch.full((*queries.shape[:2], 700), 7.0, dtype=torch.float32 if len(found) == 0 else x.dtype)
        found.append((*op(x, k, v, end, probabilities=weights, **options), weights))
    ours, plain, exact = found
    assert_as_accurate(ours[0], plain[0], exact[0])
    assert_as_accurate(ours[1], plain[1].float(), exact[1])
    if ours[2] is not None:
        assert_as_accurate(ours[2], plain[2].float(), exact[2])
        without = kernels.decode(queries, k, v, end, **options)
        torch.testing.assert_close(without[1], ours[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "S", "T", "D", "P"),
    [(1, 2, 1, 1, 1, 16, 4), (2, 8, 2, 1, 300, 64, 64), (1, 4, 1, 3, 70, 128, 16), (1, 4, 2, 3, 90, 33, 32),
     (1, 8, 2, 1, 20, 256, 8), (1, 4, 2, 1, 40, 512, 8), (1, 6, 2, 2, 300, 400, 16), (1, 1, 1, 1, 20, 301, 4)],
)  # fmt: skip
def test_decode_with_softcap_and_sinks(kernels, reference, monkeypatch, dtype, B, Hq, Hkv, S, T, D, P):
    R, sinks = B * Hkv, 2 * torch.randn(Hq)
    sinks[-1] = -INF
    queries = torch.randn(B, Hq, S, D).to(dtype)
    k_pages, v_pages, table = paged(torch.randn(R, T, D).to(dtype), torch.randn(R, T, D).to(dtype), P)
    end = torch.randint(1, T + 1, (R,), dtype=torch.int32)
    end[0] = T
    rows = queries, k_pages, v_pages, end
    check_decode(kernels, reference, *rows, block_table=table, softcap=2.0, sink_logits=sinks, causal=S > 1)
    check_decode(kernels, reference, *rows, block_table=table, sink_logits=sinks, begin=end // 2)
    check_decode(kernels, reference, *rows, block_table=table, softcap=40.0, begin=end // 2, sinks=3)
    if D == 256:
        monkeypatch.setenv("KVC_EMULATION_SHARED", str(99 * 1024))
        check_decode(kernels, reference, *rows, block_table=table, softcap=2.0, sink_logits=sinks)


def test_an_empty_row_gives_its_sink_and_a_nan_shows(kernels):
    queries, k, v = torch.randn(1, 4, 1, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    end, sinks = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0.3, -700.0, float("nan"), -INF])
    out, lse = kernels.decode(queries, k, v, end, sink_logits=sinks)
    assert not out[:, :2].any() and torch.equal(lse[0, :2, 0], sinks[:2])
    assert out[0, 2].isnan().all() and lse[0, 2].isnan() and lse[0, 3].isfinite()
    nothing = k[:, :0].contiguous()
    assert torch.equal(kernels.decode(queries, nothing, nothing, 0 * end, sink_logits=sinks)[1][0, :2, 0], sinks[:2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("Hq", "D"), [(4, 64), (4, 512), (2, 512), (6, 301), (10, 300)])
def test_near_attention_with_sinks_and_shared_are_one_softmax(kernels, reference, dtype, Hq, D):
    T, sinks, none = 400, torch.randn(Hq), torch.zeros(2, dtype=torch.int32)
    queries, (k, v) = torch.randn(1, Hq, 1, D).to(dtype), torch.randn(2, 2, T, D).to(dtype)
    k_pages, v_pages, table = paged(k, v, 16)
    end, middle = torch.tensor([400, 33], dtype=torch.int32), torch.tensor([300, 33], dtype=torch.int32)
    given, weights = {"block_table": table, "softcap": 5.0}, torch.zeros(1, Hq, T)
    near = kernels.decode(queries, k_pages, v_pages, end, begin=middle, sink_logits=sinks, **given)
    far = kernels.decode(queries, k_pages, v_pages, middle, begin=none, probabilities=weights, **given)
    out, _ = kernels.decode_shared(near, weights, far[1], v_pages, none, middle, block_table=table)
    exact = reference.decode(queries.double(), k_pages, v_pages, end, sink_logits=sinks, **given)[0]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ranges", [{}, *MASKED_RANGES])
@pytest.mark.parametrize("D", [16, 301, 512])
def test_window_scores_with_softcap_and_sinks(kernels, reference, ranges, D):
    queries, keys, sinks = torch.randn(2, 4, 9, D), 3 * torch.randn(2, 2, 150, D), 2 * torch.randn(4)
    sinks[1] = -INF
    options = {"lengths": torch.tensor([150, 40], dtype=torch.int32), "kernel_size": 1, **ranges}
    for logits in ({"softcap": 2.0}, {"sink_logits": sinks}, {"softcap": 30.0, "sink_logits": sinks}):
        exact = reference.window_scores(queries.double(), keys.double(), **options, **logits)
        plain = reference.window_scores(queries, keys, **options, **logits)
        assert_as_accurate(kernels.window_scores(queries, keys, **options, **logits), plain, exact)
    spoiled = torch.tensor([0.0, 0.0, float("nan"), 0.0])
    scores = kernels.window_scores(queries, keys, sink_logits=spoiled)
    assert scores[:, 0].isfinite().all() and scores[:, 1].isnan().all()


@pytest.mark.parametrize("D", [32, 512])
def test_layer_similarity_with_softcap(kernels, reference, D):
    queries, keys = 3 * torch.randn(3, 2, 4, D), torch.randn(3, 1, 100, D)
    options = {"sinks": 2, "recent": 3, "softcap": 4.0}
    exact, _ = reference.layer_similarity(queries.double(), keys.double(), **options)
    plain, _ = reference.layer_similarity(queries, keys, **options)
    error = (kernels.layer_similarity(queries, keys, **options)[0] - exact).abs().max()
    assert error <= 2 * (plain - exact).abs().max() + 4e-6


@pytest.mark.parametrize("scale", [1e-45, 1e-40])
def test_a_tiny_scale_gives_no_nan(kernels, scale):
    q, k, end = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 9, 16), torch.tensor([9], dtype=torch.int32)
    found = [
        *kernels.attention(q, k, k, scale=scale, grads=(q, None))[:5],
        *kernels.decode(q, k[0:1, 0], k[0:1, 0], end, scale=scale),
    ]
    found += [kernels.window_scores(q, k, scale=scale, mask_first=2), kernels.layer_similarity(q, k, scale=scale)[0]]
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("change", [{"scale": INF}, {"scale": float("nan")}, {"softcap": -1.0}, {"softcap": INF}])
def test_invalid_logits(kernels, change):
    q, k, end = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 9, 16), torch.tensor([9], dtype=torch.int32)
    for call in (
        lambda: kernels.decode(q, k[0], k[0], end, **change),
        lambda: kernels.window_scores(q, k, **change),
        lambda: kernels.layer_similarity(q, k, **change),
    ):
        with pytest.raises(emulated.LaunchError) as error:
            call()
        assert error.value.code == emulated.INVALID_VALUE
