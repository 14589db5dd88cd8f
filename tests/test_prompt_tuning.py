"""PEFT's adapters that stand in front of the tokens: a prefix has a cache of its own, a prompt is embeddings."""

import pytest
import torch
from helpers import attach, attached, random_ids, tiny_model
from transformers import DynamicCache

import kvcompress
from kvcompress import PrunedCache, QuestCache
from kvcompress.hf.attach import is_attached

peft = pytest.importorskip("peft")
IDS = random_ids(9)
PREFIX, PROMPT = (
    kind(task_type="CAUSAL_LM", num_virtual_tokens=4) for kind in (peft.PrefixTuningConfig, peft.PromptTuningConfig)
)


def read(model, cache):
    kvcompress.prefill(model, IDS, cache)


def go_on(model, cache):
    kvcompress.generate(model, IDS, cache, max_new_tokens=2)


@pytest.mark.parametrize("call", [read, go_on])
@pytest.mark.parametrize(
    ("tuning", "message"), [(PREFIX, "by a prefix, got PEFT's PREFIX_TUNING"), (PROMPT, "by a prompt")]
)
def test_what_hands_tokens_to_the_decoder_refuses_what_stands_before_them(call, tuning, message):
    model = peft.get_peft_model(attached(), tuning).eval()
    cache = PrunedCache(model.config, keep=0.5)
    with pytest.raises(ValueError, match=f"model must not be tuned {message}"):
        call(model, cache)
    assert cache.get_seq_length() == 0 and cache.stored_lengths() == [[]] * 3


def test_a_prefix_has_a_cache_of_its_own():
    model = tiny_model()
    tuned = peft.get_peft_model(model, PREFIX).eval()
    with pytest.raises(
        ValueError, match="model must not be tuned by a prefix, got PEFT's PREFIX_TUNING: PEFT puts a cache"
    ):
        attach(tuned)
    assert not is_attached(model)
    attach(model)  # the model under it is: its generate says so
    cache = QuestCache(model.config)
    # PEFT hands its prefix over by the name that transformers had before 5.24, which then counts for nothing
    refusals = r"prefix tuning \(PEFT\) is not supported by QuestCache|position_ids must count on from the 0 tokens"
    with pytest.raises((NotImplementedError, ValueError), match=refusals):
        tuned.generate(input_ids=IDS, past_key_values=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 0
    assert tuned.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape == (1, 11)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_a_prompt_goes_through_generate():
    torch.manual_seed(0)
    model = tiny_model()
    tuned = peft.get_peft_model(model, PROMPT).eval()
    given = {"input_ids": IDS, "max_new_tokens": 6, "do_sample": False}
    dense = DynamicCache(config=model.config)
    plain = tuned.generate(**given, past_key_values=dense)
    if not torch.equal(plain, tuned.generate(**given, use_cache=False)):
        pytest.skip("this PEFT gives other text with transformers' own cache: 0.21 does not know transformers 5.24")
    with attach(tuned):
        cache = QuestCache(model.config)
        assert torch.equal(tuned.generate(**given, past_key_values=cache), plain)
    assert cache.get_seq_length() == dense.get_seq_length() == 4 + 9 + 5
