"""Families whose attention is code of their own: what attaching puts on its modules, and takes off again.

tests/test_families.py, tests/test_dropping_families.py have them beside the others.
"""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from helpers import forward, random_ids

import kvcompress
from benchmarks.quality.parts.families_checks import TOLERANCE, difference
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import PrunedCache, attach, detach
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.own_attention import number_of, own_family

NAMES = [
    "falcon", "falcon/new", "falcon/every_kv_head", "falcon/alibi_eager", "bloom", "mpt/alibi", "gpt_neo", "xglm",
    "trocr", "mvp", "led",
]  # fmt: skip


def own_modules(model):
    return [module for module in model.modules() if own_family(module) is not None]


def held(model):
    return PrunedCache(model.config, keep=64)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_learned_is_verified(name):
    model = CONFIGURATIONS[name].model()
    with attach(model, verify=True):
        assert len(facts_of(base_model(model))) == 2
        assert {number_of(module) for module in own_modules(base_model(model))} == {0, 1}


def test_another_attention_is_noticed():
    model = CONFIGURATIONS["falcon/new"].model()
    attach(model)
    facts = facts_of(base_model(model))
    facts[1] = replace(facts[1], window=3)
    with pytest.raises(RuntimeError, match="layer 1 of FalconModel attends otherwise than the dense model"):
        attach(model, verify=True)


def test_kv_heads_that_the_family_repeats_are_held_once():
    model = CONFIGURATIONS["falcon/new"].model()
    with attach(model):
        cache = held(model)
        forward(model, random_ids(9), past_key_values=cache)
    assert cache.stored_lengths() == [[[9, 9]]] * 2


def test_detach_leaves_the_modules_as_they_were():
    model = CONFIGURATIONS["falcon"].model()
    before = [dict(vars(module)) for module in own_modules(model)]
    with attach(model):
        assert [dict(vars(module)) for module in own_modules(model)] != before
    assert [dict(vars(module)) for module in own_modules(model)] == before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_passes_without_a_cache_of_ours_take_the_implementation_that_was_there(implementation):
    model = CONFIGURATIONS["falcon/eager" if implementation == "eager" else "falcon"].model()
    with attach(model):
        assert {module.config._attn_implementation for module in own_modules(model)} == {implementation}
        assert {module.config.num_kv_heads for module in own_modules(model)} == {2}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_an_attached_model_has_modules_of_its_own(copied):
    model, ids = CONFIGURATIONS["falcon"].model(), random_ids(12)
    dense = forward(model, ids)
    attach(model)
    other = copied(model)
    with torch.no_grad():
        for module in own_modules(other):
            module.dense.weight.zero_()
    assert difference(forward(model, ids, past_key_values=held(model)), dense) <= TOLERANCE
    assert difference(forward(other, ids, past_key_values=held(other)), forward(other, ids)) <= TOLERANCE
    assert difference(forward(other, ids), dense) > 100 * TOLERANCE
    detach(other)
    assert all("forward" not in vars(module) for module in own_modules(other))


@pytest.mark.parametrize("order", ["dispatch first", "attach first"])
def test_models_dispatched_by_accelerate(order):
    accelerate = pytest.importorskip("accelerate")
    model, ids = CONFIGURATIONS["falcon"].model(), random_ids(12)
    dense = forward(model, ids)
    steps = [lambda: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True), lambda: attach(model)]
    for step in steps if order == "dispatch first" else reversed(steps):
        step()
    cache = held(model)
    assert difference(forward(model, ids, past_key_values=cache), dense) <= TOLERANCE
    assert cache.stored_lengths() == [[[12]]] * 2
    detach(model)
    assert torch.equal(forward(model, ids), dense)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(forward(model, ids), dense)


def test_a_class_of_that_name_from_elsewhere_is_none_of_these():
    class FalconAttention(torch.nn.Module):
        pass

    assert own_family(FalconAttention()) is None


def test_generate_gives_the_dense_models_tokens():
    model, ids = CONFIGURATIONS["falcon"].model(), random_ids(20, batch=2)
    given = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    dense = model.generate(ids, **given)
    with attach(model):
        assert torch.equal(kvcompress.generate(model, ids, held(model), **given), dense)
