import accuracy_dmc
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS
from helpers import DTYPES, covering
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops


def inputs(B, H, T, D, dtype=torch.float32, merging=0.5):
    """Keys, values, decisions of which some are exactly 0 or 1, weights."""
    keys, values = (torch.randn(B, H, T, D).to(dtype) for _ in range(2))
    alpha = torch.rand(B, H, T) ** ((1 - merging) / merging)
    alpha = torch.where(torch.rand(B, H, T) < 0.1, (torch.rand(B, H, T) < merging).float(), alpha)
    return keys, values, alpha, 0.01 + torch.rand(B, H, T)


def before(B, H, D):
    """An initial state, of which some rows are empty."""
    z = torch.rand(B, H) + 0.5
    z[0, 0] = 0
    return torch.randn(B, H, D), torch.randn(B, H, D), z


def results(function, tensors, grads, **options):
    """Averages of keys and values, z, and the gradients of keys, values, alpha and omega."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    keys, values, z = function(*leaves, **options)
    found = torch.autograd.grad((keys, values), leaves, [g.to(keys.dtype) for g in grads], materialize_grads=True)
    return [x.detach() for x in (keys, values, z, *found)]


def check(tensors, **options):
    grads = [torch.randn(tensors[0].shape).to(tensors[0].dtype) for _ in range(2)]
    double = dict(options)
    if options.get("initial") is not None:
        double["initial"] = tuple(x.double() for x in options["initial"])
    exact = results(oracle.dmc_accumulate, [x.double() for x in tensors], grads, **double)
    ours = results(ops.dmc_accumulate, tensors, grads, **options)
    bounds = accuracy_dmc.accumulate(tensors, grads, **options)
    for (name, bound), x, y in zip(bounds.items(), ours, exact, strict=True):
        assert_within(x, y, bound, name)


SHAPES = [(1, 1, 1, 16), (2, 3, 5, 33), (1, 2, 64, 64), (1, 1, 130, 20), (1, 1, 65, 80), (1, 2, 33, 256), (1, 1, 9, 1),
          (1, 1, 9, 301), (1, 2, 9, 512)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "shape", "backend"), covering(DTYPES, SHAPES, BACKENDS), indirect=["backend"])
def test_shapes_and_dtypes_as_the_reference(backend, dtype, shape):
    tensors = inputs(*shape, dtype)
    check(tensors, neuron=-1)
    check(tensors, window=12, neuron=0)
    check(tensors, initial=before(shape[0], shape[1], shape[3]), neuron=shape[3] // 2)


@pytest.mark.parametrize("window", [None, 1, 2, 12, 33, 64, 100, 999])
def test_windows_as_the_reference(backend, window):
    check(inputs(1, 1, 100, 8, merging=0.8), window=window, neuron=5)


@pytest.mark.parametrize("merging", [0.3, 0.9, 1.0])
def test_long_rows_as_the_reference(backend, merging):
    """Rows that are cut into segments: what lies before a cut has faded, or it has not."""
    tensors = inputs(1, 1, 700, 8, merging=min(merging, 0.9))
    if merging == 1:
        tensors[2][:] = 1
    check(tensors, neuron=3)
    check(tensors, initial=(torch.randn(1, 1, 8), torch.randn(1, 1, 8), torch.ones(1, 1)))


def test_a_row_of_many_segments_as_the_reference(cuda):
    """And of two tiles of the scan of weights."""
    check(inputs(1, 1, 4500, 1, merging=0.95))


@settings(max_examples=15, deadline=None)
@given(
    T=st.integers(1, 700),
    D=st.integers(1, 20),
    heads=st.integers(1, 3),
    merging=st.sampled_from([0.1, 0.5, 0.95]),
    window=st.none() | st.integers(1, 64),
    seed=st.integers(0, 99),
)
def test_any_sizes_as_the_reference(T, D, heads, merging, window, seed):
    torch.manual_seed(seed)
    tensors = inputs(2, heads, T, D, merging=merging)
    grads = [torch.randn(tensors[0].shape) for _ in range(2)]
    options = {"window": window, "neuron": seed % D}
    ours = results(ops.dmc_accumulate, tensors, grads, **options)
    exact = results(oracle.dmc_accumulate, [x.double() for x in tensors], grads, **options)
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-4, rtol=2e-4)


# ---- what must always hold ----


@pytest.mark.parametrize(("dtype", "window", "backend"), covering(DTYPES, [None, 12], BACKENDS), indirect=["backend"])
def test_a_token_that_does_not_merge_is_itself(backend, dtype, window):
    keys, values, alpha, omega = inputs(1, 2, 150, 24, dtype)
    alone = torch.rand(1, 2, 150) < 0.4
    alone[..., 0] = True
    alpha[alone] = 0
    out_k, out_v, z = ops.dmc_accumulate(keys, values, alpha, omega, window=window)
    assert torch.equal(out_k[alone], keys[alone]) and torch.equal(out_v[alone], values[alone])
    assert torch.equal(z[alone], omega[alone])


def test_merging_everything_is_the_running_mean(backend):
    keys, values, _, omega = inputs(1, 2, 900, 16)
    out_k, out_v, z = ops.dmc_accumulate(keys, values, torch.ones(1, 2, 900), omega)
    weight = omega.double()
    total = weight.cumsum(-1)
    torch.testing.assert_close(z.double(), total, rtol=1e-5, atol=0)
    for out, x in ((out_k, keys), (out_v, values)):
        mean = (weight[..., None] * x).cumsum(2) / total[..., None]
        torch.testing.assert_close(out.double(), mean, atol=1e-5, rtol=1e-5)


def test_quarter_of_a_million_tokens_lose_no_accuracy():
    """Of running means, whose weight grows to 10^5, and of entries of a thousand tokens."""
    T = 262_144
    tensors = [torch.randn(1, 1, T, 2), torch.randn(1, 1, T, 2), torch.ones(1, 1, T), 0.01 + torch.rand(1, 1, T)]
    grads = [torch.randn(1, 1, T, 2) for _ in range(2)]
    for length in (T, 1024):
        tensors[2][..., ::length] = 0
        keys, values, z, dkeys, dvalues, dalpha, domega = results(ops.dmc_accumulate, tensors, grads)
        entries = [x.double().view(-1, length, x.shape[-1]) for x in (*tensors[:2], tensors[3][..., None], *grads)]
        weight, total = entries[2], entries[2].cumsum(1)
        torch.testing.assert_close(z.double().view_as(total), total, rtol=2e-5, atol=0)
        of_weight = 0
        for x, g, mean, dx in ((entries[0], entries[3], keys, dkeys), (entries[1], entries[4], values, dvalues)):
            exact, later = (weight * x).cumsum(1) / total, (g / total).flip(1).cumsum(1).flip(1)
            torch.testing.assert_close(mean.double().view_as(exact), exact, rtol=0, atol=5e-6)
            torch.testing.assert_close(
                dx.double().view_as(exact), weight * later, rtol=0, atol=2e-5 * later.abs().max()
            )
            of_weight = of_weight + (x * later - (g * exact / total).flip(1).cumsum(1).flip(1)).sum(-1)
        scale = of_weight.abs().max().item()
        torch.testing.assert_close(domega.double().view_as(of_weight), of_weight, rtol=0, atol=1e-5 * scale)
        assert dalpha.isfinite().all()


def test_averages_stay_within_what_they_average_and_do_not_depend_on_the_scale_of_weights(backend):
    keys, values, alpha, omega = inputs(2, 2, 300, 16)
    out_k, out_v, z = ops.dmc_accumulate(keys, values, alpha, omega)
    slack = 1e-5
    for out, x in ((out_k, keys), (out_v, values)):
        assert (out <= x.cummax(2).values + slack).all() and (out >= x.cummin(2).values - slack).all()
    for x, y in zip((out_k, out_v, 8 * z), ops.dmc_accumulate(keys, values, alpha, 8 * omega), strict=True):
        assert torch.equal(x, y)  # a power of two rounds nothing


@pytest.mark.parametrize("T", [10, 200])
def test_a_window_of_everything_is_no_window_and_one_of_one_merges_nothing(backend, T):
    tensors = inputs(1, 2, T, 16)
    grads = [torch.randn(1, 2, T, 16) for _ in range(2)]
    full = results(ops.dmc_accumulate, tensors, grads)
    for window in (T, T + 1):
        for x, y in zip(full, results(ops.dmc_accumulate, tensors, grads, window=window), strict=True):
            assert torch.equal(x, y)
    for x, y in zip(results(ops.dmc_accumulate, tensors, grads, window=1)[:5], (*tensors[:2], tensors[3], *grads),
                    strict=True):  # fmt: skip
        assert torch.equal(x, y)


def test_chunks_with_the_state_between_them_are_the_whole(backend):
    keys, values, alpha, omega = inputs(2, 2, 300, 16)
    whole = ops.dmc_accumulate(keys, values, alpha, omega)
    state = None
    for begin, end in ((0, 1), (1, 100), (100, 164), (164, 300)):
        part = (x[:, :, begin:end] for x in (keys, values, alpha, omega))
        found = ops.dmc_accumulate(*part, initial=state)
        for x, y in zip(found, whole, strict=True):
            torch.testing.assert_close(x, y[:, :, begin:end], rtol=1e-5, atol=1e-6)
        state = tuple(x[:, :, -1] for x in found)


def test_the_neuron_counts_as_zero_and_has_no_gradient(backend):
    tensors = inputs(1, 2, 100, 16)
    grads = [torch.randn(1, 2, 100, 16) for _ in range(2)]
    for window in (None, 5):
        clean = results(ops.dmc_accumulate, tensors, grads, neuron=3, window=window)
        assert not clean[0][..., 3].any() and not clean[3][..., 3].any()
        tensors[0][..., 3] = float("nan")
        for x, y in zip(clean, results(ops.dmc_accumulate, tensors, grads, neuron=-13, window=window), strict=True):
            assert torch.equal(x, y)
        tensors[0][..., 3] = 0
        for x, y in zip(clean[:3], results(ops.dmc_accumulate, tensors, grads, window=window)[:3], strict=True):
            assert torch.equal(x, y)


def test_the_first_decision_changes_nothing_and_has_no_gradient(backend):
    tensors = inputs(1, 2, 30, 8)
    grads = [torch.randn(1, 2, 30, 8) for _ in range(2)]
    for window in (None, 4):
        clean = results(ops.dmc_accumulate, tensors, grads, window=window)
        assert not clean[5][..., 0].any()
        tensors[2][..., 0] = torch.rand(1, 2)
        for x, y in zip(clean, results(ops.dmc_accumulate, tensors, grads, window=window), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("window", [None, 12])
def test_threads_change_no_bit(cpu, window):
    tensors = inputs(1, 3, 1500, 32, merging=0.9)
    grads = [torch.randn(1, 3, 1500, 32) for _ in range(2)]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(results(ops.dmc_accumulate, tensors, grads, window=window))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            assert torch.equal(x, y)


def test_a_row_does_not_depend_on_the_others(backend):
    tensors = inputs(3, 4, 100, 16)
    grads = [torch.randn(3, 4, 100, 16) for _ in range(2)]
    whole = results(ops.dmc_accumulate, tensors, grads)
    part = results(ops.dmc_accumulate, [x[1:2, 2:3] for x in tensors], [g[1:2, 2:3] for g in grads])
    for x, y in zip(whole, part, strict=True):
        assert torch.equal(x[1:2, 2:3], y)


@pytest.mark.parametrize("weight", [2.0**-40, 1.0])
def test_smallest_weights_give_finite_values_and_gradients(backend, weight):
    keys, values, alpha, omega = inputs(1, 1, 200, 8)
    omega[:] = weight
    omega[..., ::7] = 2.0**-40
    for options in ({}, {"window": 12}):
        for x in results(ops.dmc_accumulate, (keys, values, alpha, omega), [keys, values], **options):
            assert x.isfinite().all()


@pytest.mark.parametrize(("shift", "window", "backend"), covering([0, 3], [None, 9], BACKENDS), indirect=["backend"])
def test_any_strides(backend, window, shift):
    """Memory as projections leave it; with a shift no row starts on 16 bytes."""

    def strided(x):
        B, H, T, D = x.shape
        return torch.empty(B, T, H, D + shift, dtype=x.dtype)[..., shift:].transpose(1, 2).copy_(x)

    keys, values, alpha, omega = inputs(1, 2, 70, 16)
    grads = [torch.randn(1, 2, 70, 16) for _ in range(2)]
    for x, y in zip(
        results(ops.dmc_accumulate, (keys, values, alpha, omega), grads, window=window),
        results(ops.dmc_accumulate, (strided(keys), strided(values), alpha, omega), map(strided, grads), window=window),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_only_one_of_keys_and_values_is_used(backend):
    tensors = [x.requires_grad_() for x in inputs(1, 2, 40, 8)]
    for number in (0, 1):
        ours = torch.autograd.grad(ops.dmc_accumulate(*tensors)[number].sum(), tensors[2:])
        plain = torch.autograd.grad(oracle.dmc_accumulate(*tensors)[number].sum(), tensors[2:])
        for x, y in zip(ours, plain, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_reference_passes_gradcheck():
    initial = tuple(x.double() for x in before(2, 1, 3))
    for options in (
        {"neuron": 1},
        {"initial": initial},
        {"window": 3, "neuron": 0},
    ):
        tensors = [x.double() for x in inputs(2, 1, 6, 3)]
        tensors[2] = 0.1 + 0.8 * torch.rand(2, 1, 6).double()
        tensors = [x.requires_grad_() for x in tensors]

        def averages(*x, options=options):
            return oracle.dmc_accumulate(*x, **options)[:2]

        assert torch.autograd.gradcheck(averages, tensors)


def test_opcheck():
    native = torch.ops.kvcompress.dmc_accumulate
    tensors = inputs(2, 2, 9, 8)
    for rest in (
        (None, None, None, -1, 0),
        (None, None, None, 3, 4),
        (*before(2, 2, 8), 3, 0),
        (None, None, None, 0, 9),
    ):
        torch.library.opcheck(native, (*tensors, *rest))  # without gradients: z and the states have none
        out_k, out_v, *saved = native(*tensors, *rest)
        backward = torch.ops.kvcompress.dmc_accumulate_backward
        torch.library.opcheck(backward, (out_k, out_v, *tensors, rest[2], *saved, *rest[3:]))


def test_z_has_no_gradient_and_second_derivatives_are_refused():
    tensors = [x.requires_grad_() for x in inputs(1, 1, 5, 4)]
    keys, _, z = ops.dmc_accumulate(*tensors)
    with pytest.raises(NotImplementedError, match="dmc_accumulate has no gradient from z"):
        z.sum().backward()
    keys = ops.dmc_accumulate(*tensors)[0]
    (first,) = torch.autograd.grad(keys.sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        first.sum().backward()


def test_empty_input_gives_empty_output(backend):
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)):
        keys, gate = torch.empty(shape), torch.empty(shape[:3])
        found = results(ops.dmc_accumulate, (keys, keys, gate, gate), [keys, keys])
        assert [x.shape for x in found] == [shape, shape, shape[:3]] * 2 + [shape[:3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.randn(2, 5, 8)}, r"keys must be \[B, Hkv, T, D\], got shape \(2, 5, 8\)"),
        ({"keys": torch.randn(1, 2, 5, 8).double()}, "keys must be float32, bfloat16 or float16"),
        ({"values": torch.randn(1, 2, 5, 9)}, r"values must be \(1, 2, 5, 8\) as keys, got \(1, 2, 5, 9\)"),
        ({"values": torch.randn(1, 2, 5, 8).half()}, "values must be torch.float32 as keys, got torch.float16"),
        ({"alpha": torch.rand(1, 2, 4)}, r"alpha must have shape \(1, 2, 5\), got \(1, 2, 4\)"),
        ({"alpha": torch.rand(1, 2, 5).half()}, "alpha must be float32, got torch.float16"),
        ({"omega": torch.rand(2, 5)}, r"omega must have shape \(1, 2, 5\)"),
        ({"neuron": 8}, "neuron must be between -8 and 7, got 8"),
        ({"neuron": -9}, "neuron must be between -8 and 7, got -9"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"initial": (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))}, "initial must hold .* got 2 tensors"),
        ({"initial": (torch.zeros(1, 2, 8),) * 3}, r"initial\[2\] must have shape \(1, 2\), got \(1, 2, 8\)"),
        ({"initial": before(1, 2, 8), "window": 3}, "initial must be None with a window"),
        (
            {"initial": (torch.zeros(1, 2, 8, requires_grad=True), torch.zeros(1, 2, 8), torch.zeros(1, 2))},
            r"initial\[0\] must not require grad",
        ),
    ],
)
def test_wrong_arguments_are_named(change, message):
    keys, values, alpha, omega = inputs(1, 2, 5, 8)
    arguments = {"keys": keys, "values": values, "alpha": alpha, "omega": omega}
    with pytest.raises(ValueError, match=message):
        ops.dmc_accumulate(**{**arguments, **change})


def test_limits_of_window_and_head_dim():
    with pytest.raises(ValueError, match=r"window must be between 1 and 64, or at least T = 99 \(all tokens\), got 65"):
        ops.dmc_accumulate(*inputs(1, 1, 99, 4), window=65)
    for D in (0, 513):
        with pytest.raises(ValueError, match=f"keys must have a head dim between 1 and 512, got {D}"):
            ops.dmc_accumulate(*inputs(1, 1, 2, D))
