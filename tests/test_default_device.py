"""torch.set_default_device(elsewhere) changes nothing: what caches make says where it is.

The default device is "meta", whose tensors hold nothing: to mix one with another, or to read it, is an error.
"""

import pytest
import torch
from helpers import attached, left_padded, random_gates, random_ids, tiny_gates
from test_gpu_models import BATCHES, SPECS, made_batch

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import CacheSpec
from kvcompress.demo import make_task


@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_and_tokens_of_the_shipped_model(name):
    spec, retrofit = SPECS[name]
    model = kvcompress.load_example_model(retrofit=retrofit)[0]
    ids, found = make_task(400, 0.4, 7, "cpu").ids, []
    with kvcompress.attach(model), torch.no_grad():
        for default in ("meta", "cpu"):
            cache = CacheSpec.parse(spec).make(model.config)
            with torch.device(default):
                kvcompress.prefill(model, ids[:, :-1], cache)
                found.append([model(ids[:, -1:], past_key_values=cache).logits for _ in range(6)])
                cache.fork().reorder_cache(torch.tensor([0], device="cpu"))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("name", BATCHES)
def test_padded_batches(name):
    model, cache_of = made_batch(name)
    ids, mask = left_padded([random_ids(n, seed=n) for n in (37, 5, 20)])
    found = []
    with kvcompress.attach(model), torch.no_grad():
        for default in ("meta", "cpu"):
            cache = cache_of(model)
            with torch.device(default):
                logits = [model(ids, attention_mask=mask, past_key_values=cache).logits]
                for i in range(8):
                    seen = torch.nn.functional.pad(mask, (0, i + 1), value=1)
                    new = torch.full((3, 1), 5 + i, device="cpu")
                    logits.append(model(new, attention_mask=seen, past_key_values=cache).logits)
            found.append(logits)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


# the order of coordinates, a window, a chunk, frequencies of each sequence, states
FAMILIES = ["glm", "gemma3_text/sliding", "llama4_text/chunked", "llama/longrope/beyond", "qwen3_next"]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_probed_and_read(name):
    model = CONFIGURATIONS[name].model()
    gates = random_gates(model)
    prompts = [random_ids(n, seed=n) for n in ((40, 40) if name == "qwen3_next" else (40, 20))]
    ids, mask = left_padded(prompts)
    found = []
    for default in ("meta", "cpu"):
        with torch.device(default), kvcompress.attach(model), torch.no_grad():
            cache = kvcompress.GatedCache(model.config, gates, threshold=0.0, window=6, page_size=4, track=True)
            kvcompress.prefill(model, ids, cache, attention_mask=mask)
            cache.reorder_cache(torch.tensor([1, 0], device="cpu"))
            logits, seen = [], mask.flip(0)
            for i in range(4):
                new = torch.full((2, 1), 5 + i, device="cpu")
                given = seen if i == 0 else torch.nn.functional.pad(seen, (0, i), value=1)
                logits.append(model(new, attention_mask=given, past_key_values=cache).logits)
            kept = cache.kept_positions()
        found.append((logits, [x for layer in kept for rows in layer for x in rows]))
    for mine, theirs in zip(*found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


def test_a_saved_cache_comes_back(tmp_path):
    model, ids = attached(), random_ids(40)
    cache = kvcompress.GatedCache(model.config, tiny_gates(), threshold=0.0, window=6, track=True)
    with torch.device("meta"), torch.no_grad():
        assert cache.kept_positions() == [[]] * 3
        kvcompress.prefill(model, ids, cache)
        cache.save(tmp_path / "cache")
        again = kvcompress.load_cache(tmp_path / "cache", model)
        logits = [model(ids[:, -1:], past_key_values=x).logits for x in (cache, again)]
    assert torch.equal(*logits)


def test_a_model_is_attached_and_probed():
    model, ids = attached(), random_ids(40)
    with torch.device("meta"):
        kvcompress.dmc.convert(model, kvcompress.dmc.DMCConfig(), anneal=False)
        loss = model(ids, labels=ids).loss
    assert loss.isfinite()
