"""Requests of continuous batching that cannot be answered: each fails alone, with the reason, and the others go on."""

import pytest
import torch
from helpers import deciding_model, tiny_model
from test_serve_batching import CACHES, DENSE, PRUNED, WHOLE, alone, greedy, model_of, prompts_of, served
from transformers import GenerationConfig

from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress.serve import batching


def test_a_request_that_may_write_nothing_fails_alone():
    model, prompts = tiny_model(), prompts_of((12, 20))
    config = GenerationConfig(max_length=15, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with batching(model, DENSE, pages=100):
        short, long = model.generate_batch(prompts, generation_config=config).values()
    assert len(short.generated_tokens) == 3
    assert "may write nothing behind its prompt of 20 tokens: max_new_tokens must be at least 1" in long.error


@pytest.mark.parametrize(
    ("cache", "settings", "message"),
    [
        (DENSE, {"pages": 30}, r"needs 42 pages for its prompt of 50 tokens, but there are 30"),
        (WHOLE, {"pages": 100, "batch_tokens": 51}, "prompt of 50 tokens, which is read whole: at most 48 can be"),
        (
            PRUNED,
            {"pages": 50, "batch_tokens": 51},
            "needs 54 pages for its prompt of 50 tokens, which no pass of 48 can",
        ),
        (DENSE, {"pages": 12, "page_size": 32}, "needs more than all 12 pages after 64 tokens"),
    ],
)
def test_a_request_that_cannot_fit_fails_and_the_others_go_on(cache, settings, message):
    model, prompts = tiny_model(), prompts_of((10, 50, 12))
    news = (6, 30, 6)
    found, _, in_use = served(model, cache, prompts, news, requests=4, **{"batch_tokens": 64, **settings})
    assert isinstance(found[1], str) and message in found[1]
    assert [found[i] for i in (0, 2)] == [alone(model, cache, prompts[i], 6) for i in (0, 2)]
    assert in_use == 0


def test_an_empty_prompt_fails_at_once():
    for cache, dmc in (CACHES["dense"], CACHES["dmc"]):
        found, _, _ = served(model_of(dmc), cache, [[], [5, 6]], (3, 1), pages=20, requests=2, batch_tokens=16)
        assert "has no token in its prompt" in found[0] and len(found[1]) == 1


def test_a_learned_ratio_with_fewer_pages_than_rows_is_refused_not_waited_for():
    found, _, in_use = served(deciding_model(), "dmc", prompts_of((9, 4)), (3, 3), pages=5, requests=2, batch_tokens=16)
    assert in_use == 0
    for error, tokens in zip(found, (9, 4), strict=True):
        assert f"needs more than all 5 pages for its prompt of {tokens} tokens" in error


def test_a_prompt_that_its_cache_refuses_fails_alone():
    model, prompts = tiny_model(max_position_embeddings=100), prompts_of((20, 60, 10))
    cache = "pruned,pruner=replay,keep=12"  # asks queries again behind the prompt
    found, _, in_use = served(model, cache, prompts, (4, 4, 4), pages=200, page_size=8, requests=4, batch_tokens=96)
    assert isinstance(found[1], str) and "asks queries again at 60 positions behind" in found[1]
    assert [found[i] for i in (0, 2)] == [alone(model, cache, prompts[i], 4) for i in (0, 2)]
    assert in_use == 0


def test_nan_fails_the_request_that_met_it_alone():
    model, prompts = tiny_model(), prompts_of((10, 14, 12))
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = torch.nan  # a token that only one prompt has
    prompts = [[token if token != 96 else 5 for token in prompt] for prompt in prompts]
    prompts[1][7] = 96
    for cache in (DENSE, PRUNED):
        found, _, in_use = served(model, cache, prompts, (5, 5, 5), pages=200, requests=4, batch_tokens=64)
        assert isinstance(found[1], str) and "NaN" in found[1]
        assert [found[i] for i in (0, 2)] == [alone(model, cache, prompts[i], 5) for i in (0, 2)]
        assert in_use == 0


def test_nan_of_one_that_decodes_fails_it_alone():
    """Though the cache of all who decode is one, and scored in one call."""
    model, prompts = tiny_model(), prompts_of((20, 24, 22))
    cache = "pruned,pruner=tova,keep=10,every=1"
    written = [alone(model, cache, prompt, 8) for prompt in prompts]
    others = {x for row in (*prompts, written[0], written[2]) for x in row}
    token = next(x for x in written[1][1:5] if x not in others)
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
    with batching(model, cache, pages=200, page_size=8, requests=4, batch_tokens=80) as serving:
        manager = model.init_continuous_batching(generation_config=greedy(1))
        names = [manager.add_request(prompt, max_new_tokens=8, eos_token_id=-1) for prompt in prompts]
        manager.start()
        results = {}
        while len(results) < 3:
            result = manager.get_result(timeout=60)
            results[result.request_id] = result
        assert f"request {names[1]} cannot go on: its queries, keys or values hold NaN" in results[names[1]].error
        for i in (0, 2):
            assert results[names[i]].error is None and results[names[i]].generated_tokens == written[i]
        later = manager.add_request(prompts[0], max_new_tokens=8, eos_token_id=-1)
        result = manager.get_result(timeout=60)
        assert (result.request_id, result.generated_tokens) == (later, written[0])
        manager.stop()
        assert serving.served.pages_in_use() == 0


@pytest.mark.parametrize("decodes", [False, True])
def test_a_second_request_of_the_same_id_fails_alone(decodes):
    model, prompts = tiny_model(), prompts_of((23, 9))
    with batching(model, DENSE, pages=400, page_size=8, requests=4, batch_tokens=64) as serving:
        manager = model.init_continuous_batching(generation_config=greedy(1))
        manager.add_request(prompts[0], request_id="a", max_new_tokens=60, streaming=decodes, eos_token_id=-1)
        if decodes:
            manager.start()
            assert manager.get_result(timeout=60).error is None
        manager.add_request(prompts[1], request_id="a", max_new_tokens=6, eos_token_id=-1)
        if not decodes:
            manager.start()
        found = []
        while len(found) < 2:
            result = manager.get_result(timeout=60)
            if result.error is not None or len(result.generated_tokens) == 60:
                found.append(result)
        assert manager.is_running()
        manager.stop()
        failed, done = sorted(found, key=lambda result: len(result.generated_tokens))
        assert "request_id must be of one request at a time, got 'a' again" in failed.error
        assert failed.generated_tokens == [] and failed.prompt_ids == prompts[1]
        assert done.generated_tokens == alone(model, DENSE, prompts[0], 60)
        assert serving.served.pages_in_use() == 0


def test_each_answer_to_a_prompt_that_is_refused_fails():
    model, prompts, config = tiny_model(), prompts_of((200, 9)), greedy(3)
    config.num_return_sequences = 2
    with batching(model, DENSE, pages=40, page_size=8, requests=4, batch_tokens=48):
        found = list(model.generate_batch(prompts, generation_config=config, progress_bar=False).values())
    assert len(found) == 4
    for result in found:
        if len(result.prompt_ids) == 200:
            assert "needs 150 pages for its prompt of 200 tokens, but there are 40" in result.error
        else:
            assert result.generated_tokens == alone(model, DENSE, prompts[1], 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", "has the token 5000 in its prompt, but the model knows 0 to 96"),
        ("gpt2", "may have 527 tokens, its prompt's 507 included, but the model has embeddings for 512 positions"),
    ],
)
def test_what_the_models_embeddings_do_not_have_fails_alone(name, message):
    model = tiny_model() if name == "llama" else CONFIGURATIONS[name].model()
    fine, wrong = prompts_of((9, 507))
    wrong = [5000, 3, 4] if name == "llama" else wrong
    found, _, in_use = served(model, DENSE, [fine, wrong], [20, 20], pages=4000, requests=4, batch_tokens=64)
    assert found[0] == alone(model, DENSE, fine, 20) and message in found[1] and in_use == 0
