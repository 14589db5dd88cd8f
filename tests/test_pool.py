import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.caches import PagePool


def new_pool(rows: int = 3, page_size: int = 4) -> PagePool:
    return PagePool(rows, 8, torch.float32, torch.device("cpu"), page_size)


def check(pool: PagePool, rows: list[torch.Tensor]) -> None:
    """The pool holds exactly these rows; keys x, values -x."""
    longest = max(len(row) for row in rows)
    k, v = pool.gather(longest + 2)
    for r, row in enumerate(rows):
        assert torch.equal(k[r, : len(row)], row)
        assert torch.equal(v[r, : len(row)], -row)
        assert not k[r, len(row) :].any()
    assert pool.lengths.tolist() == pool.counts == [len(row) for row in rows]
    used = [page for pages in pool._pages for page in pages]
    assert len(set(used)) == len(used)
    assert sorted(used + pool._free) == list(range(pool.k_pages.shape[0]))


@settings(deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 4, 16]))
def test_rows_hold_what_was_appended_and_not_dropped(data, page_size):
    pool, rows = new_pool(page_size=page_size), [torch.empty(0, 8)] * 3
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 20))
        counts = data.draw(st.lists(st.integers(0, width), min_size=3, max_size=3))
        x = torch.randn(3, width, 8)
        pool.append(x, -x, counts)
        rows = [
            torch.cat([row, x[r, width - count :]]) for r, (row, count) in enumerate(zip(rows, counts, strict=True))
        ]
        drop = data.draw(st.integers(0, min(len(row) for row in rows)))
        pool.drop_last(drop)
        rows = [row[: len(row) - drop] for row in rows]
        check(pool, rows)


def test_selected_rows_are_copies():
    pool = new_pool()
    x = torch.randn(3, 9, 8)
    pool.append(x, -x, [9, 2, 5])
    pool.select_rows([2, 0, 2])
    check(pool, [x[2, 4:], x[0], x[2, 4:]])
    y = torch.randn(3, 1, 8)
    pool.append(y, -y, [1, 1, 1])
    check(pool, [torch.cat([x[2, 4:], y[0]]), torch.cat([x[0], y[1]]), torch.cat([x[2, 4:], y[2]])])


def test_nbytes_is_what_the_tensors_hold():
    pool = new_pool(rows=2, page_size=4)
    x = torch.randn(2, 5, 8)
    pool.append(x, -x, [5, 1])
    # 3 pages of 4 tokens of 8 floats, keys and values; a table of 2 x 2 and 2 lengths
    assert pool.nbytes() == 2 * 3 * 4 * 8 * 4 + 4 * 4 + 2 * 4


def test_dropping_more_than_is_held_is_refused():
    pool = new_pool()
    x = torch.randn(3, 5, 8)
    pool.append(x, -x, [5, 2, 5])
    with pytest.raises(ValueError, match="tokens must be between 0 and the shortest row's 2, got 3"):
        pool.drop_last(3)
    check(pool, [x[0], x[1, 3:], x[2]])
