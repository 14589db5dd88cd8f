"""Memory that runs out and Ctrl-C at any moment: a cache is as before or says that it is broken; its forks are as they
were, and no page is lost."""

import contextlib
import itertools

import pytest
import torch
from helpers import logits_of, random_ids
from test_saving import CASES
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress import GlobalTopK, ops, prefill
from kvcompress.caches.formats import keys_and_values
from kvcompress.caches.passes import CachePass
from kvcompress.caches.pool import PagePool
from kvcompress.caches.store import PoolSettings

IDS, TURN, MOMENTS = random_ids(40), random_ids(7, seed=2), 4
CACHES = ("kept later", "iterative, every", "gated", "streaming", "quest", "windows", "dmc", "dms", "pod")
NO_MEMORY = "no memory is left"


class Failing(TorchDispatchMode):
    """Memory runs out at the op of a number that may ask for some; None = never. count: of such ops."""

    def __init__(self, at=None):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not op.is_view:
            self.count += 1
            if self.count - 1 == self.at:
                raise torch.OutOfMemoryError(NO_MEMORY)
        return op(*args, **kwargs or {})


def told(model, cache):
    """What it gives for the next token, on a fork; nothing for an empty one."""
    if not cache.get_seq_length():
        return torch.empty(0)
    fork = cache.fork()
    return logits_of(model, TURN[:, :1].expand(fork.batch_size, 1), fork)


def is_broken(cache):
    if not cache._incomplete:
        return False
    with pytest.raises(RuntimeError, match="this cache is incomplete"):
        cache.check_complete()
    return True


def check_pages(cache):
    """Every page is named as often as its store counts, and all others are free."""
    for layer in cache.own:
        if (pool := getattr(layer, "pool", None)) is not None:
            check_store(pool.store)


def check_store(store):
    free = store.count_free()
    names = [rows.block_table[store.named(rows)] for rows in store.tables]
    refs = torch.bincount(torch.cat(names), minlength=store.pages)
    assert torch.equal(store.refs.long(), refs)
    assert sorted(store.free_pages[:free].tolist()) == (refs == 0).nonzero().flatten().tolist()


def prompt(cache, model, folder):
    prefill(model, IDS, cache)


OPERATIONS = {
    "prompt": prompt,
    "turn": lambda cache, model, folder: logits_of(model, TURN, cache),
    "token": lambda cache, model, folder: logits_of(model, TURN[:, :1], cache),
    "fork": lambda cache, model, folder: cache.fork(),
    "save": lambda cache, model, folder: cache.save(folder / "cache", model),
    "repeat": lambda cache, model, folder: cache.batch_repeat_interleave(2),
    "trim": lambda cache, model, folder: cache.trim(),
    "reset": lambda cache, model, folder: cache.reset(),
}
MORE = {"compress": lambda cache, model, folder: cache.compress(GlobalTopK(), keep=12)}


@pytest.fixture(scope="module")
def held():
    """By case: a model and a cache that has read."""
    made = {}

    def get(case):
        if case not in made:
            model = CASES[case][0]()
            cache = prefill(model, IDS, CASES[case][1](model.config))
            logits_of(model, IDS[:, -1:], cache)
            made[case] = model, cache
        return made[case]

    return get


def begun(base, operation):
    fork = base.fork()
    if operation == "prompt":
        fork.reset()
    return fork


def shape(cache):
    return cache.get_seq_length(), cache.batch_size


def check(model, cache, whole, *right):
    """A cache is as it was, or as it was to be, or says that it is broken and can be read into again. whole: what base
    tells. right: of these two (shape, what it tells)."""
    if is_broken(cache):
        cache.reset()
        assert shape(cache) == (0, -1)
        prompt(cache, model, None)
        logits_of(model, IDS[:, -1:], cache)
        assert torch.equal(told(model, cache), whole)
        return
    said = [wanted for size, wanted in right if size == shape(cache)]
    assert said and any(torch.equal(told(model, cache), wanted) for wanted in said)


@pytest.mark.parametrize(("case", "operation"), [*itertools.product(CACHES, OPERATIONS), ("kept later", "compress")])
def test_memory_that_runs_out_breaks_nothing_in_silence(case, operation, held, tmp_path):
    model, base = held(case)
    work, whole, fork = (OPERATIONS | MORE)[operation], told(model, base), begun(base, operation)
    before = shape(fork), told(model, fork)
    with Failing() as counted:
        work(fork, model, tmp_path)
    after = shape(fork), told(model, fork)
    (tmp_path / "cache").unlink(missing_ok=True)
    for at in sorted({counted.count * i // MOMENTS for i in range(MOMENTS)} if counted.count else ()):
        del fork
        fork = begun(base, operation)
        with contextlib.suppress(torch.OutOfMemoryError), Failing(at):  # the last ones may not come: pages are free
            work(fork, model, tmp_path)
            assert at
            (tmp_path / "cache").unlink(missing_ok=True)
        check_pages(base)
        assert not list(tmp_path.iterdir())
        check(model, fork, whole, before, after)
    assert torch.equal(told(model, base), whole)


@pytest.mark.parametrize("case", CACHES)
def test_ctrl_c_in_any_layer_breaks_nothing_in_silence(case, held, monkeypatch, tmp_path):
    model, base = held(case)
    whole, attend, calls, stop = told(model, base), CachePass.attend, 0, (None, False)

    def stopped(self, *given):
        nonlocal calls
        calls += 1
        if stop == (calls - 1, False):
            raise KeyboardInterrupt
        out = attend(self, *given)
        if stop == (calls - 1, True):
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(CachePass, "attend", stopped)
    for operation in ("prompt", "turn", "token"):
        fork, work = begun(base, operation), OPERATIONS[operation]
        before, calls = (shape(fork), told(model, fork)), 0
        work(fork, model, tmp_path)
        for moment in itertools.product({0, 1, calls - 1}, (False, True)):
            fork, calls, stop = begun(base, operation), 0, moment
            with pytest.raises(KeyboardInterrupt):
                work(fork, model, tmp_path)
            stop = (None, False)
            check_pages(base)
            check(model, fork, whole, before)
    assert torch.equal(told(model, base), whole)


def test_a_sequence_that_is_not_there_changes_nothing(held):
    model, base = held("dmc")
    before = told(model, base)
    for indices in ([0, 1], [-1]):
        with pytest.raises(ValueError, match=rf"indices must be those of sequences, 0 to 0, got {indices[-1]}"):
            base.select_sequences(indices)
    assert torch.equal(told(model, base), before)


# ---- pages that forks share ----

SLOTS = torch.tensor([[0, 2, 5]] * 2, dtype=torch.int32)
POOLS = {
    "append": lambda pool: pool.append(new_slots(3)),
    "keep": lambda pool: pool.keep(SLOTS, [3, 2]),
    "keep anew": lambda pool: pool.keep(SLOTS, [3, 2], new_slots(3)),
    "drop last": lambda pool: pool.drop_last([3, 9]),
    "drop pages": lambda pool: pool.drop_pages(1, [2, 1]),
    "select": lambda pool: pool.select_rows([1, 1, 0]),
    "join": lambda pool: pool.join_rows(pool.fork()),
    "fork": lambda pool: pool.fork(),
    "trim": lambda pool: (pool.append(new_slots(9)), pool.drop_last(20), pool.trim()),
}


def new_slots(tokens):
    return [torch.randn(1, 2, tokens, 4) for _ in range(2)]


@pytest.mark.parametrize("operation", POOLS.values(), ids=POOLS)
def test_a_pool_without_memory_loses_no_page_and_leaves_its_forks(operation):
    for at in itertools.count():
        pool = PagePool(2, keys_and_values(4, torch.float32), torch.device("cpu"), PoolSettings(page_size=4))
        pool.append(new_slots(14))
        fork = pool.fork()
        held = fork.gather(14)
        failing = Failing(at)
        with contextlib.suppress(torch.OutOfMemoryError), failing:
            operation(pool)
        del pool
        assert all(map(torch.equal, fork.gather(14), held))
        fork.append(new_slots(30))  # takes what was given up
        check_store(fork.store)
        if failing.count <= at:
            break
    assert at


@pytest.mark.parametrize("way", ["append", "keep"])
def test_pages_that_were_taken_when_ctrl_c_came_are_not_counted_on(way, monkeypatch):
    """By the forks, which ask the device only where what the host knows does not suffice."""
    name = {"append": "append_tokens_", "keep": "compact_pages_"}[way]
    op, stops = getattr(ops, name), True

    def stopped(*given, **settings):
        op(*given, **settings)
        if stops:
            raise KeyboardInterrupt

    pool = PagePool(2, keys_and_values(4, torch.float32), torch.device("cpu"), PoolSettings(page_size=4))
    pool.append(new_slots(16))
    pool.reserve([24, 24])
    fork = pool.fork()
    fork.store.count_free()
    held = fork.gather(16)
    monkeypatch.setattr(ops, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        POOLS[way](pool)
    stops = False
    for _ in range(6):
        fork.append(new_slots(4))
    assert fork.counts == [40, 40]
    fork.store.count_free()  # says so where tokens were lost
    assert all(torch.equal(x[:, :16], y) for x, y in zip(fork.gather(40), held, strict=True))
