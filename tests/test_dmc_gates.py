import accuracy_dmc
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS
from helpers import DTYPES, covering
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.dmc_gates import philox

from kvcompress import ops
from kvcompress.ops import Noise

INF = float("inf")
NOISES = (Noise(0), Noise(2**63 - 1, 5, 6, 7, 8), Noise(77, 2**32 - 1, 3, 2**32 - 1, 2**32 - 100))  # counters wrap


def logits_like_keys(B, H, T, dtype=torch.float32, shift=5.0):
    """A neuron of keys: strided, around the shift."""
    return (shift + torch.randn(B, H, T, 5)).to(dtype)[..., 3]


# ---- noise ----


def test_philox_gives_the_published_numbers():
    ones, words = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, first in (
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((ones,) * 4, (ones, ones), 0x408F276D),
        (words, (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ):
        assert int(philox(tuple(torch.tensor(word) for word in counter), key)) == first


NUMBERS = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_noise_is_the_references(seed, offset, stream, sample, token):
    noise = Noise(seed, offset, stream, sample, token)
    drawn = ops.dmc_decisions(torch.zeros(2, 3, 300), shift=0.0, temperature=1.0, noise=noise).tempered
    exact = oracle.dmc_decisions(torch.zeros(2, 3, 300).double(), shift=0.0, temperature=1.0, noise=noise)[2]
    torch.testing.assert_close(drawn.double(), exact, rtol=3e-7, atol=1e-7)


@pytest.fixture(scope="module")
def drawn():
    """Logits and decisions on the CPU by NOISES: before `backend` has the ops run elsewhere."""
    logits = 5 + torch.randn(3, 4, 300, generator=torch.Generator().manual_seed(0))
    return logits, [ops.dmc_decisions(logits, noise=noise) for noise in NOISES]


def test_noise_has_the_same_bits_everywhere(drawn, backend):
    device = torch.get_default_device()
    for noise, expected in zip(NOISES, drawn[1], strict=True):
        found = ops.dmc_decisions(drawn[0].to(device), noise=noise)
        assert torch.equal(found.hard, expected.hard.to(device))
        assert torch.equal(found.tempered, expected.tempered.to(device))


def test_the_same_numbers_give_the_same_noise_and_others_do_not():
    x = logits_like_keys(3, 4, 70)
    first = ops.dmc_decisions(x, noise=Noise(7, 11))
    for y, z in zip(first, ops.dmc_decisions(x, noise=Noise(7, 11)), strict=True):
        assert torch.equal(y, z)
    for other in (Noise(8, 11), Noise(7 + 2**32, 11), Noise(7, 12), Noise(7, 11, 1), Noise(7, 11, 0, 1)):
        assert not torch.equal(first.tempered, ops.dmc_decisions(x, noise=other).tempered)


def test_a_shard_draws_what_the_whole_draws(backend):
    x = logits_like_keys(3, 4, 70)
    whole = ops.dmc_decisions(x, noise=Noise(3, 1, stream=40, sample=6))
    part = ops.dmc_decisions(x[1:, 2:, 30:50], noise=Noise(3, 1, stream=42, sample=7, token=30))
    for y, z in zip(whole, part, strict=True):
        assert torch.equal(y[1:, 2:, 30:50], z)


def test_mean_of_hard_decisions_is_the_sigmoid_of_the_logit():
    logits = torch.tensor([-1.0, 0.0, 2.0])[None, :, None].expand(20, 3, 20_000) + 5
    for temperature in (0.1, 1.0):
        hard = ops.dmc_decisions(logits, temperature=temperature, noise=Noise(1)).hard.mean((0, 2))
        torch.testing.assert_close(hard, (logits[0, :, 0] - 5).sigmoid(), atol=4e-3, rtol=0)


# ---- decisions ----


@pytest.mark.parametrize(
    ("dtype", "options", "backend"),
    covering(
        DTYPES,
        [{}, {"scale": 100.0, "shift": 500.0, "temperature": 2.0}, {"margin": 0.25}, {"hard": True, "margin": 0.5}],
        BACKENDS,
    ),
    indirect=["backend"],
)
def test_decisions_as_the_reference(backend, dtype, options):
    for shape in ((1, 1, 1), (2, 3, 7), (2, 3, 300), (1, 2, 1000)):
        x = logits_like_keys(*shape, dtype)
        for noise in (None, torch.randn(shape), *NOISES[2:]):
            if noise is not None and "hard" in options:
                continue
            double = noise.double() if isinstance(noise, torch.Tensor) else noise
            exact = oracle.dmc_decisions(x.double(), noise=double, **options)
            bounds = accuracy_dmc.decisions(x, exact, noise=noise, **options)
            for y, z, bound in zip(ops.dmc_decisions(x, noise=noise, **options), exact, bounds, strict=True):
                assert_within(y, z, bound)


def test_hard_decisions_are_thresholds_and_hide_all_or_nothing(backend):
    x = torch.tensor([[[4.0, 5.0, 5.5, 6.0, float("nan")]]])
    soft = ops.dmc_decisions(x, margin=0.5)
    assert soft.hard.tolist() == [[[0, 0, 0, 1, 0]]]
    assert soft.alpha.isnan().tolist() == [[[False] * 4 + [True]]]
    alpha, hard, tempered = ops.dmc_decisions(x, margin=0.5, hard=True)
    assert torch.equal(alpha, soft.hard) and torch.equal(hard, soft.hard)
    assert tempered.tolist() == [[[-INF, -INF, -INF, INF, -INF]]]
    assert ops.dmc_mask(tempered).tolist() == [[[0, 0, -INF, 0, 0]]]


def test_gradients_of_decisions_as_the_references(backend):
    x, noise = logits_like_keys(2, 3, 50), torch.randn(2, 3, 50)
    grads = [torch.randn(2, 3, 50) for _ in range(3)]
    for chosen in ((0,), (1,), (2,), (0, 1, 2)):
        ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        y = ops.dmc_decisions(ours, noise=noise, scale=2.0, shift=10.0)
        z = oracle.dmc_decisions(exact, noise=noise.double(), scale=2.0, shift=10.0)
        torch.autograd.backward([y[i] for i in chosen], [grads[i] for i in chosen])
        torch.autograd.backward([z[i] for i in chosen], [grads[i].double() for i in chosen])
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_the_threshold_has_the_gradient_of_the_sigmoid():
    x = logits_like_keys(1, 2, 9).clone().requires_grad_()
    alpha, hard, _ = ops.dmc_decisions(x, noise=Noise(1))
    soft, through = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (alpha, hard))
    assert soft.any() and torch.equal(soft, through)


def test_hard_decisions_have_no_gradient():
    x = logits_like_keys(1, 2, 9).clone().requires_grad_()
    found = ops.dmc_decisions(x, hard=True)
    (ops.dmc_mask(found.tempered).clamp(min=-1) + found.alpha + found.hard).sum().backward()
    assert x.grad is None or not x.grad.any()


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_extreme_logits_give_finite_decisions_and_gradients(backend, size):
    x = torch.tensor([[[-size, size, 5.0]]], requires_grad=True)
    alpha, _, tempered = ops.dmc_decisions(x)
    bias = ops.dmc_mask(tempered)
    assert alpha.isfinite().all() and bias.isfinite().all()
    (alpha.sum() + bias.sum()).backward()
    assert x.grad.isfinite().all() and x.grad[0, 0, 1] < 0


# ---- importance ----


@pytest.mark.parametrize(
    ("dtype", "reduce", "heads", "backend"),
    covering(DTYPES, ops.IMPORTANCES, [(1, 1), (6, 2), (8, 8), (8, 1)], BACKENDS),
    indirect=["backend"],
)
def test_importance_as_the_reference(backend, dtype, reduce, heads):
    heads, kv_heads = heads
    x = logits_like_keys(2, heads, 300, dtype, shift=-5.0)
    exact = oracle.dmc_importance(x.double(), kv_heads, reduce=reduce, eps=2.0**-7)
    bound = accuracy_dmc.importance(x, kv_heads, reduce=reduce, eps=2.0**-7)
    assert_within(ops.dmc_importance(x, kv_heads, reduce=reduce, eps=2.0**-7), exact, bound)
    ours, double = x.float().clone().requires_grad_(), x.double().requires_grad_()
    grad = torch.randn(2, kv_heads, 300)
    ops.dmc_importance(ours, kv_heads, reduce=reduce).backward(grad)
    oracle.dmc_importance(double, kv_heads, reduce=reduce).backward(grad.double())
    torch.testing.assert_close(ours.grad.double(), double.grad, rtol=1e-5, atol=1e-7)


def test_importance_is_never_zero_and_does_not_depend_on_the_order_of_heads(backend):
    x = torch.tensor([-100.0, 100.0, -33.0, -30.0])[None, :, None]
    assert ops.dmc_importance(x, 4).flatten().tolist() == [2.0**-40, 1.0, 2.0**-40, pytest.approx(1.388794e-11)]
    x = logits_like_keys(1, 4, 20, shift=-5.0)
    for reduce in ("mean_logit", "mean_sigmoid"):
        torch.testing.assert_close(
            ops.dmc_importance(x, 2, reduce=reduce), ops.dmc_importance(x[:, [1, 0, 3, 2]], 2, reduce=reduce)
        )


# ---- mask ----


def test_mask_as_the_reference(backend):
    tempered = 30 * torch.randn(2, 3, 300)
    tempered[0, 0, :10] = torch.tensor([1e4, -1e4, 17, 20, 100, -100, INF, -INF, 0, 50])
    exact = oracle.dmc_mask(tempered.double())
    assert_within(ops.dmc_mask(tempered), exact, accuracy_dmc.mask(exact))
    ours, double = tempered.clone().requires_grad_(), tempered.double().requires_grad_()
    grad = torch.randn(2, 3, 300)
    ops.dmc_mask(ours).backward(grad)
    oracle.dmc_mask(double).backward(grad.double())
    torch.testing.assert_close(ours.grad.double(), double.grad, rtol=1e-6, atol=1e-7)


def test_what_the_next_token_leaves_of_a_key_is_its_bias_and_of_the_last_all():
    merged = pytest.approx(-torch.tensor(2.0).exp().log1p().item())
    assert ops.dmc_mask(torch.full((1, 1, 4), 2.0))[0, 0].tolist() == [merged, merged, merged, 0.0]


def test_the_first_token_of_a_sequence_changes_no_bias():
    tempered = torch.randn(1, 1, 5, requires_grad=True)
    ops.dmc_mask(tempered).sum().backward()
    assert tempered.grad[0, 0, 0] == 0 and tempered.grad[0, 0, 1:].all()


# ---- of all ----


def test_reference_passes_gradcheck():
    x = (torch.randn(1, 2, 4, dtype=torch.float64) + 5).requires_grad_()
    noise = torch.randn(1, 2, 4).double()
    assert torch.autograd.gradcheck(lambda y: oracle.dmc_decisions(y, noise=noise, temperature=0.7)[::2], (x,))
    for reduce in ops.IMPORTANCES:
        assert torch.autograd.gradcheck(lambda y, reduce=reduce: oracle.dmc_importance(y, 1, reduce=reduce), (x,))
    assert torch.autograd.gradcheck(oracle.dmc_mask, (x,))


def test_opcheck():
    native, x = torch.ops.kvcompress, torch.randn(1, 4, 5, requires_grad=True)
    settings = (1, 2, 3, 4, 5, 5.0, 0.5, 1.0, 0.0, False)
    torch.library.opcheck(native.dmc_decisions, (x, None, True, *settings), rtol=1e-4, atol=1e-4)
    torch.library.opcheck(native.dmc_decisions, (x, torch.randn(1, 4, 5), False, *settings), rtol=1e-4, atol=1e-4)
    for reduce in range(3):
        torch.library.opcheck(native.dmc_importance, (x, 2, 5.0, 0.0, reduce), rtol=1e-4, atol=1e-4)
    torch.library.opcheck(native.dmc_mask, (x,), rtol=1e-4, atol=1e-4)


def test_empty_input_gives_empty_output(backend):
    for shape in ((0, 2, 3), (2, 0, 3), (2, 2, 0)):
        assert all(x.shape == shape for x in ops.dmc_decisions(torch.empty(shape)))
        assert ops.dmc_mask(torch.empty(shape)).shape == shape
    for shape in ((0, 4, 3), (2, 4, 0)):
        assert ops.dmc_importance(torch.empty(shape), 2).shape == (shape[0], 2, shape[2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.dmc_decisions(x[0]), r"logits must be \[B, H, T\], got shape \(4, 5\)"),
        (lambda x: ops.dmc_decisions(x.double()), "logits must be float32, bfloat16 or float16, got torch.float64"),
        (lambda x: ops.dmc_decisions(x, temperature=0.0), "temperature must be a number between 1e-06 and .*, got 0.0"),
        (lambda x: ops.dmc_decisions(x, temperature=1e-320), "temperature must be a number .*, got 1e-320"),
        (lambda x: ops.dmc_decisions(x, scale=float("nan")), "scale must be a number .*, got nan"),
        (lambda x: ops.dmc_decisions(x, shift="5"), "shift must be a number .*, got '5'"),
        (lambda x: ops.dmc_decisions(x, noise=x[..., :4]), r"noise must have shape \(1, 4, 5\), got \(1, 4, 4\)"),
        (lambda x: ops.dmc_decisions(x, noise=x.double()), "noise must be float32"),
        (lambda x: ops.dmc_decisions(x, noise=Noise(-1)), "noise.seed must be at least 0, got -1"),
        (lambda x: ops.dmc_decisions(x, noise=Noise(1, 2, -3)), "noise.stream must be at least 0, got -3"),
        (lambda x: ops.dmc_decisions(x, noise=Noise(2**63)), "noise.seed must be at most"),
        (lambda x: ops.dmc_importance(x, 3), "kv_heads must divide the logits' 4 heads, got 3"),
        (lambda x: ops.dmc_importance(x, 0), "kv_heads must be at least 1, got 0"),
        (lambda x: ops.dmc_importance(x, 2, eps=-1.0), "eps must be a number between 0 and .*, got -1.0"),
        (lambda x: ops.dmc_importance(x, 2, reduce="max"), "reduce must be one of mean_logit, mean_sigmoid, first"),
        (lambda x: ops.dmc_mask(x.half()), "tempered must be float32, got torch.float16"),
        (lambda x: ops.dmc_mask(x[0]), r"tempered must be \[B, H, T\], got shape \(4, 5\)"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(1, 4, 5))
