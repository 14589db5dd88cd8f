"""csrc/cuda/select.cu in the emulation, against kvcompress.reference."""

import emulated
import pytest
import torch

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("R", "T", "k"), [(1, 1, 1), (3, 33, 7), (2, 64, 64), (2, 300, 1), (1, 301, 299), (1, 5000, 1234)]
)
def test_indices_as_the_reference(kernels, reference, R, T, k):
    scores = torch.randn(R, T)
    assert torch.equal(kernels.select_topk(scores, k), reference.select_topk(scores, k))
    scores = scores.mul(2).round()  # many ties, and both zeros
    assert torch.equal(kernels.select_topk(scores, k), reference.select_topk(scores, k))


def test_ragged_rows_choose_within_their_length(kernels, reference):
    scores, lengths = torch.randn(4, 130), torch.tensor([130, 20, 77, 33], dtype=torch.int32)
    scores[1, 20:] = 100.0
    expected = reference.select_topk(scores, 20, lengths=lengths)
    assert torch.equal(kernels.select_topk(scores, 20, lengths=lengths), expected)


def test_infinities_are_ordinary_and_nan_is_never_chosen(kernels):
    scores = torch.tensor([[-INF, NAN, INF, 0.0, -NAN, 1e-45, -1e-45, -INF]])
    assert kernels.select_topk(scores, 1).tolist() == [[2]]
    assert kernels.select_topk(scores, 4).tolist() == [[2, 3, 5, 6]]
    assert kernels.select_topk(scores, 5).tolist() == [[0, 2, 3, 5, 6]]
    assert kernels.select_topk(scores, 6).tolist() == [[0, 2, 3, 5, 6, 7]]


def test_both_zeros_tie(kernels):
    assert kernels.select_topk(torch.tensor([[-0.0, 0.0, -1.0, 0.0]]), 2).tolist() == [[0, 1]]


def test_missing_places_are_minus_one(kernels):
    scores = torch.tensor([[NAN, 3.0, NAN, 1.0], [NAN] * 4, [1.0, 2.0, 3.0, 4.0]])
    assert kernels.select_topk(scores, 3).tolist() == [[1, 3, -1], [-1, -1, -1], [1, 2, 3]]
    lengths = torch.tensor([4, 9, -1], dtype=torch.int32)
    assert kernels.select_topk(scores, 3, lengths=lengths).tolist() == [[1, 3, -1], [-1, -1, -1], [-1, -1, -1]]


def test_invalid_sizes_and_empty_work(kernels):
    assert kernels.select_topk(torch.empty(0, 5), 3).shape == (0, 3)
    assert kernels.select_topk(torch.randn(2, 5), 0).shape == (2, 0)
    with pytest.raises(emulated.LaunchError) as error:
        kernels.select_topk(torch.randn(1, 5), 6)
    assert error.value.code == emulated.INVALID_VALUE
