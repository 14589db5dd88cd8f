"""Families whose layers are not all alike, in batches: 20 requests that begin alike, are read in parts, give their
pages up and are cancelled have the tokens of generate alone."""

import pytest
from helpers import covering
from test_serve_batching import DENSE, PRUNED, STREAMING, alone
from test_serve_prefixes import served, tree

from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress.serve.requests import Requests

CACHES = {
    "dense": DENSE,
    "streaming": STREAMING,
    "pruned": PRUNED,
    "pruned every 4": PRUNED + ",every=4",
    "quantized": "quantized,dtype=int8",
}
READING = ("gemma3n_text/shared", "gemma4_text/shared", "gemma4_unified_text/shared")  # layers that read others' keys
CANCELLED = (3, 11)


@pytest.mark.parametrize(("family", "name"), covering(READING, CACHES))
def test_requests_of_a_family_get_the_tokens_of_generate_alone(family, name, monkeypatch):
    monkeypatch.setattr(Requests, "coming_pages", lambda self, prompts: 0)  # as if there were room
    model, cache, prompts = CONFIGURATIONS[family].model(), CACHES[name], tree(22)
    news = [5 + 3 * i % 8 for i in range(len(prompts))]
    settings = {"pages": 20, "requests": 6, "batch_tokens": 112 if "pruned" in name else 48}
    found, metrics = served(model, cache, prompts, news, cancelled=CANCELLED, **settings)
    stay = [i for i in range(len(prompts)) if i not in CANCELLED]
    assert found == [alone(model, cache, prompts[i], news[i]) for i in stay]
    assert metrics["peak_running"] > 2
    if name in ("dense", "quantized"):
        assert metrics["preempted"] > 0
    if "pruned" not in name:
        assert metrics["prefix_tokens"] > 0
