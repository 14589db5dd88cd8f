"""docs/scale.md: its tables are the script's, and the script's shapes are those of the models."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from benchmarks.scale import SHAPES, TABLES, Machine, Plan, Shape

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_page_are_what_the_script_prints(name):
    assert TABLES[name]() in PAGE.read_text()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_parameters_are_those_of_the_model(shape):
    same = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocabulary,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if shape.experts:
        config = Qwen3MoeConfig(
            **same, num_experts=shape.experts, num_experts_per_tok=shape.active, moe_intermediate_size=shape.inner
        )
    else:
        config = LlamaConfig(**same, intermediate_size=shape.inner)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters


def test_operations_are_those_that_a_forward_pass_counts():
    shape = Shape("tiny", 2, 64, 96, 4, 2, 16, 128)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128,
        intermediate_size=96, attn_implementation="eager",
    )  # fmt: skip
    T = 32
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        AutoModelForCausalLM.from_config(config)(torch.zeros(1, T, dtype=torch.long))
    whole = 4 * shape.layers * shape.query_heads * shape.head_dim * T * T  # eager attends to all, not half
    assert counter.get_total_flops() == 2 * shape.multiplied * T + whole
    assert shape.forward_flops(T) * T == 2 * shape.multiplied * T + whole / 2


def test_sharding_divides_what_it_says():
    shape = SHAPES[0]
    alone, shared, copies = (Plan(shape, *ranks).sent() for ranks in ((1, 1), (64, 64), (64, 8)))
    assert set(alone.values()) == {0.0} and shared["copies"] == 0
    assert shared["weights"] == pytest.approx(4 * shape.parameters * 63 / 64)
    assert copies["copies"] == pytest.approx(8 * shape.parameters / 8 * 7 / 8)
    for ranks in (8, 64, 1024):
        plan = Plan(shape, ranks, ranks)
        assert plan.ranks * plan.rows * plan.passes * plan.tokens == 1024 * 4096
        assert sum(plan.memory()[name] for name in ("weights", "gradients", "Adam")) * ranks == 16 * shape.parameters
    assert Plan(shape, 8, 8).tokens_per_second() < 8 * Machine.rate / (3 * shape.forward_flops(4096))
