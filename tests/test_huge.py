"""Huge pages under a store: asked for, of memory that is used already too; what is in a store is as before."""

import os
import sys
from pathlib import Path

import pytest
import torch

from kvcompress.caches import huge
from kvcompress.caches.huge import HUGE, advise_huge
from kvcompress.caches.store import PageStore, PoolSettings


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_memory_that_was_written_to_is_given_back_and_comes_again_as_zeros():
    x = torch.full((5 * HUGE // 4 + 12,), 7.0)
    advise_huge(x[3:], written=True)
    given = -(-x[3:].data_ptr() // HUGE) * HUGE
    first, n = (given - x.data_ptr()) // 4, (x.data_ptr() + x.nbytes - given) // HUGE * HUGE // 4
    assert x[first : first + n].eq(0).all() and x[:first].eq(7).all() and x[first + n :].eq(7).all()
    assert x.fill_(1).sum() == len(x)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_memory_of_an_engine_beyond_its_pages_is_not_the_processs_any_more():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    memory = torch.ones(96 << 20, dtype=torch.uint8)
    before = resident()
    slots = {"keys": ((64,), torch.float32), "values": ((64,), torch.float32)}
    PageStore(slots, torch.device("cpu"), PoolSettings(page_size=16, max_pages=64, grow="error"), memory)
    assert resident() < before - (64 << 20)


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
    assert [what for _, _, what in told] == [14, 4]


def test_nothing_is_asked_of_other_systems_or_of_a_gpus_memory(monkeypatch):
    monkeypatch.setattr(huge.ctypes, "CDLL", None)  # a call would fail
    assert not huge.gives_back(torch.device("cuda"))
    monkeypatch.setattr(huge.sys, "platform", "darwin")
    x = torch.ones(2 * HUGE)
    advise_huge(x, written=True)
    assert x.eq(1).all()
