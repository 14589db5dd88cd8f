import copy
import gc
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_definition import D, append, check, new_pool, new_pool_beside, numbered, step
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress.caches import PoolSettings
from kvcompress.caches.origins import Origins
from kvcompress.caches.swapping import own_pages, swap_in, swap_out


class NoMemoryAt(TorchDispatchMode):
    """PyTorch's operation of this number finds no memory."""

    class Error(RuntimeError): ...

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise self.Error
        return func(*args, **kwargs or {})


def finds_no_memory(number: int, call) -> bool:
    try:
        with NoMemoryAt(number):
            call()
    except NoMemoryAt.Error:
        return True
    return False


@settings(deadline=None, max_examples=150)
@given(data=st.data(), page_size=st.sampled_from([1, 4, 16]), grow=st.sampled_from(["double", "error"]))
def test_pools_and_forks_hold_what_lists_would(data, page_size, grow):
    first = new_pool(page_size=page_size, grow=grow, max_pages=4096 if grow == "error" else None)
    pools = [(first, [torch.empty(0, D)] * 3)]
    del first  # so that it can be dropped
    written = 0
    for _ in range(data.draw(st.integers(1, 10))):
        which = data.draw(st.integers(0, len(pools) - 1))
        pool, rows = pools[which]
        R = len(rows)
        action = data.draw(
            st.sampled_from(
                ["append", "append", "steps", "steps", "back", "fork", "select", "keep", "trim", "drop", "swap"]
            )
        )
        if action == "append":
            width = data.draw(st.integers(1, 9))
            counts = data.draw(st.one_of(st.none(), st.lists(st.integers(0, width), min_size=R, max_size=R)))
            x = numbered(R, width, written)
            written += x.numel()
            added = [width] * R if counts is None else counts
            on_device = counts is not None and data.draw(st.booleans())
            append(pool, x, torch.tensor(counts, dtype=torch.int32) if on_device else counts)
            rows = [torch.cat([row, x[0, r, width - added[r] :]]) for r, row in enumerate(rows)]
        elif action == "steps":  # of several pools in turn, and nobody looks between them
            del pool, rows
            for turn in data.draw(st.lists(st.integers(0, len(pools) - 1), min_size=1, max_size=12)):
                pool, rows = pools[turn]
                counts = data.draw(
                    st.one_of(st.none(), st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
                )
                x = numbered(len(rows), 1, written)
                written += x.numel()
                step(pool, x, counts)
                added = counts or [1] * len(rows)
                pools[turn] = pool, [torch.cat([row, x[0, r, 1 - added[r] :]]) for r, row in enumerate(rows)]
                del pool
            check(*pools)
            continue
        elif action == "back":
            chosen = pool.origins.chosen
            taken = [data.draw(st.integers(0, len(row) - first)) for row, first in zip(rows, chosen, strict=True)]
            pool.drop_last(taken)
            rows = [row[: len(row) - count] for row, count in zip(rows, taken, strict=True)]
        elif action == "fork":
            pools.append((pool.fork(), list(rows)))
        elif action == "trim":
            pool.trim()
            assert grow == "error" or pool.store.pages == int((pool.store.refs > 0).sum())
        elif action == "swap":
            own = int(own_pages(pool).sum())
            out, x = swap_out(pool), numbered(R, 9, written)
            written += x.numel()
            assert out.pages == own and pool.lengths.tolist() == out.there.tolist()
            other = new_pool_beside(pool)  # takes the pages that are free now
            append(other, x)
            if data.draw(st.booleans()):
                pool.trim()  # cuts its table, too
            swap_in(pool, out)
            check((other, list(x[0])), (pool, rows), *(pair for i, pair in enumerate(pools) if i != which))
            del other
        elif action == "select":
            chosen = data.draw(st.lists(st.integers(0, R - 1), min_size=1, max_size=5))
            pool.select_rows(chosen)
            rows = [rows[r] for r in chosen]
        elif action == "keep":
            chosen = [sorted(data.draw(st.sets(st.integers(0, len(row) - 1)))) if len(row) else [] for row in rows]
            kept = [len(places) if data.draw(st.integers(0, 3)) else -1 for places in chosen]
            indices = torch.zeros(R, max(map(len, chosen)), dtype=torch.int32)
            for r, places in enumerate(chosen):
                indices[r, : len(places)] = torch.tensor(places, dtype=torch.int32)
            pool.keep(indices, kept)
            rows = [row[places] if n >= 0 else row for row, places, n in zip(rows, chosen, kept, strict=True)]
        elif len(pools) > 1:
            del pool
            pools.pop(which)
            check(*pools)
            continue
        pools[which] = (pool, rows)
        del pool
        check(*pools)
    for pool, _ in pools:
        assert pool.counts == pool.lengths.tolist()
    check(*pools)


def test_selected_rows_share_pages_until_written():
    pool, x = new_pool(), numbered(3, 9)
    append(pool, x, [9, 2, 5])
    assert pool.pages_in_use() == 3 + 1 + 2
    pool.select_rows([2, 0, 2, 2])
    rows = [x[0, 2, 4:], x[0, 0], x[0, 2, 4:], x[0, 2, 4:]]
    check((pool, rows))
    assert pool.pages_in_use() == 2 + 3
    y = numbered(4, 1, 1000)
    append(pool, y)
    check((pool, [torch.cat([row, y[0, r]]) for r, row in enumerate(rows)]))
    # row 0 had filled a page and half: the full page stays shared, each row has its own copy of the other
    assert pool.pages_in_use() == (1 + 3) + 3


def test_rows_in_place_are_left_alone():
    pool, x = new_pool(), numbered(3, 9)
    append(pool, x)
    before = pool.block_table
    pool.select_rows([0, 1, 2])
    assert pool.block_table is before and not pool._shares


def test_a_fork_takes_pages_only_for_what_it_writes():
    pool, x = new_pool(1, 4), numbered(1, 10)
    append(pool, x)
    pages = pool.store.pages
    forks = [pool.fork() for _ in range(5)]
    assert pool.store.pages == pages == pool.pages_in_use() == 3
    for i, fork in enumerate(forks):
        append(fork, numbered(1, 1, 100 * i))
    check((pool, [x[0, 0]]), *[(f, [torch.cat([x[0, 0], numbered(1, 1, 100 * i)[0, 0]])]) for i, f in enumerate(forks)])
    assert pool.store.pages - pool.store.count_free() == 3 + 5
    assert [fork.pages_in_use() for fork in forks] == [3] * 5


@pytest.mark.parametrize("how", ["copy", "deepcopy", "fork"])
def test_pages_of_a_dropped_fork_are_used_again(how):
    pool, x = new_pool(1, 4), numbered(1, 8)
    append(pool, x)
    for i in range(20):
        fork = pool.fork() if how == "fork" else getattr(copy, how)(pool)
        append(fork, numbered(1, 8, 100 * i))
        del fork
    assert pool.store.pages == 4
    check((pool, [x[0, 0]]))


@pytest.mark.parametrize("together", [False, True])
def test_forks_that_never_append_leave_nothing(monkeypatch, together):
    pool, x = new_pool(2, 4), numbered(2, 9)
    append(pool, x)
    kept = pool.fork()
    monkeypatch.setattr(type(pool.store), "count_free", lambda self: pytest.fail("asked the device"))
    forks = []
    for _ in range(3000):
        forks.append(pool.fork())
        if not together:
            forks.clear()
        assert len(pool.store.dropped) <= 32
    forks.clear()
    pool.fork()
    assert len(pool.store.dropped) <= 32
    assert int(pool.store.refs.max()) <= 2 + 32
    monkeypatch.undo()
    check((pool, list(x[0])), (kept, list(x[0])))


def test_the_last_of_the_forks_writes_in_place():
    pool = new_pool(1, 4)
    append(pool, numbered(1, 6))
    fork = pool.fork()
    del pool
    append(fork, numbered(1, 1))
    assert fork.store.pages == fork.pages_in_use() == 2


def test_a_pool_starts_at_what_it_needs_and_doubles():
    pool = new_pool(2, 4)
    append(pool, numbered(2, 9))
    assert (pool.store.pages, pool.block_table.shape[1]) == (6, 3)
    append(pool, numbered(2, 4))
    assert (pool.store.pages, pool.block_table.shape[1]) == (12, 6)
    append(pool, numbered(2, 40))
    assert pool.store.pages == 2 * 14


@pytest.mark.parametrize("grow", ["double", "error"])
def test_a_pool_that_may_not_grow_says_which_setting_and_loses_nothing(grow):
    pool, x = new_pool(2, 4, max_pages=5, grow=grow), numbered(2, 8)
    append(pool, x)
    assert pool.store.pages == (4 if grow == "double" else 5)
    before = copy.deepcopy(pool)
    with pytest.raises(RuntimeError, match=r"max_pages = 5 is too few: 6 pages of 4 tokens .* max_pages of at least 6"):
        append(pool, numbered(2, 1))
    check((pool, list(x[0])), (before, list(x[0])))
    append(pool, numbered(2, 1, 500), [1, 0])
    rows = [torch.cat([x[0, 0], numbered(2, 1, 500)[0, 0]]), x[0, 1]]
    check((pool, rows), (before, list(x[0])))
    with pytest.raises(RuntimeError, match="max_pages"):
        pool.keep(torch.tensor([[1], [1]], dtype=torch.int32), [1, 1])
    check((pool, rows), (before, list(x[0])))
    del before
    pool.keep(torch.tensor([[1], [1]], dtype=torch.int32), [1, 1])
    check((pool, [row[1:2] for row in rows]))


def test_a_pool_that_finds_no_memory_to_grow_stays_as_it_was():
    x, y = numbered(2, 5), numbered(2, 40, 1000)
    failed = 0
    for number in range(1000):
        pool = new_pool(2, 4)
        append(pool, x)
        fork, dropped = pool.fork(), pool.fork()
        append(fork, y[:, :, :4])
        del dropped
        if not finds_no_memory(number, lambda pool=pool: append(pool, y)):
            break
        failed += 1
        shapes = {array.shape[0] for array in pool.store.arrays.values()}
        assert shapes == {pool.store.pages} == {pool.store.free_pages.shape[0]}
        forked = [torch.cat([x[0, r], y[0, r, :4]]) for r in range(2)]
        check((pool, list(x[0])), (fork, forked))
        append(pool, y)
        check((pool, [torch.cat([x[0, r], y[0, r]]) for r in range(2)]), (fork, forked))
    assert 20 < failed < 999


def test_steps_ask_the_device_and_the_host_once_in_a_page(monkeypatch):
    pool = new_pool(2, 8)
    append(pool, numbered(2, 11))
    made, make_room = [], pool._make_room
    monkeypatch.setattr(pool, "_make_room", lambda known: made.append(pool._taken) or make_room(known))
    for i in range(64):
        step(pool, numbered(2, 1, i))
    assert len(made) <= 2 + 64 // 8 and pool.bounds == [75, 75] == pool.counts


def test_steps_of_forks_never_take_the_same_page_nor_more_than_there_are():
    """Pages that one fork has set aside go to another that needs them, and the first finds out."""
    pool = new_pool(1, 4, grow="error", max_pages=6)
    append(pool, numbered(1, 6))
    other, rows = pool.fork(), [[numbered(1, 6)[0, 0]] for _ in range(2)]
    for i in range(6):
        for turn, one in enumerate((pool, other)):
            x = numbered(1, 1, 100 * i + 10 * turn)
            step(one, x)
            rows[turn] = [torch.cat([rows[turn][0], x[0, 0]])]
    check((pool, rows[0]), (other, rows[1]))  # one page together, two each of their own
    for _ in range(4):
        step(pool, numbered(1, 1))  # into the last page that is free
    with pytest.raises(RuntimeError, match="max_pages = 6 is too few"):
        step(other, numbered(1, 1))
    rows[0] = [torch.cat([rows[0][0], *[numbered(1, 1)[0, 0]] * 4])]
    check((pool, rows[0]), (other, rows[1]))


def test_a_step_that_fails_changes_nothing():
    pool = new_pool(2, 4)
    append(pool, numbered(2, 3))

    def fails(table):
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            pool.step(fails)
    assert pool.bounds == [3, 3]
    step(pool, numbered(2, 1, 50))
    check((pool, [torch.cat([numbered(2, 3)[0, r], numbered(2, 1, 50)[0, r]]) for r in range(2)]))


def test_reserved_pages_are_found_without_asking_the_device(monkeypatch):
    pool = new_pool(2, 4)
    pool.reserve([30, 30])
    monkeypatch.setattr(type(pool.store), "count_free", lambda self: pytest.fail("asked the device"))
    table = pool.block_table
    for _ in range(30):
        append(pool, numbered(2, 1), torch.tensor([1, 0], dtype=torch.int32))
    assert pool.block_table is table
    assert pool.bounds == [30, 30] and not pool.exact
    assert pool.counts == [30, 0]


def test_nbytes_is_what_is_used_and_reserved_nbytes_what_is_held():
    pool = new_pool(rows=2, page_size=4)
    append(pool, numbered(2, 5), [5, 1])
    # 3 pages of 4 slots of 2*D floats and an int; a table of 2 x 2 and 2 lengths
    page, tables = 4 * (2 * D * 4 + 4), 4 * 4 + 2 * 4
    assert pool.nbytes() == 3 * page + tables
    # refs and free list of every page, and two counts
    assert pool.reserved_nbytes() == 3 * (page + 8) + 2 * 4 + tables
    pool.drop_last(1)
    assert pool.nbytes() == 1 * page + tables
    assert pool.reserved_nbytes() == 3 * (page + 8) + 2 * 4 + tables


def test_trim_gives_back_what_dropped_forks_have_left():
    pool, x = new_pool(2, 4), numbered(2, 9)
    append(pool, x)
    forks = [pool.fork() for _ in range(4)]
    for i, fork in enumerate(forks):  # the pool's own later pages lie behind those of the forks
        append(fork, numbered(2, 30, 1000 * i))
    y = numbered(2, 20, 9000)
    append(pool, y)
    rows = [torch.cat([x[0, r], y[0, r]]) for r in range(2)]
    forked = [torch.cat([x[0, r], numbered(2, 30, 2000)[0, r]]) for r in range(2)]
    other = forks[2]
    del forks, fork
    gathered = pool.gather(30)
    pool.trim()
    # 8 pages a row, and 10 of the fork of which it shares the 2 full ones
    assert pool.store.pages == 2 * (8 + 8) and pool.store.free_at_least == 0
    for before, after in zip(gathered, pool.gather(30), strict=True):
        assert torch.equal(before, after)
    check((pool, rows), (other, forked))
    del other
    pool.trim()
    bookkeeping = 2 * 4 * pool.store.pages + 2 * 4  # counts and the free list
    assert pool.reserved_nbytes() == pool.nbytes() + bookkeeping
    append(pool, x)
    check((pool, [torch.cat([rows[r], x[0, r]]) for r in range(2)]))


def test_trim_of_pools_of_which_the_device_alone_knows_the_lengths():
    pool, x = new_pool(2, 4), numbered(2, 9)
    counts = torch.tensor([9, 1], dtype=torch.int32)
    append(pool, x, counts)
    fork = pool.fork()
    append(fork, x, counts)
    pool.trim()
    assert not pool.exact and not fork.exact
    append(fork, x, counts)
    append(pool, x, counts)
    last = x[0, 1, 8:]
    check(
        (pool, [torch.cat([x[0, 0]] * 2), torch.cat([last] * 2)]),
        (fork, [torch.cat([x[0, 0]] * 3), torch.cat([last] * 3)]),
    )


def test_trim_of_nothing_and_of_a_pool_that_must_not_ask_again():
    empty = new_pool()
    empty.trim()
    assert empty.store.pages == 0
    append(empty, numbered(3, 5))
    empty.drop_last(5)
    empty.trim()
    assert empty.store.pages == 0
    fork = empty.fork()
    for one in (empty, fork):
        append(one, numbered(3, 5))
    for one in (empty, fork):
        one.drop_last(5)
    empty.trim()
    assert empty.store.pages == 0
    for one in (empty, fork):
        append(one, numbered(3, 5))
    check((empty, list(numbered(3, 5)[0])), (fork, list(numbered(3, 5)[0])))
    del fork, one
    fixed = new_pool(max_pages=9, grow="error")
    append(fixed, numbered(3, 5))
    fixed.trim()
    assert fixed.store.pages == 9
    again = pickle.loads(pickle.dumps(empty))
    again.drop_last([0, 5, 0])
    again.trim()
    assert again.store.pages == 4
    check((again, [numbered(3, 5)[0, 0], torch.empty(0, D), numbered(3, 5)[0, 2]]))


def test_a_trim_that_finds_no_memory_changes_nothing():
    x, y = numbered(2, 9), numbered(2, 7, 1000)
    failed = 0
    for number in range(1000):
        pool = new_pool(2, 4)
        append(pool, x)
        fork, dropped = pool.fork(), pool.fork()
        append(dropped, y)
        append(fork, y)
        del dropped
        if not finds_no_memory(number, pool.trim):
            break
        failed += 1
        check((pool, list(x[0])), (fork, [torch.cat([x[0, r], y[0, r]]) for r in range(2)]))
    assert 20 < failed < 999
    check((pool, list(x[0])), (fork, [torch.cat([x[0, r], y[0, r]]) for r in range(2)]))


def test_wrong_lengths_are_refused():
    pool, x = new_pool(), numbered(3, 5)
    append(pool, x, [5, 2, 5])
    for tokens in (3, [1, 3, 1]):
        with pytest.raises(ValueError, match="tokens must be between 0 and the 2 that row 1 can give back, got 3"):
            pool.drop_last(tokens)
    with pytest.raises(ValueError, match="kept must be at most the 2 that can stay of row 1, got 3"):
        pool.keep(torch.arange(3, dtype=torch.int32).repeat(3, 1), [3, 3, -1])
    with pytest.raises(ValueError, match="fill must find empty rows, got one of 5 slots"):
        pool.fill((x, -x, x[..., 0].to(torch.int32)), [1, 1, 1], Origins(3))
    check((pool, [x[0, 0], x[0, 1, 3:], x[0, 2]]))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 3, 1], "counts must be between 0 and the S = 2 new tokens, got 3 for row 1"),
        ([2, 2, -1], "counts must be between 0 and the S = 2 new tokens, got -1 for row 2"),
        ([2, 2], "counts must hold one number for each of 3 rows, got 2"),
    ],
)
def test_wrong_counts_are_refused(counts, message):
    pool, x = new_pool(), numbered(3, 5)
    append(pool, x)
    with pytest.raises(ValueError, match=message):
        append(pool, numbered(3, 2), counts)
    assert pool.exact and pool.bounds == [5] * 3
    check((pool, list(x[0])))


@pytest.mark.parametrize("rows", [[0, -1], [0, 3], [-3, 1, 2]])
def test_rows_that_are_not_there_are_refused(rows):
    pool, x = new_pool(), numbered(3, 5)
    append(pool, x)
    with pytest.raises(ValueError, match=f"rows must be between 0 and 2, got {min(rows) if min(rows) < 0 else 3}"):
        pool.select_rows(rows)
    assert not pool._shares
    check((pool, list(x[0])))


@pytest.mark.parametrize("how", ["copy", "deepcopy"])
def test_a_copy_and_its_end_leave_the_original_alone(how):
    pool, x, y = new_pool(), numbered(3, 5), numbered(3, 2, 1000)
    append(pool, x)
    other = getattr(copy, how)(pool)
    append(other, y)
    check((pool, list(x[0])), (other, [torch.cat([x[0, r], y[0, r]]) for r in range(3)]))
    del other
    gc.collect()
    check((pool, list(x[0])))
    append(pool, y)
    check((pool, [torch.cat([x[0, r], y[0, r]]) for r in range(3)]))


def test_a_saved_pool_comes_back():
    pool, x = new_pool(), numbered(3, 5)
    append(pool, x)
    again = pickle.loads(pickle.dumps(pool))
    append(again, numbered(3, 1))
    check((again, [torch.cat([x[0, r], numbered(3, 1)[0, r]]) for r in range(3)]))
    check((pool, list(x[0])))
    gc.collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 48}, "page_size must be a power of two, an integer such as 64, got 48"),
        ({"page_size": "1k"}, "page_size must be a power of two, an integer such as 64, got '1k'"),
        ({"page_size": 0}, "page_size must be a power of two, an integer such as 64, got 0"),
        ({"grow": "never"}, "grow must be 'double' or 'error', got 'never'"),
        ({"grow": "error"}, "max_pages must be given with grow='error'"),
        ({"max_pages": 0}, "max_pages must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PoolSettings(**options)
