"""quality/dmc_quality.py on a few short prompts and models that nobody trained: its rows hold what they name."""

import argparse
import json
from dataclasses import replace

import pytest
import torch
from helpers import tiny_model

import kvcompress
from benchmarks.quality import dmc_quality as benchmark
from kvcompress.dmc import DMCConfig, convert
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.retrofit.gqa import convert_to_gqa

SIZES = benchmark.SIZES["tiny"]
MEASURED = ("bits_per_byte", "fact_recall", "later_recall", "pair_recall")


def example():
    return kvcompress.load_example_model()[0]


def deciding(**config):
    """The shipped model with random decisions."""
    model = example()
    convert(model, DMCConfig(**{"shift": 0.0} | config), anneal=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            rows = layer.self_attn.k_proj.weight.unflatten(0, (-1, 64))[:, -1]
            rows.copy_(torch.randn(rows.shape, generator=generator) * 0.1)
    return model


def by_name(rows):
    return {row["name"].removeprefix("dmc_quality/example/"): row for row in rows}


def test_rows_of_a_converted_model_and_of_pruners_with_its_bytes(tmp_path):
    subjects = [benchmark.Subject("mine", "DMC", deciding()),
                benchmark.Subject("heads", "GQA", convert_to_gqa(example(), 1))]  # fmt: skip
    rows = benchmark.run(example(), byte_tokenizer(), subjects, SIZES, page_size=4, pruners=("H2O", "StreamingLLM"))
    found = by_name(rows)
    assert list(found) == [
        "dense", "DMC/mine", "DMC/mine/every1", "GQA/heads", "H2O/as_mine", "H2O/as_mine/every1",
        "StreamingLLM/as_mine", "StreamingLLM/as_mine/every1",
    ]  # fmt: skip
    dense, mine, heads = found["dense"], found["DMC/mine"], found["GQA/heads"]
    assert dense["fact_recall"] == 1.0 and dense["nbytes_share"] == 1.0
    assert heads["nbytes_share"] == 0.5 and heads["kv_heads"] == 1
    assert 1.2 < mine["compression_ratio"] < 20
    ratios = mine["compression_ratio_by_head"]
    assert len(ratios) == 4 and len(ratios[0]) == 2
    kept = [1 / ratio for layer in ratios for ratio in layer]
    assert 1 / mine["compression_ratio"] == pytest.approx(sum(kept) / len(kept), rel=1e-4)
    assert mine["compression_ratio_over_length"]["lengths"][-1] == 256
    assert mine["compression_ratio_over_length"]["total"][-1] == pytest.approx(mine["compression_ratio"], rel=1e-4)
    # pages of 4 entries of 512 bytes, the newest entry's sums and the tables come on top of the entries
    assert 1 / mine["compression_ratio"] < mine["nbytes_share"] < 1 / mine["compression_ratio"] + 0.04
    for name in ("H2O", "StreamingLLM"):
        pruned = found[f"{name}/as_mine"]
        for field in MEASURED:
            assert pruned[f"{field}_nbytes_share"] == pytest.approx(mine[f"{field}_nbytes_share"], rel=0.03)
        assert found[f"{name}/as_mine/every1"]["share_removed"] == pytest.approx(
            1 - 1 / mine["compression_ratio"], 1e-4
        )
    assert found["StreamingLLM/as_mine"]["bits_per_byte_over_dense"] > 0
    # read in one call or token by token, a converted model says the same
    steps = found["DMC/mine/every1"]
    assert steps["bits_per_byte_samples"] == pytest.approx(mine["bits_per_byte_samples"][:1], rel=1e-3)
    over = steps["bits_per_byte_samples"][0] - dense["bits_per_byte_samples"][0]
    assert steps["bits_per_byte_over_dense"] == pytest.approx(over, abs=1e-5)
    for field in ("full_bits_per_byte", *MEASURED):
        assert len(mine[f"{field}_samples"]) == len(dense[f"{field}_samples"])
    assert mine["full_bits_per_byte_over_dense"] > 0

    choice = argparse.Namespace(json=tmp_path / "rows.json", figure=tmp_path / "rows.png")
    benchmark.deliver(choice, rows, benchmark.show, benchmark.draw)
    assert choice.figure.stat().st_size > 10_000
    assert json.loads(choice.json.read_text())["rows"] == rows


def test_a_model_that_never_merges_is_close_to_the_original():
    """What is lost is one coordinate of 64 alone; all its bytes are there."""
    model = example()
    convert(model, anneal=False)
    sizes = replace(SIZES, stepwise=0)
    dense, whole = benchmark.run(example(), byte_tokenizer(), [benchmark.Subject("whole", "DMC", model)], sizes,
                                 pruners=())  # fmt: skip
    assert whole["compression_ratio"] == 1.0
    assert whole["nbytes_share"] == pytest.approx(1.0, abs=0.02)
    assert set(whole["decision_over_position"]) == {0.0}
    for field in ("bits_per_byte", "full_bits_per_byte"):
        assert whole[field] == pytest.approx(dense[field], abs=0.5)


def test_other_converted_models_are_matched_where_there_is_no_dmc():
    model = deciding(stride=4, omega="uniform")
    subject = benchmark.Subject("four", "pooling", model)
    sizes = replace(SIZES, facts=1, stepwise=0)
    found = by_name(benchmark.run(example(), byte_tokenizer(), [subject], sizes, pruners=("TOVA",)))
    assert found["pooling/four"]["compression_ratio"] == 4.0
    assert found["TOVA/as_four"]["nbytes_share"] == pytest.approx(found["pooling/four"]["nbytes_share"], rel=0.05)


def test_models_of_another_vocabulary_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="vocabulary of 256, got 97 in tiny"):
        benchmark.run(example(), byte_tokenizer(), [benchmark.Subject("tiny", "DMC", tiny_model())],
                      replace(SIZES, stepwise=0))  # fmt: skip
    with pytest.raises(FileNotFoundError, match="must be folders with a config"):
        list(benchmark.subjects_of([f"DMC-C={tmp_path}"], tiny_model()))
