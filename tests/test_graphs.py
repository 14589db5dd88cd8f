"""A decoded step as a recording: on the CPU a tape of PyTorch's operations stands for the CUDA graph."""

import pytest
import torch
from helpers import attached, random_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvcompress
from kvcompress import DMCCache, IterativeCache, PrunedCache, QuestCache, StepGraph, StreamingCache, dmc, graphs
from kvcompress.caches.base import CompressedCache
from kvcompress.pruners import SnapKV


class Tape(TorchDispatchMode):
    """Operations and the tensors that they were given and gave; played, each is done again with the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host asked the device for a number")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        for func, args, kwargs, out in self.calls:
            given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


def record(run):
    """As graphs.record: the operations are undone, what they changed with them; the host has counted the step."""
    tape = Tape()
    changed = [x for layer in CACHE[0].own for x in layer.held_tensors(CACHE[0].facts[layer.index])]
    before = [x.clone() for x in changed]
    with tape:
        out = run()
    for x, old in zip(changed, before, strict=True):
        x.copy_(old)
    return tape.play, out


CACHE: list[CompressedCache] = []


@pytest.fixture
def recorded(monkeypatch):
    """What the cache asks on the CPU alone, before and after the layers, is not of the step."""
    monkeypatch.setattr(graphs, "record", record)
    for name in ("begin", "end"):
        whole = getattr(CompressedCache, name)

        def aside(self, *args, whole=whole):
            with torch.utils._python_dispatch._disable_current_modes():
                return whole(self, *args)

        monkeypatch.setattr(CompressedCache, name, aside)
    yield
    CACHE.clear()


def merging():
    model = attached()
    dmc.convert(model, dmc.DMCConfig(shift=0.0), anneal=False)
    return model


CASES = {
    "iterative": (attached, lambda config: IterativeCache(config, memory_size=20, chunk_size=10, page_size=4)),
    "pruned": (attached, lambda config: PrunedCache(config, SnapKV(), 15, page_size=4)),
    "ragged": (attached, lambda config: PrunedCache(config, SnapKV(), kvcompress.AdaKV(15), page_size=8)),
    "dense": (attached, lambda config: QuestCache(config, page_size=4, dense_layers=9)),
    "quest": (attached, lambda config: QuestCache(config, page_size=4, token_budget=12, dense_layers=1)),
    "dmc": (merging, lambda config: DMCCache(config, page_size=4)),
    "window": (merging, lambda config: DMCCache(config, page_size=16)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_step_computes_what_the_step_does(recorded, name):
    make, cache_of = CASES[name]
    model = make()
    ids = torch.cat([random_ids(30, seed=1), random_ids(30, seed=2)])
    cache = cache_of(model.config)
    kvcompress.prefill(model, ids, cache)
    plain = cache.fork()
    CACHE.append(cache)
    step, replayed = StepGraph(model, cache), 0
    for i in range(40):
        new = torch.stack([random_ids(1, seed=100 + i)[0], random_ids(1, seed=200 + i)[0]])
        room = cache.steps_ahead()
        found = step(new)
        replayed += room > 0 and i >= graphs.WARM
        with torch.no_grad():
            expected = model(new, past_key_values=plain).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert cache.get_seq_length() == plain.get_seq_length()
        if i == 20:  # what else changes the cache may come between
            cache.reorder_cache(torch.tensor([1, 0]))
            plain.reorder_cache(torch.tensor([1, 0]))
    assert cache.stored_lengths() == plain.stored_lengths()
    assert replayed > 20 and 1 <= step.recordings < replayed / 2, (replayed, step.recordings)


def test_caches_that_need_the_host_are_refused(monkeypatch):
    model = attached()
    monkeypatch.setattr(graphs, "record", record)
    for cache in (
        StreamingCache(model.config, window_size=8),
        PrunedCache(model.config, SnapKV(), 15, every=4),
        PrunedCache(model.config, SnapKV(), 15, positions=kvcompress.RemoteGap(gap=4)),
    ):
        kvcompress.prefill(model, random_ids(30), cache)
        with pytest.raises(NotImplementedError, match=r"layer 0 of .* needs the host for each token"):
            StepGraph(model, cache)


def test_what_cannot_be_recorded_is_named():
    model = attached()
    cache = PrunedCache(model.config, SnapKV(), 15)
    with pytest.raises(ValueError, match="cache must hold a prompt"):
        StepGraph(model, cache)
    kvcompress.prefill(model, random_ids(30), cache)
    with pytest.raises(ValueError, match="model must be on a CUDA device, got cpu"):
        StepGraph(model, cache)
    with pytest.raises(TypeError, match="cache must be a cache of kvcompress, got list"):
        StepGraph(model, [])
