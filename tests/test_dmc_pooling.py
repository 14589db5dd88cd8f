"""Fixed memory pooling, DMC's baseline: which tokens open an entry says their place, in training and in the cache."""

import pytest
import torch
from helpers import deciding_model, left_padded, random_ids

from kvcompress import DMCCache, attach, prefill


@pytest.fixture
def model():
    model = deciding_model(dmc={"stride": 3, "omega": "uniform"})
    attach(model)
    return model


def new_cache(model, **options):
    return DMCCache(model.config, page_size=4, track=True, **options)


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_the_cache_computes_what_training_does(model, chunk_size):
    ids, cache = random_ids(41, 2), new_cache(model, chunk_size=chunk_size)
    with torch.no_grad():
        expected = model(ids).logits
        prefill(model, ids[:, :21], cache)
        logits = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(20, 41)]
    torch.testing.assert_close(torch.cat(logits, 1), expected[:, 20:], rtol=1e-3, atol=1e-4)
    assert cache.stored_lengths() == [[[14, 14]] * 2] * 3
    places = (torch.arange(41) % 3 != 0).expand(2, 2, 41)
    assert all(torch.equal(cache.decisions(layer), places) for layer in range(3))


def test_padding_is_no_place(model):
    prompts = [random_ids(14, seed=3), random_ids(29, seed=4)]
    ids, mask = left_padded(prompts)
    cache = new_cache(model)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, attention_mask=mask).logits
        for b, prompt in enumerate(prompts):
            alone = model(prompt).logits[0]
            torch.testing.assert_close(logits[b, -prompt.shape[1] :], alone, rtol=1e-3, atol=1e-4)
    assert cache.stored_lengths() == [[[5, 5], [10, 10]]] * 3
