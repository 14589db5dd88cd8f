"""csrc/cuda/pages.cu in the emulation, against kvcompress.reference."""

from typing import NamedTuple

import emulated
import pytest
import torch
from helpers import check_table, others_of, rows_of, shared_table


class PageTable(NamedTuple):
    block_table: torch.Tensor
    lengths: torch.Tensor
    refs: torch.Tensor
    free_pages: torch.Tensor
    free_count: torch.Tensor


# slots of 16-byte, 4-byte, 2-byte and 1-byte units; more than one slice of 64 bytes
KINDS = [((32,), torch.float32), ((33,), torch.bfloat16), ((), torch.int32), ((3,), torch.uint8), ((8,), torch.float16)]


def new_arrays(pages: int, page_size: int) -> list[torch.Tensor]:
    return [(100 * torch.rand(pages, page_size, *shape)).to(dtype) for shape, dtype in KINDS]


def copies(*groups):
    return tuple([x.clone() for x in group] for group in groups)


def same(table, arrays, expected, expected_arrays) -> None:
    """Pages become free in any order; all else is as the reference has it."""
    for field in ("block_table", "lengths", "refs", "free_count"):
        assert torch.equal(getattr(table, field), getattr(expected, field)), field
    for array, plain in zip(arrays, expected_arrays, strict=True):
        for row, old in zip(rows_of(array, table), rows_of(plain, expected), strict=True):
            assert torch.equal(row, old)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("B", "H", "S"), [(3, 2, 1), (3, 2, 7), (2, 3, 150), (70, 2, 1)])
@pytest.mark.parametrize("counted", [False, True])
def test_append_as_the_reference(kernels, reference, page_size, B, H, S, counted):
    table = PageTable(*shared_table(B + S, B * H, page_size, 20, B * H * (S // page_size + 2)))
    blocks = -(-(20 + S) // page_size) + 1
    table = table._replace(block_table=torch.nn.functional.pad(table[0], (0, blocks - table[0].shape[1]), value=-7))
    others, arrays = others_of(table, page_size), new_arrays(len(table.refs), page_size)
    tokens = [(100 * torch.rand(B, S, H, *shape)).to(dtype).transpose(1, 2) for shape, dtype in KINDS]
    counts = torch.randint(0, S + 1, (B * H,), dtype=torch.int32) if counted else None
    expected_arrays, expected = copies(arrays, table)
    kernels.append_tokens_(arrays, tokens, table, counts)
    reference.append_tokens_(expected_arrays, tokens, PageTable(*expected), counts)
    same(table, arrays, PageTable(*expected), expected_arrays)
    check_table(table, page_size, others)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("R", [5, 140])
def test_truncation_as_the_reference(kernels, reference, page_size, R):
    table = PageTable(*shared_table(R, R, page_size, 20, 3))
    others, arrays = others_of(table, page_size), [torch.rand(len(table.refs), page_size, 4)]
    lengths = (torch.rand(R) * (table.lengths + 1)).to(torch.int32)
    (expected,) = copies(table)
    kernels.truncate_rows_(table, lengths, page_size)
    reference.truncate_rows_(PageTable(*expected), lengths, page_size)
    same(table, arrays, PageTable(*expected), arrays)
    check_table(table, page_size, others)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("R", "longest"), [(5, 20), (3, 200), (140, 9)])
@pytest.mark.parametrize("counted", [False, True])
def test_compaction_as_the_reference(kernels, reference, page_size, R, longest, counted):
    table = PageTable(*shared_table(R, R, page_size, longest, 3 * R, shortest=0 if counted else longest // 2))
    others, arrays = others_of(table, page_size), new_arrays(len(table.refs), page_size)
    K = longest if counted else int(table.lengths.min())
    indices, kept = torch.full((R, K), -1, dtype=torch.int32), torch.zeros(R, dtype=torch.int32)
    for r, length in enumerate(table.lengths.tolist()):
        count = int(torch.randint(0, length + 1, ())) if counted else K
        places = torch.randperm(length)[:count].sort().values
        if r % 3 == 0:
            places = torch.arange(count)  # a row that stays where it is
        indices[r, :count] = places.to(torch.int32)
        kept[r] = -1 if r % 7 == 6 else count
    expected_arrays, expected = copies(arrays, table)
    given = kept if counted else None
    kernels.compact_pages_(arrays, table, indices, given)
    reference.compact_pages_(expected_arrays, PageTable(*expected), indices, given)
    same(table, arrays, PageTable(*expected), expected_arrays)
    check_table(table, page_size, others)


def state() -> tuple[list[torch.Tensor], PageTable]:
    """Two rows of 6 and 5 slots that share both of their pages of 4; one page is free."""
    table = PageTable(
        torch.tensor([[2, 0, -1], [2, 0, -1]], dtype=torch.int32),
        torch.tensor([6, 5], dtype=torch.int32),
        torch.tensor([2, 0, 2], dtype=torch.int32),
        torch.tensor([1, -1, -1], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
    )
    return [torch.randn(3, 4, 2)], table


@pytest.mark.parametrize(
    "call",
    [
        lambda k, a, t: k.append_tokens_(a, [torch.ones(1, 2, 1, 2)], t),
        lambda k, a, t: k.append_tokens_(a, [torch.ones(1, 2, 8, 2)], t),
        lambda k, a, t: k.append_tokens_(a, [torch.ones(1, 2, 1, 2)], t, torch.tensor([2, 0]).int()),
        lambda k, a, t: k.append_tokens_(a, [torch.ones(1, 2, 1, 2)], t, torch.tensor([0, -1]).int()),
        lambda k, a, t: k.compact_pages_(a, t, torch.tensor([[1], [1]]).int()),
    ],
)
def test_what_does_not_fit_changes_nothing_and_is_counted(kernels, call):
    arrays, table = state()
    before = [x.clone() for x in (*arrays, *table[:4])]
    call(kernels, arrays, table)
    for x, old in zip((*arrays, *table[:4]), before, strict=True):
        assert torch.equal(x, old)
    assert table.free_count.tolist() == [1, 1]


def test_wrong_contents_stay_within_the_arrays(kernels):
    arrays, table = state()
    kernels.truncate_rows_(table, torch.tensor([100, -5]).int(), 4)
    assert table.lengths.tolist() == [6, 0]
    assert table.refs.tolist() == [1, 0, 1]
    arrays, table = state()
    table.refs.clamp_(max=1)
    before = arrays[0].clone()
    kernels.compact_pages_(arrays, table, torch.tensor([[3, 99], [-4, 100]]).int())
    assert torch.equal(arrays[0][[0, 1]], before[[0, 1]])
    assert torch.equal(arrays[0][2, 0], before[2, 3]) and torch.equal(arrays[0][2, 1:], before[2, 1:])
    arrays, table = state()
    table.block_table[0, 1] = 1000
    kernels.append_tokens_(arrays, [torch.ones(1, 2, 1, 2)], table)
    assert table.free_count.tolist() == [1, 1]


def test_invalid_sizes_and_empty_work(kernels):
    arrays, table = state()
    kernels.append_tokens_(arrays, [torch.empty(1, 2, 0, 2)], table)
    assert table.lengths.tolist() == [6, 5]
    with pytest.raises(emulated.LaunchError) as error:
        kernels.append_tokens_(arrays, [torch.ones(1, 3, 1, 2)], table)
    assert error.value.code == emulated.INVALID_VALUE
    with pytest.raises(emulated.LaunchError):
        kernels.truncate_rows_(table, torch.tensor([1, 1]).int(), 0)
    kernels.compact_pages_(arrays, table, torch.empty(2, 0, dtype=torch.int32))
    assert table.lengths.tolist() == [0, 0]
    assert sorted(table.free_pages.tolist()) == [0, 1, 2]
