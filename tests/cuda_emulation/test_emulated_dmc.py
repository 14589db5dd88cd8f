"""csrc/cuda/dmc_gates.cu, dmc_accumulate*.cu and dmc_window.cu in the emulation, against kvcompress.reference."""

import emulated
import pytest
import torch
from helpers import assert_as_accurate

DTYPES = emulated.DTYPES
NAN = float("nan")
NAMES = ("keys", "values", "z", "dkeys", "dvalues", "dalpha", "domega")


# ---- gates ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 70), (1, 2, 1000)])
def test_decisions_as_the_reference(kernels, reference, dtype, shape):
    logits = (5 + 3 * torch.randn(*shape, 4)).to(dtype)[..., 2]  # a neuron: strides of D
    seeds = (2**62 + 12345, 3, 7, 2**32 - 1, 2**32 - 5)  # seed, offset, stream, sample, token: counters wrap
    for options in (
        {},
        {"noise": torch.randn(shape)},
        {"noise": seeds},
        {"hard": True, "margin": 0.5},
        {"scale": 2.0, "shift": 9.0, "temperature": 0.5},
    ):
        ours = kernels.dmc_decisions(logits, **options)
        exact = reference.dmc_decisions(logits.double(), **options)
        for x, y in zip(ours, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=3e-5)


def test_nan_is_no_decision_to_merge(kernels):
    alpha, hard, _ = kernels.dmc_decisions(torch.tensor([[[9.0, NAN, 1.0]]]))
    assert hard.tolist() == [[[1, 0, 0]]] and alpha.isnan().tolist() == [[[False, True, False]]]


def test_noise_has_the_bits_of_the_cpu(kernels):
    ops = pytest.importorskip("kvcompress.ops")
    logits = 5 + torch.randn(3, 4, 300)
    for noise in (ops.Noise(0), ops.Noise(2**63 - 1, 5, 6, 7, 8), ops.Noise(77, 2**32 - 1, token=2**32 - 100)):
        ours, cpu = kernels.dmc_decisions(logits, noise=noise), ops.dmc_decisions(logits, noise=noise)
        assert torch.equal(ours[1], cpu.hard) and torch.equal(ours[2], cpu.tempered)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("reduce", ["mean_logit", "mean_sigmoid", "first"])
def test_importance_as_the_reference(kernels, reference, dtype, G, reduce):
    logits = (30 * torch.randn(2, 2 * G, 70)).to(dtype)
    ours = kernels.dmc_importance(logits, 2, reduce=reduce, eps=2.0**-7)
    exact = reference.dmc_importance(logits.double(), 2, reduce=reduce, eps=2.0**-7)
    torch.testing.assert_close(ours.double(), exact, rtol=3e-6, atol=0)
    assert kernels.dmc_importance(torch.full((1, 2, 3), -100.0), 2).eq(2.0**-40).all()


def test_mask_as_the_reference(kernels, reference):
    tempered = 30 * torch.randn(2, 3, 300)
    tempered[0, 0, :2] = torch.tensor([1e4, -1e4])
    ours, exact = kernels.dmc_mask(tempered), reference.dmc_mask(tempered.double())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-40)


# ---- averages ----


def inputs(B, H, T, D, dtype=torch.float32, merging=0.5):
    """Keys, values, decisions of which some are exactly 0 or 1, weights."""
    keys, values = (torch.randn(B, H, T, D).to(dtype) for _ in range(2))
    alpha = torch.rand(B, H, T) ** ((1 - merging) / merging)
    alpha = torch.where(torch.rand(B, H, T) < 0.1, (torch.rand(B, H, T) < merging).float(), alpha)
    return keys, values, alpha, 0.01 + torch.rand(B, H, T)


def by_reference(reference, tensors, grads, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    keys, values, z = reference.dmc_accumulate(*leaves, **options)
    found = torch.autograd.grad((keys, values), leaves, [g.to(keys.dtype) for g in grads], materialize_grads=True)
    return [x.detach() for x in (keys, values, z, *found)]


def check(kernels, reference, tensors, views=torch.empty_like, **options):
    grads = [torch.randn(tensors[0].shape).to(tensors[0].dtype) for _ in range(2)]
    double = dict(options)
    if options.get("initial") is not None:
        double["initial"] = tuple(x.double() for x in options["initial"])
    exact = by_reference(reference, [x.double() for x in tensors], grads, **double)
    plain = by_reference(reference, tensors, grads, **options)
    ours = kernels.dmc_accumulate(*tensors, grads=grads, views=views, **options)
    for name, x, y, z in zip(NAMES, ours, plain, exact, strict=True):
        try:
            assert_as_accurate(x, y, z, typical=True)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 16), (2, 3, 5, 33), (1, 2, 70, 80), (1, 1, 65, 256), (1, 1, 9, 1), (1, 1, 9, 512)]
)
def test_shapes_and_dtypes_as_the_reference(kernels, reference, dtype, shape):
    tensors = inputs(*shape, dtype)
    B, H, _, D = shape
    z = torch.rand(B, H) + 0.5
    z[0, 0] = 0
    check(kernels, reference, tensors, neuron=-1)
    check(kernels, reference, tensors, window=12, neuron=0)
    check(kernels, reference, tensors, initial=(torch.randn(B, H, D), torch.randn(B, H, D), z), neuron=D // 2)


@pytest.mark.parametrize("merging", [0.3, 0.9, 1.0])
def test_long_rows_as_the_reference(kernels, reference, merging):
    """Rows of several segments: what lies before a cut has faded, or it has not."""
    tensors = inputs(1, 2, 700, 8, merging=min(merging, 0.9))
    if merging == 1:
        tensors[2][:] = 1
    check(kernels, reference, tensors, neuron=3)
    check(kernels, reference, tensors, initial=(torch.randn(1, 2, 8), torch.randn(1, 2, 8), torch.ones(1, 2)))


def test_a_row_of_many_segments_and_two_tiles_of_the_scan_of_weights(kernels, reference):
    check(kernels, reference, inputs(1, 1, 4500, 1, merging=0.95))


@pytest.mark.parametrize("window", [1, 2, 12, 33, 64])
def test_windows_as_the_reference(kernels, reference, window):
    tensors = inputs(2, 1, 150, 24, merging=0.8)
    check(kernels, reference, tensors, window=window, neuron=5)


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3] + 3, dtype=x.dtype)[..., 3:].transpose(1, 2)


@pytest.mark.parametrize("window", [None, 9])
def test_strides_change_nothing(kernels, window):
    keys, values, alpha, omega = inputs(2, 3, 70, 32)
    grads = [torch.randn(2, 3, 70, 32) for _ in range(2)]
    plain = kernels.dmc_accumulate(keys, values, alpha, omega, window=window, grads=grads)
    others = [strided(x).copy_(x) for x in (keys, values, *grads)]
    found = kernels.dmc_accumulate(*others[:2], alpha, omega, window=window, grads=others[2:], views=strided)
    for x, y in zip(found, plain, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 12])
def test_a_token_that_does_not_merge_is_itself(kernels, dtype, window):
    keys, values, alpha, omega = inputs(1, 2, 200, 48, dtype)
    alone = torch.rand(1, 2, 200) < 0.4
    alone[..., 0] = True
    alpha[alone] = 0
    out_k, out_v, z = kernels.dmc_accumulate(keys, values, alpha, omega, window=window)
    assert torch.equal(out_k[alone], keys[alone]) and torch.equal(out_v[alone], values[alone])
    assert torch.equal(z[alone], omega[alone])


def test_smallest_weights_give_finite_values_and_gradients(kernels):
    keys, values, alpha, omega = inputs(1, 1, 200, 8)
    omega[:] = 2.0**-40
    for window in (None, 12):
        for x in kernels.dmc_accumulate(keys, values, alpha, omega, window=window, grads=[keys, values]):
            assert x.isfinite().all()


def test_invalid_sizes_and_empty_work(kernels):
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)):
        keys, gate = torch.empty(shape), torch.empty(shape[:3])
        assert kernels.dmc_accumulate(keys, keys, gate, gate, grads=[keys, keys])[0].shape == shape
    keys, gate = torch.randn(1, 1, 99, 4), torch.ones(1, 1, 99)
    wide = torch.randn(1, 1, 2, 513), torch.ones(1, 1, 2)
    for (x, gates), options in (((keys, gate), {"window": 65}), (wide, {})):
        with pytest.raises(emulated.LaunchError) as error:
            kernels.dmc_accumulate(x, x, gates, gates, **options)
        assert error.value.code == emulated.INVALID_VALUE
    logits = torch.randn(1, 3, 4)
    with pytest.raises(emulated.LaunchError):
        kernels.dmc_importance(logits, 2)
    assert kernels.dmc_importance(logits[..., :0], 3).shape == (1, 3, 0)
    assert kernels.dmc_mask(logits[..., :0]).shape == (1, 3, 0)
