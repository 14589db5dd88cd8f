from contextlib import nullcontext
from itertools import pairwise

import oracle
import pytest
import torch
from backends import BACKENDS
from helpers import DTYPES, check_table, covering, others_of, rows_of, shared_table
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops
from kvcompress.caches.formats import FORMATS
from kvcompress.ops import PageTable, Tail

NAN = float("nan")


def tables(rows: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
    return angles.cos(), angles.sin()


def empty_table(rows: int, page_size: int, longest: int, pages: int | None = None) -> PageTable:
    blocks = -(-longest // page_size)
    pages = rows * blocks if pages is None else pages
    ints = {"dtype": torch.int32}
    free = torch.tensor([pages, 0], **ints)
    table = torch.full((rows, blocks), -7, **ints)
    return PageTable(table, torch.zeros(rows, **ints), torch.zeros(pages, **ints), torch.arange(pages, **ints), free)


def tokens(B, H, S, D, dtype=torch.float32, merging=0.6):
    """Keys, values, hard decisions and weights."""
    keys, values = (torch.randn(B, H, S, D).to(dtype) for _ in range(2))
    return keys, values, (torch.rand(B, H, S) < merging).float(), 0.01 + torch.rand(B, H, S)


def copy_of(group):
    copies = [x.clone() for x in group]
    return copies if isinstance(group, list) else type(group)(*copies)


def random_tail(table: PageTable, D: int, window: int | None, neuron: int | None) -> Tail:
    """The state of rows of any length, of which some have nothing to join."""
    R, N = len(table.lengths), window or 1
    tail = Tail(torch.randn(R, N, D), torch.randn(R, N, D), 0.1 + torch.rand(R, N), torch.randint(0, 9, (R,)).int())
    tail.counts[table.lengths == 0] = 0
    if neuron is not None:
        tail.keys[..., neuron] = 0
    return tail


@pytest.mark.parametrize("window", [None, 2])
def test_what_is_added_may_be_views_of_what_is_changed(backend, window):
    B, D = 3, 6
    cos, sin = tables(30, 4)

    def given():
        torch.manual_seed(0)
        table, tail = empty_table(B, 4, 8), Tail.empty(B, D, window=window)
        pages = [torch.zeros(len(table.refs), 4, D) for _ in range(2)]
        first = tokens(B, 1, 2, D, merging=0.0)
        ops.dmc_append_(*pages, table, tail, *first, cos=cos, sin=sin, window=window)
        tail.keys.view(-1)[:B] = torch.tensor([0.0, 1.0, 0.0])  # what the first decides
        return pages, table, tail

    def views(pages, table, tail):
        """Keys and values: the slot that is written next, of each row's page in reverse order."""
        keys, values = (x[int(table.block_table[:, 0].min()) :][:B, 2][:, None, None] for x in pages)
        alpha, omega = tail.keys.view(-1)[:B].view(B, 1, 1), tail.weights[:, :1, None]
        return keys, values, alpha, omega, table.lengths[:, None], tail.counts

    def append(pages, table, tail, keys, values, alpha, omega, positions, counts):
        options = {"cos": cos, "sin": sin, "window": window, "positions": positions, "counts": counts}
        ops.dmc_append_(*pages, table, tail, keys, values, alpha, omega, **options)
        return [*pages, *table, *tail]

    changed = given()
    expected = given()
    expected = append(*expected, *(x.clone() for x in views(*expected)))
    assert [x.data_ptr() for x in views(*changed)[4:]] == [changed[1].lengths.data_ptr(), changed[2].counts.data_ptr()]
    for x, y in zip(append(*changed, *views(*changed)), expected, strict=True):
        assert torch.equal(x, y)


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


def append_to_random_rows(seed, S, page_size, merging, *, window, neuron, rotary_dim):
    """Random pages, table and tail after the op, and the same as the reference leaves them."""
    torch.manual_seed(seed)
    B, H, D = 3, 2, 6
    device = torch.get_default_device()
    with torch.device("cpu"):
        table = shared_table(seed, B * H, page_size, 20, 80 + 6 * S // page_size)
    table = PageTable(*(x.to(device) for x in table))
    table = table._replace(block_table=torch.nn.functional.pad(table.block_table, (0, S // page_size + 2), value=-7))
    others, tail = others_of(table, page_size), random_tail(table, D, window, neuron)
    pages = [torch.randn(len(table.refs), page_size, D) for _ in range(2)]
    new = tokens(B, H, S, D, merging=merging)
    new[2][torch.rand(B, H, S) < 0.1] = NAN
    cos, sin = tables(30, rotary_dim)
    options = {
        "counts": torch.randint(0, S + 1, (B * H,), dtype=torch.int32),
        "positions": torch.randint(0, 30, (B, S), dtype=torch.int32),
        "cos": cos,
        "sin": sin,
        "neuron": neuron,
        "window": window,
    }
    expected = [copy_of(x) for x in (pages, table, tail)]
    ops.dmc_append_(*pages, table, tail, *new, **options)
    oracle.dmc_append_(*expected[0], *expected[1:], *new, **options)
    same((pages, table, tail), expected)
    check_table(table, page_size, others)
    return (pages, table, tail), expected


@pytest.mark.parametrize(
    ("page_size", "sizes", "backend"),
    covering([1, 4, 16], [(1, 0.5), (1, 1.0), (9, 0.3), (9, 0.9), (300, 0.95)], BACKENDS),
    indirect=["backend"],
)
def test_appends_as_the_reference_and_writes_no_shared_page(backend, page_size, sizes):
    S, merging = sizes
    for window in (None, 1, 5):
        append_to_random_rows(S + page_size, S, page_size, merging, window=window, neuron=1, rotary_dim=4)


@settings(deadline=None, max_examples=60)
@given(
    page_size=st.sampled_from([1, 2, 4, 16]),
    S=st.integers(1, 9),
    window=st.none() | st.integers(1, 5),
    neuron=st.none() | st.integers(0, 5),
    rotary_dim=st.sampled_from([0, 4, 6]),
    seed=st.integers(0, 999),
)
def test_changes_exactly_what_the_reference_changes(page_size, S, window, neuron, rotary_dim, seed):
    options = {"window": window, "neuron": neuron, "rotary_dim": rotary_dim}
    found, expected = append_to_random_rows(seed, S, page_size, 0.1 * (seed % 11), **options)
    assert torch.equal(found[1].free_pages, expected[1].free_pages)
    for x, y in zip((*found[0], *found[2][:3]), (*expected[0], *expected[2][:3]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "D", "backend"), covering(DTYPES, [1, 33, 80, 128, 200, 300, 512], BACKENDS), indirect=["backend"]
)
def test_dtypes_and_head_dims_as_the_reference(backend, dtype, D):
    B, H, S, P = 2, 2, 40, 16
    cos, sin = tables(S, D // 4 * 2)
    for window in (None, 12):
        new = tokens(B, H, S, D, dtype, merging=0.9)
        found = []
        for append in (ops.dmc_append_, oracle.dmc_append_):
            table, tail = empty_table(B * H, P, S), Tail.empty(B * H, D, window=window)
            pages = [torch.zeros(len(table.refs), P, D, dtype=dtype) for _ in range(2)]
            append(*pages, table, tail, *new, cos=cos, sin=sin, neuron=-1, window=window)
            found.append((pages, table, tail))
        same(*found)


@pytest.mark.parametrize(
    ("format", "dtype", "D", "window", "page_size", "backend"),
    covering(FORMATS, DTYPES, [2, 34, 80, 128, 256, 512], [None, 1, 5], [1, 4, 16], BACKENDS), indirect=["backend"],
)  # fmt: skip
def test_codes_are_those_of_the_averages_in_float32(backend, format, dtype, D, window, page_size):
    """However often tokens join a slot, and where a page that others share is copied first."""
    torch.manual_seed(D)
    B, H, P, device = 2, 2, page_size, torch.get_default_device()
    with torch.device("cpu"):
        table = shared_table(D, B * H, P, 20, 80 + 60 // P)
    table = PageTable(*(x.to(device) for x in table))
    table = table._replace(block_table=torch.nn.functional.pad(table.block_table, (0, 60 // P + 2), value=-7))
    others, tail = others_of(table, P), random_tail(table, D, window, 1)
    pages = [torch.randn(len(table.refs), P, D) for _ in range(2)]
    stored = [ops.quantize(x, code) for x, code in zip(pages, FORMATS[format], strict=True)]
    codes, scales = [x for x, _ in stored], {"key_scales": stored[0][1], "value_scales": stored[1][1]}
    (cos, sin), other, tail_of_codes = tables(30, D // 4 * 2), copy_of(table), copy_of(tail)
    for S in (1, 1, 9, 1, 40):
        k, v, alpha, omega = tokens(B, H, S, D, dtype, merging=0.8)
        options = {"positions": torch.randint(0, 30, (B, S), dtype=torch.int32), "cos": cos, "sin": sin, "neuron": 1}
        options["window"] = window
        ops.dmc_append_(*codes, other, tail_of_codes, k, v, alpha, omega, **options, **scales)
        ops.dmc_append_(*pages, table, tail, k.float(), v.float(), alpha, omega, **options)
    assert all(torch.equal(x, y) for x, y in zip((*other, *tail_of_codes), (*table, *tail), strict=True))
    for x, code, *found in zip(pages, FORMATS[format], codes, scales.values(), strict=True):
        for wanted, *row in zip(*(rows_of(y, table) for y in (x, *found)), strict=True):
            assert all(torch.equal(y, z) for y, z in zip(row, ops.quantize(wanted, code), strict=True))
    check_table(other, P, others)


@pytest.mark.parametrize(("window", "dtype", "backend"), covering([None, 3], DTYPES, BACKENDS), indirect=["backend"])
def test_any_chunks_are_token_by_token(backend, dtype, window):
    """Also those of several pieces, and a slot that is longer than a piece."""
    B, H, S, D, P = 1, 2, 600, 20, 4
    new = tokens(B, H, S, D, dtype, merging=0.9)
    new[2][:, 0, 200:590] = 1
    cos, sin = tables(S, D)
    positions = torch.arange(S, dtype=torch.int32).expand(B, S)
    found = []
    for cuts in ([*range(40), *range(40, S, 7), S], [0, S], [0, 1, 20, 21, 300, S]):
        table, tail = empty_table(B * H, P, S), Tail.empty(B * H, D, window=window)
        pages = [torch.zeros(len(table.refs), P, D, dtype=dtype) for _ in range(2)]
        for begin, end in pairwise(cuts):
            part = (x[:, :, begin:end] for x in new)
            where = positions[:, begin:end].contiguous()
            ops.dmc_append_(*pages, table, tail, *part, cos=cos, sin=sin, positions=where, neuron=3, window=window)
        found.append((table.lengths, tail.counts, *(row for x in pages for row in rows_of(x, table)), *tail[:3]))
    for other in found[1:]:
        for x, y in zip(found[0][: -3 if window else None], other[: -3 if window else None], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("window", [None, 12])
def test_slots_are_the_last_averages_of_dmc_accumulate(backend, window):
    B, H, S, D, P = 1, 2, 150, 16, 8
    keys, values, alpha, omega = tokens(B, H, S, D, merging=0.9)
    cos, sin = tables(S, D)
    mean_k, mean_v, z = ops.dmc_accumulate(keys, values, alpha, omega, neuron=-1, window=window)
    mean_k = ops.rope(mean_k, cos, sin)
    mean_k[..., -1] = 0
    table, tail = empty_table(B * H, P, S), Tail.empty(B * H, D, window=window)
    pages = [torch.zeros(len(table.refs), P, D) for _ in range(2)]
    ops.dmc_append_(*pages, table, tail, keys, values, alpha, omega, cos=cos, sin=sin, neuron=-1, window=window)
    alpha[..., 0] = 0
    last = torch.cat([alpha[..., 1:] == 0, torch.ones(B, H, 1, dtype=torch.bool)], -1)
    for r, (k, v) in enumerate(zip(*(rows_of(x, table) for x in pages), strict=True)):
        b, h = divmod(r, H)
        assert len(k) == 1 + int((alpha[b, h, 1:] == 0).sum())
        for x, mean in ((k, mean_k), (v, mean_v)):
            torch.testing.assert_close(x, mean[b, h, last[b, h]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tail.weights[r].sum() if window is None else z[b, h, -1], z[b, h, -1])


def test_closed_slots_and_pages_of_others_are_never_written(backend):
    B, H, D, P = 1, 2, 8, 4
    table, tail = empty_table(B * H, P, 40), Tail.empty(B * H, D)
    pages = [torch.zeros(len(table.refs), P, D) for _ in range(2)]
    ops.dmc_append_(*pages, table, tail, *tokens(B, H, 20, D, merging=0.5))
    fork = PageTable(table.block_table.clone(), table.lengths.clone(), *table[2:])
    for r, length in enumerate(table.lengths.tolist()):
        table.refs[table.block_table[r, : -(-length // P)].long()] += 1
    before = [rows_of(x, fork) for x in pages]
    ops.dmc_append_(*pages, table, tail, *tokens(B, H, 9, D, merging=0.5))
    for x, old in zip(pages, before, strict=True):
        for r, row in enumerate(rows_of(x, table)):
            closed = len(old[r]) - 1
            assert torch.equal(row[:closed], old[r][:closed])
        for row, kept in zip(rows_of(x, fork), old, strict=True):
            assert torch.equal(row, kept)
    check_table(table, P, others_of(table, P))


def test_a_full_last_page_that_is_shared_is_copied_where_its_last_slot_is_joined(backend):
    D, P = 4, 2
    for joins, taken in ((1.0, 1), (0.0, 1)):
        table, tail = empty_table(1, P, 8), Tail.empty(1, D)
        pages = [torch.zeros(len(table.refs), P, D) for _ in range(2)]
        x = torch.randn(1, 1, 2, D)
        weight = torch.ones(1, 1, 2)
        ops.dmc_append_(*pages, table, tail, x, x, torch.zeros(1, 1, 2), weight)
        table.refs[table.block_table[0, 0]] += 1
        held, free = int(table.block_table[0, 0]), int(table.free_count[0])
        y = torch.randn(1, 1, 1, D)
        ops.dmc_append_(*pages, table, tail, y, y, torch.full((1, 1, 1), joins), weight[..., :1])
        assert int(table.free_count[0]) == free - taken
        assert (int(table.block_table[0, 0]) != held) == bool(joins)
        assert int(table.refs[held]) == (1 if joins else 2)
        assert torch.equal(pages[0][held], x[0, 0])
        expected = torch.stack([x[0, 0, 0], (x[0, 0, 1] + y[0, 0, 0]) / 2]) if joins else torch.cat([x[0, 0], y[0, 0]])
        torch.testing.assert_close(rows_of(pages[0], table)[0], expected)


def test_padding_is_not_read_and_empty_rows_open_a_slot_whatever_is_decided(backend):
    keys, values, alpha, omega = tokens(2, 1, 6, 4)
    alpha[:] = 1
    counts = torch.tensor([4, 0], dtype=torch.int32)
    for x in (keys, values, omega):
        x[0, :, :2], x[1] = NAN, NAN
    table, tail = empty_table(2, 4, 8), Tail.empty(2, 4)
    pages = [torch.zeros(len(table.refs), 4, 4) for _ in range(2)]
    ops.dmc_append_(*pages, table, tail, keys, values, alpha, omega, counts=counts)
    assert table.lengths.tolist() == [1, 0] and tail.counts.tolist() == [4, 0]
    mean = (omega[0, 0, 2:, None] * keys[0, 0, 2:]).sum(0) / omega[0, 0, 2:].sum()
    torch.testing.assert_close(rows_of(pages[0], table)[0][0], mean)


def test_what_is_worked_out_by_hand(backend):
    """Section 4.1 of the method on six tokens with the decisions of the paper's Figure 2; token 5 is a tie."""
    keys = torch.tensor(
        [[1, 0, -1, 6.0], [1, 3, 2, 5.5], [1, -1, 2, 7.0], [0, 1, 1, 4.5], [5, 1, -4, 5.25], [-1, 2, 0, 5]]
    )
    values = torch.tensor([[3.0, 0, 0, 1], [0, 3, 0, 1], [0, 1, 2, 1], [0, 0, 5, 0], [5, 0, 0, 5], [1, 2, 3, 4]])
    neurons = torch.tensor([0.5, 0.25, 0.75, 0.5, 0.75, 0.5]).logit() - 5
    alpha = ops.dmc_decisions(keys[None, None, :, 3], hard=True).alpha
    omega = ops.dmc_importance(neurons[None, None], 1)
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.01])
    for window, third in ((None, [1, 0, 1, 0, 1, 1, 1, 1]), (2, [1, 0, 2, 0, 0, 1.5, 1.5, 1])):
        table, tail = empty_table(1, 2, 6), Tail.empty(1, 4, window=window)
        pages = [torch.zeros(len(table.refs), 2, 4) for _ in range(2)]
        new = (keys[None, None], values[None, None], alpha, omega)
        ops.dmc_append_(*pages, table, tail, *new, cos=angles.cos(), sin=angles.sin(), neuron=3, window=window)
        k, v = (rows_of(x, table)[0] for x in pages)
        means = torch.tensor([third[:4], [3, 1, -2, 0], [-1, 2, 0, 0]]).float()[None, None]
        places = torch.tensor([[2, 4, 5]], dtype=torch.int32)
        expected = oracle.rope(means, angles.cos(), angles.sin(), places)[0, 0]
        expected[:, 3] = 0
        torch.testing.assert_close(k, expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(v, torch.tensor([third[4:], [3, 0, 2, 3], [1, 2, 3, 4]]).float(), atol=2e-6, rtol=0)


def test_threads_change_no_bit(cpu):
    new = tokens(2, 4, 300, 64, merging=0.7)
    cos, sin = tables(300, 64)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            table, tail = empty_table(8, 16, 300), Tail.empty(8, 64)
            pages = [torch.zeros(len(table.refs), 16, 64) for _ in range(2)]
            ops.dmc_append_(*pages, table, tail, *new, cos=cos, sin=sin, neuron=-1)
            found.append((*pages, *table, *tail))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
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


def new_tokens(S=1, merging=1.0):
    return tokens(1, 2, S, 2, merging=merging)


COS = torch.ones(3, 1)


@pytest.mark.parametrize(
    ("S", "merging", "change", "message"),
    [
        (1, 1.0, {}, "the pool is full"),
        (1, 0.0, {}, "the pool is full"),
        (8, 0.0, {}, r"block_table must have room for 14 slots in row 0 \(6 held and 8 new\), got 3 pages of 4"),
        (300, 0.0, {}, "block_table must have room for 306 slots"),
        (1, 1.0, {"counts": [2, 0]}, r"counts must be between 0 and 1 \(S\), got 2 at 0"),
        (1, 1.0, {"counts": [0, -1]}, r"counts must be between 0 and 1 \(S\), got -1 at 1"),
        (1, 1.0, {"lengths": [13, 5]}, "lengths must be between 0 and 12 .slots in a row of block_table., got 13 at 0"),
        (1, 1.0, {"lengths": [-1, 5]}, "lengths must be between 0 and 12 .*, got -1 at 0"),
        (
            1,
            1.0,
            {"block_table": [[2, 1000, -1], [2, -4, -1]]},
            r"must name pages between 0 and 2, got 1000 at \[0, 1\]",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(backend, S, merging, change, message):
    """The CPU says what it is, CUDA counts the call."""
    pages, table, tail = state()
    change = {name: torch.tensor(x, dtype=torch.int32) for name, x in change.items()}
    counts = change.pop("counts", None)
    table = table._replace(**change)
    before = [x.clone() for x in (*pages, *table, *tail)]
    on_cpu = backend not in ("emulated", "cuda")
    with pytest.raises(RuntimeError, match=message) if on_cpu else nullcontext():
        ops.dmc_append_(*pages, table, tail, *new_tokens(S, merging), counts=counts)
    assert table.free_count.tolist() == [1, 0 if on_cpu else 1]
    table.free_count[1] = 0
    for x, old in zip((*pages, *table, *tail), before, strict=True):
        assert torch.equal(x, old)


def test_a_position_outside_the_tables_is_refused_and_changes_nothing():
    pages, table, tail = state()
    before = [x.clone() for x in (*pages, *table, *tail)]
    message = r"positions must be between 0 and 2 \(last row of cos and sin\), got 3 at \[0, 0\]"
    with pytest.raises(RuntimeError, match=message):
        ops.dmc_append_(*pages, table, tail, *new_tokens(), cos=COS, sin=COS, positions=torch.tensor([[3]]).int())
    for x, old in zip((*pages, *table, *tail), before, strict=True):
        assert torch.equal(x, old)


def test_on_cuda_a_position_outside_the_tables_gives_nan_in_the_rotated_part(cuda):
    table, tail = empty_table(1, 4, 4), Tail.empty(1, 6)
    pages = [torch.zeros(1, 4, 6) for _ in range(2)]
    cos, sin = tables(5, 4)
    positions = torch.tensor([[0, -1, 9]], dtype=torch.int32)
    ops.dmc_append_(*pages, table, tail, *tokens(1, 1, 3, 6, merging=0.0), cos=cos, sin=sin, positions=positions)
    key = rows_of(pages[0], table)[0]
    assert key.isnan().tolist() == [[False] * 6, [True] * 4 + [False] * 2, [True] * 4 + [False] * 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k_pages": torch.zeros(4, 4, 2), "v_pages": torch.zeros(4, 4, 2)},
            r"k_pages must be torch.float32 \(3, 4, 2\) on cpu, got torch.float32 \(4, 4, 2\)",
        ),
        ({"v_pages": torch.zeros(3, 4, 2).half()}, "v_pages must be torch.float32"),
        ({"keys": torch.zeros(1, 3, 1, 2)}, r"B\*Hkv = 2"),
        ({"keys": torch.zeros(1, 2, 1, 2).half()}, r"k_pages must be torch.float16 \(3, 4, 2\)"),
        ({"keys": torch.zeros(1, 2, 1, 2).double()}, "keys must be float32, bfloat16 or float16"),
        ({"keys": torch.zeros(2, 1, 2)}, r"keys must be \[B, Hkv, S, D\]"),
        ({"values": torch.zeros(1, 2, 1, 3)}, r"values must be torch.float32 \(1, 2, 1, 2\) on cpu"),
        (
            {"alpha": torch.zeros(1, 2, 2)},
            r"alpha must be torch.float32 \(1, 2, 1\) on cpu, got torch.float32 \(1, 2, 2\)",
        ),
        ({"omega": torch.zeros(1, 2, 1).half()}, "omega must be torch.float32"),
        ({"window": 3}, r"tail.keys must be torch.float32 \(2, 3, 2\) on cpu, got torch.float32 \(2, 1, 2\)"),
        ({"window": 65}, "window must be at most 64, got 65"),
        ({"cos": COS}, "cos and sin must be given together"),
        ({"cos": torch.ones(3, 2), "sin": torch.ones(3, 2)}, "cos and sin rotate 4 dimensions"),
        ({"cos": torch.ones(0, 1), "sin": torch.ones(0, 1)}, "cos and sin need 1 rows, got 0"),
        ({"positions": torch.zeros(1, 1)}, "positions must be int32"),
        ({"counts": torch.zeros(3).int()}, r"counts must have shape \(2,\)"),
        ({"neuron": 2}, "neuron must be between -2 and 1, got 2"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    (k_pages, v_pages), table, tail = state()
    keys, values, alpha, omega = new_tokens()
    arguments = {"k_pages": k_pages, "v_pages": v_pages, "table": table, "tail": tail, "keys": keys, "values": values}
    with pytest.raises(ValueError, match=message):
        ops.dmc_append_(**{**arguments, "alpha": alpha, "omega": omega, **change})


def test_opcheck():
    (k_pages, v_pages), table, tail = state()
    table.free_count[0] = 1
    counts = torch.tensor([1, 0], dtype=torch.int32)
    for cos, positions, window in ((None, None, 0), (COS, torch.tensor([[2]]).int(), 0), (COS, None, 1)):
        arguments = (k_pages, v_pages, *table, *tail, *new_tokens(), cos, cos, positions, counts, 1, window)
        torch.library.opcheck(torch.ops.kvcompress.dmc_append_, arguments)


def test_empty_work(backend):
    table, tail = empty_table(0, 4, 8), Tail.empty(0, 2)
    nothing = torch.empty(0, 2, 3, 2), torch.empty(0, 2, 3, 2), torch.empty(0, 2, 3), torch.empty(0, 2, 3)
    ops.dmc_append_(torch.empty(0, 4, 2), torch.empty(0, 4, 2), table, tail, *nothing)
    pages, table, tail = state()
    before = [x.clone() for x in (*pages, *table, *tail)]
    ops.dmc_append_(*pages, table, tail, *new_tokens(0))
    ops.dmc_append_(*pages, table, tail, *new_tokens(2), counts=torch.zeros(2, dtype=torch.int32))
    for x, old in zip((*pages, *table, *tail), before, strict=True):
        assert torch.equal(x, old)


def test_a_gradient_of_pages_is_refused_when_it_comes_back():
    table, tail = empty_table(2, 4, 8), Tail.empty(2, 2)
    pages = [torch.zeros(len(table.refs), 4, 2) for _ in range(2)]
    keys, values, alpha, omega = new_tokens()
    ops.dmc_append_(*pages, table, tail, keys.requires_grad_(), values, alpha, omega)
    with pytest.raises(NotImplementedError, match="dmc_append_ has no gradient"):
        rows_of(pages[0], table)[0].sum().backward()
    with pytest.raises(ValueError, match="k_pages and v_pages must not be a leaf that requires grad"):
        ops.dmc_append_(pages[0].detach().requires_grad_(), pages[1].detach(), table, tail, keys, values, alpha, omega)
