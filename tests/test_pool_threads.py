"""Pools over the same pages in several threads at once: each holds what its own rows would, and no page is lost."""

import gc
import pickle
import random
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from pool_definition import append, check, new_pool, numbered

from kvcompress import ops
from kvcompress.caches.pool import PagePool

THREADS, ROUNDS = 6, 15


@contextmanager
def eager_switching():
    """Threads change places at every chance."""
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-6)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def eager_switches():
    with eager_switching():
        yield


def in_threads(*works) -> None:
    """Runs works(barrier) at once; the first error of any is raised."""
    barrier, errors = threading.Barrier(len(works)), []

    def run(work) -> None:
        try:
            work(barrier)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), None)
    if first is not None:
        raise first


def read(held, rows) -> None:
    """A snapshot holds these rows."""
    P = held.k_pages.shape[1]
    assert held.lengths.tolist() == [len(row) for row in rows]
    for r, row in enumerate(rows):
        pages = held.block_table[r, : -(-len(row) // P)].long()
        assert torch.equal(held.k_pages[pages].flatten(0, 1)[: len(row)], row)
        assert torch.equal(held.v_pages[pages].flatten(0, 1)[: len(row)], -row)


class Work:
    """One thread: forks of a pool that all threads have, changed at random beside lists of tensors."""

    def __init__(self, origin: PagePool, rows: list[torch.Tensor], seed: int) -> None:
        self.origin, self.rows, self.seed = origin, rows, seed
        self.pools: list[tuple[PagePool, list[torch.Tensor]]] = []
        self.written = 100_000 * (seed % 100 + 1)

    def __call__(self, barrier: threading.Barrier) -> None:
        chance = random.Random(self.seed)
        for _ in range(ROUNDS):
            barrier.wait(60)
            self.pools.append((self.origin.fork(), list(self.rows)))
            for _ in range(6):
                self.change(chance, chance.randrange(len(self.pools)))
            pool, rows = chance.choice(self.pools)
            held = pool.snapshot()
            barrier.wait(60)
            if chance.random() < 0.3:
                pool.trim()
            read(held, rows)
            for pool, rows in self.pools:
                read(pool.snapshot(), rows)
            while len(self.pools) > 3:
                self.pools.pop(0)

    def change(self, chance: random.Random, which: int) -> None:
        pool, rows = self.pools[which]
        R = len(rows)
        action = chance.choice(["append"] * 5 + ["back", "select", "keep", "anew", "pages", "fork", "trim"])
        if action in ("append", "anew"):
            width = chance.randint(1, 9)
            counts = [chance.randint(0, width) for _ in range(R)]
            if action == "anew":
                counts = [min(count, len(row)) for count, row in zip(counts, rows, strict=True)]
            x = numbered(R, width, self.written)
            self.written += x.numel()
            new = [x[0, r, width - counts[r] :] for r in range(R)]
            if action == "anew":
                slots = torch.arange(width, dtype=torch.int32).repeat(R, 1)
                pool.keep(slots, counts, (x, -x, x[..., 0].to(torch.int32)))
                rows = new
            else:
                append(pool, x, counts if chance.random() < 0.5 else torch.tensor(counts, dtype=torch.int32))
                rows = [torch.cat(pair) for pair in zip(rows, new, strict=True)]
        elif action == "back":
            free = [len(row) - first for row, first in zip(rows, pool.origins.chosen, strict=True)]
            taken = [chance.randint(0, count) // 2 for count in free]
            pool.drop_last(taken)
            rows = [row[: len(row) - count] for row, count in zip(rows, taken, strict=True)]
        elif action == "select":
            chosen = [chance.randrange(R) for _ in range(R)]
            pool.select_rows(chosen)
            rows = [rows[r] for r in chosen]
        elif action == "keep":
            places = [sorted(chance.sample(range(len(row)), len(row) * 3 // 4)) for row in rows]
            indices = torch.zeros(R, max(map(len, places)), dtype=torch.int32)
            for r, chosen in enumerate(places):
                indices[r, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            pool.keep(indices, [len(chosen) for chosen in places])
            rows = [row[chosen] for row, chosen in zip(rows, places, strict=True)]
        elif action == "pages":
            P = pool.page_size
            pool.drop_pages(0, [min(len(row) // P, 1) for row in rows])
            rows = [row[min(len(row) // P, 1) * P :] for row in rows]
        elif action == "fork":
            self.pools.append((pool.fork(), list(rows)))
        else:
            pool.trim()
        self.pools[which] = (pool, rows)


def forks_in_threads(seed: int) -> int:
    """Returns how many forks each thread had at the end."""
    origin, x = new_pool(12, 4), numbered(12, 10)
    append(origin, x)
    works = [Work(origin, list(x[0]), 100 * seed + i) for i in range(THREADS)]
    in_threads(*works)
    check((origin, list(x[0])), *(pair for work in works for pair in work.pools))
    held = min(len(work.pools) for work in works)
    del works
    origin.trim()
    check((origin, list(x[0])))
    assert origin.store.pages == origin.pages_in_use()
    return held


def test_forks_in_many_threads_hold_what_lists_would():
    for seed in range(3):
        assert forks_in_threads(seed) > 0


@pytest.mark.parametrize("options", [{}, {"max_pages": 4000, "grow": "error"}])
def test_threads_that_take_and_leave_pages_lose_none(options):
    origin, x = new_pool(64, 4, **options), numbered(64, 6)
    append(origin, x)

    def work(number: int):
        y = numbered(64, 3, 2000 * number)

        def run(barrier: threading.Barrier) -> None:
            barrier.wait(60)
            for _ in range(150):
                fork = origin.fork()
                append(fork, y)
                assert torch.equal(fork.gather(9)[0], torch.cat([x[0], y[0]], 1))
                fork.drop_last(5 - number)
                del fork  # its pages are given up by whoever comes next

        return run

    in_threads(*map(work, range(1, 5)))
    check((origin, list(x[0])))


def test_a_pool_that_goes_amid_a_change_of_its_store_is_given_up_later(monkeypatch):
    """Garbage collection ends pools anywhere: here in another thread while one has the lock, and in that thread."""
    origin, x = new_pool(3, 4), numbered(3, 6)
    append(origin, x)
    forks = [origin.fork(), origin.fork()]
    for fork in forks:
        append(fork, x)
    truncate = ops.truncate_rows_

    def and_meanwhile(*arguments) -> None:
        if forks:
            forks.pop()
            other = threading.Thread(target=forks.clear)
            other.start()
            other.join(30)
            assert not other.is_alive()
        truncate(*arguments)

    monkeypatch.setattr(ops, "truncate_rows_", and_meanwhile)
    del fork
    origin.drop_last(1)
    assert len(origin.store.dropped) == 2
    check((origin, list(x[0, :, :5])))


def test_what_was_read_stays_as_it_was_while_forks_write_and_trim():
    """Copying a shared page, compacting in place, writing a newest slot anew, growing and moving pages together."""
    origin, x = new_pool(2, 4), numbered(2, 6)
    append(origin, x)
    y = numbered(2, 1, 500)
    for change in (
        lambda fork: append(fork, y),  # copies the last page
        lambda fork: append(fork, numbered(2, 90, 900)),  # the store grows
        lambda fork: fork.keep(torch.tensor([[1, 3, 5]] * 2, dtype=torch.int32), [3, 3]),
        lambda fork: (fork.drop_last(1), append(fork, y)),  # the newest slot of all is written anew
        lambda fork: (append(fork, x), fork.keep(torch.tensor([[7, 9]] * 2, dtype=torch.int32), [2, 2])),
        lambda fork: fork.trim(),
        lambda fork: fork.keep(torch.tensor([[3]] * 2, dtype=torch.int32), [1, 1], (y, -y, y[..., 0].to(torch.int32))),
    ):
        fork = origin.fork()
        held, theirs = origin.snapshot(), fork.snapshot()
        in_threads(lambda barrier, change=change, fork=fork: change(fork))
        read(held, list(x[0]))
        del fork, theirs
        append(origin.fork(), numbered(2, 30, 7000))
        read(held, list(x[0]))
        read(origin.snapshot(), list(x[0]))
    check((origin, list(x[0])))


def test_the_lock_is_that_of_the_store_and_comes_back_with_it():
    origin, x = new_pool(3, 4), numbered(3, 6)
    append(origin, x)
    fork = origin.fork()
    append(fork, x)
    again = pickle.loads(pickle.dumps(origin))
    assert origin.lock is fork.lock and again.lock is not origin.lock
    # it is saved without the pages of the fork, and none of its own counts as shared
    assert again.store.pages == again.pages_in_use() == 6
    append(again, x)
    check((again, [torch.cat([row, row]) for row in x[0]]))
    check((origin, list(x[0])), (fork, [torch.cat([row, row]) for row in x[0]]))
    del again
    gc.collect()
