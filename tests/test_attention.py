import numpy as np
import oracle
import pytest
import torch
from attention_definition import MASKS, check, inputs, results
from backends import BACKENDS
from helpers import DTYPES, covering
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops


@pytest.mark.parametrize(("mask", "bias", "backend"), covering(MASKS, [False, True], BACKENDS), indirect=["backend"])
def test_masks_and_gradients_as_the_reference(backend, mask, bias):
    check(inputs(2, 2, 1, 100, 150, 32, bias=bias), **MASKS[mask])


def with_sinks(*args, **settings):
    tensors = inputs(*args, **settings)
    sinks = 2 * torch.randn(tensors[0].shape[1])
    sinks[-1] = float("-inf")
    return *tensors, sinks.requires_grad_()


@pytest.mark.parametrize(
    ("mask", "sizes", "dtype", "backend"),
    covering(MASKS, [(40, 70, 16), (20, 45, 300)], DTYPES, BACKENDS),
    indirect=["backend"],
)
def test_softcap_and_sinks_as_the_reference(backend, mask, sizes, dtype):
    S, T, D = sizes
    options = {"lengths": torch.tensor([T, S - 5], dtype=torch.int32), **MASKS[mask]}
    check(inputs(2, 2, 1, S, T, D, dtype, bias=True), softcap=1.5, **options)
    check(with_sinks(2, 2, 1, S, T, D, dtype), **options)
    check(with_sinks(2, 2, 1, S, T, D, dtype), softcap=40.0, **options)


SIZES = [
    (1, 8, 1, 3, 20, 64), (2, 4, 2, 3, 35, 80), (1, 1, 1, 20, 200, 96), (1, 1, 1, 65, 130, 128),
    (1, 1, 1, 20, 70, 256), (1, 2, 1, 64, 64, 33), (1, 1, 1, 7, 9, 1), (1, 2, 2, 5, 9, 7), (1, 1, 1, 40, 40, 136),
    (1, 1, 1, 9, 70, 200), (1, 2, 1, 17, 33, 512), (2, 2, 2, 3, 40, 400), (1, 3, 1, 33, 34, 257),
    (1, 2, 1, 9, 40, 509),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "sizes", "backend"), covering(DTYPES, SIZES, BACKENDS), indirect=["backend"])
def test_shapes_and_dtypes_as_the_reference(backend, dtype, sizes):
    B, Hq, Hkv, S, T, D = sizes
    check(with_sinks(B, Hq, Hkv, S, T, D, dtype, bias=True), softcap=2.0)
    check(inputs(B, Hq, Hkv, S, T, D, dtype, bias=True), softcap=30.0, window=20, sinks=2, complement=True)
    check(inputs(B, Hq, Hkv, S, T, D, dtype, bias=True))
    check(inputs(B, Hq, Hkv, S, T, D, dtype), window=20, sinks=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_with_less_shared_memory(cuda, monkeypatch, dtype):
    monkeypatch.setenv("KVC_EMULATION_SHARED", str(99 * 1024))
    check(with_sinks(1, 2, 1, 20, 40, 256, dtype), softcap=3.0)
    check(inputs(1, 2, 1, 20, 40, 128, dtype))


@pytest.mark.parametrize(
    ("window", "sinks"), [(1, 0), (7, 1), (64, 0), (65, 64), (200, 5), (1, 500), (30, 70), (130, 0)]
)
def test_windows_and_sinks_across_tiles(backend, window, sinks):
    tensors = inputs(1, 1, 1, 100, 200, 16, torch.bfloat16)
    check(tensors, window=window, sinks=sinks)
    check(tensors, window=window, sinks=sinks, complement=True)


def test_large_logits_do_not_overflow(backend):
    queries, keys, values, _ = inputs(1, 1, 1, 10, 70, 16)
    check([(100 * x).detach().requires_grad_() for x in (queries, keys)] + [values, None])


def test_capped_logits_saturate(backend):
    queries, keys, values, _ = inputs(1, 2, 1, 5, 30, 16)
    huge = [(1e18 * x).detach().requires_grad_() for x in (queries, keys)]
    check((*huge, values, None), softcap=3.0)
    (dq,) = torch.autograd.grad(ops.attention(*huge, values, softcap=3.0)[0].sum(), huge[0])
    assert not dq.any()
    huge = [(1e30 * x).detach().requires_grad_() for x in (queries, keys)]  # logits of infinity, or NaN by inf - inf
    out, lse = ops.attention(huge[0].abs(), huge[1].abs(), values, softcap=3.0)
    torch.testing.assert_close(lse[0, 0], 3 + torch.arange(26, 31).log())
    assert out.isfinite().all()
    keys = keys.detach().clone()
    keys[0, 0, 3, 2] = float("nan")
    assert ops.attention(queries, keys, values, softcap=3.0)[0].isnan().all()


def test_queries_that_see_nothing_have_their_sink_and_padding_has_none(backend):
    tensors = with_sinks(3, 4, 2, 20, 40, 16)
    lengths = torch.tensor([40, 7, 0], dtype=torch.int32)
    options = {"window": 30, "complement": True, "lengths": lengths}
    check(tensors, **options)
    out, lse = ops.attention(*tensors[:3], sink_logits=tensors[4], **options)
    assert not out[0, :, :9].any()
    assert torch.equal(lse[0, :, :10], tensors[4][:, None].expand(4, 10))
    assert (lse[1, :, :13] == float("-inf")).all() and torch.equal(lse[1, :, 13:], tensors[4][:, None].expand(4, 7))
    assert (lse[2] == float("-inf")).all() and not out[1:].any()
    # what padding holds reaches no gradient
    grads = torch.randn_like(out), torch.randn_like(lse)
    clean = torch.autograd.grad((out, lse), (*tensors[:3], tensors[4]), grads)
    dirty = [x.clone() for x in (tensors[0].detach(), *grads)]
    for x in dirty:
        x[1, :, :13] = x[2] = float("nan")
    dirty[0].requires_grad_()
    found = ops.attention(*dirty[:1], *tensors[1:3], sink_logits=tensors[4], **options, softcap=None)
    for x, y in zip(torch.autograd.grad(found, (dirty[0], *tensors[1:3], tensors[4]), dirty[1:]), clean, strict=True):
        assert torch.equal(x, y)
    found = ops.attention(*dirty[:1], *tensors[1:3], sink_logits=tensors[4], lengths=lengths, softcap=2.0)
    for x in torch.autograd.grad(found, (dirty[0], *tensors[1:3], tensors[4]), dirty[1:]):
        assert x.isfinite().all()


def test_a_branch_with_the_sinks_and_one_without_merge_to_the_whole_with_exact_gradients(backend):
    tensors = with_sinks(2, 4, 2, 60, 90, 32)
    options, leaves = {"window": 20, "sinks": 3, "softcap": 2.0}, (*tensors[:3], tensors[4])
    for first in (True, False):
        sinks = (tensors[4], None) if first else (None, tensors[4])
        near = ops.attention(*tensors[:3], sink_logits=sinks[0], **options)
        far = ops.attention(*tensors[:3], sink_logits=sinks[1], complement=True, **options)
        merged = ops.merge_states(near, far)
        whole = ops.attention(*tensors[:3], sink_logits=tensors[4], softcap=2.0)
        grads = torch.randn_like(whole[0]), torch.randn_like(whole[1])
        found = [*merged, *torch.autograd.grad(merged, leaves, grads)]
        for x, y in zip(found, [*whole, *torch.autograd.grad(whole, leaves, grads)], strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_one_token(backend):
    queries, keys, values, _ = inputs(1, 2, 1, 1, 1, 16)
    out, lse = ops.attention(queries, keys, values)
    assert torch.equal(out, values.expand(1, 2, 1, 16))
    torch.testing.assert_close(lse, (queries * keys).sum(-1) / 4)
    grads = torch.autograd.grad((out, lse), (queries, keys, values), (torch.ones_like(out), torch.ones_like(lse)))
    torch.testing.assert_close(grads[0], keys.expand(1, 2, 1, 16) / 4, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads[1], queries.sum(1, keepdim=True) / 4, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads[2], torch.full_like(values, 2.0))


@pytest.mark.parametrize("mask", MASKS)
def test_sequences_of_different_length(backend, mask):
    lengths = torch.tensor([0, 1, 30, 90], dtype=torch.int32)
    tensors = inputs(4, 4, 2, 40, 90, 16, bias=True)
    check(tensors, lengths=lengths, **MASKS[mask])
    out, lse = ops.attention(*tensors[:3], lengths=lengths, **MASKS[mask])
    assert not out[0].any() and (lse[0] == float("-inf")).all()
    # the 30 tokens of sequence 2 alone: its first 10 columns are padding
    alone = [x[2:3, :, :30] for x in tensors[1:3]]
    there = ops.attention(tensors[0][2:3, :, 10:], *alone, **MASKS[mask])
    torch.testing.assert_close(out[2:3, :, 10:], there[0])
    torch.testing.assert_close(lse[2:3, :, 10:], there[1])
    assert not out[2, :, :10].any()


@pytest.mark.parametrize(
    ("dtype", "mask"), [*((dtype, "causal") for dtype in DTYPES), *((torch.bfloat16, mask) for mask in MASKS)]
)
def test_what_lies_past_a_sequence_is_not_read(backend, dtype, mask):
    tensors = inputs(2, 2, 1, 40, 80, 16, dtype, bias=True)
    grads = torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40)
    lengths = torch.tensor([33, 80], dtype=torch.int32)
    clean = results(ops.attention, tensors, grads, lengths=lengths, **MASKS[mask])
    with torch.no_grad():
        for x in tensors[1:]:
            x[0, :, 33:] = float("nan")
    for x, y in zip(results(ops.attention, tensors, grads, lengths=lengths, **MASKS[mask]), clean, strict=True):
        assert torch.equal(x, y)
    assert not clean[3][0, :, 33:].any() and not clean[4][0, :, 33:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_has_no_gradient(backend, dtype):
    queries, keys, values, _ = inputs(1, 2, 1, 6, 6, 16, dtype)
    bias = torch.full((1, 1, 6), float("-inf"), requires_grad=True)
    out, lse = ops.attention(queries, keys, values, key_bias=bias, window=1, complement=True)
    assert not out.any() and (lse == float("-inf")).all()
    for grad in torch.autograd.grad((out, lse), (queries, keys, values, bias), (out + 1, lse.exp() + 1)):
        assert not grad.any()


@pytest.mark.parametrize(
    ("dtype", "D", "softcap", "backend"), covering(DTYPES, [16, 136, 300], [None, 2.0], BACKENDS), indirect=["backend"]
)
def test_what_a_query_that_sees_nothing_holds_reaches_no_gradient(backend, dtype, D, softcap):
    lengths = torch.tensor([20, 3, 0], dtype=torch.int32)  # 50, 67 and 70 of the queries of each head are padding
    queries, *rest = inputs(3, 2, 1, 70, 75, D, dtype, bias=True)
    grads = torch.randn(3, 2, 70, D).to(dtype), torch.randn(3, 2, 70)
    blind = (torch.arange(70) < 70 - lengths[:, None])[:, None].expand(3, 2, 70)

    def gradients(queries, *grads):
        out, lse = ops.attention(queries, *rest[:2], key_bias=rest[2], lengths=lengths, softcap=softcap)
        assert torch.equal(lse == float("-inf"), blind)
        return torch.autograd.grad((out, lse), (queries, *rest), grads)

    clean = gradients(queries, *grads)
    assert not clean[0][blind].any()
    dirty = [x.detach().masked_fill(blind.view(3, 2, 70, *[1] * (x.ndim - 3)), float("nan")) for x in (queries, *grads)]
    for x, y in zip(gradients(dirty[0].requires_grad_(), *dirty[1:]), clean, strict=True):
        assert torch.equal(x, y)


def test_branches_joined_by_hand_leave_padding_without_gradient(backend):
    queries, keys, values, _ = inputs(2, 2, 1, 6, 6, 16)
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    near = ops.attention(queries, keys, values, lengths=lengths, window=2)[1]
    far = ops.attention(queries, keys, values, lengths=lengths, window=2, complement=True)[1]
    joined = torch.logaddexp(near, far)  # the gradient of -inf and -inf is NaN
    joined[joined.isfinite()].sum().backward()
    for x in (queries, keys):
        assert x.grad.isfinite().all() and x.grad.any()
    assert not queries.grad[0, :, :2].any()


def test_own_position_is_exempt_from_the_bias(backend):
    queries, keys, values, _ = inputs(1, 1, 1, 5, 5, 16)
    bias = torch.full((1, 1, 5), float("-inf"))
    out, _ = ops.attention(queries, keys, values, key_bias=bias)
    torch.testing.assert_close(out, values)  # each query is left with its own token


@pytest.mark.parametrize(
    "mask",
    [{"causal": True}, {"causal": False}]
    + [{"window": n, "sinks": sinks, "complement": True} for n in (1, 65, 390) for sinks in (0, 3, 70)],
    ids=str,
)
def test_few_keys_that_are_not_hidden(backend, mask):
    tensors = inputs(2, 4, 2, 150, 400, 32, bias=True)
    with torch.no_grad():
        tensors[3][torch.rand(2, 2, 400) < 0.8] = float("-inf")
        tensors[3][1, 1] = float("-inf")  # its queries are left with their own tokens, or with none
    check(tensors, **mask, lengths=torch.tensor([400, 311], dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_window_and_complement_merge_to_causal_with_exact_gradients(backend, dtype):
    tensors = inputs(1, 2, 1, 70, 130, 32, dtype)[:3]
    options = {"window": 20, "sinks": 3}
    near, far = ops.attention(*tensors, **options), ops.attention(*tensors, complement=True, **options)
    merged, lse = ops.merge_states(near, far)
    whole = ops.attention(*tensors)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(merged, whole[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, whole[1])
    grad, grad_lse = torch.randn_like(merged), torch.randn_like(lse)
    ours = torch.autograd.grad((merged, lse), tensors, (grad, grad_lse))
    exact = torch.autograd.grad(whole, tensors, (grad, grad_lse))
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=8 * tolerance, rtol=8 * tolerance)


def test_threads_change_no_bit(cpu):
    tensors = with_sinks(1, 6, 2, 300, 400, 64, bias=True)
    grads = torch.randn(1, 6, 300, 64), torch.randn(1, 6, 300)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(results(ops.attention, tensors, grads, window=100, sinks=4, softcap=5.0))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            assert torch.equal(x, y)


def test_errors_do_not_add_up_over_many_keys_or_queries(cpu):
    """CUDA sums tile after tile: there errors grow with their number."""
    tokens, D = 16384, 8
    # one block of queries over many keys: equal weights, so that each of out and dq is one long sum of equal parts
    queries = torch.zeros(1, 1, 16, D, requires_grad=True)
    half = (torch.arange(tokens) % 2 == 0).float()[:, None].expand(1, 1, tokens, D)
    out, _ = ops.attention(queries, 0.1 * half, half, causal=False, scale=1.0)
    constant, _ = ops.attention(queries, half, torch.full_like(half, 0.1), causal=False)
    torch.testing.assert_close(constant, torch.full_like(constant, 0.1), rtol=2e-6, atol=0)
    (dq,) = torch.autograd.grad(out, queries, torch.ones_like(out))
    torch.testing.assert_close(dq, torch.full_like(dq, 0.1 * D / 4), rtol=2e-6, atol=0)
    # many queries that see key 0 and their own
    queries = torch.full((1, 1, tokens, D), 0.1)
    keys, values = torch.zeros(1, 1, tokens, D, requires_grad=True), torch.zeros(1, 1, tokens, D)
    values[:, :, 0] = 1
    values.requires_grad_()
    out, _ = ops.attention(queries, keys, values, window=1, sinks=1, scale=1.0)
    dk, dv = torch.autograd.grad(out, (keys, values), torch.full_like(out, 0.1))
    torch.testing.assert_close(dk[0, 0, 0], torch.full((D,), 0.1 * 0.1 * D / 4 * (tokens - 1)), rtol=2e-6, atol=0)
    torch.testing.assert_close(dv[0, 0, 0], torch.full((D,), 0.1 * (tokens + 1) / 2), rtol=2e-6, atol=0)


@pytest.mark.parametrize(("dtype", "shift", "backend"), covering(DTYPES, [0, 3], BACKENDS), indirect=["backend"])
def test_any_strides(backend, dtype, shift):
    """Memory as projections leave it; with a shift no row starts on 16 bytes."""

    def strided(x):
        B, H, T, D = x.shape
        storage = torch.full((B, T, H, D + 8), 55.0, dtype=x.dtype)
        return storage.transpose(1, 2)[..., shift : shift + D].copy_(x.detach())

    tensors = inputs(2, 2, 1, 20, 70, 48, dtype)
    grads = torch.randn(2, 2, 20, 48).to(dtype), torch.randn(2, 2, 20)
    views = [strided(x).requires_grad_() for x in tensors[:3]]
    for x, y in zip(
        results(ops.attention, (*views, None), (strided(grads[0]), grads[1])),
        results(ops.attention, tensors, grads),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time_and_for_each_sequence_alone(backend, monkeypatch, dtype):
    tensors = inputs(2, 2, 1, 40, 70, 32, dtype, bias=True)
    grads = torch.randn(2, 2, 40, 32), torch.randn(2, 2, 40)
    runs = []
    for order in ("forward", "reverse"):
        monkeypatch.setenv("KVC_EMULATION_ORDER", order)
        runs.append(results(ops.attention, tensors, grads))
    alone = [results(ops.attention, [x[b : b + 1] for x in tensors], [x[b : b + 1] for x in grads]) for b in range(2)]
    runs.append([torch.cat(parts) for parts in zip(*alone, strict=True)])
    for other in runs[1:]:
        for x, y in zip(runs[0], other, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_not_finite_show(backend, dtype):
    queries, keys, values, _ = inputs(1, 1, 1, 10, 70, 16, dtype)
    with torch.no_grad():
        keys[0, 0, 62, 3] = float("nan")  # seen from query 2 on
    out, lse = ops.attention(queries, keys, values)
    assert out[0, 0, :2].isfinite().all()
    assert out[0, 0, 2:].isnan().all() and lse[0, 0, 2:].isnan().all()


@pytest.mark.parametrize("empty", [{"B": 0}, {"Hq": 0}, {"S": 0}, {"S": 0, "T": 0}])
def test_empty_work_gives_empty_results_and_zero_gradients(backend, empty):
    sizes = {"B": 1, "Hq": 2, "Hkv": 1, "S": 4, "T": 40, "D": 16} | empty
    tensors = inputs(**sizes, bias=True)
    B, Hq, S, D = tensors[0].shape
    out, lse, *grads = results(ops.attention, tensors, (torch.randn(B, Hq, S, D), torch.randn(B, Hq, S)))
    assert out.shape == (B, Hq, S, D) and lse.shape == (B, Hq, S)
    for grad, x in zip(grads, tensors, strict=True):
        assert grad.shape == x.shape and not grad.any()


def test_on_cuda_lengths_are_clamped(cuda):
    queries, keys, values, _ = inputs(2, 2, 1, 4, 8, 16)
    found, expected = (
        ops.attention(queries, keys, values, lengths=torch.tensor(x, dtype=torch.int32)) for x in ([-3, 99], [0, 8])
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@settings(max_examples=60, deadline=None)
@given(
    S=st.integers(1, 90),
    extra=st.integers(0, 200),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    window=st.none() | st.integers(1, 150),
    sinks=st.integers(0, 100),
    complement=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_mask_sees_what_the_reference_sees(S, extra, heads, window, sinks, complement, seed):
    torch.manual_seed(seed)
    options = {"window": window, "sinks": sinks if window else 0, "complement": complement and window is not None}
    tensors = [x.detach().requires_grad_() for x in inputs(1, *heads, S, S + extra, 8)[:3]]
    grads = torch.randn(1, heads[0], S, 8), torch.randn(1, heads[0], S)
    ours = results(ops.attention, (*tensors, None), grads, **options)
    exact = results(
        oracle.attention, (*(x.detach().double().requires_grad_() for x in tensors), None), grads, **options
    )
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-4, rtol=2e-4)


def test_reference_passes_gradcheck():
    for mask in MASKS.values():
        tensors = [
            None if x is None else x.detach().double().requires_grad_() for x in inputs(2, 2, 1, 6, 9, 3, bias=True)
        ]
        lengths = torch.tensor([9, 4], dtype=torch.int32)

        def function(q, k, v, bias, sinks, mask=mask, lengths=lengths):
            out, lse = oracle.attention(q, k, v, key_bias=bias, sink_logits=sinks, softcap=2.0, lengths=lengths, **mask)
            return out, torch.where(lse.isinf(), 0, lse)

        # finite biases: the derivative in one of -inf is 0, but no difference quotient shows it
        tensors[3] = torch.randn(2, 1, 9, dtype=torch.float64, requires_grad=True)
        tensors.append(torch.randn(2, dtype=torch.float64, requires_grad=True))
        assert torch.autograd.gradcheck(function, tensors)


def test_opcheck():
    for bias in (False, True):
        q, k, v, key_bias = inputs(1, 4, 2, 5, 8, 16, bias=bias)
        key_bias = None if key_bias is None else torch.randn(1, 2, 8, requires_grad=True)
        lengths = torch.tensor([7], dtype=torch.int32)
        torch.library.opcheck(
            torch.ops.kvcompress.attention, (q, k, v, key_bias, lengths, 0.25, True, 4, 1, False), rtol=1e-4, atol=1e-4
        )
        sinks = torch.randn(4, requires_grad=True)
        arguments = (q, k, v, key_bias, lengths, 0.25, True, 4, 1, False, sinks, 2.0)
        torch.library.opcheck(torch.ops.kvcompress.attention, arguments, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("D", [16, 300])
def test_only_one_of_out_and_lse_is_used(backend, D):
    q, k, v, _ = inputs(1, 2, 1, 9, 12, D)
    for number in (0, 1):
        ours = torch.autograd.grad(ops.attention(q, k, v)[number].sum(), (q, k), retain_graph=False)
        plain = torch.autograd.grad(oracle.attention(q, k, v)[number].sum(), (q, k))
        for x, y in zip(ours, plain, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_second_derivatives_are_refused():
    q, k, v, _ = inputs(1, 2, 1, 4, 4, 8)
    (first,) = torch.autograd.grad(ops.attention(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.randn(1, 4, 9, 8)}, "9 queries and 8 keys"),
        ({"queries": torch.randn(1, 3, 4, 8)}, "queries have 3 heads"),
        ({"queries": torch.randn(4, 4, 8)}, r"queries must be \[B, Hq, S, D\]"),
        ({"queries": torch.randn(1, 4, 4, 8).double()}, "queries must be float32"),
        ({"keys": torch.randn(1, 2, 8, 8).bfloat16()}, "keys must be torch.float32"),
        ({"keys": torch.randn(1, 2, 8, 16)}, r"keys must be \[1, Hkv, T, 8\]"),
        ({"values": torch.randn(1, 2, 7, 8)}, "values must be"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": 3, "causal": False}, "window needs causal=True"),
        ({"complement": True}, "complement needs a window"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"scale": float("inf")}, "scale must be finite in float32, got inf"),
        ({"softcap": -1.0}, "softcap must be above 0 and finite in float32, or None, got -1.0"),
        ({"softcap": float("nan")}, "softcap must be above 0 and finite in float32, or None, got nan"),
        ({"key_bias": torch.zeros(1, 2, 7)}, "key_bias must be"),
        ({"key_bias": torch.zeros(1, 2, 8).double()}, "key_bias must be float32"),
        ({"lengths": torch.tensor([8])}, "lengths must be int32"),
        ({"lengths": torch.tensor([8, 8], dtype=torch.int32)}, "lengths must have shape"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"queries": torch.randn(1, 4, 4, 8), "keys": torch.randn(1, 2, 8, 8), "values": torch.randn(1, 2, 8, 8)}
    with pytest.raises(ValueError, match=message):
        ops.attention(**{**arguments, **change})


@pytest.mark.parametrize("length", [-1, 9])
def test_lengths_out_of_range_are_refused(length):
    tensors = inputs(1, 4, 2, 4, 8, 8)[:3]
    with pytest.raises(RuntimeError, match=rf"^attention: lengths must be between 0 and 8 \(T\), got {length} at 0$"):
        ops.attention(*tensors, lengths=torch.tensor([length], dtype=torch.int32))


@pytest.mark.parametrize("lengths", [[8], np.array([8], dtype=np.int32)])
def test_lengths_that_are_no_tensor_are_named(lengths):
    with pytest.raises(TypeError, match=f"lengths must be a torch.Tensor, got {type(lengths).__name__}"):
        ops.attention(*inputs(1, 4, 2, 4, 8, 8)[:3], lengths=lengths)


@pytest.mark.parametrize("D", [0, 513])
def test_head_dim_limits(D):
    x = torch.randn(1, 1, 2, D)
    with pytest.raises(ValueError, match=f"queries must have a head dim between 1 and 512, got {D}"):
        ops.attention(x, x, x, scale=1.0)
