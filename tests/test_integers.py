"""Integer settings of pruners, budgets and caches: one out of range is named with its value when the object is made.
A pruner works with the greatest."""

import dataclasses
import re
from functools import partial

import pytest
import torch
from helpers import tiny_gates, tiny_model

import kvcompress
from kvcompress import (
    IterativeCache,
    PrunedCache,
    PyramidKV,
    QuestCache,
    RemoteGap,
    StreamingCache,
    pruners,
)
from kvcompress.caches.base import CompressedCache
from kvcompress.heads import HeadProfile
from kvcompress.pruners import ObservedAttention, Replay, SnapKV

MOST = 2**31 - 1
CONFIG = tiny_model().config
HEADS = HeadProfile(((0.5, 0.2),) * 3)
MADE = {  # fields that must be there, or that another is bounded by
    pruners.DuoAttention: {"heads": HEADS},
    pruners.Gate: {"gates": tiny_gates()},
    pruners.CenterOfGravity: {"compressed_length": MOST, "near_length": MOST},
}
ENDS = {"future_positions": 2**16, "sketch": 512, "seed": 2**63 - 1}


def made(kind, given, name, value):
    return kind(**given | {name: value})


def settings():
    """(what it is of, name, how it is made with a value, the greatest value)."""
    for kind in (getattr(pruners, name) for name in pruners.__all__):
        if not (isinstance(kind, type) and issubclass(kind, pruners.Pruner) and dataclasses.is_dataclass(kind)):
            continue
        for field in dataclasses.fields(kind):
            if field.type in ("int", "int | None"):
                make = partial(made, kind, MADE.get(kind, {}), field.name)
                yield kind, field.name, make, ENDS.get(field.name, MOST)
    for name in ("beta", "window"):
        yield PyramidKV, name, partial(made, PyramidKV, {}, name), MOST
    for name in ("gap", "near_length", "headroom"):
        yield RemoteGap, name, partial(made, RemoteGap, {}, name), MOST
    for name in ("sinks", "recent"):
        yield HeadProfile, name, partial(made, HeadProfile, {"gates": ((0.5,),)}, name), MOST
    small = {"memory_size": 16, "chunk_size": 8}
    caches = {
        IterativeCache: (small, ("memory_size", "chunk_size", "dense_below", "every")),
        PrunedCache: ({"pruner": SnapKV(window=4), "keep": 16}, ("keep", "every", "chunk_size")),
        StreamingCache: ({}, ("window_size", "num_sink_tokens", "chunk_size")),
        QuestCache: ({}, ("token_budget", "dense_layers", "chunk_size")),
    }
    for kind, (given, names) in caches.items():
        for name in (*names, *(() if kind is StreamingCache else ("page_size", "max_pages"))):
            make = partial(made, kind, {"config": CONFIG, **given}, name)
            yield kind, name, make, 2**30 if name == "page_size" else MOST
    linear = {"config": CONFIG, **small, "schedule": "linear"}
    yield IterativeCache, "initial_memory", partial(made, IterativeCache, linear, "initial_memory"), 16


SETTINGS = [*settings()]
TEXTS = {  # as "1k" in caches
    "keep", "memory_size", "chunk_size", "dense_below", "every", "window_size", "num_sink_tokens", "token_budget",
    "initial_memory",
}  # fmt: skip
WRONG = (-1, True, 1.5, "3", 2**31, 2**40, 2**63, 2**80)


@pytest.mark.parametrize(("kind", "name", "make", "most"), SETTINGS, ids=[f"{k.__name__}-{n}" for k, n, *_ in SETTINGS])
def test_an_integer_out_of_range_is_named_with_its_value(kind, name, make, most):
    for value in WRONG:
        if type(value) is int and 0 <= value <= most:
            continue
        if isinstance(value, str) and name in TEXTS and issubclass(kind, CompressedCache):
            continue
        if name == "gap" and isinstance(value, str):
            continue
        with pytest.raises(ValueError, match=rf"\b{name}\b.*got") as error:
            make(value)
        assert str(value) in str(error.value)
        if type(value) is int and value > most and name != "initial_memory":
            assert re.search(rf"must be at most {most}\b|power of two", str(error.value))


def test_sizes_of_a_streaming_cache_are_bounded_together():
    with pytest.raises(ValueError, match=r"window_size \+ num_sink_tokens must be at most 2147483647, got 2147483651"):
        StreamingCache(CONFIG, window_size=MOST)


ASKED = [
    (kind, name, make, most) for kind, name, make, most in SETTINGS
    if issubclass(kind, pruners.Pruner) and kind not in (pruners.DuoAttention, pruners.CenterOfGravity)
    and not getattr(kind, "rereads", False) and kind is not ObservedAttention
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    with kvcompress.attach(model):
        yield model


@pytest.mark.parametrize(("kind", "name", "make", "most"), ASKED, ids=[f"{k.__name__}-{n}" for k, n, *_ in ASKED])
def test_a_pruner_takes_the_greatest_value_of_a_setting(model, kind, name, make, most):
    ids = torch.randint(1, CONFIG.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    cache = PrunedCache(model.config, make(most), keep=0.5)
    kvcompress.prefill(model, ids, cache)
    assert cache.get_seq_length() == 23  # the last one is decoded


def test_a_chunk_of_replay_past_the_text_is_the_text(model):
    ids = torch.randint(1, CONFIG.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    kept = []
    for chunk in (24, MOST):
        cache = PrunedCache(model.config, Replay(chunk=chunk), keep=0.5)
        kvcompress.prefill(model, ids, cache)
        kept.append([layer.pool.gather(12)[0] for layer in cache.compressing])
    assert all(torch.equal(x, y) for x, y in zip(*kept, strict=True))
