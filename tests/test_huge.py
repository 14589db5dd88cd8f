"""Huge pages under a store: asked for, of memory that is used already too; what is in a store is as before."""

import sys

import pytest
import torch

from kvcompress.caches import huge
from kvcompress.caches.huge import HUGE, advise_huge
from kvcompress.caches.store import PageStore, PoolSettings


def test_memory_that_was_written_to_is_zeros_or_was_refused():
    x = torch.full((5 * HUGE // 4 + 12,), 7.0)
    advise_huge(x[3:], written=True)
    assert x[:3].eq(7).all() and (x[3:].eq(0).all() or x[3:].eq(7).all())  # where Linux was built without
    assert x[3:].fill_(1).sum() == len(x) - 3


@pytest.mark.parametrize("numbers", [0, 10, HUGE // 4 - 1])
@pytest.mark.parametrize("written", [False, True])
def test_what_is_smaller_than_a_huge_page_or_empty_is_left_to_the_host(numbers, written):
    x = torch.ones(numbers)
    advise_huge(x, written=written)
    assert len(x) == numbers and x.eq(1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_whole_huge_pages_of_a_tensor_and_nothing_beside_are_advised(monkeypatch):
    told = []

    class Libc:
        def __init__(self, name):
            pass

        def madvise(self, start, nbytes, what):
            told.append((start.value, nbytes.value, what))
            return 0

    monkeypatch.setattr(huge.ctypes, "CDLL", Libc)
    x = torch.zeros(3 * HUGE, dtype=torch.uint8)
    advise_huge(x)
    [(start, nbytes, what)] = told
    assert start % HUGE == nbytes % HUGE == 0 and what == 14
    assert x.data_ptr() <= start and start + nbytes <= x.data_ptr() + x.nbytes and nbytes >= 2 * HUGE
    del told[:]
    slots = {"keys": ((64,), torch.float32), "values": ((64,), torch.float32)}
    store = PageStore(slots, torch.device("cpu"), PoolSettings(page_size=16, max_pages=2048, grow="error"))
    assert len(told) == 2 and all(4 * HUGE - HUGE <= n <= 4 * HUGE for _, n, _ in told)
    del told[:]
    memory = torch.ones(sum(array.nbytes for array in store.arrays.values()), dtype=torch.uint8)
    PageStore(slots, torch.device("cpu"), PoolSettings(page_size=16, max_pages=2048, grow="error"), memory)
    assert [what for _, _, what in told] == [14, 4] and memory.eq(0).all()


def test_where_linux_has_none_memory_is_left_as_it_is(monkeypatch):
    class Libc:
        def __init__(self, name):
            pass

        def madvise(self, start, nbytes, what):
            assert what == 14  # and pages are not given back
            return -1

    monkeypatch.setattr(huge.ctypes, "CDLL", Libc)
    x = torch.ones(2 * HUGE)
    advise_huge(x, written=True)
    assert x.eq(1).all()
