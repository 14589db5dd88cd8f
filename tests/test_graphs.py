"""A decoded step as a recording: on the CPU a tape of PyTorch's operations stands for the CUDA graph."""

import gc
import weakref

import pytest
import torch
from helpers import attached, forward, left_padded, random_ids, tiny_gates_folder
from published_gates import hidden_gates_folder
from tape import Tape, recorder

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from benchmarks.quality.parts.families_images import even_prompts, one_prompt
from kvcompress import (
    DMCCache,
    Gate,
    GatedCache,
    IterativeCache,
    PrunedCache,
    QuantizedCache,
    QuestCache,
    StepGraph,
    StreamingCache,
    dmc,
)
from kvcompress.caches import graphs
from kvcompress.caches.base import CompressedCache
from kvcompress.caches.ring import Ring
from kvcompress.hf.attach import base_model
from kvcompress.pruners import Replay, SnapKV

CACHE: list[CompressedCache] = []
record = recorder(lambda: [x for layer in CACHE[0].own for x in layer.held_tensors(CACHE[0].facts[layer.index])])


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


def dropping():
    model = attached()
    dmc.convert(model, dmc.DMCConfig(mode="dms", dms_window=9, shift=0.0), anneal=False)
    return model


def family(name):
    """Attached, with heads as many as the others'."""

    def make():
        model = CONFIGURATIONS[name].model()
        model.config.pad_token_id = None  # else transformers looks for it among the ids, unless a GPU records
        kvcompress.attach(model)
        return model

    return make


def unrotated(**fields):
    """Some of its layers turn nothing."""

    def make():
        model = family("smollm3/no_rope")()
        dmc.convert(model, dmc.DMCConfig(shift=0.0, **fields), anneal=False)
        return model

    return make


def snapkv(config):
    return PrunedCache(config, SnapKV(window=4), keep=15, page_size=8)


CASES = {
    "iterative": (attached, lambda config: IterativeCache(config, memory_size=20, chunk_size=10, page_size=4)),
    "pruned": (attached, lambda config: PrunedCache(config, SnapKV(), keep=15, page_size=4)),
    "voting": (attached, lambda config: PrunedCache(config, Replay(), keep=15, page_size=16)),
    "default": (attached, lambda config: PrunedCache(config, keep=0.5)),
    "hidden states": (attached, lambda config: PrunedCache(config, Gate(hidden_gates_folder()), keep=15)),
    "ragged": (attached, lambda config: PrunedCache(config, SnapKV(), kvcompress.AdaKV(), keep=15, page_size=8)),
    "dense": (attached, lambda config: QuestCache(config, page_size=4, dense_layers=9)),
    "quest": (attached, lambda config: QuestCache(config, page_size=4, token_budget=12, dense_layers=1)),
    "dmc": (merging, lambda config: DMCCache(config, page_size=4)),
    "window": (merging, lambda config: DMCCache(config, page_size=16)),
    "windows": (family("gemma3_text/sliding"), snapkv),
    "windows with sinks": (family("gpt_oss/sliding"), lambda config: QuantizedCache(config, "int8", page_size=8)),
    "windows of neighbours": (family("cohere2/sliding"), snapkv),
    "windows alone": (family("mistral/sliding"), snapkv),
    "windows that fill": (family("gemma3_text"), snapkv),
    "streaming": (attached, lambda config: StreamingCache(config, window_size=8, num_sink_tokens=2)),
    "streaming at distance": (
        attached, lambda config: StreamingCache(config, window_size=8, sink_distance="window", dtype="int8")
    ),
    "dms": (dropping, lambda config: DMCCache(config, page_size=4)),
    "dmc without rotation": (unrotated(), lambda config: DMCCache(config, page_size=16)),
    "dms without rotation": (unrotated(mode="dms", dms_window=9), lambda config: DMCCache(config, page_size=16)),
    "gated": (
        attached, lambda config: GatedCache(config, tiny_gates_folder(), threshold=0, window=6, page_size=4)
    ),
    "gated by hidden states": (
        attached,
        lambda config: GatedCache(config, hidden_gates_folder(), threshold=-1, window=40, dtype="k8v4", page_size=8),
    ),
}  # fmt: skip

VOTING = ("voting", "default", "hidden states")


def fewest(name):
    """Of 40 steps, so many are more than replayed: tokens that vote are launched op by op, and what comes back anew."""
    return 12 if name in VOTING else 20


def assert_replays_what_the_step_does(name, model, cache, error):
    """40 tokens of both sequences of a cache that has read their prompts. error: of the logits."""
    device, plain = model.device, cache.fork()
    step, replayed = StepGraph(model, cache), 0
    for i in range(40):
        new = torch.stack([random_ids(1, seed=100 + i)[0], random_ids(1, seed=200 + i)[0]]).to(device)
        before, warm = step.recordings, step._warm
        found = step(new)
        replayed += step.recordings == before and step._warm == warm
        torch.testing.assert_close(found, forward(model, new, past_key_values=plain), rtol=error, atol=error)
        assert cache.get_seq_length() == plain.get_seq_length()
        if i == 20:  # what else changes the cache may come between
            for each in (cache, plain):
                each.reorder_cache(torch.tensor([1, 0], device=device))
    assert cache.stored_lengths() == plain.stored_lengths()
    assert replayed > fewest(name) and 1 <= step.recordings < replayed / 2, (replayed, step.recordings)


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_step_computes_what_the_step_does(recorded, name):
    make, cache_of = CASES[name]
    model = make()
    cache = cache_of(model.config)
    kvcompress.prefill(model, torch.cat([random_ids(30, seed=1), random_ids(30, seed=2)]), cache)
    CACHE.append(cache)
    assert_replays_what_the_step_does(name, model, cache, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_no_step_is_launched_op_by_op_once_it_is_warm(recorded, monkeypatch, name):
    """Pages are taken before the step, and the tokens are those of a cache without recordings. Where tokens vote, every
    16th is launched so, and the ring of queries that it empties is another tensor."""
    make, cache_of = CASES[name]
    model, (cache, plain) = make(), (cache_of(make().config) for _ in range(2))
    for each in (cache, plain):
        kvcompress.prefill(model, random_ids(30), each)
    CACHE.append(cache)
    step, calls = StepGraph(model, cache), []
    whole = step._step
    monkeypatch.setattr(step, "_step", lambda: calls.append(1) or whole())
    for i in range(60):
        new = random_ids(1, seed=100 + i)
        found = step(new)
        torch.testing.assert_close(found, forward(model, new, past_key_values=plain), rtol=1e-5, atol=1e-5)
    votes = 60 // 16 if name in VOTING else 0
    assert len(calls) <= graphs.WARM + step.recordings + votes and step.recordings <= 9
    assert cache.stored_lengths() == plain.stored_lengths()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_of_prompts_moves_no_token(recorded, name):
    """Those of GPT-2 know where they stand by position_ids alone."""
    model = CONFIGURATIONS[name].model()
    model.config.pad_token_id = None  # else transformers looks for it among the ids, unless a GPU records
    prompts = [random_ids(30, seed=1), random_ids(11, seed=2)]
    ids, mask = left_padded(prompts)
    with kvcompress.attach(model):
        cache, *alone = (PrunedCache(model.config, SnapKV(window=4), keep=8, page_size=4) for _ in range(3))
        kvcompress.prefill(model, ids, cache, attention_mask=mask)
        for own, prompt in zip(alone, prompts, strict=True):
            kvcompress.prefill(model, prompt, own)
        CACHE.append(cache)
        step = StepGraph(model, cache)
        for i in range(12):
            new = torch.cat([random_ids(1, seed=100 + i), random_ids(1, seed=200 + i)])
            expected = [forward(model, x[None], past_key_values=own) for x, own in zip(new, alone, strict=True)]
            torch.testing.assert_close(step(new), torch.cat(expected), rtol=1e-4, atol=1e-4)
        assert step.recordings


@pytest.mark.parametrize("prompt", [one_prompt, even_prompts])
@torch.no_grad()
def test_a_step_behind_an_image_turns_by_its_places(recorded, prompt):
    model, given = CONFIGURATIONS["qwen2_vl/images"].model(), prompt()
    with kvcompress.attach(model):
        cache, plain = (PrunedCache(model.config, SnapKV(window=4), keep=12, page_size=4) for _ in range(2))
        for each in (cache, plain):
            model(**given, past_key_values=each)
        CACHE.append(cache)
        step = StepGraph(model, cache)
        for i in range(20):
            new = torch.cat([random_ids(1, seed=100 + i)] * len(given["input_ids"]))
            want = base_model(model)(new, past_key_values=plain)[0] @ model.lm_head.weight.T
            torch.testing.assert_close(step(new), want, rtol=1e-4, atol=1e-4)
        assert step.recordings


def test_what_the_cache_replaces_is_freed(monkeypatch):
    """A graph knows addresses and keeps no tensor, as this stand-in does."""
    monkeypatch.setattr(graphs, "record", lambda run, device, pool=None: (lambda: None, run()))
    model = attached()
    cache = PrunedCache(model.config, SnapKV(), keep=15, page_size=4)
    kvcompress.prefill(model, random_ids(30), cache)
    step = StepGraph(model, cache)
    for i in range(4):
        step(random_ids(1, seed=i))
    held = [weakref.ref(layer.pool.k_pages) for layer in cache.compressing]
    assert step.recordings == 1 and held[0]() is not None
    cache.reset()
    gc.collect()
    assert [x() for x in held] == [None] * len(held)


def test_a_token_that_finds_no_page_is_not_counted(recorded):
    model = attached()
    cache = QuestCache(model.config, page_size=4, dense_layers=9, max_pages=2 * 10)
    kvcompress.prefill(model, random_ids(30), cache)
    CACHE.append(cache)
    step = StepGraph(model, cache)
    for i in range(11):
        step(random_ids(1, seed=i))
    assert cache.get_seq_length() == 40
    with pytest.raises(RuntimeError, match="max_pages"):
        step(random_ids(1))
    assert cache.get_seq_length() == 40


def test_caches_that_need_the_host_are_refused(monkeypatch):
    model = attached()
    monkeypatch.setattr(graphs, "record", record)
    for cache in (
        GatedCache(model.config, tiny_gates_folder(), threshold=0, window=6, track=True),
        PrunedCache(model.config, SnapKV(), keep=15, every=4),
        PrunedCache(model.config, SnapKV(), keep=15, positions=kvcompress.RemoteGap(gap=4)),
    ):
        kvcompress.prefill(model, random_ids(30), cache)
        with pytest.raises(NotImplementedError, match=r"layer 0 of .* needs the host for each token"):
            StepGraph(model, cache)


@pytest.mark.parametrize("ask", ["item", "__bool__", "__int__", "nonzero"])
@torch.inference_mode()
def test_the_tape_sees_whoever_asks(ask):
    with pytest.raises(AssertionError, match="the host asked"), Tape():
        getattr(torch.ones(()), ask)()


def test_frequencies_that_follow_the_length_are_refused(monkeypatch):
    """transformers' embedding asks for the largest position of each pass."""
    monkeypatch.setattr(graphs, "record", record)
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = attached(rope_parameters=parameters, max_position_embeddings=512)
    cache = PrunedCache(model.config, SnapKV(), keep=15)
    kvcompress.prefill(model, random_ids(30), cache)
    with pytest.raises(NotImplementedError, match="layer 0 rotates by frequencies that follow the length"):
        StepGraph(model, cache)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama4_text/chunked", "layers of Llama4ForCausalLM ask the host how many tokens came"),  # to scale queries
        ("gemma3n_text/shared", r"layer \d reads the keys of layer \d"),
    ],
)
def test_models_whose_layers_need_the_host_are_refused(monkeypatch, name, message):
    monkeypatch.setattr(graphs, "record", record)
    model = family(name)()
    cache = snapkv(model.config)
    kvcompress.prefill(model, random_ids(30), cache)
    with pytest.raises(NotImplementedError, match=message):
        StepGraph(model, cache)


@torch.inference_mode()
def test_what_the_host_hands_over_in_a_step_is_seen():
    host, device = torch.ones(3), torch.empty(3, device="meta")
    for copies in (lambda: host.to("meta"), lambda: device.copy_(host)):
        with pytest.raises(NotImplementedError, match="copies between the host and the device"), graphs.AsksNothing():
            copies()
    with graphs.AsksNothing():
        host.to(torch.float64)
        device.to(torch.float64)


@torch.no_grad()
def test_windows_that_grow_in_a_step_are_usable_after_it():
    """StepGraph works in inference mode; images in a batch take ops that write to rings outside of it."""
    ring = Ring(8, [torch.ones(1, 1, 0, 4)])
    with torch.inference_mode():
        ring.make_room(3)
    ring.put([torch.ones(1, 1, 1, 4)], *ring.slots(torch.zeros(1, 1, dtype=torch.int32)))


def test_what_cannot_be_recorded_is_named():
    model = attached()
    cache = PrunedCache(model.config, SnapKV(), keep=15)
    with pytest.raises(ValueError, match="cache must hold a prompt"):
        StepGraph(model, cache)
    kvcompress.prefill(model, random_ids(30), cache)
    with pytest.raises(ValueError, match="model must be on a CUDA device, got cpu"):
        StepGraph(model, cache)
    with pytest.raises(TypeError, match="cache must be a cache of kvcompress, got list"):
        StepGraph(model, [])


def test_an_emptied_cache_is_named(recorded):
    model = attached()
    cache = PrunedCache(model.config, SnapKV(), keep=15)
    kvcompress.prefill(model, random_ids(30), cache)
    CACHE.append(cache)
    step = StepGraph(model, cache)
    cache.reset()
    with pytest.raises(ValueError, match="cache must hold a prompt, got one that was emptied"):
        step(random_ids(1))
