"""Two-branch attention: near tokens by their own keys, distant ones by a lead's."""

import accuracy
import oracle
import pytest
import torch
from accuracy import Softmax, assert_within
from backends import BACKENDS
from helpers import DTYPES, covering
from hypothesis import given
from hypothesis import strategies as st
from oracle import visible

from kvcompress import ops


def states(B=2, Hq=4, Hkv=2, S=24, T=24, D=16, dtype=torch.float32):
    shapes = ((B, Hq, S, D), (B, Hkv, T, D), (B, Hkv, T, D), (B, Hq, S, D), (B, Hkv, T, D))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def gradients(op, tensors, weights, **settings):
    """Results, and gradients of a weighted sum of them."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    results = op(*tensors, **settings)
    finite = [torch.where(x.isfinite(), x, 0) for x in results]
    loss = sum((x.double() * w.double()).sum() for x, w in zip(finite, weights, strict=True))
    return results, torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)


SHAPES = {
    "usual": {},
    "one query": {"S": 1, "T": 31},
    "a chunk": {"S": 9, "T": 40, "Hq": 6, "Hkv": 3, "D": 10},
    "one token": {"S": 1, "T": 1, "Hq": 1, "Hkv": 1},
    "long": {"B": 1, "S": 150, "T": 200, "D": 33, "Hq": 8, "Hkv": 1},
}
SETS = [(3, 5), (0, 1), (0, 7), (16, 1), (2, 300), (50, 4)]


@pytest.mark.parametrize(
    ("shape", "sinks_and_recent", "backend"), covering(SHAPES, SETS, BACKENDS), indirect=["backend"]
)
def test_results_and_gradients_are_those_of_one_softmax(backend, shape, sinks_and_recent):
    sinks, recent = sinks_and_recent
    tensors, settings = states(**SHAPES[shape]), {"sinks": sinks, "recent": recent}
    weights = [torch.randn_like(tensors[0]), *torch.randn(2, *tensors[0].shape[:3])]
    exact, exact_grads = gradients(oracle.pod_attention, [x.double() for x in tensors], weights, **settings)
    results, grads = gradients(ops.pod_attention, tensors, weights, **settings)
    for x, y in zip(results + grads, exact + exact_grads, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_within_the_roundings_of_two_branches_and_their_merge(backend, dtype):
    tensors = states(S=60, T=60, dtype=dtype)
    exact = oracle.pod_attention(*(x.double() for x in tensors), sinks=4, recent=9)
    found = ops.pod_attention(*tensors, sinks=4, recent=9)
    q, k, v, q_lead, k_lead = tensors
    branches, errors = [], []
    for of_branch, distant in (((q, k), False), ((q_lead, k_lead), True)):
        mask = {"window": 9, "sinks": 4, "complement": distant}
        softmax = Softmax(*of_branch, visible(60, 60, **mask)[:, None])
        branches.append(oracle.attention(*(x.double() for x in (*of_branch, v)), **mask))
        errors.append((softmax.out_error(v, dtype), softmax.lse_error()))
    bounds = accuracy.merged(*branches, errors, dtype)
    for name, x, y, bound in zip(("out", "lse", "gate"), found, exact, bounds, strict=True):
        assert_within(x, y, bound, name)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32]


def test_the_reference_passes_gradcheck():
    tensors = [x.requires_grad_() for x in states(B=1, S=5, T=7, D=3, dtype=torch.float64)]
    lengths = torch.tensor([6], dtype=torch.int32)
    torch.autograd.gradcheck(
        lambda *x: oracle.pod_attention(*x, sinks=1, recent=2, lengths=lengths)[::2], tensors, fast_mode=True
    )


def test_rows_of_unequal_length_are_each_as_alone(backend):
    tensors = states(B=3, S=20, T=30)
    lengths = torch.tensor([30, 17, 4], dtype=torch.int32)  # the last two begin with padded queries
    weights = [torch.randn_like(tensors[0]), torch.zeros(3, 4, 20), torch.randn(3, 4, 20)]
    results, grads = gradients(ops.pod_attention, tensors, weights, sinks=2, recent=6, lengths=lengths)
    exact, exact_grads = gradients(
        oracle.pod_attention, [x.double() for x in tensors], weights, sinks=2, recent=6, lengths=lengths
    )
    for x, y in zip(results + grads, exact + exact_grads, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)
    out, lse, gate = (x[2, :, :16] for x in results)
    assert not out.any() and (lse == float("-inf")).all() and (gate == 1).all()
    for b, n in enumerate(lengths.tolist()):
        S = min(n, 20)
        parts = [x[b : b + 1, :, 20 - S :] if i in (0, 3) else x[b : b + 1, :, :n] for i, x in enumerate(tensors)]
        alone = ops.pod_attention(*parts, sinks=2, recent=6)
        torch.testing.assert_close(results[0][b : b + 1, :, 20 - S :], alone[0], rtol=1e-5, atol=1e-5)


def test_a_layer_that_leads_itself_is_plain_attention():
    q, k, v, _, _ = states(S=40, T=40)
    weights = [torch.randn_like(q), torch.randn(2, 4, 40)]
    plain, plain_grads = gradients(ops.attention, (q, k, v), weights)

    def own(q, k, v):
        return ops.pod_attention(q, k, v, q, k, sinks=3, recent=5)[:2]

    found, grads = gradients(own, (q, k, v), weights)
    for x, y in zip(found + grads, plain + plain_grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 24), (20, 4), (3, 100)])
def test_a_window_that_holds_all_is_plain_attention_and_the_lead_gets_nothing(sinks, recent):
    tensors = states()
    weights = [torch.randn_like(tensors[0]), *torch.randn(2, 2, 4, 24)]
    results, grads = gradients(ops.pod_attention, tensors, weights, sinks=sinks, recent=recent)
    plain = ops.attention(*tensors[:3])
    for x, y in zip(results, plain, strict=False):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert (results[2] == 1).all()
    assert not grads[3].any() and not grads[4].any()


def test_queries_without_distant_keys_and_near_keys_send_their_lead_nothing(backend):
    tensors = states(S=30, T=30)
    weights = [torch.randn_like(tensors[0]), *torch.randn(2, 2, 4, 30)]
    results, grads = gradients(ops.pod_attention, tensors, weights, sinks=3, recent=5)
    assert not grads[3][:, :, :8].any() and grads[3][:, :, 8:].any((1, 3)).all()
    assert not grads[4][:, :, :3].any() and not grads[4][:, :, -5:].any() and grads[4][:, :, 3:-5].any((1, 3)).all()
    assert (results[2][:, :, :8] == 1).all() and (results[2][:, :, 8:] < 1).all()


@given(st.integers(1, 40), st.integers(0, 45), st.integers(1, 45), st.integers(0, 10**6))
def test_near_and_distant_keys_are_all_keys_and_the_gate_is_the_share_of_the_near(T, sinks, recent, seed):
    torch.manual_seed(seed)
    near, far = (visible(T, T, window=recent, sinks=sinks, complement=c) for c in (False, True))
    assert not (near & far).any() and torch.equal(near | far, visible(T, T))
    tensors = states(B=1, S=T, T=T, D=4)
    out, lse, gate = ops.pod_attention(*tensors, sinks=sinks, recent=recent)
    assert ((gate >= 0) & (gate <= 1)).all() and (gate[:, :, : sinks + recent] == 1).all()
    # values of 1 for near and 0 for distant keys of the last query give its gate
    tensors[2] = near[:, -1:, :, None].expand(1, 2, T, 4).float()
    torch.testing.assert_close(
        ops.pod_attention(*tensors, sinks=sinks, recent=recent)[0][:, :, -1, 0], gate[:, :, -1], rtol=1e-5, atol=1e-5
    )
    assert out.isfinite().all() and lse.isfinite().all()


def test_equal_values_come_out_and_leave_logits_without_gradient():
    tensors = states(S=30, T=30)
    tensors[2] = torch.randn(2, 2, 1, 16).expand(2, 2, 30, 16).clone()
    dout = torch.randn_like(tensors[0])
    weights = [dout, *torch.zeros(2, 2, 4, 30)]
    results, grads = gradients(ops.pod_attention, tensors, weights, sinks=3, recent=5)
    torch.testing.assert_close(
        results[0], tensors[2][:, :, :1].repeat_interleave(2, 1).expand(2, 4, 30, 16), rtol=1e-5, atol=1e-5
    )
    for i in (0, 1, 3, 4):
        torch.testing.assert_close(grads[i], torch.zeros_like(grads[i]), rtol=0, atol=1e-4)
    tensors[2] = torch.randn(2, 2, 30, 16)
    _, grads = gradients(ops.pod_attention, tensors, weights, sinks=3, recent=5)
    torch.testing.assert_close(grads[2].sum(2), dout.unflatten(1, (2, 2)).sum((2, 3)), rtol=1e-4, atol=1e-4)


def example():
    """The worked example: one query at position 5, sinks 1, recent 2; queries [1, 1, 1, 2], keys [1, 1, 6, 2]."""
    k = [[2, 0], [9, 9], [9, 9], [9, 9], [0, 1], [1, 0]]
    k_lead = [[9, 9], [0, 1], [3, 0], [1, 0.5], [9, 9], [9, 9]]
    v = [[1, 0], [0, 1], [2, 0], [0, 2], [1, 1], [3, 0]]
    return [torch.tensor(x).float()[None, None] for x in ([[1, 0]], k, v, [[0, 1]], k_lead)]


@pytest.mark.parametrize("op", [ops.pod_attention, oracle.pod_attention])
def test_the_worked_example(op):
    tensors = [x.requires_grad_() for x in example()]
    out, lse, gate = op(*tensors, sinks=1, recent=2, scale=1.0)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([1.125623, 0.425858]), rtol=0, atol=2e-6)
    torch.testing.assert_close(lse[0, 0, 0], torch.tensor(2.801804), rtol=0, atol=2e-6)
    torch.testing.assert_close(gate[0, 0, 0], torch.tensor(0.674220), rtol=0, atol=2e-6)
    dq, dk, dv, dq_lead, dk_lead = torch.autograd.grad(out[0, 0, 0, 0], tensors)
    torch.testing.assert_close(dq[0, 0, 0], torch.tensor([0.196585, -0.007625]), rtol=0, atol=2e-6)
    torch.testing.assert_close(dq_lead[0, 0, 0], torch.tensor([0.046575, -0.242054]), rtol=0, atol=2e-6)
    probabilities = torch.tensor([0.448519, 0.165001, 0.060700, 0.100078, 0.060700, 0.165001])
    torch.testing.assert_close(dv[0, 0, :, 0], probabilities, rtol=0, atol=2e-6)
    # ds times the query of each branch
    torch.testing.assert_close(
        dk[0, 0, [0, 4, 5], 0], torch.tensor([-0.056344, -0.007625, 0.309274]), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(dk_lead[0, 0, 1:4, 1], torch.tensor([-0.185729, 0.053075, -0.112650]), rtol=0, atol=2e-6)
    assert not dk[0, 0, 1:4].any() and not dk_lead[0, 0, [0, 4, 5]].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recent": 0}, "recent must be at least 1, got 0"),
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({3: torch.randn(2, 4, 23, 16)}, "lead_queries must be torch.float32"),
        ({4: torch.randn(2, 2, 24, 16).double()}, "lead_keys must be torch.float32"),
        ({1: torch.randn(2, 3, 24, 16), 4: torch.randn(2, 3, 24, 16), 2: torch.randn(2, 3, 24, 16)}, "4 heads"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    tensors, settings = states(), {"sinks": 1, "recent": 2}
    for name, value in changes.items():
        if isinstance(name, int):
            tensors[name] = value
        else:
            settings[name] = value
    with pytest.raises(ValueError, match=message):
        ops.pod_attention(*tensors, **settings)
