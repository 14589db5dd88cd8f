import pytest
import torch
from helpers import check_table, others_of, rows_of, shared_table
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops, reference
from kvcompress.ops import PageTable

PAGES = st.sampled_from([1, 2, 4, 16])


def new_arrays(pages: int, page_size: int) -> list[torch.Tensor]:
    """Keys, values of another size, and a side array of numbers."""
    return [
        torch.randn(pages, page_size, 6),
        torch.randn(pages, page_size, 3).to(torch.bfloat16),
        torch.randint(0, 9999, (pages, page_size), dtype=torch.int32),
    ]


def new_tokens(B: int, H: int, S: int, *, strided: bool) -> list[torch.Tensor]:
    def view(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if strided else x.transpose(1, 2).contiguous()

    return [
        view(torch.randn(B, S, H, 6)),
        view(torch.randn(B, S, H, 3).to(torch.bfloat16)),
        view(torch.randint(0, 9999, (B, S, H), dtype=torch.int32)),
    ]


def copies(*groups):
    return tuple([x.clone() for x in group] for group in groups)


@settings(deadline=None)
@given(data=st.data(), page_size=PAGES, seed=st.integers(0, 999), strided=st.booleans())
def test_append_adds_the_last_tokens_and_writes_no_shared_page(data, page_size, seed, strided):
    B, H, S = 3, 2, data.draw(st.integers(1, 9))
    table = PageTable(*shared_table(seed, B * H, page_size, 20, 80))
    others, arrays, tokens = others_of(table, page_size), new_arrays(len(table.refs), page_size), new_tokens(
        B, H, S, strided=strided
    )  # fmt: skip
    counts = torch.tensor(data.draw(st.lists(st.integers(0, S), min_size=6, max_size=6)), dtype=torch.int32)
    counts = data.draw(st.sampled_from([counts, None]))
    before = [rows_of(array, table) for array in arrays]
    if table.block_table.shape[1] * page_size < 20 + S:
        table = table._replace(block_table=torch.nn.functional.pad(table.block_table, (0, 9), value=-7))
    expected_arrays, expected = copies(arrays, table)
    ops.append_tokens_(arrays, tokens, table, counts=counts)
    check_table(table, page_size, others)
    for array, new, old in zip(arrays, tokens, before, strict=True):
        for r, row in enumerate(rows_of(array, table)):
            count = S if counts is None else int(counts[r])
            assert torch.equal(row, torch.cat([old[r], new[r // H, r % H, S - count :]]))
    reference.append_tokens_(expected_arrays, tokens, PageTable(*expected), counts)
    for ours, plain in zip([*arrays, *table], [*expected_arrays, *expected], strict=True):
        assert torch.equal(ours, plain)


@settings(deadline=None)
@given(data=st.data(), page_size=PAGES, seed=st.integers(0, 999))
def test_truncated_rows_give_up_their_pages(data, page_size, seed):
    table = PageTable(*shared_table(seed, 5, page_size, 20, 3))
    others, array = others_of(table, page_size), torch.randn(len(table.refs), page_size, 4)
    before = rows_of(array, table)
    lengths = torch.tensor([data.draw(st.integers(0, n)) for n in table.lengths.tolist()], dtype=torch.int32)
    (expected,) = copies(table)
    ops.truncate_rows_(table, lengths, page_size)
    check_table(table, page_size, others)
    for row, old, length in zip(rows_of(array, table), before, lengths.tolist(), strict=True):
        assert torch.equal(row, old[:length])
    reference.truncate_rows_(PageTable(*expected), lengths, page_size)
    for ours, plain in zip(table, expected, strict=True):
        assert torch.equal(ours, plain)


@settings(deadline=None)
@given(data=st.data(), page_size=PAGES, seed=st.integers(0, 999))
def test_compaction_keeps_the_chosen_slots_and_writes_no_shared_page(data, page_size, seed):
    table = PageTable(*shared_table(seed, 5, page_size, 20, 80))
    others, arrays = others_of(table, page_size), new_arrays(len(table.refs), page_size)
    before = [rows_of(array, table) for array in arrays]
    chosen = [
        sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=n))) if n else [] for n in table.lengths.tolist()
    ]
    K = max(map(len, chosen)) + data.draw(st.integers(0, 2))
    indices = torch.full((5, K), -3, dtype=torch.int32)
    kept = torch.tensor([len(places) for places in chosen], dtype=torch.int32)
    for r, places in enumerate(chosen):
        indices[r, : len(places)] = torch.tensor(places, dtype=torch.int32)
        if data.draw(st.integers(0, 4)) == 0:
            kept[r] = -1
    expected_arrays, expected = copies(arrays, table)
    ops.compact_pages_(arrays, table, indices, kept=kept)
    check_table(table, page_size, others)
    for array, old in zip(arrays, before, strict=True):
        for r, row in enumerate(rows_of(array, table)):
            assert torch.equal(row, old[r][chosen[r]] if kept[r] >= 0 else old[r])
    reference.compact_pages_(expected_arrays, PageTable(*expected), indices, kept)
    for ours, plain in zip([*arrays, *table], [*expected_arrays, *expected], strict=True):
        assert torch.equal(ours, plain)


def test_compaction_of_rows_of_one_length_needs_no_counts():
    table = PageTable(*shared_table(0, 3, 4, 20, 20))
    table.lengths.zero_()
    table = PageTable(*(x.clone() for x in (table.block_table, table.lengths, table.refs * 0)),
                      torch.arange(len(table.refs), dtype=torch.int32),
                      torch.tensor([len(table.refs), 0], dtype=torch.int32))  # fmt: skip
    array, x = torch.zeros(len(table.refs), 4, 8), torch.randn(1, 3, 10, 8)
    ops.append_tokens_([array], [x], table)
    ops.compact_pages_([array], table, torch.tensor([[0, 1, 9]] * 3, dtype=torch.int32))
    for r, row in enumerate(rows_of(array, table)):
        assert torch.equal(row, x[0, r, [0, 1, 9]])
    assert int((table.refs > 0).sum()) == 3


def state() -> tuple[list[torch.Tensor], PageTable]:
    """Two rows of 6 and 5 slots that share both of their pages of 4; one page is free."""
    refs = torch.tensor([2, 0, 2], dtype=torch.int32)
    table = PageTable(
        torch.tensor([[2, 0, -1], [2, 0, -1]], dtype=torch.int32),
        torch.tensor([6, 5], dtype=torch.int32),
        refs,
        torch.tensor([1, -1, -1], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
    )
    return [torch.randn(3, 4, 2)], table


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 1, 2)], t), "the pool is full"),
        (
            lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 8, 2)], t),
            "room for 14 slots in row 0 .6 held and 8 new., got 3 pages of 4",
        ),
        (
            lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 1, 2)], t, counts=torch.tensor([2, 0]).int()),
            r"counts must be between 0 and 1 \(S\), got 2 at 0",
        ),
        (lambda a, t: ops.truncate_rows_(t, torch.tensor([7, 5]).int(), 4), "between 0 and 6 .lengths., got 7 at 0"),
        (lambda a, t: ops.truncate_rows_(t, torch.tensor([6, -1]).int(), 4), "between 0 and 5 .lengths., got -1 at 1"),
        (lambda a, t: ops.compact_pages_(a, t, torch.tensor([[1], [1]]).int()), "the pool is full"),
        (lambda a, t: ops.compact_pages_(a, t, torch.tensor([[0, 1], [1, 1]]).int()), r"rise .* got 1 at \[1, 1\]"),
        (
            lambda a, t: ops.compact_pages_(a, t, torch.ones(2, 1).int(), kept=torch.tensor([-1, 2]).int()),
            r"kept must be at most 1 \(K\), got 2 at 1",
        ),
        (
            lambda a, t: ops.truncate_rows_(t._replace(block_table=t.block_table - 3), torch.tensor([2, 5]).int(), 4),
            r"block_table must name pages between 0 and 2, got -3 at \[0, 1\]",
        ),
        (
            lambda a, t: ops.truncate_rows_(t._replace(lengths=t.lengths + 7), torch.tensor([0, 0]).int(), 4),
            "lengths must be between 0 and 12 .slots in a row of block_table., got 13 at 0",
        ),
        (lambda a, t: ops.compact_pages_(a, t, torch.tensor([[0], [5]]).int()), r"0 and 4, got 5 at \[1, 0\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(call, message):
    arrays, table = state()
    before = [x.clone() for x in (*arrays, *table)]
    with pytest.raises(RuntimeError, match=message):
        call(arrays, table)
    for x, old in zip((*arrays, *table), before, strict=True):
        assert torch.equal(x, old)


def test_shared_rows_are_parted_only_where_they_are_written():
    arrays, table = state()
    before = rows_of(arrays[0], table)
    ops.append_tokens_(arrays, [torch.ones(1, 2, 1, 2)], table, counts=torch.tensor([1, 0]).int())
    assert table.block_table[:, :2].tolist() == [[2, 1], [2, 0]]
    assert table.refs.tolist() == [1, 1, 2]
    assert torch.equal(rows_of(arrays[0], table)[0], torch.cat([before[0], torch.ones(1, 2)]))
    assert torch.equal(rows_of(arrays[0], table)[1], before[1])


def test_an_unchanged_page_stays_shared_in_a_compaction():
    arrays, table = state()
    before = rows_of(arrays[0], table)
    ops.compact_pages_(arrays, table, torch.tensor([[0, 1, 2, 3, 5]] * 2).int(), kept=torch.tensor([5, -1]).int())
    assert table.block_table[:, :2].tolist() == [[2, 1], [2, 0]]
    assert table.refs.tolist() == [1, 1, 2]
    assert torch.equal(rows_of(arrays[0], table)[0], before[0][[0, 1, 2, 3, 5]])


def chain() -> tuple[list[torch.Tensor], PageTable]:
    """Rows of 2 slots in pages 1, 2 and 3 of 4 slots; pages 0, 4 and 5 are free."""
    table = PageTable(
        torch.tensor([[1, 0], [2, 0], [3, 0]], dtype=torch.int32),
        torch.tensor([2, 2, 2], dtype=torch.int32),
        torch.tensor([0, 1, 1, 1, 0, 0], dtype=torch.int32),
        torch.tensor([5, 4, 0, 0, 0, 0], dtype=torch.int32),
        torch.tensor([3, 0], dtype=torch.int32),
    )
    return [torch.randn(6, 4, 2), torch.randn(6, 4, 2)], table


@pytest.mark.parametrize(
    "view",
    [
        lambda a: [a[0][0:3, 2:4][None], a[1][0:3, 2:4][None]],  # what the row before has just written
        lambda a: [a[0][1:4, 1:4][None], a[1][1:4, 1:4][None]],  # a row's own slots, moved by one
        lambda a: [a[1][0:3, 2:4][None], a[0][0:3, 2:4][None]],  # another array's
        lambda a: [a[0][2:3, 1:3][None].expand(1, 3, 2, 2), a[1][:3, :2].transpose(0, 1)[None].transpose(1, 2)],
    ],
)
def test_tokens_may_be_views_of_the_pages(view):
    arrays, table = chain()
    tokens = [x.clone() for x in view(arrays)]
    before = [rows_of(array, table) for array in arrays]
    ops.append_tokens_(arrays, view(arrays), table)
    for array, new, old in zip(arrays, tokens, before, strict=True):
        for r, row in enumerate(rows_of(array, table)):
            assert torch.equal(row, torch.cat([old[r], new[0, r]]))
    plain, table = chain()
    expected = [x.clone() for x in view(plain)]
    reference.append_tokens_(plain, view(plain), table)
    assert torch.equal(rows_of(plain[0], table)[1][2:], expected[0][0, 1])


def test_counts_and_places_may_be_those_of_the_table():
    arrays, table = chain()
    x, before = [torch.randn(1, 3, 3, 2)] * 2, rows_of(arrays[0], table)
    ops.append_tokens_(arrays, x, table, counts=table.lengths)
    assert table.lengths.tolist() == [4, 4, 4]
    for r, row in enumerate(rows_of(arrays[0], table)):
        assert torch.equal(row, torch.cat([before[r], x[0][0, r, 1:]]))
    arrays, table = chain()
    rows = rows_of(arrays[0], table)
    ops.compact_pages_(arrays, table, torch.tensor([[1, 0]] * 3, dtype=torch.int32), kept=table.refs[1:4])
    assert table.refs.tolist() == [0, 1, 1, 1, 0, 0] and table.lengths.tolist() == [1, 1, 1]
    assert all(torch.equal(row, old[1:]) for row, old in zip(rows_of(arrays[0], table), rows, strict=True))
    ops.truncate_rows_(table, table.lengths, 4)
    assert table.lengths.tolist() == [1, 1, 1]


def test_tensors_that_are_changed_and_share_memory_are_refused():
    _, table = chain()
    whole = torch.randn(60)
    for arrays in ([whole[:48].view(6, 4, 2)] * 2, [whole[:48].view(6, 4, 2), whole[12:].view(6, 4, 2)]):
        before = [x.clone() for x in (*arrays, *table)]
        for call in (
            lambda arrays=arrays: ops.append_tokens_(arrays, [torch.ones(1, 3, 1, 2)] * 2, table),
            lambda arrays=arrays: ops.compact_pages_(arrays, table, torch.tensor([[1]] * 3, dtype=torch.int32)),
            lambda: ops.truncate_rows_(table._replace(refs=table.free_pages), table.lengths, 4),
        ):
            with pytest.raises(
                RuntimeError, match="must not share memory with another tensor that is changed in place"
            ):
                call()
        assert all(torch.equal(x, y) for x, y in zip((*arrays, *table), before, strict=True))


def test_empty_work():
    empty = torch.empty(0, dtype=torch.int32)
    table = PageTable(torch.empty(0, 0, dtype=torch.int32), empty, empty, empty, torch.zeros(2, dtype=torch.int32))
    ops.append_tokens_([torch.empty(0, 4, 2)], [torch.empty(0, 2, 3, 2)], table)
    ops.truncate_rows_(table, empty, 4)
    ops.compact_pages_([torch.empty(0, 4, 2)], table, torch.empty(0, 3, dtype=torch.int32))
    arrays, table = state()
    before = [x.clone() for x in (*arrays, *table)]
    ops.append_tokens_(arrays, [torch.empty(1, 2, 0, 2)], table)
    for x, old in zip((*arrays, *table), before, strict=True):
        assert torch.equal(x, old)


def test_opcheck():
    native = torch.ops.kvcompress
    counts = torch.tensor([1, 0]).int()
    arrays, table = state()
    torch.library.opcheck(native.append_tokens_, (arrays, [torch.ones(1, 2, 1, 2)], *table, counts))
    torch.library.opcheck(native.truncate_rows_, (*state()[1], torch.tensor([3, 5]).int(), 4))
    arrays, table = state()
    indices = torch.tensor([[0, 1, 2, 3, 5]] * 2).int()
    torch.library.opcheck(native.compact_pages_, (arrays, *table, indices, torch.tensor([5, -1]).int()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, t: ops.append_tokens_(a * 9, [torch.ones(1, 2, 1, 2)] * 9, t), "arrays must hold 1 to 8 tensors"),
        (lambda a, t: ops.append_tokens_(a, [], t), "tokens must hold 1 tensors, one for each array, got 0"),
        (lambda a, t: ops.append_tokens_(a, [torch.ones(1, 3, 1, 2)], t), r"B\*H = 2"),
        (lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 1, 3)], t), r"tokens must be \(1, 2, 1, 2\)"),
        (lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 1, 2).half()], t), "tokens must be torch.float32"),
        (lambda a, t: ops.append_tokens_([a[0][:2]], [torch.ones(1, 2, 1, 2)], t), r"arrays must be \[3, P, ...\]"),
        (lambda a, t: ops.truncate_rows_(t, torch.tensor([3, 3]), 4), "new_lengths must be int32"),
        (lambda a, t: ops.truncate_rows_(t, torch.tensor([3, 3]).int(), 0), "page_size must be at least 1, got 0"),
        (lambda a, t: ops.truncate_rows_(t._replace(free_count=t.refs), t.lengths, 4), "free_count must have shape"),
        (lambda a, t: ops.compact_pages_(a, t, torch.tensor([0, 1]).int()), r"indices must be \[R, K\]"),
        (lambda a, t: ops.compact_pages_(a, t, torch.tensor([[0]]).int()), r"indices must have shape \(2, 1\)"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, message):
    arrays, table = state()
    with pytest.raises(ValueError, match=message):
        call(arrays, table)


def test_a_gradient_of_pages_is_refused_when_it_comes_back():
    table = ops.PageTable(*shared_table(1, rows=2, page_size=4, longest=9, spare=8, shortest=5))
    pages = torch.zeros(table.refs.shape[0], 4, 3)
    tokens, positions = torch.randn(1, 2, 2, 3, requires_grad=True), torch.ones(1, 2, 2, dtype=torch.int32)
    arrays = pages.clone(), pages[..., 0].to(torch.int32)
    ops.append_tokens_(arrays, (tokens, positions), table)
    last = rows_of(arrays[0], table)[1][-1]
    assert torch.equal(last, tokens[0, 1, 1])
    with pytest.raises(NotImplementedError, match="append_tokens_ has no gradient"):
        last.sum().backward()
    compacted = (1 * pages.requires_grad_(),)
    indices = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    with pytest.raises(ValueError, match="arrays must not be a leaf that requires grad"):
        ops.compact_pages_((pages,), table, indices)
    ops.compact_pages_(compacted, table, indices)
    with pytest.raises(NotImplementedError, match="compact_pages_ has no gradient"):
        compacted[0].sum().backward()
