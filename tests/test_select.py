import pytest
import torch
from helpers import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops, reference


@pytest.mark.parametrize(
    ("R", "T", "k"), [(1, 1, 1), (3, 100, 10), (2, 1000, 999), (8, 5000, 1024), (2, 64, 64), (2, 7, 0)]
)
def test_selects_as_a_stable_sort(simd, R, T, k):
    scores = torch.randn(R, T)
    assert torch.equal(ops.select_topk(scores, k), reference.select_topk(scores, k))


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
    assert torch.equal(chosen, reference.select_topk(scores, k))
    assert not scores[0, chosen[0].long()].isnan().any()


def test_ragged_rows_choose_among_their_own(simd):
    scores = torch.randn(4, 60)
    lengths = torch.tensor([60, 10, 33, 11], dtype=torch.int32)
    assert torch.equal(ops.select_topk(scores, 10, lengths=lengths), reference.select_topk(scores, 10, lengths=lengths))


def test_too_few_candidates_is_an_error():
    scores = torch.randn(2, 10)
    scores[1, 2:] = float("nan")
    with pytest.raises(RuntimeError, match="not NaN"):
        ops.select_topk(scores, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 7, 64])
def test_compaction_moves_the_chosen_to_the_front(simd, dtype, D):
    rows = torch.randn(3, 50, D).to(dtype)
    indices = torch.stack([torch.randperm(50)[:20].sort().values for _ in range(3)]).to(torch.int32)
    expected = reference.compact_rows(rows, indices)
    ops.compact_rows_(rows, indices)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("length", [4, 21])
def test_candidates_out_of_range_are_named(length):
    lengths = torch.tensor([20, length], dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match=rf"^select_topk: lengths must be between 5 and 20 \(T\), got {length} at 1$"
    ):
        ops.select_topk(torch.randn(2, 20), 5, lengths=lengths)


def test_compaction_of_part_of_a_buffer_leaves_the_rest(simd):
    buffer = torch.randn(2, 3, 40, 8)
    before = buffer.clone()
    indices = torch.arange(5, 25, 2, dtype=torch.int32).expand(3, -1)
    ops.compact_rows_(buffer[1, :, :30], indices)
    assert torch.equal(buffer[1, :, :10], before[1, :, 5:25:2])
    assert torch.equal(buffer[1, :, 10:], before[1, :, 10:])
    assert torch.equal(buffer[0], before[0])


@pytest.mark.parametrize(("bad", "place"), [([0, 0, 1], 1), ([2, 1, 3], 1), ([-1, 0, 1], 0), ([0, 1, 10], 2)])
def test_indices_that_do_not_rise_are_refused_and_nothing_moves(bad, place):
    rows = torch.randn(2, 10, 4)
    before = rows.clone()
    indices = torch.tensor([[0, 1, 2], bad], dtype=torch.int32)
    message = (
        rf"^compact_rows_: indices of a row must rise and lie between 0 and 9, got {bad[place]} at \[1, {place}\]$"
    )
    with pytest.raises(RuntimeError, match=message):
        ops.compact_rows_(rows, indices)
    assert torch.equal(rows, before)


def test_opcheck():
    torch.library.opcheck(torch.ops.kvcompress.select_topk, (torch.randn(2, 20), 5, None))
    indices = torch.tensor([[1, 3]], dtype=torch.int32)
    torch.library.opcheck(torch.ops.kvcompress.compact_rows_, (torch.randn(1, 6, 4), indices))


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


def test_a_gradient_of_compacted_rows_is_refused_when_it_comes_back():
    leaf, indices = torch.randn(2, 5, 3, requires_grad=True), torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match="rows must not be a leaf that requires grad"):
        ops.compact_rows_(leaf, indices)
    rows = 1 * leaf
    ops.compact_rows_(rows, indices)
    assert torch.equal(rows[1, :2], leaf[1, 1:3])
    part = 1 * leaf
    ops.compact_rows_(part[:1], indices[:1])
    for x in (rows, part):
        with pytest.raises(NotImplementedError, match=r"compact_rows_ has no gradient; use torch.gather"):
            x.sum().backward()
    with torch.no_grad():
        ops.compact_rows_(leaf, indices)
    assert leaf.is_leaf and torch.equal(leaf, rows)
