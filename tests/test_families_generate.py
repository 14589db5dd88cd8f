"""generate in every mode, on models that differ in kind, with room for everything: the dense model's tokens."""

import pytest
import torch
import transformers
from helpers import left_padded

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS

NAMES = [
    "llama", "qwen3_moe", "gemma3_text/sliding", "gemma4_text/shared", "gpt_oss/sliding", "phi3", "cohere2/sliding",
    "glm4", "qwen3_next", "deepseek_v3", "llama4_text/chunked", "falcon_h1",
]  # fmt: skip
MODES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2},
}
ROOM = 64
CACHES = {
    "pruned": lambda config: kvcompress.PrunedCache(config, keep=ROOM),
    "iterative": lambda config: kvcompress.IterativeCache(config, memory_size=ROOM, chunk_size=ROOM),
    "streaming": lambda config: kvcompress.StreamingCache(config, window_size=ROOM),
    "quest": lambda config: kvcompress.QuestCache(config, token_budget=ROOM, dense_layers=0),
}


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with torch.no_grad():
        return CONFIGURATIONS[request.param].model()


def prompts(*lengths):
    return [torch.randint(3, 97, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]


def tokens(model, ids, mask, mode, cache=None):
    given = MODES[mode] | {"max_new_tokens": 8, "attention_mask": mask}
    torch.manual_seed(5)
    if cache is None:
        return model.generate(ids, **given)
    return kvcompress.generate(model, ids, cache, **given)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_generates_what_the_dense_model_does(model, mode):
    ids = torch.cat(prompts(30, 30))
    mask = torch.ones_like(ids)
    dense = tokens(model, ids, mask, mode)
    with kvcompress.attach(model):
        for name, make in CACHES.items():
            assert torch.equal(tokens(model, ids, mask, mode, make(model.config)), dense), name


@torch.no_grad()
def test_left_padding_changes_no_token(model):
    every = prompts(30, 17)
    ids, mask = left_padded(every)
    with kvcompress.attach(model):
        for name, make in CACHES.items():
            together = tokens(model, ids, mask, "greedy", make(model.config))
            for b, alone in enumerate(every):
                ours = tokens(model, alone, torch.ones_like(alone), "greedy", make(model.config))
                assert torch.equal(together[b, 30:], ours[0, alone.shape[1] :]), name


@torch.no_grad()
def test_turns_of_a_conversation_and_forks(model):
    first, second = prompts(20, 31)
    whole = torch.cat([first, second], 1)
    dense = tokens(model, whole, torch.ones_like(whole), "greedy")
    with kvcompress.attach(model) as attached:
        for name, make in CACHES.items():
            cache = make(model.config)
            kvcompress.prefill(attached, torch.cat([first, second[:, :1]], 1), cache)
            fork = cache.fork()
            assert torch.equal(tokens(model, whole, torch.ones_like(whole), "greedy", cache), dense), name
            assert torch.equal(tokens(model, whole, torch.ones_like(whole), "greedy", fork), dense), name
