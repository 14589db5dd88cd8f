"""csrc/cuda/select.cu and compact.cu in the emulation, against kvcompress.reference."""

import emulated
import pytest
import torch
from helpers import DTYPES

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


def random_indices(R: int, T: int, k: int) -> torch.Tensor:
    return torch.stack([torch.randperm(T)[:k].sort().values for _ in range(R)]).to(torch.int32)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
@pytest.mark.parametrize(
    ("R", "T", "D", "k"),
    [(1, 1, 16, 1), (3, 50, 64, 20), (2, 70, 33, 70), (2, 40, 80, 39), (1, 600, 128, 555), (1, 900, 33, 800)],
)
def test_rows_move_to_their_indices(kernels, reference, dtype, R, T, D, k):
    rows = (100 * torch.randn(R, T, D)).to(dtype)
    indices = random_indices(R, T, k)
    expected = reference.compact_rows(rows, indices)
    assert torch.equal(kernels.compact_rows_(rows, indices), expected)


def test_strided_rows_leave_the_gap_alone(kernels, reference):
    storage = torch.randn(3, 40 * 16 + 5)
    before = storage.clone()
    rows = storage[:, : 40 * 16].unflatten(1, (40, 16))
    indices = random_indices(3, 40, 11)
    expected = reference.compact_rows(rows, indices)
    assert torch.equal(kernels.compact_rows_(rows, indices), expected)
    assert torch.equal(storage[:, 40 * 16 :], before[:, 40 * 16 :])


def test_slots_without_a_valid_index_keep_what_they_had(kernels):
    rows = torch.arange(8.0).reshape(1, 8, 1).repeat(1, 1, 16)
    indices = torch.tensor([[2, 5, -1, 8]], dtype=torch.int32)
    assert kernels.compact_rows_(rows, indices)[0, :, 0].tolist() == [2, 5, 2, 3, 4, 5, 6, 7]


def test_invalid_sizes_and_empty_work(kernels):
    assert kernels.select_topk(torch.empty(0, 5), 3).shape == (0, 3)
    assert kernels.select_topk(torch.randn(2, 5), 0).shape == (2, 0)
    assert kernels.compact_rows_(torch.randn(2, 3, 4), torch.empty(2, 0, dtype=torch.int32)).shape == (2, 3, 4)
    with pytest.raises(emulated.LaunchError) as error:
        kernels.select_topk(torch.randn(1, 5), 6)
    assert error.value.code == emulated.INVALID_VALUE
    with pytest.raises(emulated.LaunchError):
        kernels.compact_rows_(torch.randn(1, 2, 4), torch.zeros(1, 3, dtype=torch.int32))
