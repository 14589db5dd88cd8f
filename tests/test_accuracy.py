"""The bounds bite: what is off by more fails, and so does each of a few mistakes on sizes that the tests use."""

import accuracy
import accuracy_dmc
import oracle
import pytest
import torch
from accuracy import assert_within
from attention_definition import errors, inputs, results
from helpers import DTYPES, covering
from test_dmc_accumulate import inputs as averaged
from test_dmc_accumulate import results as averages

CUDA = [False, True]


def summed(products: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Their sum over the last dimension, each partial sum rounded to dtype."""
    total = torch.zeros_like(products[..., 0]).to(dtype)
    for x in products.unbind(-1):
        total = (total.double() + x).to(dtype)
    return total.double()


def attend(queries, keys, values, dropped=None, sums=None):
    """Plain attention of float64 numbers, causal; without a key; with sums of partial sums rounded to a dtype."""
    G, (S, D), T = queries.shape[1] // keys.shape[1], queries.shape[2:], keys.shape[2]
    q, k, v = (x.double() for x in (queries, keys.repeat_interleave(G, 1), values.repeat_interleave(G, 1)))
    logits = q @ k.mT if sums != "logits" else summed(q[:, :, :, None] * k[:, :, None], torch.bfloat16)
    logits = logits * D**-0.5
    seen = oracle.visible(S, T)[:, None].clone()
    if dropped is not None:
        seen[..., dropped] = False
    p = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    out = p @ v if sums != "out" else summed(p[..., None, :] * v.mT[:, :, None], torch.bfloat16)
    return out, logits.masked_fill(~seen, float("-inf")).logsumexp(-1)


def caught(found, exact, bound) -> bool:
    try:
        assert_within(found, exact, bound)
    except AssertionError:
        return True
    return False


MISTAKES = ("a key", "heads", "logits in bfloat16", "sums in bfloat16")


@pytest.mark.parametrize(
    ("mistake", "sizes", "dtype", "on_cuda"),
    covering(MISTAKES, [(2, 8, 2, 1, 300, 64), (2, 4, 1, 60, 100, 32), (1, 4, 2, 5, 40, 128)], DTYPES, CUDA),
)
def test_attention_with_a_mistake_is_outside(monkeypatch, mistake, sizes, dtype, on_cuda):
    monkeypatch.setattr(accuracy, "on_cuda", on_cuda)
    B, Hq, Hkv, S, T, D = sizes
    queries, keys, values, _ = (None if x is None else x.detach() for x in inputs(B, Hq, Hkv, S, T, D, dtype))
    softmax = accuracy.Softmax(queries, keys, oracle.visible(S, T)[:, None])
    exact, bounds = attend(queries, keys, values), (softmax.out_error(values, dtype), softmax.lse_error())
    assert not caught(exact[0].to(dtype), exact[0], bounds[0]) and not caught(exact[1].float(), exact[1], bounds[1])
    if mistake == "a key":
        for dropped in range(0, T - S, 7):
            found = attend(queries, keys, values, dropped=dropped)
            assert caught(found[0].to(dtype), exact[0], bounds[0]) and caught(found[1].float(), exact[1], bounds[1])
        return
    found = attend(queries, keys, values, sums={"logits in bfloat16": "logits", "sums in bfloat16": "out"}.get(mistake))
    if mistake == "heads":
        found = [x[:, [1, 0, *range(2, Hq)]] for x in exact]
    assert caught(found[0].to(dtype), exact[0], bounds[0])
    assert mistake == "sums in bfloat16" or caught(found[1].float(), exact[1], bounds[1])


@pytest.mark.parametrize(("dtype", "on_cuda"), covering(DTYPES, CUDA))
def test_gradients_with_a_mistake_are_outside(monkeypatch, dtype, on_cuda):
    monkeypatch.setattr(accuracy, "on_cuda", on_cuda)
    tensors = inputs(2, 4, 2, 60, 100, 32, dtype, bias=True)
    grads = torch.randn(tensors[0].shape).to(dtype), torch.randn(tensors[0].shape[:3])
    bounds = list(errors(tensors, grads).values())

    def gradients(tensors, grads):
        return results(oracle.attention, [x.detach().double().requires_grad_() for x in tensors], grads)

    exact = gradients(tensors, grads)
    for x, y, bound in zip(exact, exact, bounds, strict=False):
        assert not caught(x + bound / 2, y, bound) and caught(x + 2 * bound, y, bound)
    # a key of weight 0, a query whose gradient is left out, swapped heads
    hidden = tensors[3].detach().clone()
    hidden[..., 11] = float("-inf")
    left_out = grads[0].clone()
    left_out[:, :, 33] = 0
    for found in (
        gradients((*tensors[:3], hidden), grads),
        gradients(tensors, (left_out, grads[1])),
        [x[:, [1, 0, *range(2, x.shape[1])]] for x in exact],
    ):
        for x, y, bound in list(zip(found, exact, bounds, strict=False))[2:]:
            assert caught(x, y, bound)


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
def test_scores_with_a_mistake_are_outside(reduce):
    queries, keys = torch.randn(1, 8, 32, 128).bfloat16(), torch.randn(1, 2, 300, 128).bfloat16()
    options = {"reduce": reduce}
    exact = oracle.window_scores(queries.double(), keys.double(), **options)
    bound = accuracy.window_scores(queries, keys, **options)
    assert not caught(exact.float(), exact, bound)
    for other in (keys.flip(1), keys[:, :, torch.arange(300).where(torch.arange(300) != 100, 101)]):
        assert caught(oracle.window_scores(queries.double(), other.double(), **options), exact, bound)
    assert caught(exact + 2 * bound, exact, bound)
    assert caught(exact.bfloat16(), exact, bound)
    for lost in ({"mask_first": 1}, {"kernel_size": 3}, {"scale": 128**-0.5 * (1 + 1e-4)}):
        assert caught(oracle.window_scores(queries.double(), keys.double(), **options, **lost), exact, bound)


def test_similarity_with_a_mistake_is_outside():
    queries, keys = torch.randn(3, 4, 8, 64), torch.randn(3, 2, 77, 64)
    exact, _ = oracle.layer_similarity(queries.double(), keys.double())
    bound = accuracy.layer_similarity(queries, keys)
    assert not caught(exact, exact, bound)
    for found in (
        oracle.layer_similarity(queries.double(), keys.double(), sinks=1)[0],
        oracle.layer_similarity(queries.double(), keys.double().flip(1))[0],
        oracle.layer_similarity(queries.double(), keys.double(), scale=0.125 * (1 + 1e-4))[0],
    ):
        assert caught(found, exact, bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_with_a_mistake_is_outside(dtype):
    x, angles = torch.randn(2, 3, 17, 64).to(dtype), torch.randn(40, 32)
    cos, sin, positions = angles.cos(), angles.sin(), torch.randint(0, 40, (2, 17))
    exact = oracle.rope(x.double(), cos.double(), sin.double(), positions)
    bound = accuracy.rope(x, cos, sin, positions)
    assert not caught(exact.to(dtype), exact, bound)
    assert caught(exact.bfloat16() if dtype == torch.float32 else exact + 2 * bound, exact, bound)
    assert caught(exact[:, [1, 0, 2]], exact, bound)
    # tables of bfloat16, a rounding too many, the next position
    assert caught(oracle.rope(x, cos.bfloat16(), sin.bfloat16(), positions), exact, bound)
    assert dtype == torch.float32 or caught(oracle.rope(x, cos, sin, positions), exact, bound)
    assert caught(oracle.rope(x.double(), cos.double(), sin.double(), (positions + 1) % 40), exact, bound)


def test_merged_and_shared_states_with_a_mistake_are_outside():
    states = [(torch.randn(2, 4, 5, 32), torch.randn(2, 4, 5)) for _ in range(2)]
    double = [(out.double(), lse.double()) for out, lse in states]
    none = [(torch.zeros_like(out), torch.zeros_like(lse)) for out, lse in double]
    bounds, exact = accuracy.merged(*double, none, torch.float32), oracle.merge_states(*double)
    for i in (0, 1):
        assert not caught(exact[i].float(), exact[i], bounds[i]) and caught(exact[i].bfloat16(), exact[i], bounds[i])
        assert caught(exact[i].flip(1), exact[i], bounds[i])
        assert caught(oracle.merge_states((double[0][0], double[0][1] + 1e-5), double[1])[i], exact[i], bounds[i])

    near, weights, far = (
        (torch.randn(2, 4, 1, 32), torch.randn(2, 4, 1)),
        torch.rand(2, 4, 300) / 300,
        torch.randn(2, 4, 1),
    )
    rows, table = (torch.zeros(4, dtype=torch.int32), torch.full((4,), 300)), torch.arange(4)[:, None]
    v = torch.randn(4, 300, 32)
    given = [(near[0].double(), near[1].double()), weights.double(), far.double(), v.double(), *rows]
    exact, _ = oracle.decode_shared(*given, block_table=table)
    bound = accuracy.shared(near, weights, far, v, *rows, table)
    assert not caught(exact.float(), exact, bound) and caught(exact.bfloat16(), exact, bound)
    for t in range(0, 300, 50):  # each column
        given[1] = weights.double()
        given[1][:, :, t] = 0
        assert caught(oracle.decode_shared(*given, block_table=table)[0], exact, bound)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_averages_with_a_mistake_are_outside(dtype, window):
    tensors = averaged(2, 3, 130, 33, dtype, merging=0.8)
    grads = [torch.randn(tensors[0].shape).to(dtype) for _ in range(2)]
    double = [x.double() for x in tensors]
    exact = averages(oracle.dmc_accumulate, double, grads, window=window)
    bounds = accuracy_dmc.accumulate(tensors, grads, window=window)
    for (name, bound), x in zip(bounds.items(), exact, strict=True):
        assert not caught(x + bound / 2, x, bound) and caught(x + 2 * bound, x, bound), name
        assert caught(x.flip(1), x, bound), name
    kinds = [dtype, dtype, torch.float32, dtype, dtype, torch.float32, torch.float32]
    # a weight of bfloat16, a token that is left out, a window of one token less
    coarse = [*double[:3], double[3].bfloat16().double()]
    lost = [*double[:3], double[3].clone()]
    lost[3][..., 77] = 1e-30
    for changed, options in ((coarse, {}), (lost, {}), (double, {"window": 11 if window else 40})):
        found = averages(oracle.dmc_accumulate, changed, grads, **({"window": window} | options))
        for (name, bound), x, y, kind in zip(bounds.items(), found, exact, kinds, strict=True):
            assert caught(x.to(kind), y, bound), name
    # an average that is kept in bfloat16
    if window is None and dtype == torch.float32:
        mean, z = torch.zeros(2, 3, 33, dtype=torch.float64), torch.zeros(2, 3, 1, dtype=torch.float64)
        found = torch.empty_like(exact[0])
        for t in range(130):
            old = (double[2][..., t, None] if t else 0) * z
            z = old + double[3][..., t, None]
            mean = ((old * mean + double[3][..., t, None] * double[0][:, :, t]) / z).bfloat16().double()
            found[:, :, t] = mean
        assert caught(found, exact[0], bounds["keys"])


def test_gates_with_a_mistake_are_outside():
    x = (5 + torch.randn(2, 6, 300)).bfloat16()
    exact = oracle.dmc_decisions(x.double())
    for i, bound in enumerate(accuracy_dmc.decisions(x, exact)):
        assert not caught(exact[i].float(), exact[i], bound) and caught(exact[i].flip(1), exact[i], bound)
        assert i == 1 or caught(exact[i].bfloat16(), exact[i], bound)
    for reduce in ("mean_logit", "mean_sigmoid", "first"):
        exact = oracle.dmc_importance(x.double() - 10, 2, reduce=reduce)
        bound = accuracy_dmc.importance(x.double() - 10, 2, reduce=reduce)
        assert not caught(exact.float(), exact, bound) and caught(exact.bfloat16(), exact, bound)
        assert caught(oracle.dmc_importance(x.roll(1, 1).double() - 10, 2, reduce=reduce), exact, bound)
    tempered = 30 * torch.randn(2, 3, 300)
    exact = oracle.dmc_mask(tempered.double())
    assert not caught(exact.float(), exact, accuracy_dmc.mask(exact))
    assert caught(exact.bfloat16(), exact, accuracy_dmc.mask(exact))


def test_what_is_not_finite_must_be_the_same():
    nan, inf = float("nan"), float("inf")
    exact, bound = torch.tensor([1.0, nan, inf, -inf], dtype=torch.float64), torch.tensor([1e-3, nan, nan, nan])
    assert not caught(exact.float(), exact, bound)
    for i, wrong in ((1, 0.0), (1, inf), (2, -inf), (2, nan), (3, 0.0), (0, nan), (0, inf)):
        found = exact.float()
        found[i] = wrong
        assert caught(found, exact, bound)
