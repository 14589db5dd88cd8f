"""Files of caches that the versions before wrote are loaded as they were: 5, in which layers had what is of a sequence
twice, and 4, in which budgets held their size besides."""

import json
import zlib

import pytest
import torch
from helpers import attached, kind_model, logits_of, random_ids, tiny_gates
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvcompress
from kvcompress import (
    AdaKV,
    GatedCache,
    GlobalTopK,
    IterativeCache,
    PoDCache,
    PrunedCache,
    PyramidKV,
    QuantizedCache,
    SnapKV,
    StreamingCache,
    Uniform,
    attach,
    load_cache,
    pod,
    prefill,
)
from kvcompress.caches.local import LocalLayer
from kvcompress.heads import HeadProfile
from kvcompress.pod import PoDConfig
from kvcompress.pruners import H2O, DuoAttention

SNAP = SnapKV(window=4)
HEADS = HeadProfile(((0.9, 0.1),) * 3, sinks=2, recent=6)
CACHES = {  # and what stood for keep in the budget
    "share": (lambda c: PrunedCache(c, SNAP, keep=0.4, page_size=4), 0.6),
    "tokens": (lambda c: PrunedCache(c, SNAP, Uniform(), keep=20, every=4, page_size=4), 20),
    "bytes": (lambda c: PrunedCache(c, SNAP, keep="40KiB", page_size=4), "40KiB"),
    "all": (lambda c: PrunedCache(c, keep=1.0, later="keep", page_size=4), 0.0),
    "pyramid": (lambda c: PrunedCache(c, SNAP, PyramidKV(), keep=20, page_size=4), 20),
    "adakv": (lambda c: PrunedCache(c, SNAP, AdaKV(floor=0.3), keep=0.25, page_size=4), 0.75),
    "adakv, pyramid": (lambda c: PrunedCache(c, SNAP, AdaKV(PyramidKV()), keep=24, page_size=4), 24),
    "global": (lambda c: PrunedCache(c, SNAP, GlobalTopK(), keep=0.5, page_size=4), 0.5),
    "duo": (lambda c: PrunedCache(c, DuoAttention(HEADS), page_size=4), None),
    "iterative": (lambda c: IterativeCache(c, memory_size=16, chunk_size=12, pruner=SNAP, track=True), 16),
    "gated": (lambda c: GatedCache(c, tiny_gates(), keep=0.5, window=8, page_size=4), None),
    "streaming": (lambda c: StreamingCache(c, window_size=20), None),
}


def sharing():
    model = attached(num_hidden_layers=4)
    pod.convert(model, PoDConfig(((0, 0), (0, 1), (2, 1), (2, 1)), 3, 9))
    return model


CACHES_5 = {
    "pruned": (attached, lambda c: PrunedCache(c, H2O(), keep=20, every=3, page_size=4)),
    "iterative": (attached, lambda c: IterativeCache(c, memory_size=16, chunk_size=12, pruner=SNAP, every=3)),
    "gated": (attached, lambda c: GatedCache(c, tiny_gates(), keep=0.5, window=8, page_size=4)),
    "streaming": (attached, lambda c: StreamingCache(c, window_size=20, dtype="int8")),
    "pod": (sharing, lambda c: PoDCache(c, page_size=4)),
}


def rewrite(path, change):
    """The file at a path, with change(saved) in its header, and classes where they once stood."""
    with safe_open(path, "pt") as file:
        saved = json.loads(file.metadata()["kvcompress"])
    change(saved)
    text = json.dumps(saved)
    for here, once in (("support.units:", "units:"), ("ops.softmax:", "softmax:")):
        text = text.replace(f"kvcompress.{here}", f"kvcompress.{once}")
    save_file(load_file(path), path, {"kvcompress": text, "check": str(zlib.crc32(text.encode()))})


def formerly(saved, *sizes):
    """As a version before would have written it: 5, or with what stood for keep in a budget 4."""
    repeat_fields(saved["objects"])
    saved["format"] = "kvcompress caches 5"
    for size in sizes:
        move_sizes(saved["objects"], size)
        saved["format"] = "kvcompress caches 4"


def repeat_fields(objects):
    for one in objects:
        kind, state = one["class"].rpartition(":")[2], one["state"]
        for name in ("arrays", "scales", "groups"):
            if "tuple" in (state.get(name) or ()):
                state[name] = state[name]["tuple"]
        if state.get("offsets"):
            batch, rows = len(state["next"]), len(objects[state["pool"]["object"]]["state"]["_bounds"])
            if kind == "PrunedLayer":
                state["tokens"] = [n - m for n, m in zip(state["next"], state["offsets"], strict=True)]
            state["offsets"] = [offset for offset in state["offsets"] for _ in range(rows // batch)]
        if kind == "PoDLayer":
            state["next"] = objects[state["values"]["object"]]["state"]["tokens"]
        if kind == "IterativeCache":
            state["read"] = state["_lengths"]
        if kind.endswith("Cache"):
            state["_batch"] = len(state["_lengths"])


def move_sizes(objects, size):
    for one in objects:
        kind, state = one["class"], one["state"]
        if kind == "kvcompress.caches.policy:Policy":
            del state["keep"]
            budget = objects[state["budget"]["object"]]
            if budget["class"].endswith(":AdaKV") and objects[budget["state"]["inner"]["object"]]["state"] == {}:
                budget["state"]["inner"] = size
            elif budget["class"].endswith(":AdaKV"):
                objects[budget["state"]["inner"]["object"]]["state"]["size"] = size
            elif not budget["class"].endswith(":StreamingHeads"):
                budget["state"]["size"] = size
        elif kind == "kvcompress.caches.pruned:PrunedCache":
            del state["keep"]
        elif kind == "kvcompress.gates.cache:GatedCache":
            state["share"] = state.pop("keep")
        one["class"] = kind.replace(":ChunkReading", ":Reading")


@pytest.mark.parametrize("name", CACHES)
def test_a_file_of_version_4_goes_on_as_it_was(name, tmp_path):
    new_cache, size = CACHES[name]
    model, ids = attached(), random_ids(60, seed=3)
    cache, loaded = goes_on(model, new_cache, ids, tmp_path, size)
    for field in ("keep", "budget", "track"):
        assert str(getattr(loaded, field, None)) == str(getattr(cache, field, None))


@pytest.mark.parametrize("name", CACHES_5)
def test_a_file_of_version_5_goes_on_as_it_was(name, tmp_path):
    new_model, new_cache = CACHES_5[name]
    model, ids = new_model(), random_ids(60, batch=2, seed=3)
    cache, loaded = goes_on(model, new_cache, ids, tmp_path)
    for one in (cache, loaded):
        one.select_sequences([1, 0, 1])
    new = random_ids(1, batch=3, seed=4)
    assert torch.equal(*(logits_of(model, new, one) for one in (cache, loaded)))
    assert loaded.stored_lengths() == cache.stored_lengths()


def test_a_file_goes_on_whose_classes_stood_elsewhere(tmp_path):
    model, path = attached(), tmp_path / "cache.safetensors"
    cache = PrunedCache(model.config, SNAP, keep=20, every=4, page_size=4)
    prefill(model, random_ids(60, seed=3), cache)
    cache.save(path, model)
    before = path.read_bytes()
    rewrite(path, lambda saved: None)
    assert b"kvcompress.units:Keep" in path.read_bytes() != before
    loaded, new = load_cache(path, model), random_ids(1, seed=4)
    assert torch.equal(*(logits_of(model, new, one) for one in (cache, loaded)))


def goes_on(model, new_cache, ids, tmp_path, *sizes):
    """(a cache, the same from a file of before), after both have gone on alike."""
    cache, path = new_cache(model.config), tmp_path / "cache.safetensors"
    prefill(model, ids, cache)
    cache.save(path, model)
    rewrite(path, lambda saved: formerly(saved, *sizes))
    loaded = load_cache(path, model)
    assert loaded.stored_lengths() == cache.stored_lengths() and repr(loaded) == repr(cache)
    options = {"max_new_tokens": 6, "do_sample": False}
    further = torch.cat([ids, random_ids(20, batch=len(ids), seed=5)], 1)  # and a turn that is compressed
    outs = []
    for one in (cache, loaded):
        out = model.generate(ids, past_key_values=one, **options)
        outs.append(kvcompress.generate(model, torch.cat([out, further[:, 60:]], 1), one, **options))
    assert torch.equal(*outs)
    assert loaded.stored_lengths() == cache.stored_lengths()
    return cache, loaded


def test_a_budget_that_is_not_ours_is_refused(tmp_path):
    model, path = attached(), tmp_path / "cache.safetensors"
    cache = PrunedCache(model.config, SNAP, Uniform(), keep=20)
    prefill(model, random_ids(60), cache)
    cache.save(path, model)

    def of_anothers(saved):
        formerly(saved, 20)
        for one in saved["objects"]:
            one["class"] = one["class"].replace("kvcompress.budgets:Uniform", "mine:LowerHalf")

    rewrite(path, of_anothers)
    with pytest.raises(ValueError, match=r"budget LowerHalf was saved before .*: read the text anew"):
        load_cache(path, model)


def test_windows_from_before_there_were_codes_of_them_hold_numbers_on(tmp_path):
    model, ids, path = kind_model("gemma2"), random_ids(60, seed=3), tmp_path / "cache.safetensors"
    attach(model)
    cache = QuantizedCache(model.config)
    windows = [layer for layer in cache.layers if isinstance(layer, LocalLayer)]
    for layer in windows:
        layer.dtype = None
    prefill(model, ids, cache)
    cache.save(path, model)

    def before(saved):
        formerly(saved)
        for one in saved["objects"]:
            if one["class"].endswith(":LocalLayer"):
                del one["state"]["dtype"], one["state"]["form"]

    rewrite(path, before)
    loaded = load_cache(path, model)
    assert len(windows) == 2 and loaded.nbytes() == cache.nbytes()
    outs = [model.generate(ids, past_key_values=one, max_new_tokens=20, do_sample=False) for one in (cache, loaded)]
    assert torch.equal(*outs)
    loaded.reset()
    prefill(model, ids, loaded)
    assert loaded.nbytes() < cache.nbytes()
