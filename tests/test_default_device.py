"""torch.set_default_device(elsewhere) changes nothing: what caches make says where it is.

The default device is "meta", whose tensors hold nothing: to mix one with another, or to read it, is an error.
"""

import pytest
import torch
from helpers import attached, left_padded, random_ids
from test_gpu_models import BATCHES, SPECS, made_batch

import kvcompress
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


def test_a_model_is_attached_and_probed():
    model, ids = attached(), random_ids(40)
    with torch.device("meta"):
        kvcompress.dmc.convert(model, kvcompress.dmc.DMCConfig(), anneal=False)
        loss = model(ids, labels=ids).loss
    assert loss.isfinite()
