"""Families whose layers are not all alike, in batches: 20 requests that begin alike, are read in parts, give their
pages up and are cancelled have the tokens of generate alone."""

import gc

import pytest
import torch
from helpers import needs_transformers, random_gates, turns
from test_serve_batching import DENSE, PRUNED, STREAMING, alone, greedy, prompts_of
from test_serve_prefixes import read, read_twice, served, tree, with_prefixes
from transformers.cache_utils import LinearAttentionLayer

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress.dmc.config import DMCConfig
from kvcompress.hf.attach import is_attached
from kvcompress.serve import batching
from kvcompress.serve.requests import Requests

CACHES = {
    "dense": DENSE,
    "streaming": STREAMING,
    "pruned": PRUNED,
    "pruned every 4": PRUNED + ",every=4",
    "quantized": "quantized,dtype=int8",
    "gated": "gated,threshold=0,window=6,num_sink_tokens=2",
    "dmc": "dmc",
}
READING = ("gemma3n_text/shared", "gemma4_text/shared", "gemma4_unified_text/shared")  # layers that read others' keys
RECURRING = ("qwen3_next", "qwen3_5_text", "falcon_h1", "granitemoehybrid", "lfm2", "lfm3")
WHOLE = ("jamba", "bamba")  # begin anew in every call of several tokens
CASES = (
    *turns(READING, [name for name in CACHES if name not in ("gated", "dmc")]),  # which such layers refuse
    *turns((*RECURRING, *WHOLE), CACHES),
)
CANCELLED = (3, 11)


def made(family, name, folder):
    """(a model, the text of its cache)"""
    model, cache = CONFIGURATIONS[family].model(), CACHES[name]
    if name == "gated":
        random_gates(model).save(folder)
        cache += f",gates={folder}"
    if name == "dmc":
        model.config.get_text_config().kvcompress = DMCConfig(shift=0.0).to_dict()
    return model, cache


@needs_transformers(5, 23)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_requests_of_a_family_get_the_tokens_of_generate_alone(family, name, monkeypatch, tmp_path):
    monkeypatch.setattr(Requests, "coming_pages", lambda self, prompts: 0)  # as if there were room
    (model, cache), prompts = made(family, name, tmp_path / "gates"), tree(22)
    news = [5 + 3 * i % 8 for i in range(len(prompts))]
    whole = "pruned" in name or family in WHOLE
    settings = {"pages": 60, "requests": 6, "batch_tokens": 112 if whole else 48, "swap": "16MiB"}
    found, metrics = served(model, cache, prompts, news, cancelled=CANCELLED, **settings)
    stay = [i for i in range(len(prompts)) if i not in CANCELLED]
    assert found == [alone(model, cache, prompts[i], news[i]) for i in stay]
    assert len({token for written in found for token in written}) > 30 and metrics["peak_running"] > 2
    if name in ("dense", "quantized"):
        assert metrics["preempted"] > 0 and metrics["swapped"] == metrics["preempted"]
    if family in WHOLE or "pruned" not in name:  # of pruned prompts some are long enough
        assert (metrics["prefix_tokens"] > 0) == (family not in WHOLE)


@needs_transformers(5, 23)
@pytest.mark.parametrize("family", ["lfm2", "gemma3n_text/shared"])
def test_a_pruned_prefix_gives_up_no_end_that_states_or_windows_have_seen(family):
    model, (prompt,) = CONFIGURATIONS[family].model(), prompts_of((50,))
    with kvcompress.attach(model):
        served = with_prefixes(model, PRUNED, 9, pages=60)
        read_twice(model, served, "r", prompt)
        served.prompts.offer("next", prompt, 50)
        assert served.prompts.seen("next") == 32
        assert served.make_free(served.free + 1) and served.prompts.seen("next") == served.kept == 0
        served.drop("next")
        token = read(model, served, "again", prompt)
    assert [token] == alone(model, PRUNED, prompt, 1)


@needs_transformers(5, 23)
def test_no_state_is_left_of_requests_that_are_over():
    """Though one is cancelled while it is read, one while it decodes, and prefixes held some."""
    model, prompts = CONFIGURATIONS["lfm2"].model(), prompts_of((60, 20, 24))
    with batching(model, DENSE, pages=2000, page_size=8, requests=4, batch_tokens=32) as serving:
        manager = model.init_continuous_batching(generation_config=greedy(1))
        short = manager.add_request(prompts[1], max_new_tokens=400, streaming=True, eos_token_id=-1)
        long = manager.add_request(prompts[0] * 6, max_new_tokens=400, streaming=True, eos_token_id=-1)
        manager.start()
        assert manager.get_result(timeout=60).request_id == short
        manager.cancel_request(long)
        manager.cancel_request(short)
        for _ in range(2):
            last = manager.add_request(prompts[2], max_new_tokens=5, eos_token_id=-1)
            while (result := manager.get_result(timeout=60)).request_id != last:
                pass
            assert result.generated_tokens == alone(model, DENSE, prompts[2], 5)
        (prefix,) = serving.served.prefixes._kept  # where the last but one ended
        assert prefix.beside_nbytes() >= prefix.cache._states_nbytes() > 0
        del prefix
        assert serving.metrics()["peak_running"] == 2
        manager.stop()
        assert serving.served.pages_in_use() == 0 and not held_states()


def held_states():
    """Recurrent states that are alive."""
    gc.collect()
    layers = [x for x in gc.get_objects() if isinstance(x, LinearAttentionLayer)]
    return [state for layer in layers for state in layer.conv_states.values() if state is not None]


@needs_transformers(5, 23)
def test_nan_fails_the_request_that_met_it_alone_where_layers_recur():
    model, prompts, cache = CONFIGURATIONS["qwen3_next"].model(), prompts_of((20, 24, 22, 18)), PRUNED + ",every=4"
    prompts = [[token if token != 96 else 5 for token in prompt] for prompt in prompts]
    written = [alone(model, cache, prompt, 8) for prompt in prompts]
    others = {x for i in (0, 2, 3) for x in (*prompts[i], *written[i])} | {*prompts[1]}
    token = next(x for x in written[1][1:5] if x not in others)
    prompts[2][7] = 96  # one meets it while it is read, one while it decodes
    with torch.no_grad():
        model.get_input_embeddings().weight[[token, 96]] = torch.nan
    found, _ = served(model, cache, prompts, (8,) * 4, pages=200, requests=4, batch_tokens=96)
    assert all(isinstance(found[i], str) and "NaN" in found[i] for i in (1, 2))
    assert [found[i] for i in (0, 3)] == [written[i] for i in (0, 3)]


@needs_transformers(5, 23)
def test_a_prompt_that_its_cache_refuses_fails_alone_where_layers_recur():
    model, prompts = CONFIGURATIONS["lfm2"].model(), prompts_of((20, 300, 22))
    cache = "pruned,pruner=replay,keep=12"  # asks queries again behind the prompt
    found, _ = served(model, cache, prompts, (4, 4, 4), pages=400, requests=4, batch_tokens=400)
    assert isinstance(found[1], str) and "asks queries again at 256 positions behind the 300" in found[1]
    assert [found[i] for i in (0, 2)] == [alone(model, cache, prompts[i], 4) for i in (0, 2)]


@needs_transformers(5, 23)
def test_a_model_that_keeps_its_states_itself_is_refused():
    model = CONFIGURATIONS["recurrent_gemma"].model()
    with pytest.raises(ValueError, match="model must hand its recurrent states to a cache to be served"):
        batching(model, DENSE, pages=100)
    assert not is_attached(model)


def test_a_module_that_is_several_layers_is_refused():
    """What it is next, only a cache says, and passes of many requests have none."""
    with pytest.raises(ValueError, match="model must have an attention module for each layer to be served"):
        batching(CONFIGURATIONS["hrm_text"].model(), DENSE, pages=600)
