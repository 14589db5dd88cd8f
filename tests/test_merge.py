"""Attention over parts of the keys put together: outputs, their logarithms, gradients."""

import accuracy
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS
from helpers import DTYPES, covering
from test_decode import INF, int32

from kvcompress import ops


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_merge_to_the_whole(backend, dtype):
    queries = torch.randn(2, 4, 1, 64).to(dtype)
    k, v = torch.randn(4, 600, 64).to(dtype), torch.randn(4, 600, 64).to(dtype)
    end = int32(600, 4, 100, 577)
    cut = int32(5, 4, 0, 300)
    parts = ops.decode(queries, k, v, cut), ops.decode(queries, k, v, end, begin=cut)
    merged = ops.merge_states(*parts)
    exact, states, errors = oracle.decode(queries.double(), k, v, end), [], []
    for last, options in ((cut, {}), (end, {"begin": cut})):
        states.append(oracle.decode(queries.double(), k, v, last, **options))
        softmax, values = accuracy.of_pages(queries, k, v, last, **options)
        errors.append((softmax.out_error(values, dtype), softmax.lse_error()))
    bounds = accuracy.merged(*states, errors, dtype)
    for found, wanted, bound in zip(merged, exact, bounds, strict=False):
        assert_within(found, wanted, bound)


@pytest.mark.parametrize(("dtype", "D", "backend"), covering(DTYPES, [16, 33, 80, 128], BACKENDS), indirect=["backend"])
def test_merge_as_the_reference(backend, dtype, D):
    states = [(torch.randn(2, 3, 5, D).to(dtype), 3 * torch.randn(2, 3, 5)) for _ in range(2)]
    states[0][1][0, 0, 0] = states[1][1][0, 0, 1] = -INF
    exact = oracle.merge_states(*((out.double(), lse.double()) for out, lse in states))
    double = [(out.double(), lse.double()) for out, lse in states]
    none = [(torch.zeros_like(out), torch.zeros_like(lse)) for out, lse in double]
    for found, wanted, bound in zip(
        ops.merge_states(*states), exact, accuracy.merged(*double, none, dtype), strict=False
    ):
        assert_within(found, wanted, bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_with_nothing_changes_no_bit(backend, dtype):
    out, lse = torch.randn(1, 2, 3, 16).to(dtype), torch.randn(1, 2, 3)
    nothing = torch.full_like(out, float("nan")), torch.full_like(lse, -INF)
    for states in (((out, lse), nothing), (nothing, (out, lse))):
        merged = ops.merge_states(*states)
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    both = ops.merge_states(nothing, nothing)
    assert not both[0].any()
    assert (both[1] == float("-inf")).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states_gradients_as_the_reference(dtype):
    outs = [torch.randn(2, 3, 4, 16).to(dtype).requires_grad_() for _ in range(3)]
    lses = [torch.randn(2, 3, 4) for _ in range(3)]
    lses[0][0, 0] = lses[1][0, 0] = lses[2][0, 1] = float("-inf")
    lses[0][1, 2] = lses[1][1, 2] = lses[2][1, 2] = float("-inf")
    for lse in lses:
        lse.requires_grad_()
    grad, grad_lse = torch.randn(2, 3, 4, 16).to(dtype), torch.randn(2, 3, 4)
    grad_lse[1, 2] = 0  # the merged lse is -inf there, whatever the others do
    out, lse = ops.merge_states(*zip(outs, lses, strict=True))
    ours = torch.autograd.grad((out, lse), outs + lses, (grad, grad_lse))
    double = [x.detach().double().requires_grad_() for x in outs + lses]
    with torch.no_grad():
        empty = torch.stack(double[3:]).amax(0) == float("-inf")
    # the reference, without the rows that have no keys at all (their softmax has no derivative)
    shares = torch.stack(double[3:]).masked_fill(empty, 0).softmax(0)
    exact_out = (shares[..., None] * torch.stack(double[:3])).sum(0).masked_fill(empty[..., None], 0)
    exact_lse = torch.stack(double[3:]).masked_fill(empty, 0).logsumexp(0).masked_fill(empty, 0)
    exact = torch.autograd.grad((exact_out, exact_lse), double, (grad.double(), grad_lse.double()))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 6e-3}[dtype]
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.double(), y, atol=tolerance, rtol=tolerance)


def test_merged_sets_without_weight_have_no_gradient():
    outs = [torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor([[[first, 0.5, second]]], requires_grad=True) for first, second in ((-INF, -INF), (-INF, 1.0))]
    out, lse = ops.merge_states(*zip(outs, lses, strict=True))
    spoiled, spoiled_lse = torch.ones_like(out), torch.ones_like(lse)
    spoiled[:, :, 0] = spoiled_lse[:, :, 0] = float("nan")
    grads = torch.autograd.grad((out, lse), outs + lses, (spoiled, spoiled_lse))
    for grad in grads:
        assert grad.isfinite().all()
        assert not grad[:, :, 0].any()
    assert not grads[0][:, :, 2].any() and not grads[2][:, :, 2].any()
    assert (grads[1][:, :, 2] == 1).all() and (grads[3][:, :, 2] == 1).all()
    # weight 0 also where the other set is larger beyond measure
    lses = [torch.tensor([[[0.0]]], requires_grad=True), torch.tensor([[[300.0]]], requires_grad=True)]
    out, lse = ops.merge_states((outs[0][:, :, :1], lses[0]), (outs[1][:, :, :1], lses[1]))
    grad, other = torch.autograd.grad((out, lse), lses, (torch.ones_like(out), torch.full_like(lse, INF)))
    assert grad.item() == 0 and other.item() == INF
