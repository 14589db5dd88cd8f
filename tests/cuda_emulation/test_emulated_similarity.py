"""csrc/cuda/similarity.cu in the emulation, against kvcompress.reference."""

import emulated
import pytest
import torch
from helpers import DTYPES


def check(kernels, reference, queries, keys, **options):
    exact, count = reference.layer_similarity(queries.double(), keys.double(), **options)
    plain, _ = reference.layer_similarity(queries.float(), keys.float(), **options)
    sums, _ = kernels.layer_similarity(queries, keys, **options)
    assert torch.equal(sums, sums.mT) and not sums.diagonal(dim1=1, dim2=2).any()
    error, allowed = (sums - exact).abs().max().item(), (plain - exact).abs().max().item()
    assert error <= 2 * allowed + 1e-6 * max(count, 1), f"error {error:.3g}, plain PyTorch {allowed:.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("L", "Hq", "Hkv", "S", "T", "D"),
    [(1, 2, 1, 2, 5, 16), (3, 4, 2, 3, 77, 64), (5, 1, 1, 2, 300, 33), (2, 1, 1, 1, 1, 8)],
)
def test_sums_as_the_reference(kernels, reference, dtype, L, Hq, Hkv, S, T, D):
    check(kernels, reference, torch.randn(L, Hq, S, D).to(dtype), torch.randn(L, Hkv, T, D).to(dtype))


@pytest.mark.parametrize(("sinks", "recent"), [(1, 2), (70, 5), (3, 145), (150, 0), (0, 150)])
def test_distant_keys_alone(kernels, reference, sinks, recent):
    queries, keys = 2 * torch.randn(3, 2, 4, 16), torch.randn(3, 1, 150, 16)
    check(kernels, reference, queries, keys, sinks=sinks, recent=recent)


def test_more_pairs_than_threads(kernels, reference):
    check(kernels, reference, torch.randn(24, 1, 1, 8), torch.randn(24, 1, 70, 8))


def test_strided_states_of_two_types(kernels, reference):
    queries = torch.randn(3, 9, 4, 32).transpose(1, 2)[:, :, -2:]
    keys = torch.randn(3, 80, 2, 32).transpose(1, 2).to(torch.bfloat16)
    check(kernels, reference, queries, keys)
    check(kernels, reference, queries, torch.randn(3, 2, 80, 33)[..., 1:])  # not on 16 bytes


def test_large_logits_equal_layers_and_nan(kernels, reference):
    queries, keys = 60 * torch.randn(3, 2, 2, 32), torch.randn(3, 1, 100, 32)
    queries[1], keys[1] = queries[0], keys[0]
    check(kernels, reference, queries, keys)
    assert not kernels.layer_similarity(queries, keys)[0][:, 0, 1].any()
    queries[2, 1, 0, 3] = float("nan")
    sums, _ = kernels.layer_similarity(queries, keys)
    assert sums[0].isfinite().all() and sums[1, 2, :2].isnan().all() and sums[1, 0, 1] == 0


def test_invalid_sizes_and_no_queries(kernels):
    queries, keys = torch.randn(2, 2, 3, 16), torch.randn(2, 1, 8, 16)
    assert not kernels.layer_similarity(queries[:, :, :0], keys)[0].any()
    for change in ({"sinks": -1}, {"recent": -1}, {"scale": -1.0}):
        with pytest.raises(emulated.LaunchError) as error:
            kernels.layer_similarity(queries, keys, **change)
        assert error.value.code == emulated.INVALID_VALUE
    with pytest.raises(emulated.LaunchError):
        kernels.layer_similarity(torch.randn(189, 1, 1, 4), torch.randn(189, 1, 2, 4))
