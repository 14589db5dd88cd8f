"""csrc/cuda/score.cu in the emulation, against kvcompress.reference."""

import emulated
import pytest
import torch
from helpers import DTYPES, MASKED_RANGES, assert_as_accurate


def check(kernels, reference, queries, keys, **options):
    exact = reference.window_scores(queries.double(), keys.double(), **options)
    plain = reference.window_scores(queries.float(), keys.float(), **options)
    assert_as_accurate(kernels.window_scores(queries, keys, **options), plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "W", "T", "D"),
    [(1, 1, 1, 1, 2, 16), (2, 4, 2, 8, 77, 64), (1, 8, 1, 12, 130, 128), (1, 3, 3, 5, 64, 33), (1, 1, 1, 65, 140, 80)],
)
def test_scores_as_the_reference(kernels, reference, dtype, B, Hq, Hkv, W, T, D):
    queries, keys = torch.randn(B, Hq, W, D).to(dtype), torch.randn(B, Hkv, T, D).to(dtype)
    check(kernels, reference, queries, keys)


@pytest.mark.parametrize("reduce", emulated.REDUCTIONS)
@pytest.mark.parametrize("pooling", emulated.POOLINGS)
@pytest.mark.parametrize("kernel_size", [1, 3, 15])
def test_every_reduction_and_pooling(kernels, reference, reduce, pooling, kernel_size):
    queries, keys = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 70, 16)
    check(kernels, reference, queries, keys, reduce=reduce, pooling=pooling, kernel_size=kernel_size)


@pytest.mark.parametrize("pooling", emulated.POOLINGS)
def test_ragged_batch_scores_each_sequence_as_alone(kernels, reference, pooling):
    queries, keys = torch.randn(3, 4, 4, 32), torch.randn(3, 2, 90, 32)
    lengths = torch.tensor([90, 5, 41], dtype=torch.int32)
    check(kernels, reference, queries, keys, lengths=lengths, pooling=pooling, kernel_size=7)
    keys[1, :, 5:] = float("nan")  # past the length: never seen
    scores = kernels.window_scores(queries, keys, lengths=lengths, pooling=pooling, kernel_size=7)
    assert scores.isfinite().all()
    assert not scores[1, :, 1:].any()


def test_mixed_dtypes_and_strided_views(kernels, reference):
    queries = torch.randn(2, 5, 4, 32).to(torch.bfloat16).transpose(1, 2)  # [B, T, H, D] storage
    keys = torch.randn(2, 60, 2, 40).transpose(1, 2)[..., 4:36]
    check(kernels, reference, queries, keys)


@pytest.mark.parametrize("reduce", emulated.REDUCTIONS)
@pytest.mark.parametrize("kernel_size", [1, 5])
def test_nan_logit_makes_the_scores_of_its_kv_head_nan(kernels, reduce, kernel_size):
    queries, keys = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 80, 16)
    keys[0, 1, 70, 3] = float("nan")
    scores = kernels.window_scores(queries, keys, reduce=reduce, kernel_size=kernel_size)
    assert scores[0, 0].isfinite().all()
    assert scores[0, 1].isnan().all()


def test_lengths_no_longer_than_the_window_score_zero(kernels):
    queries, keys = torch.randn(3, 1, 4, 16), torch.randn(3, 1, 9, 16)
    lengths = torch.tensor([4, 0, -3], dtype=torch.int32)
    assert not kernels.window_scores(queries, keys, lengths=lengths).any()


@pytest.mark.parametrize("ranges", MASKED_RANGES)
def test_masked_columns_and_own_keys(kernels, reference, ranges):
    queries, keys = torch.randn(2, 4, 9, 16), 3 * torch.randn(2, 2, 150, 16)
    check(
        kernels,
        reference,
        queries,
        keys,
        reduce="sum",
        kernel_size=1,
        lengths=torch.tensor([150, 40], dtype=torch.int32),
        **ranges,
    )


def test_every_query_scores_every_key_it_sees(kernels, reference):
    queries, keys = torch.randn(1, 2, 100, 16), torch.randn(1, 1, 100, 16)
    check(kernels, reference, queries, keys, reduce="sum", kernel_size=1, skip_last=0)


def test_scratch_grows_with_the_keys_not_with_the_probabilities(kernels):
    def scratch_bytes(T, W, Hq):
        args = emulated.WindowScoresArgs(B=1, Hq=Hq, Hkv=8, W=W, T=T, D=128, kernel_size=5, skip_last=W)
        return kernels.library.kvc_cuda_window_scores_scratch_bytes(emulated.byref(args))

    assert scratch_bytes(131072, 64, 32) < 131072 * 8 * 4 + 64 * 32 * 4 * 256 * 2
    assert scratch_bytes(131072, 64, 32) < 131072 * 64 * 32 * 4 / 64


def test_invalid_sizes_and_empty_work(kernels):
    queries, keys = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 8, 16)
    assert kernels.window_scores(queries[:0], keys[:0]).shape == (0, 1, 5)
    for options in ({"kernel_size": 4}, {"kernel_size": 0}):
        with pytest.raises(emulated.LaunchError) as error:
            kernels.window_scores(queries, keys, **options)
        assert error.value.code == emulated.INVALID_VALUE
    with pytest.raises(emulated.LaunchError):
        kernels.window_scores(queries, keys[:, :, :3])  # T = W
    with pytest.raises(emulated.LaunchError):
        kernels.window_scores(torch.randn(1, 2, 3, 513), torch.randn(1, 1, 8, 513))
