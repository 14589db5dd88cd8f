"""csrc/cuda/dmc_append.cu in the emulation, against kvcompress.reference."""

from itertools import pairwise
from typing import NamedTuple

import emulated
import pytest
import torch
from helpers import check_table, others_of, rows_of, shared_table

NAN = float("nan")


class PageTable(NamedTuple):
    block_table: torch.Tensor
    lengths: torch.Tensor
    refs: torch.Tensor
    free_pages: torch.Tensor
    free_count: torch.Tensor


class Tail(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor


def angles(rows: int, rotary_dim: int) -> dict[str, torch.Tensor]:
    x = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
    return {"cos": x.cos(), "sin": x.sin()}


def empty(rows: int, page_size: int, longest: int, D: int, dtype: torch.dtype, window: int | None):
    """Pages, table and tail of rows that hold nothing."""
    blocks, ints = -(-longest // page_size), {"dtype": torch.int32}
    pages, N = rows * blocks, window or 1
    free = torch.tensor([pages, 0], **ints)
    block_table = torch.full((rows, blocks), -7, **ints)
    table = PageTable(
        block_table, torch.zeros(rows, **ints), torch.zeros(pages, **ints), torch.arange(pages, **ints), free
    )
    tail = Tail(torch.zeros(rows, N, D), torch.zeros(rows, N, D), torch.zeros(rows, N), torch.zeros(rows, **ints))
    return [torch.zeros(pages, page_size, D, dtype=dtype) for _ in range(2)], table, tail


def tokens(B, H, S, D, dtype=torch.float32, merging=0.6):
    """Keys, values, hard decisions and weights."""
    keys, values = (torch.randn(B, H, S, D).to(dtype) for _ in range(2))
    return keys, values, (torch.rand(B, H, S) < merging).float(), 0.01 + torch.rand(B, H, S)


def copy_of(group):
    copies = [x.clone() for x in group]
    return copies if isinstance(group, list) else type(group)(*copies)


def same(found, expected) -> None:
    """Pages become free in any order, slots and places of a ring that hold nothing hold anything; all else is as the
    reference has it. found, expected: (pages, table, tail)."""
    for field in ("block_table", "lengths", "refs", "free_count"):
        assert torch.equal(getattr(found[1], field), getattr(expected[1], field)), field
    assert torch.equal(found[2].counts, expected[2].counts)
    live = torch.arange(found[2].weights.shape[1]) < found[2].counts[:, None]
    pairs = [(x[live], y[live]) for x, y in zip(found[2][:3], expected[2][:3], strict=True)]
    for x, y in zip(found[0], expected[0], strict=True):
        pairs += zip(rows_of(x, found[1]), rows_of(y, expected[1]), strict=True)
    for x, y in pairs:
        # one rounding may fall on either side
        eps = 2 * torch.finfo(x.dtype).eps if x.dtype != torch.float32 else 1e-5
        torch.testing.assert_close(x, y, rtol=eps, atol=2e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("S", "merging"), [(1, 0.5), (1, 1.0), (9, 0.3), (9, 0.9), (300, 0.95)])
def test_appends_as_the_reference_and_writes_no_shared_page(kernels, reference, page_size, window, S, merging):
    B, H, D = 3, 2, 6
    table = PageTable(*shared_table(S + page_size, B * H, page_size, 20, 80 + 6 * S // page_size))
    table = table._replace(block_table=torch.nn.functional.pad(table[0], (0, S // page_size + 2), value=-7))
    others, R, N = others_of(table, page_size), B * H, window or 1
    tail = Tail(torch.randn(R, N, D), torch.randn(R, N, D), 0.1 + torch.rand(R, N), torch.randint(0, 9, (R,)).int())
    tail.keys[..., 1] = 0
    tail.counts[table.lengths == 0] = 0
    pages = [torch.randn(len(table.refs), page_size, D) for _ in range(2)]
    new = tokens(B, H, S, D, merging=merging)
    new[2][torch.rand(B, H, S) < 0.1] = NAN
    options = angles(30, 4) | {"neuron": 1, "window": window}
    options["counts"] = torch.randint(0, S + 1, (R,), dtype=torch.int32)
    options["positions"] = torch.randint(0, 30, (B, S), dtype=torch.int32)
    expected = [copy_of(x) for x in (pages, table, tail)]
    kernels.dmc_append_(*pages, table, tail, *new, **options)
    reference.dmc_append_(*expected[0], *expected[1:], *new, **options)
    same((pages, table, tail), expected)
    check_table(table, page_size, others)


@pytest.mark.parametrize("dtype", emulated.DTYPES)
@pytest.mark.parametrize("D", [1, 33, 80, 200, 300, 512])
@pytest.mark.parametrize("window", [None, 12])
def test_dtypes_and_head_dims_as_the_reference(kernels, reference, dtype, D, window):
    B, H, S, P = 1, 2, 40, 16
    new = tokens(B, H, S, D, dtype, merging=0.9)
    options = angles(S, D // 4 * 2) | {"neuron": -1, "window": window}
    found = []
    for append in (kernels.dmc_append_, reference.dmc_append_):
        pages, table, tail = empty(B * H, P, S, D, dtype, window)
        append(*pages, table, tail, *new, **options)
        found.append((pages, table, tail))
    same(*found)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", emulated.DTYPES)
def test_any_chunks_are_token_by_token(kernels, dtype, window):
    """Also chunks of several pieces, each of a warp."""
    B, H, S, D, P = 1, 2, 600, 6, 4
    new = tokens(B, H, S, D, dtype, merging=0.9)
    new[2][:, 0, 200:590] = 1  # a slot that is longer than a piece
    tables, positions = angles(S, D), torch.arange(S, dtype=torch.int32).expand(B, S)
    found = []
    for cuts in ([*range(0, 600, 7), S], [0, S], [0, 1, 300, S]):
        pages, table, tail = empty(B * H, P, S, D, dtype, window)
        for begin, end in pairwise(cuts):
            part, where = (x[:, :, begin:end].contiguous() for x in new), positions[:, begin:end].contiguous()
            kernels.dmc_append_(*pages, table, tail, *part, **tables, positions=where, neuron=3, window=window)
        found.append((table.lengths, tail.counts, *(row for x in pages for row in rows_of(x, table)), *tail[:3]))
    for other in found[1:]:
        for x, y in zip(found[0][: -3 if window else None], other[: -3 if window else None], strict=True):
            assert torch.equal(x, y)


# ---- refusals ----


def state():
    """Two rows of 6 and 5 slots that share both of their pages of 4; one page is free."""
    table = PageTable(
        torch.tensor([[2, 0, -1], [2, 0, -1]], dtype=torch.int32),
        torch.tensor([6, 5], dtype=torch.int32),
        torch.tensor([2, 0, 2], dtype=torch.int32),
        torch.tensor([1, -1, -1], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
    )
    tail = Tail(torch.randn(2, 1, 2), torch.randn(2, 1, 2), torch.ones(2, 1), torch.ones(2, dtype=torch.int32))
    return [torch.randn(3, 4, 2) for _ in range(2)], table, tail


@pytest.mark.parametrize(
    ("S", "merging", "change"),
    [
        (1, 1.0, {}),
        (1, 0.0, {}),
        (8, 0.0, {}),
        (300, 0.0, {}),
        (1, 1.0, {"counts": torch.tensor([2, 0]).int()}),
        (1, 1.0, {"counts": torch.tensor([0, -1]).int()}),
        (1, 1.0, {"lengths": torch.tensor([13, 5]).int()}),
        (1, 1.0, {"lengths": torch.tensor([-1, 5]).int()}),
        (1, 1.0, {"block_table": torch.tensor([[2, 1000, -1], [2, -4, -1]]).int()}),
    ],
)
def test_what_does_not_fit_changes_nothing_and_is_counted(kernels, S, merging, change):
    pages, table, tail = state()
    counts = change.get("counts")
    table = table._replace(**{name: x.clone() for name, x in change.items() if name != "counts"})
    before = [x.clone() for x in (*pages, *table[:4], *tail)]
    kernels.dmc_append_(*pages, table, tail, *tokens(1, 2, S, 2, merging=merging), counts=counts)
    for x, old in zip((*pages, *table[:4], *tail), before, strict=True):
        assert torch.equal(x, old)
    assert table.free_count.tolist() == [1, 1]


def test_position_outside_the_tables_gives_nan_in_its_rotated_part(kernels):
    pages, table, tail = empty(1, 4, 4, 6, torch.float32, None)
    new = tokens(1, 1, 3, 6, merging=0.0)
    positions = torch.tensor([[0, -1, 9]], dtype=torch.int32)
    kernels.dmc_append_(*pages, table, tail, *new, **angles(5, 4), positions=positions)
    key = rows_of(pages[0], table)[0]
    assert key.isnan().tolist() == [[False] * 6, [True] * 4 + [False] * 2, [True] * 4 + [False] * 2]


def test_invalid_sizes_and_empty_work(kernels):
    pages, table, tail = state()
    before = [x.clone() for x in (*pages, *table, *tail)]
    kernels.dmc_append_(*pages, table, tail, *tokens(1, 2, 0, 2))
    for new, options in (
        (tokens(1, 3, 1, 2), {}),
        (tokens(1, 2, 1, 2), angles(1, 4)),
        (tokens(1, 2, 2, 2), angles(1, 2)),
    ):
        with pytest.raises(emulated.LaunchError) as error:
            kernels.dmc_append_(*pages, table, tail, *new, **options)
        assert error.value.code == emulated.INVALID_VALUE
    for x, old in zip((*pages, *table, *tail), before, strict=True):
        assert torch.equal(x, old)
