"""The vLLM plugin's own arithmetic, which needs no vLLM: what is asked, facts by a config, pages and who is let in."""

from types import SimpleNamespace

import pytest
import torch
from helpers import KINDS, deciding_model, kind_model, tiny_model
from transformers import LlamaConfig, MixtralConfig

import kvcompress
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.hollow import facts_from
from kvcompress.ops.softmax import Softmax
from kvcompress.serve.vllm.engine import Engine, Row
from kvcompress.serve.vllm.settings import Settings

P = 8
PRUNED = "pruned,pruner=snapkv,window=4,keep=8"


def engine_of(model, cache, blocks=20, ratio=None):
    engine = Engine(Settings(cache, ratio), model.config, torch.float32, P)
    rows = sum(x.kv_heads for x in engine.facts.values())
    engine.open(torch.zeros(blocks * rows * engine.page_nbytes, dtype=torch.uint8), blocks)
    return engine


def step(engine, rows):
    """A pass of random queries and keys; its results as each layer gave them."""
    facts, T = engine.facts, sum(row.tokens for row in rows)
    assert engine.begin(rows)
    outs = []
    for index, found in facts.items():
        q, k, v = (torch.randn(T, n, found.size) for n in (found.query_heads, found.kv_heads, found.kv_heads))
        outs.append(torch.full_like(q, torch.nan))
        engine.attend(index, q, k, v, Softmax(found.size**-0.5), outs[-1])
    return outs


def known(**prompts):
    """Requests that share no prefixes."""
    other = {"skip_reading_prefix_cache": True, "num_output_tokens": 0, "max_tokens": 1}
    return {name: SimpleNamespace(num_tokens=n, num_prompt_tokens=n, **other) for name, n in prompts.items()}


def test_settings_are_what_is_asked_or_the_converted_models_own():
    plain, converted = tiny_model().config, deciding_model().config
    assert Settings.asked({}, plain) is None and Settings.asked({"other": 1}, plain) is None
    assert Settings.asked({}, converted) == Settings("dmc")
    assert Settings.asked({"kvcompress": {"cache": PRUNED}}, plain) == Settings(PRUNED)
    assert Settings.asked({"kvcompress": {"ratio": 4}}, converted) == Settings("dmc", 4)
    for given, message in (
        ("dmc", "takes cache, ratio, prefixes, swap, cuda_graphs, got 'dmc'"),
        ({"cahce": "dmc"}, "takes cache, ratio, prefixes, swap, cuda_graphs, got 'cahce'"),
        ({"cache": "dmc", "prefixes": -1}, "prefixes must be an integer of at least 0, got -1"),
        ({"cache": 3}, "cache must be text"),
        ({"cache": "none"}, "cache must be one of"),
        ({"cache": "dmc", "ratio": 0.5}, "ratio must be a finite number of at least 1, or None, got 0.5"),
        ({"cache": "dmc", "ratio": float("inf")}, "ratio must be a finite number of at least 1, or None, got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings.asked({"kvcompress": given}, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_facts_by_a_config_are_those_that_attach_learns(kind):
    model, x, at = kind_model(kind), None, torch.arange(5, dtype=torch.int32)[None]
    made, softmax = facts_from(model.config)
    with kvcompress.attach(model):
        learned = facts_of(base_model(model))
    assert list(learned) == list(made) == list(softmax)
    assert {name: value for name, value in vars(learned).items()} == vars(made)
    for index, found in learned.items():
        mine = made[index]
        for name in ("query_heads", "kv_heads", "head_dim", "value_dim", "window", "chunk", "reads", "readers"):
            assert getattr(found, name) == getattr(mine, name), name
        assert (found.order is None and mine.order is None) or torch.equal(found.order, mine.order)
        x = torch.randn(1, found.kv_heads, 5, found.size)
        assert torch.equal(*[y.key_rotary.rotate(x, at, 5, [5]) for y in (found, mine)])


def test_a_large_model_is_known_without_its_weights():
    """70B parameters, and experts."""
    for config in (LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=4), MixtralConfig()):
        facts, softmax = facts_from(config)
        assert len(facts) == config.num_hidden_layers and softmax[0].scale == facts[0].head_dim ** -0.5


def test_rows_of_any_order_are_one_pass_and_blocks_follow_the_pages():
    engine = engine_of(tiny_model(), "dense")
    engine.known = known(a=13, b=5)
    engine.start_step()
    assert engine.has_room("a", 0, 13) and engine.blocks_of("a") == 1
    engine.named("a", 7)
    for out in step(engine, [Row(7, 0, 13)]):
        assert not out.isnan().any()
    engine.start_step()
    assert engine.decoding == ["a"] and engine.blocks_of("a") == 2 and engine.has_room("a", 13, 14)
    assert engine.has_room("b", 0, 5)
    engine.named("b", 3)
    for out in step(engine, [Row(3, 0, 5), Row(7, 5, 1)]):
        assert not out.isnan().any()
    assert not engine.begin([Row(11, 0, 4)])  # nobody that is known
    engine.start_step()
    with pytest.raises(RuntimeError, match="request a decodes, and must have one token in every step"):
        engine.begin([Row(3, 0, 1)])
    engine.drop("a", 7)
    engine.drop("b", 3)
    engine.settle()
    assert engine.requests.pages_in_use() == 0


def test_prompts_are_read_in_parts_of_what_pages_there_are():
    engine = engine_of(tiny_model(), "dense", blocks=6)  # five blocks of eight tokens are given out
    engine.known = known(a=9, b=60, c=15)
    engine.start_step()
    assert engine.most_read([], ["a", "c"], 100) == 9 + 15
    assert engine.most_read([], ["a", "b"], 100) == 9  # b would not find all its pages in what a leaves
    assert engine.most_read([], ["b", "a"], 100) == 40  # and nobody behind one that is cut
    assert engine.most_read([], ["a", "c"], 20) == 20


def test_requests_are_let_in_by_what_they_will_take_and_never_beyond_what_is_there():
    engine = engine_of(tiny_model(), "dense", blocks=6)  # five blocks are given out
    engine.known = known(a=33, b=9, c=60)
    engine.start_step()
    assert engine.most_read([], ["c"], 100) == 40 and not engine.has_room("c", 0, 60)
    assert engine.has_room("a", 0, 33)
    engine.named("a", 1)
    step(engine, [Row(1, 0, 33)])
    engine.start_step()
    assert not engine.has_room("b", 0, 9)  # a has all five
    engine.drop("a", 1)
    assert engine.has_room("b", 0, 9)  # and gives them back at once


@pytest.mark.parametrize(
    ("cache", "ratio", "blocks"),
    [("dense", None, 8), (PRUNED, None, 1), ("dmc", None, 8), ("dmc", 1, 8), ("dmc", 4, 2)],
)
def test_blocks_that_a_prompt_is_expected_to_take(cache, ratio, blocks):
    model = deciding_model() if cache == "dmc" else tiny_model()
    assert engine_of(model, cache, ratio=ratio).blocks_for(64) == blocks


def test_what_lies_beside_pages_is_counted_in_blocks():
    assert engine_of(tiny_model(), "streaming,window_size=30,num_sink_tokens=4").blocks_for(1000) == 5


def test_pruners_that_need_the_models_weights_are_refused():
    with pytest.raises(ValueError, match="as CriticalKV does"):
        engine_of(tiny_model(), "pruned,pruner=criticalkv:tova,keep=8")
