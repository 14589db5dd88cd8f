"""What caches tell of themselves is what they have seen and hold; and dir() shows what users call."""

import re
from pathlib import Path

import pytest
import torch
from helpers import attached, deciding_model, kind_model, left_padded, random_ids, tiny_gates
from transformers import DynamicCache

import kvcompress
from kvcompress import (
    CompressedCache,
    DMCCache,
    GatedCache,
    IterativeCache,
    PoDCache,
    PrunedCache,
    PyramidKV,
    QuestCache,
    StreamingCache,
    attach,
    pod,
)
from kvcompress.pod import PoDConfig
from kvcompress.pruners import KVzip, SnapKV

SNAP = SnapKV(window=4)
LENGTHS = [50, 31]


def followers(mode):
    model = attached(num_hidden_layers=4)
    pod.convert(model, PoDConfig(((0, 0), (0, 1), (2, 1), (2, 1)), 3, 9, mode=mode))
    return model


def attached_to(model):
    attach(model)
    return model


CASES = {
    "pruned": (attached, lambda c: PrunedCache(c, SNAP, keep=20, page_size=8)),
    "pruned, windows": (
        lambda: attached_to(kind_model("gemma2")), lambda c: PrunedCache(c, SNAP, keep=20, page_size=8)
    ),
    "kvzip": (attached, lambda c: PrunedCache(c, KVzip(), keep=20, page_size=8)),
    "iterative": (attached, lambda c: IterativeCache(c, memory_size=20, chunk_size=16, page_size=8)),
    "gated": (attached, lambda c: GatedCache(c, tiny_gates(), threshold=0.0, window=8, page_size=4)),
    "streaming": (attached, lambda c: StreamingCache(c, window_size=20)),
    "quest": (attached, lambda c: QuestCache(c, token_budget=12, page_size=4)),
    "dmc": (lambda: attached_to(deciding_model()), lambda c: DMCCache(c)),
    "pod": (lambda: followers("pod"), lambda c: PoDCache(c, page_size=4)),
    "cla": (lambda: followers("cla"), lambda c: PoDCache(c, page_size=4)),
}  # fmt: skip


@pytest.mark.parametrize(("new_model", "new_cache"), CASES.values(), ids=CASES)
def test_figures_are_those_of_what_was_read_and_is_held(new_model, new_cache):
    model, prompts = new_model(), [random_ids(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(prompts)
    cache = new_cache(model.config)
    assert repr(cache) == cache.summary() == f"{type(cache).__name__}(empty)"
    assert cache.dense_nbytes() == 0 and cache.seen_lengths() == []
    kvcompress.generate(model, ids, cache, mask, max_new_tokens=3, do_sample=False)

    assert cache.seen_lengths() == [n + 2 for n in LENGTHS]  # the last token that is written is not read
    windows = [12 if "sliding" in kind else 1000 for kind in getattr(model.config, "layer_types", None) or ()]
    windows = windows or [1000] * model.config.num_hidden_layers
    tokens = sum(min(n, window) for window in windows for n in cache.seen_lengths())
    assert cache.dense_nbytes() == 2 * 2 * 16 * 4 * tokens  # keys and values of 2 heads of 16 numbers of float32

    values = cache.stored_lengths()
    keys = cache.stored_keys() if isinstance(cache, PoDCache) else values
    count, total = 0, 0.0
    for layer in cache.compressing:
        for b in range(2):
            for k, v in zip(keys[layer.index][b], values[layer.index][b], strict=True):
                total += (k + v) / 2
                count += 1
    assert cache.compression_ratio() == pytest.approx(sum(cache.seen_lengths()) / 2 * count / total)
    ratios = cache.compression_ratios()
    assert len(ratios) == len(cache.compressing) and {len(layer) for layer in ratios} == {2}
    assert f"{sum(cache.seen_lengths())} tokens seen of 2 sequences" in cache.summary()
    assert repr(cache).startswith(f"{type(cache).__name__}({sum(cache.seen_lengths())} tokens of 2 sequences seen, ")


def test_dense_bytes_are_those_of_transformers_cache():
    model, ids = attached(), random_ids(40)
    ours, dense = PrunedCache(model.config, SNAP, keep=20), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (ours, dense):
            model(ids, past_key_values=cache)
    assert ours.dense_nbytes() == sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)


def test_tokens_seen_follow_all_that_happens_to_a_cache(tmp_path):
    model, ids = attached(), random_ids(40)
    cache = IterativeCache(model.config, memory_size=20, chunk_size=16)
    kvcompress.prefill(model, ids, cache, guide=ids[0, -6:])  # the prompt ends with the guide: 34 are read
    assert cache.seen_lengths() == [34]
    model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.seen_lengths() == [43]
    cache.crop(-2)
    assert cache.seen_lengths() == [41]
    fork = cache.fork()
    fork.select_sequences([0, 0, 0])
    assert fork.seen_lengths() == [41] * 3 and cache.seen_lengths() == [41]
    again = kvcompress.load_cache(cache.save(tmp_path / "cache.safetensors"), model)
    assert repr(again) == repr(cache) and again.summary() == cache.summary()
    cache.mark_incomplete()
    assert repr(cache) == "IterativeCache(incomplete)" and "incomplete" in cache.summary()
    cache.reset()
    assert cache.seen_lengths() == [] and repr(cache) == "IterativeCache(empty)"
    with pytest.raises(ValueError, match="a compression ratio needs a cache that has seen tokens"):
        cache.compression_ratio()


def test_dir_shows_what_the_documentation_names():
    model = attached()
    cache = PrunedCache(model.config, SNAP, keep=20)
    shown = dir(cache)
    assert {"pruner", "keep", "budget", "compress", "save", "summary"} <= set(shown)
    assert not [name for name in shown if name.startswith("_") or not hasattr(cache, name)]
    api = (Path(__file__).parent.parent / "docs/api.md").read_text()
    listed = re.search(r"::: kvcompress.CompressedCache\n.*?members: \[(.*?)\]", api, re.DOTALL)[1].split(", ")
    for kind in (CompressedCache, IterativeCache, PrunedCache, StreamingCache, QuestCache, DMCCache, PoDCache):
        assert set(listed) <= set(kind.__dir__(cache)), kind
        for name in kind.answers:
            assert getattr(kind, name, None) is not None or name == "settings"


@torch.no_grad()
def test_a_summary_says_where_layers_differ():
    model = attached(num_hidden_layers=4)
    for budget, told in ((PyramidKV(beta=4), r"; (\S+) in layer 0 to (\S+) in layer 3$"), (None, r"one held()()$")):
        cache = PrunedCache(model.config, SNAP, budget, keep=12, page_size=4)
        model(random_ids(60), past_key_values=cache)
        found = re.search(told, cache.summary(), re.MULTILINE)
        assert found, cache.summary()
        ratios = cache.compression_ratios()
        assert budget is None or (found[1], found[2]) == (f"{ratios[0][0]:.1f}", f"{ratios[3][0]:.1f}")
