"""model.generate(custom_generate=FOLDER): transformers' own way to another cache."""

import functools
import shutil
from pathlib import Path

import pytest
import torch
from helpers import deciding_model, left_padded, random_ids, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

import kvcompress
from kvcompress import CacheSpec
from kvcompress.hf.attach import is_attached

FOLDER = Path(__file__).parents[1] / "examples/custom_generate"
OPTIONS = {"max_new_tokens": 6, "do_sample": False}


def custom(model, *args, **options):
    return model.generate(*args, custom_generate=str(FOLDER), trust_remote_code=True, **OPTIONS, **options)


def ours(model, text, ids, mask=None, **options):
    with kvcompress.attach(model):
        cache = CacheSpec.parse(text).make(model.config)
        return kvcompress.generate(model, ids, cache, mask, **OPTIONS, **options)


@pytest.mark.parametrize("text", [None, "streaming,window_size=24", "pruned,pruner=snapkv,window=4,keep=16"])
def test_a_folder_brings_a_compressed_cache(text):
    model = tiny_model()
    ids, mask = left_padded([random_ids(40, seed=1), random_ids(29, seed=2)])
    wanted = ours(model, text or "pruned,keep=1/4", ids, mask)
    given = {} if text is None else {"compress": text}
    assert torch.equal(custom(model, input_ids=ids, attention_mask=mask, **given), wanted)
    assert torch.equal(custom(model, ids, attention_mask=mask, **given), wanted)
    assert not is_attached(model)
    more = custom(model, ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **given)
    assert torch.equal(more.sequences, wanted) and len(more.scores) == 6


def test_a_guide_and_a_converted_model_have_their_own():
    model, ids = tiny_model(), random_ids(50)
    text = "pruned,pruner=snapkv,window=4,keep=12"
    guide = random_ids(5, seed=3)[0]
    wanted = ours(model, text, ids, guide=guide)
    assert torch.equal(custom(model, ids, compress=text, guide=guide), wanted)
    merging = deciding_model()
    assert torch.equal(custom(merging, ids), ours(merging, "dmc", ids))


def test_a_model_s_folder_may_bring_it(tmp_path):
    model, ids = tiny_model(), random_ids(40)
    model.save_pretrained(tmp_path)
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "custom_generate")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert isinstance(loaded.generate, functools.partial)
    for _ in range(2):
        assert torch.equal(loaded.generate(input_ids=ids, **OPTIONS), ours(model, "pruned,keep=1/4", ids))


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({}, ValueError, "input_ids must be given, once"),
        ({"input_ids": random_ids(9), "inputs": random_ids(9)}, ValueError, "input_ids must be given, once"),
        ({"input_ids": random_ids(9), "compress": 3}, TypeError, "compress must be a cache as text, such as 'pruned"),
        (
            {"input_ids": random_ids(9), "compress": "dense"},
            ValueError,
            "compress must be a compressed cache",
        ),
        ({"input_ids": random_ids(9), "compress": "nothing"}, ValueError, "cache must be one of"),
        (
            {"input_ids": random_ids(9), "past_key_values": DynamicCache()},
            TypeError,
            "must not be given: compress makes the cache",
        ),
    ],
)
def test_wrong_arguments_are_named(given, error, told):
    model = tiny_model()
    with pytest.raises(error, match=told):
        kvcompress.custom_generate.generate(model, **given, **OPTIONS)
    assert not is_attached(model)
