import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("R", "T", "k"),
    [(1, 1, 1), (3, 100, 10), (2, 1000, 999), (3, 5000, 1234), (2, 64, 64), (2, 7, 0), (2, 300, 1), (0, 5, 3)],
)
def test_selects_as_a_stable_sort(backend, R, T, k):
    scores = torch.randn(R, T)
    assert torch.equal(ops.select_topk(scores, k), oracle.select_topk(scores, k))
    scores = scores.mul(2).round()  # many ties, and both zeros
    assert torch.equal(ops.select_topk(scores, k), oracle.select_topk(scores, k))


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.sampled_from([-1.0, -0.0, 0.0, 1.0, 1e-40, 3e38, float("inf"), -float("inf"), float("nan")]),
                    min_size=1, max_size=80),
    share=st.floats(0, 1),
)  # fmt: skip
def test_ties_infinities_and_nan(values, share):
    scores = torch.tensor([values])
    allowed = int((~scores.isnan()).sum())
    k = round(share * allowed)
    chosen = ops.select_topk(scores, k)
    assert torch.equal(chosen, oracle.select_topk(scores, k))
    assert not scores[0, chosen[0].long()].isnan().any()


def test_infinities_are_ordinary_and_nan_is_never_chosen(backend):
    scores = torch.tensor([[-INF, NAN, INF, 0.0, -NAN, 1e-45, -1e-45, -INF]])
    for chosen in ([2], [2, 3, 5, 6], [0, 2, 3, 5, 6], [0, 2, 3, 5, 6, 7]):
        assert ops.select_topk(scores, len(chosen)).tolist() == [chosen]
    assert ops.select_topk(torch.tensor([[-0.0, 0.0, -1.0, 0.0]]), 2).tolist() == [[0, 1]]


def test_ragged_rows_choose_among_their_own(backend):
    scores = torch.randn(4, 130)
    lengths = torch.tensor([130, 10, 77, 11], dtype=torch.int32)
    scores[1, 10:] = 100.0
    assert torch.equal(ops.select_topk(scores, 10, lengths=lengths), oracle.select_topk(scores, 10, lengths=lengths))


def test_too_few_candidates_is_an_error():
    scores = torch.randn(2, 10)
    scores[1, 2:] = float("nan")
    with pytest.raises(RuntimeError, match="not NaN"):
        ops.select_topk(scores, 3)


@pytest.mark.parametrize("length", [4, 21])
def test_candidates_out_of_range_are_named(length):
    lengths = torch.tensor([20, length], dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match=rf"^select_topk: lengths must be between 5 and 20 \(T\), got {length} at 1$"
    ):
        ops.select_topk(torch.randn(2, 20), 5, lengths=lengths)


def test_missing_places_are_minus_one(cuda):
    scores = torch.tensor([[NAN, 3.0, NAN, 1.0], [NAN] * 4, [1.0, 2.0, 3.0, 4.0]])
    assert ops.select_topk(scores, 3).tolist() == [[1, 3, -1], [-1, -1, -1], [1, 2, 3]]
    lengths = torch.tensor([4, 9, -1], dtype=torch.int32)
    assert ops.select_topk(scores, 3, lengths=lengths).tolist() == [[1, 3, -1], [-1, -1, -1], [-1, -1, -1]]


def test_opcheck():
    torch.library.opcheck(torch.ops.kvcompress.select_topk, (torch.randn(2, 20), 5, None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(2, 10), 11), "k must be between 0 and T = 10, got 11"),
        ((torch.randn(2, 10), -1), "k must be between"),
        ((torch.randn(10), 1), r"scores must be \[R, T\]"),
        ((torch.randn(2, 10).double(), 1), "scores must be float32"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.select_topk(*arguments)
