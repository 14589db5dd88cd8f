"""What every op that makes logits does with them: scale, softcap, sink logits, head dims up to 512."""

import itertools
import math

import accuracy
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS
from helpers import DTYPES, MASKED_RANGES, covering, paged

from kvcompress import ops

INF = float("inf")


def sinks_of(heads):
    """One of them is none."""
    sinks = 2 * torch.randn(heads)
    sinks[-1] = -INF
    return sinks


def check_decode(queries, k, v, end, **options):
    """out, lse and, of one query, the probabilities."""
    found = []
    for op, x, kind in ((ops.decode, queries, torch.float32), (oracle.decode, queries.double(), torch.float64)):
        probabilities = None
        if queries.shape[2] == 1 and not options.get("sinks"):
            probabilities = torch.full((*queries.shape[:2], 700), 7.0, dtype=kind)
        found.append((*op(x, k, v, end, probabilities=probabilities, **options), probabilities))
    ours, exact = found
    softmax, values = accuracy.of_pages(queries, k, v, end, **options)
    assert_within(ours[0], exact[0], softmax.out_error(values, queries.dtype), "out")
    assert_within(ours[1], exact[1], softmax.lse_error(), "lse")
    if ours[2] is not None:
        assert_within(ours[2], exact[2], accuracy.probabilities(700, queries, k, v, end, **options), "probabilities")
        without = ops.decode(queries, k, v, end, **options)
        torch.testing.assert_close(
            ours[0], without[0], rtol=1e-2 if queries.dtype != torch.float32 else 1e-5, atol=1e-5
        )


SIZES = [
    (1, 2, 1, 1, 1, 16, 4), (2, 8, 2, 1, 300, 64, 64), (1, 4, 1, 3, 70, 128, 16), (2, 3, 3, 2, 33, 80, 8),
    (1, 4, 2, 3, 90, 33, 256), (1, 8, 2, 1, 20, 256, 8), (2, 4, 2, 1, 40, 512, 8), (1, 4, 2, 9, 30, 512, 64),
    (1, 6, 2, 2, 270, 400, 16), (1, 2, 1, 2, 30, 509, 16), (1, 16, 1, 1, 50, 300, 16), (1, 1, 1, 1, 520, 301, 4),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "sizes", "backend"), covering(DTYPES, SIZES, BACKENDS), indirect=["backend"])
def test_decode_with_softcap_and_sinks(backend, dtype, sizes):
    B, Hq, Hkv, S, T, D, P = sizes
    R = B * Hkv
    queries = torch.randn(B, Hq, S, D).to(dtype)
    k_pages, v_pages, table = paged(torch.randn(R, T, D).to(dtype), torch.randn(R, T, D).to(dtype), P)
    end = torch.randint(1, T + 1, (R,), dtype=torch.int32)
    end[0] = T
    given = {"block_table": table}
    check_decode(queries, k_pages, v_pages, end, softcap=2.0, sink_logits=sinks_of(Hq), causal=S > 1, **given)
    check_decode(queries, k_pages, v_pages, end, sink_logits=sinks_of(Hq), begin=end // 2, **given)
    check_decode(queries, k_pages, v_pages, end, softcap=40.0, begin=end // 2, sinks=3, causal=S > 1, **given)
    check_decode(queries, k_pages, v_pages, end, **given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_where_a_block_has_less_shared_memory(cuda, monkeypatch, dtype):
    monkeypatch.setenv("KVC_EMULATION_SHARED", str(99 * 1024))
    queries, k, v = torch.randn(1, 8, 1, 256).to(dtype), *torch.randn(2, 2, 20, 256).to(dtype)
    end = torch.tensor([20, 9], dtype=torch.int32)
    check_decode(queries, k, v, end, softcap=2.0, sink_logits=sinks_of(8))


def test_an_empty_row_gives_its_sink(backend):
    queries, k, v, sinks = torch.randn(1, 4, 3, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16), sinks_of(4)
    end = torch.tensor([0, 2], dtype=torch.int32)
    out, lse = ops.decode(queries, k, v, end, sink_logits=sinks, causal=True)
    assert not out[:, :2].any() and torch.equal(lse[0, :2], sinks[:2, None].expand(2, 3))
    assert not out[:, :, 0].any() and torch.equal(lse[0, :, 0], sinks)
    check_decode(queries, k, v, end, sink_logits=sinks, causal=True)
    nothing = ops.decode(queries, k[:, :0], v[:, :0], 0 * end, sink_logits=sinks)  # no capacity at all
    assert not nothing[0].any() and torch.equal(nothing[1][0], sinks[:, None].expand(4, 3))
    weights = torch.full((1, 4, 9), 7.0)
    ops.decode(queries[:, :, :1], k, v, end, sink_logits=sinks, probabilities=weights)
    assert (weights[:, :2] == 7).all() and (weights[0, 2, :2].sum() < 1).all()


@pytest.mark.parametrize("logit", [1000.0, -1000.0])
def test_a_sink_far_from_the_logits(backend, logit):
    queries, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 9, 16), torch.randn(1, 9, 16)
    end, sinks = torch.tensor([9], dtype=torch.int32), torch.full((2,), logit)
    out, lse = ops.decode(queries, k, v, end, sink_logits=sinks)
    plain = ops.decode(queries, k, v, end)
    assert torch.equal(out, torch.zeros_like(out) if logit > 0 else plain[0])
    assert torch.equal(lse, torch.full_like(lse, logit) if logit > 0 else plain[1])
    x = queries.expand(1, 2, 3, 16), k[None], v[None]
    out, lse = ops.attention(*x, sink_logits=sinks)
    plain = ops.attention(*x)
    torch.testing.assert_close(out, torch.zeros_like(out) if logit > 0 else plain[0])
    torch.testing.assert_close(lse, torch.full_like(lse, logit) if logit > 0 else plain[1])


def test_a_sink_that_is_nan_shows(backend):
    queries, k, v = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 9, 16), torch.randn(1, 1, 9, 16)
    end, sinks = torch.tensor([9], dtype=torch.int32), torch.tensor([math.nan, 0.0])
    scores = ops.window_scores(queries, k.expand(1, 2, 9, 16), sink_logits=sinks)
    assert scores[:, 0].isnan().all() and scores[:, 1].isfinite().all()
    for out, lse in (
        ops.attention(queries, k, v, sink_logits=sinks),
        ops.decode(queries, k[0], v[0], end, sink_logits=sinks),
    ):
        assert out[:, 0].isnan().all() and lse[:, 0].isnan().all()
        assert out[:, 1].isfinite().all() and lse[:, 1].isfinite().all()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_segments_of_which_one_has_the_sinks_merge_to_the_whole(backend, which):
    queries, k, v, sinks = torch.randn(2, 4, 1, 64), torch.randn(4, 600, 64), torch.randn(4, 600, 64), sinks_of(4)
    end, zero = torch.tensor([600, 4, 100, 577], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    cuts = [
        zero,
        torch.tensor([5, 4, 0, 300], dtype=torch.int32),
        torch.tensor([9, 4, 100, 301], dtype=torch.int32),
        end,
    ]
    parts = [
        ops.decode(queries, k, v, last, begin=first, softcap=3.0, sink_logits=sinks if i == which else None)
        for i, (first, last) in enumerate(itertools.pairwise(cuts))
    ]
    exact = oracle.decode(queries.double(), k, v, end, softcap=3.0, sink_logits=sinks)
    merged = ops.merge_states(*parts)
    torch.testing.assert_close(merged[0].double(), exact[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged[1].double(), exact[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "sizes", "backend"),
    covering(DTYPES, [(8, 32), (4, 64), (4, 512), (2, 512), (6, 301), (10, 300)], BACKENDS),
    indirect=["backend"],
)
def test_near_attention_with_sinks_and_shared_are_one_softmax(backend, dtype, sizes):
    Hq, D = sizes
    B, Hkv, T = 2, 2, 330
    queries, k, v = torch.randn(B, Hq, 1, D).to(dtype), *torch.randn(2, B * Hkv, T, D).to(dtype)
    k_pages, v_pages, table = paged(k, v, 16)
    sinks, none = sinks_of(Hq), torch.zeros(4, dtype=torch.int32)
    end = torch.tensor([330, 90, 300, 33], dtype=torch.int32)
    # the second row has no near keys, the last no distant ones
    middle = torch.tensor([300, 90, 1, 0], dtype=torch.int32)
    given = {"block_table": table, "softcap": 5.0}
    near = ops.decode(queries, k_pages, v_pages, end, begin=middle, sink_logits=sinks, **given)
    weights = torch.full((B, Hq, T), math.nan)
    far = ops.decode(queries, k_pages, v_pages, middle, begin=none, probabilities=weights, **given)
    shared = near, weights, far[1], v_pages, none, middle
    found, _ = ops.decode_shared(*shared, block_table=table)
    exact = oracle.decode(queries.double(), k_pages, v_pages, end, sink_logits=sinks, **given)[0]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)
    # the gate is the probability of near keys and sink; tau is compared with it
    ones = torch.zeros(4, T, D, dtype=dtype)
    for row, first in enumerate(middle.tolist()):
        ones[row, :first] = 1  # distant keys
    of_far = ops.decode(queries, k, ones, end, sink_logits=sinks, softcap=5.0)[0][..., 0].double()
    for tau in (0.2, 0.5, 0.8):
        out, skipped = ops.decode_shared(*shared, block_table=table, tau=tau)
        has = (middle > 0).view(B, Hkv, 1).repeat_interleave(Hq // Hkv, 1)
        sure = (1 - of_far - tau).abs() > 1e-2
        assert torch.equal(skipped[sure], (has & (1 - of_far >= tau))[sure])
        assert torch.equal(out[skipped], near[0][skipped])
        torch.testing.assert_close(out[~skipped].double(), exact[~skipped], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("reduce", "ranges", "backend"), covering(ops.REDUCTIONS, [{}, *MASKED_RANGES], BACKENDS), indirect=["backend"]
)
def test_window_scores_with_softcap_and_sinks(backend, ranges, reduce):
    queries, keys = torch.randn(2, 4, 9, 32), 3 * torch.randn(2, 2, 150, 32)
    options = {"reduce": reduce, "lengths": torch.tensor([150, 40], dtype=torch.int32), "kernel_size": 1, **ranges}
    for logits in ({"softcap": 2.0}, {"sink_logits": sinks_of(4)}, {"softcap": 30.0, "sink_logits": sinks_of(4)}):
        exact = oracle.window_scores(queries.double(), keys.double(), **options, **logits)
        bound = accuracy.window_scores(queries, keys, **options, **logits)
        assert_within(ops.window_scores(queries, keys, **options, **logits), exact, bound)


@pytest.mark.parametrize(
    ("dtype", "sizes", "backend"),
    covering(DTYPES, [(4, 2, 8, 77, 512), (6, 1, 3, 200, 400), (2, 2, 70, 130, 301)], BACKENDS),
    indirect=["backend"],
)
def test_window_scores_of_large_heads(backend, dtype, sizes):
    Hq, Hkv, W, T, D = sizes
    queries, keys = torch.randn(1, Hq, W, D).to(dtype), torch.randn(1, Hkv, T, D).to(dtype)
    options = {"softcap": 3.0, "sink_logits": sinks_of(Hq)}
    exact = oracle.window_scores(queries.double(), keys.double(), **options)
    assert_within(ops.window_scores(queries, keys, **options), exact, accuracy.window_scores(queries, keys, **options))


def test_window_scores_of_many_passes_with_sinks():
    queries, keys, sinks = torch.randn(1, 2, 3000, 16), torch.randn(1, 1, 3000, 16), torch.tensor([1.0, 4.0])
    options = {"reduce": "sum", "kernel_size": 1, "skip_last": 0, "sink_logits": sinks, "softcap": 5.0}
    exact = oracle.window_scores(queries.double(), keys.double(), **options)
    assert_within(ops.window_scores(queries, keys, **options), exact, accuracy.window_scores(queries, keys, **options))


@pytest.mark.parametrize(
    ("sinks_and_recent", "D", "backend"),
    covering([(0, 0), (1, 2), (70, 64)], [32, 512], BACKENDS),
    indirect=["backend"],
)
def test_layer_similarity_with_softcap(backend, sinks_and_recent, D):
    sinks, recent = sinks_and_recent
    queries, keys = 3 * torch.randn(3, 4, 12, D), torch.randn(3, 2, 150, D)
    options = {"sinks": sinks, "recent": recent, "softcap": 4.0}
    exact, _ = oracle.layer_similarity(queries.double(), keys.double(), **options)
    found, _ = ops.layer_similarity(queries, keys, **options)
    assert_within(found, exact, accuracy.layer_similarity(queries, keys, **options))


@pytest.mark.parametrize(
    ("dtype", "sizes", "backend"),
    covering(DTYPES, [((3, 5), 16), ((0, 1), 16), ((2, 300), 16), ((3, 5), 512)], BACKENDS),
    indirect=["backend"],
)
def test_pod_attention_with_softcap_and_sinks_is_one_softmax(backend, dtype, sizes):
    sets, D = sizes
    shapes = ((2, 4, 24, D), (2, 2, 30, D), (2, 2, 30, D), (2, 4, 24, D), (2, 2, 30, D))
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    lengths = torch.tensor([30, 19], dtype=torch.int32)
    found = []
    for op, kind in ((ops.pod_attention, dtype), (oracle.pod_attention, torch.float64)):
        leaves = [x.to(kind).requires_grad_() for x in tensors]
        torch.manual_seed(1)
        sinks = sinks_of(4).to(torch.float32 if kind == dtype else kind).requires_grad_()
        results = op(*leaves, sinks=sets[0], recent=sets[1], lengths=lengths, softcap=2.0, sink_logits=sinks)
        weights = [torch.randn(x.shape) for x in results]
        loss = sum((torch.where(x.isfinite(), x, 0).double() * w).sum() for x, w in zip(results, weights, strict=True))
        grads = torch.autograd.grad(loss, (*leaves, sinks), allow_unused=True, materialize_grads=True)
        found.append((*results, *grads))
    tolerance = {torch.float32: 5e-5, torch.bfloat16: 1e-1, torch.float16: 1e-2}[dtype]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(
            x.double(), y, atol=tolerance * max(1.0, y[y.isfinite()].abs().max().item()), rtol=tolerance
        )


def test_the_reference_of_pod_attention_with_softcap_and_sinks_passes_gradcheck():
    shapes = ((1, 4, 5, 3), (1, 2, 7, 3), (1, 2, 7, 3), (1, 4, 5, 3), (1, 2, 7, 3), (4,))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    torch.autograd.gradcheck(
        lambda *x: oracle.pod_attention(*x[:5], sinks=1, recent=2, sink_logits=x[5], softcap=2.0),
        tensors,
        fast_mode=True,
    )


def calls():
    """A call of each op that makes logits, with room for options."""
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    end = torch.tensor([9, 5], dtype=torch.int32)
    weights = torch.zeros(1, 4, 9)
    return {
        "attention": lambda **x: ops.attention(q, k, v, **x),
        "decode": lambda **x: ops.decode(q, k[0], v[0], end, **x),
        "probabilities": lambda **x: ops.decode(q[:, :, :1], k[0], v[0], end, probabilities=weights, **x),
        "window_scores": lambda **x: ops.window_scores(q, k, **x),
        "masked window_scores": lambda **x: ops.window_scores(q, k, mask_first=2, mask_last=1, **x),
        "layer_similarity": lambda **x: ops.layer_similarity(q, k, sinks=2, **x),
        "pod_attention": lambda **x: ops.pod_attention(q, k, v, q, k, sinks=1, recent=2, **x),
    }


CALLS = list(calls())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scale", [INF, -INF, math.nan, 1e39])
def test_a_scale_that_is_not_finite_is_refused(name, scale):
    with pytest.raises(ValueError, match=f"scale must be finite in float32, got {scale}".replace("+", r"\+")):
        calls()[name](scale=scale)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("softcap", [0.0, -1.0, INF, math.nan, 1e-60, 1e39])
def test_a_wrong_softcap_is_refused(name, softcap):
    with pytest.raises(ValueError, match="softcap must be above 0 and finite in float32, or None, got"):
        calls()[name](softcap=softcap)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "layer_similarity"])
def test_wrong_sink_logits_are_named(name):
    call = calls()[name]
    with pytest.raises(ValueError, match=r"sink_logits must be float32, got torch\.bfloat16"):
        call(sink_logits=torch.zeros(4).bfloat16())
    for shape in ((3,), (4, 1), (1, 4)):
        with pytest.raises(ValueError, match=r"sink_logits must be \[4\], got shape"):
            call(sink_logits=torch.zeros(shape))
    with pytest.raises(TypeError, match=r"sink_logits must be a torch\.Tensor, got list"):
        call(sink_logits=[0.0] * 4)


@pytest.mark.parametrize(
    ("name", "scale", "backend"), covering(CALLS, [1e-45, 1e-60, 1e-30, 3e38], BACKENDS), indirect=["backend"]
)
def test_scales_at_the_ends_of_float32_give_no_nan(backend, name, scale):
    """Small ones: logits that are all alike."""
    torch.manual_seed(0)
    call, tiny = calls()[name], scale < 1
    if not tiny:
        call(scale=scale, softcap=5.0)
        return
    found, alike = call(scale=scale), call(scale=1e-12)
    for x, y in zip(*((z if isinstance(z, tuple) else (z,)) for z in (found, alike)), strict=True):
        if isinstance(x, torch.Tensor):
            assert not x.isnan().any()
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-45, 1e-40])
def test_a_tiny_scale_gives_finite_gradients(backend, scale):
    q, k = torch.randn(1, 2, 3, 16, requires_grad=True), torch.randn(1, 1, 9, 16, requires_grad=True)
    out, lse = ops.attention(q, k, k, scale=scale)
    (out.sum() + lse.sum()).backward()
    assert q.grad.isfinite().all() and k.grad.isfinite().all()


def test_zero_and_negative_scales_keep_masked_keys_out(backend):
    queries, keys = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 90, 16)
    for scale in (0.0, -0.7):
        options = {"scale": scale, "mask_first": 3, "mask_last": 2, "kernel_size": 1}
        exact = oracle.window_scores(queries.double(), keys.double(), **options)
        bound = accuracy.window_scores(queries, keys, **options)
        assert_within(ops.window_scores(queries, keys, **options), exact, bound)


def test_no_gradient_to_sinks_where_there_is_none():
    sinks = torch.zeros(4, requires_grad=True)
    for name in ("decode", "probabilities", "window_scores"):
        found = calls()[name](sink_logits=sinks)
        with pytest.raises(NotImplementedError, match="no gradient"):
            (found if isinstance(found, torch.Tensor) else found[0]).sum().backward()


def test_tensors_without_elements_may_have_any_strides(backend):
    def empty(*shape):
        x = torch.empty(*shape[:-2], shape[-1], shape[-2] + 5).mT[..., : shape[-2], :]
        assert x.stride(-1) != 1  # the last dimension is strided
        return x

    for B, S, T in ((0, 3, 9), (2, 0, 9), (2, 0, 0)):
        q, k = empty(B, 4, S, 16), empty(B, 2, T, 16)
        out, lse = ops.attention(q, k, k)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
        assert ops.rope(q, torch.ones(9, 8), torch.zeros(9, 8)).shape == q.shape
    assert ops.window_scores(empty(0, 4, 3, 16), empty(0, 2, 9, 16)).shape == (0, 2, 6)
    assert ops.layer_similarity(empty(0, 4, 3, 16), empty(0, 2, 9, 16))[0].shape == (4, 0, 0)
    end = torch.zeros(2, dtype=torch.int32)
    out, lse = ops.decode(empty(1, 2, 0, 16), torch.randn(2, 4, 16), torch.randn(2, 4, 16), end)
    assert out.shape == (1, 2, 0, 16) and lse.shape == (1, 2, 0)
    near, v, table = (torch.randn(1, 2, 1, 16), torch.zeros(1, 2, 1)), torch.randn(2, 4, 16), torch.zeros(2, 1).int()
    nothing = torch.empty(1, 5, 2).mT[..., :0]
    out, _ = ops.decode_shared(near, nothing, near[1], v, end, end, block_table=table)
    assert torch.equal(out, near[0])


def test_a_bad_page_of_values_names_the_value_table():
    k_pages, v_pages, table = paged(torch.randn(2, 9, 16), torch.randn(2, 9, 16), 4)
    end, far = torch.tensor([9, 3], dtype=torch.int32), table.clone()
    far[0, 1] = len(v_pages)
    with pytest.raises(RuntimeError, match=r"decode: value_table must name pages between 0 and 8, got 9 at \[0, 1\]"):
        ops.decode(torch.randn(1, 4, 1, 16), k_pages, v_pages, end, block_table=table, value_table=far)
    with pytest.raises(RuntimeError, match=r"decode: block_table must name pages between 0 and 8, got 9 at \[0, 1\]"):
        ops.decode(torch.randn(1, 4, 1, 16), k_pages, v_pages, end, block_table=far, value_table=table)


@pytest.mark.parametrize("name", ["decode", "probabilities", "window_scores", "layer_similarity"])
def test_opcheck(name):
    q, k, sinks = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 9, 16), torch.randn(4)
    rows = (q, k[0], k[0], None, None, None, torch.tensor([9, 3], dtype=torch.int32))
    native = torch.ops.kvcompress
    op, arguments = {
        "decode": (native.decode, (*rows, 0.25, True, 3, sinks, 2.0)),
        "probabilities": (native.decode_probabilities, (*rows, torch.zeros(1, 4, 9), 0.25, sinks, 2.0)),
        "window_scores": (native.window_scores, (q, k, None, 0.25, 0, 0, 5, 3, 1, 2, sinks, 2.0)),
        "layer_similarity": (native.layer_similarity, (q, k, 0.25, 1, 2, 2.0)),
    }[name]
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("D", [300, 512])
def test_rotation_of_large_heads(backend, D):
    x, angles = torch.randn(2, 3, 7, D), torch.rand(7, D // 2)
    found = ops.rope(x, angles.cos(), angles.sin())
    exact = oracle.rope(x.double(), angles.cos().double(), angles.sin().double())
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=1e-6)
