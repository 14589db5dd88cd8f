"""The layers whose newest tokens lie in rings: a decoded token is one op, and what its parts give in turn."""

import copy

import pytest
import torch
from test_dmc_layers import FREQUENCIES, Rotation
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress.caches import streaming
from kvcompress.caches.local import LocalLayer
from kvcompress.caches.passes import CachePass
from kvcompress.caches.store import PoolSettings
from kvcompress.caches.streaming import StreamingLayer
from kvcompress.dmc import DMCConfig
from kvcompress.dmc.dms import DMSLayer
from kvcompress.hf.facts import Facts, LayerFacts
from kvcompress.ops.softmax import Softmax
from kvcompress.positions import RotaryTables

LAYERS = {
    "window": lambda: LocalLayer(0, 6, None),
    "chunks": lambda: LocalLayer(0, None, 6),
    "window, k8v4": lambda: LocalLayer(0, 6, None, "k8v4"),
    "chunks, int8": lambda: LocalLayer(0, None, 6, "int8"),
    "streaming": lambda: StreamingLayer(0, 0, 3, 6, "slot"),
    "streaming, apart": lambda: StreamingLayer(0, 0, 3, 6, "window"),
    "streaming, int8": lambda: StreamingLayer(0, 0, 3, 6, "slot", "int8"),
    "streaming, apart, k8v4": lambda: StreamingLayer(0, 0, 3, 6, "window", "k8v4"),
    "dms": lambda: DMSLayer(0, 0, PoolSettings(page_size=4), DMCConfig(mode="dms", dms_window=5, shift=0.0), False),
}


class Ops(TorchDispatchMode):
    """Notes the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def facts_of(heads, D, same=True):
    """same: queries and keys are rotated by one object, as they must be for a step in one op."""
    rotary, other = (RotaryTables(Rotation(FREQUENCIES), torch.arange(len(FREQUENCIES))) for _ in range(2))
    return Facts({0: LayerFacts(0, *heads, D, D, rotary if same else other, rotary)})


def feed(layer, facts, new, counts=None):
    q = new[0]
    step = CachePass(facts, [layer], counts or [q.shape[2]] * q.shape[0], q.shape[2])
    return step.attend(0, *new, Softmax(0.25))


def columns(S, B=2, heads=(4, 2), D=16):
    return tuple(torch.randn(B, h, S, D) for h in (heads[0], heads[1], heads[1]))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_of_a_layer_is_one_op(kind):
    layer, facts = LAYERS[kind](), facts_of((4, 2), 16)
    feed(layer, facts, columns(20))
    for _ in range(9):  # pages are set aside for the next four steps of DMS now and then
        feed(layer, facts, columns(1))
    seen, new = [], columns(1)
    for _ in range(2):
        with Ops() as noted:
            feed(layer, facts, new)
        seen.append(noted.names)
    assert ["kvcompress::ring_step_"] in seen and (kind == "dms" or seen[0] == seen[1])


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "dms"])
def test_a_step_of_a_layer_is_what_its_ops_give_in_turn(cpu, monkeypatch, kind):
    monkeypatch.setattr(streaming, "_LEAST_BLOCK", 256)
    layer, other = LAYERS[kind](), LAYERS[kind]()
    facts, apart = facts_of((4, 2), 16), facts_of((4, 2), 16, same=False)
    new = columns(11)
    assert torch.equal(feed(layer, facts, new, [11, 4]), feed(other, apart, new, [11, 4]))
    for t in range(330):  # the streaming ring moves back in between
        if t == 150:
            for one in (layer, other):
                one.select([1, 0, 1], 2)
        new = columns(7 if t == 200 else 1, B=2 if t < 150 else 3)
        assert torch.equal(feed(layer, facts, new), feed(other, apart, new)), t
    assert layer.stored_lengths() == other.stored_lengths()
    if "streaming" in kind:
        assert layer.base == other.base and min(layer.base) > 0
        assert layer.places.flatten().tolist() == layer.tokens and layer.bases.flatten().tolist() == layer.base
    else:
        assert layer.places.flatten().tolist() == layer.next


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "dms"])  # whose pages are of one store
def test_layers_that_join_go_on_as_they_were(cpu, kind):
    facts, prompts = facts_of((4, 2), 16), [columns(S, B=1) for S in (11, 4)]
    apart, joined = ([LAYERS[kind]() for _ in prompts] for _ in range(2))
    for layer, prompt in zip((*apart, *joined), prompts * 2, strict=True):
        feed(layer, facts, prompt)
    joined[0].join(joined[1], 1, 1)
    assert joined[0].stored_lengths() == apart[0].stored_lengths() + apart[1].stored_lengths()
    for _ in range(9):
        new = columns(1)
        wanted = [feed(layer, facts, [x[b : b + 1] for x in new]) for b, layer in enumerate(apart)]
        assert torch.equal(feed(joined[0], facts, new), torch.cat(wanted))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_copy_of_a_layer_goes_on_alone(kind):
    layer, facts = LAYERS[kind](), facts_of((4, 2), 16)
    feed(layer, facts, columns(20), [20, 3])
    fork = copy.deepcopy(layer)
    new, others = [columns(1) for _ in range(9)], [columns(1) for _ in range(5)]
    expected = [feed(fork, facts, x) for x in new]
    fork = copy.deepcopy(layer)
    for x in others:
        feed(layer, facts, x)
    assert all(torch.equal(feed(fork, facts, x), y) for x, y in zip(new, expected, strict=True))
    assert fork.places.flatten().tolist() == [29, 12] and layer.places.flatten().tolist() == [25, 8]
