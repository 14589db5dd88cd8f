import oracle
import pytest
import torch
from helpers import check_table, others_of, rows_of, shared_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcompress import ops
from kvcompress.ops import PageTable

# slots of 16-byte, 4-byte, 2-byte and 1-byte units; more than one slice of 64 bytes
KINDS = [((32,), torch.float32), ((33,), torch.bfloat16), ((), torch.int32), ((3,), torch.uint8), ((8,), torch.float16)]
PAGES = st.sampled_from([1, 2, 4, 16])
EVERYWHERE = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def new_arrays(*shape: int) -> list[torch.Tensor]:
    return [(100 * torch.rand(*shape, *rest)).to(dtype) for rest, dtype in KINDS]


def copies(*groups):
    return tuple([x.clone() for x in group] for group in groups)


def check_same(backend, table, arrays, expected, expected_arrays) -> None:
    """On CUDA pages become free in any order; all that they hold is as the reference has it."""
    for name, ours, plain in zip(table._fields, table, expected, strict=True):
        assert name == "free_pages" or torch.equal(ours, plain), name
    if backend not in ("emulated", "cuda"):
        assert all(torch.equal(x, y) for x, y in zip([table.free_pages, *arrays],
                                                     [expected.free_pages, *expected_arrays], strict=True))  # fmt: skip
    for array, plain in zip(arrays, expected_arrays, strict=True):
        for row, old in zip(rows_of(array, table), rows_of(plain, expected), strict=True):
            assert torch.equal(row, old)


@EVERYWHERE
@given(
    sizes=st.sampled_from([(3, 2, 9), (2, 3, 150), (70, 2, 1)]),  # B, H, most new tokens
    page_size=PAGES,
    seed=st.integers(0, 999),
    strided=st.booleans(),
    counted=st.booleans(),
)
def test_append_adds_the_last_tokens_and_writes_no_shared_page(backend, sizes, page_size, seed, strided, counted):
    torch.manual_seed(seed)
    B, H, most = sizes
    S = int(torch.randint(1, most + 1, ()))
    table = PageTable(*shared_table(seed, B * H, page_size, 20, B * H * (S // page_size + 2)))
    blocks = -(-(20 + S) // page_size)
    wider = torch.nn.functional.pad(table.block_table, (0, max(0, blocks - table.block_table.shape[1])), value=-7)
    table = table._replace(block_table=wider)
    others, arrays = others_of(table, page_size), new_arrays(len(table.refs), page_size)
    tokens = [x.transpose(1, 2) for x in new_arrays(B, S, H)]
    tokens = tokens if strided else [x.contiguous() for x in tokens]
    counts = torch.randint(0, S + 1, (B * H,), dtype=torch.int32) if counted else None
    before = [rows_of(array, table) for array in arrays]
    expected_arrays, expected = copies(arrays, table)
    ops.append_tokens_(arrays, tokens, table, counts=counts)
    check_table(table, page_size, others)
    for array, new, old in zip(arrays, tokens, before, strict=True):
        for r, row in enumerate(rows_of(array, table)):
            count = S if counts is None else int(counts[r])
            assert torch.equal(row, torch.cat([old[r], new[r // H, r % H, S - count :]]))
    expected = PageTable(*expected)
    oracle.append_tokens_(expected_arrays, tokens, expected, counts)
    check_same(backend, table, arrays, expected, expected_arrays)


@EVERYWHERE
@given(R=st.sampled_from([5, 140]), page_size=PAGES, seed=st.integers(0, 999))
def test_truncated_rows_give_up_their_pages(backend, R, page_size, seed):
    torch.manual_seed(seed)
    table = PageTable(*shared_table(seed, R, page_size, 20, 3))
    others, array = others_of(table, page_size), torch.randn(len(table.refs), page_size, 4)
    lengths = (torch.rand(R) * (table.lengths + 1)).to(torch.int32)
    before, expected = rows_of(array, table), PageTable(*copies(table)[0])
    ops.truncate_rows_(table, lengths, page_size)
    check_table(table, page_size, others)
    for row, old, length in zip(rows_of(array, table), before, lengths.tolist(), strict=True):
        assert torch.equal(row, old[:length])
    oracle.truncate_rows_(expected, lengths, page_size)
    check_same(backend, table, [array], expected, [array])


@EVERYWHERE
@given(
    sizes=st.sampled_from([(5, 20), (3, 200), (140, 9)]),
    page_size=PAGES,
    seed=st.integers(0, 999),
    more=st.integers(0, 2),
)
def test_compaction_keeps_the_chosen_slots_and_writes_no_shared_page(backend, sizes, page_size, seed, more):
    torch.manual_seed(seed)
    R, longest = sizes
    table = PageTable(*shared_table(seed, R, page_size, longest, R * (longest // page_size + 2)))
    others, arrays = others_of(table, page_size), new_arrays(len(table.refs), page_size)
    before, chosen = [rows_of(array, table) for array in arrays], []
    for r, length in enumerate(table.lengths.tolist()):
        count = int(torch.randint(0, length + 1, ()))
        places = torch.arange(count) if r % 3 == 0 else torch.randperm(length)[:count].sort().values
        chosen.append(places)  # of every third row the first, which stay where they are
    indices = torch.full((R, max(map(len, chosen)) + more), -3, dtype=torch.int32)
    kept = torch.tensor([-1 if r % 5 == 4 else len(places) for r, places in enumerate(chosen)], dtype=torch.int32)
    for r, places in enumerate(chosen):
        indices[r, : len(places)] = places
    expected_arrays, expected = copies(arrays, table)
    ops.compact_pages_(arrays, table, indices, kept=kept)
    check_table(table, page_size, others)
    for array, old in zip(arrays, before, strict=True):
        for r, row in enumerate(rows_of(array, table)):
            assert torch.equal(row, old[r][chosen[r]] if kept[r] >= 0 else old[r])
    expected = PageTable(*expected)
    oracle.compact_pages_(expected_arrays, expected, indices, kept)
    check_same(backend, table, arrays, expected, expected_arrays)


def test_compaction_of_rows_of_one_length_needs_no_counts(backend):
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


@pytest.mark.parametrize(
    "call",
    [
        lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 1, 2)], t),
        lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 8, 2)], t),
        lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 1, 2)], t, counts=torch.tensor([2, 0]).int()),
        lambda a, t: ops.append_tokens_(a, [torch.ones(1, 2, 1, 2)], t, counts=torch.tensor([0, -1]).int()),
        lambda a, t: ops.compact_pages_(a, t, torch.tensor([[1], [1]]).int()),
    ],
)
def test_what_does_not_fit_changes_nothing_and_is_counted(cuda, call):
    arrays, table = state()
    before = [x.clone() for x in (*arrays, *table[:4])]
    call(arrays, table)
    for x, old in zip((*arrays, *table[:4]), before, strict=True):
        assert torch.equal(x, old)
    assert table.free_count.tolist() == [1, 1]


def test_wrong_contents_stay_within_the_arrays(cuda):
    arrays, table = state()
    ops.truncate_rows_(table, torch.tensor([100, -5]).int(), 4)
    assert table.lengths.tolist() == [6, 0]
    assert table.refs.tolist() == [1, 0, 1]
    arrays, table = state()
    table.refs.clamp_(max=1)
    before = arrays[0].clone()
    ops.compact_pages_(arrays, table, torch.tensor([[3, 99], [-4, 100]]).int())
    assert torch.equal(arrays[0][[0, 1]], before[[0, 1]])
    assert torch.equal(arrays[0][2, 0], before[2, 3]) and torch.equal(arrays[0][2, 1:], before[2, 1:])
    arrays, table = state()
    table.block_table[0, 1] = 1000
    ops.append_tokens_(arrays, [torch.ones(1, 2, 1, 2)], table)
    assert table.free_count.tolist() == [1, 1]


def test_shared_rows_are_parted_only_where_they_are_written(backend):
    arrays, table = state()
    before = rows_of(arrays[0], table)
    ops.append_tokens_(arrays, [torch.ones(1, 2, 1, 2)], table, counts=torch.tensor([1, 0]).int())
    assert table.block_table[:, :2].tolist() == [[2, 1], [2, 0]]
    assert table.refs.tolist() == [1, 1, 2]
    assert torch.equal(rows_of(arrays[0], table)[0], torch.cat([before[0], torch.ones(1, 2)]))
    assert torch.equal(rows_of(arrays[0], table)[1], before[1])


def test_an_unchanged_page_stays_shared_in_a_compaction(backend):
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
def test_tokens_may_be_views_of_the_pages(backend, view):
    arrays, table = chain()
    tokens = [x.clone() for x in view(arrays)]
    before = [rows_of(array, table) for array in arrays]
    ops.append_tokens_(arrays, view(arrays), table)
    for array, new, old in zip(arrays, tokens, before, strict=True):
        for r, row in enumerate(rows_of(array, table)):
            assert torch.equal(row, torch.cat([old[r], new[0, r]]))
    plain, table = chain()
    expected = [x.clone() for x in view(plain)]
    oracle.append_tokens_(plain, view(plain), table)
    assert torch.equal(rows_of(plain[0], table)[1][2:], expected[0][0, 1])


def test_counts_and_places_may_be_those_of_the_table(backend):
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


def test_empty_work(backend):
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
    ops.compact_pages_(arrays, table, torch.empty(2, 0, dtype=torch.int32))
    assert table.lengths.tolist() == [0, 0]
    assert sorted(table.free_pages.tolist()) == [0, 1, 2]


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
