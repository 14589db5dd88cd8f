"""quality/quality.py on a few short prompts: its tasks ask what was said, and its rows hold what they name."""

import argparse
import json

import pytest
from helpers import tiny_model

import kvcompress
from benchmarks.quality import quality
from kvcompress.models.tokenizer import byte_tokenizer

SIZES = quality.SIZES["tiny"]


def test_every_answer_is_in_its_prompt_and_where_it_is_scored():
    for task in quality.make_tasks(byte_tokenizer(), SIZES)[1:]:
        assert len({len(prompt) for prompt in task.prompts}) == 1
        for prompt, following, questions in zip(task.prompts, task.following, task.questions, strict=True):
            assert questions
            for asked in questions:
                assert bytes([*asked.asked, *asked.answer]) in bytes(prompt)
                assert following[asked.place : asked.place + 5] == list(asked.answer)


def test_rows_of_the_example_model(tmp_path):
    model, tokenizer = kvcompress.load_example_model()
    chosen = ("StreamingLLM", "SnapKV/guided")
    rows = quality.run(model, tokenizer, SIZES, only=lambda method: method.name in chosen)
    dense, whole, streaming, guided = rows
    assert dense["fact_recall"] == 1.0
    for field in ("bits_per_byte", "fact_recall", "later_recall", "pair_recall"):
        assert whole[field] == pytest.approx(dense[field], abs=1e-4)
    assert streaming["bits_per_byte_over_dense"] > 0
    assert streaming["pair_recall"] < 1.0
    assert 0.47 < streaming["nbytes_share"] <= 0.5 * (1 + quality.TOLERANCE)  # tables and all
    assert guided["pair_recall"] == 1.0
    assert "bits_per_byte" not in guided
    choice = argparse.Namespace(json=tmp_path / "rows.json", figure=None)
    quality.deliver(choice, rows, quality.show, lambda *_: None)
    assert json.loads(choice.json.read_text())["rows"] == rows


def test_a_model_that_recalls_nothing_is_measured_on_text_alone():
    model = tiny_model("qwen2", vocab_size=256)
    rows = quality.run(model, byte_tokenizer(), SIZES, only=lambda method: method.name == "H2O")
    assert [row["method"] for row in rows] == ["dense", "PrunedCache/whole", "H2O"]
    assert rows[2]["bits_per_byte"] > 1.0
    assert not any("recall" in field for row in rows for field in row)


def test_ablations_have_the_paper_s_settings_once():
    methods = list(quality.ablations(64))
    assert len({(method.pruner, method.positions) for method in methods}) == len(methods)
    assert {method.pruner.head_length for method in methods} == {0, 4, 6, 16}
    assert {method.pruner.window for method in methods} == {1, 16, 64}
    gaps = {getattr(method.positions, "gap", method.positions) for method in methods}
    assert gaps == {"original", 0, 64, 128, "auto"}


def test_the_best_rows_are_the_best_of_what_was_measured():
    def row(method, part, guided=False, **measured):
        return {"method": method, "share_kept": 1 / part, "nbytes_share": 1 / part, "guided": guided} | measured

    dense = row("dense", 1, bits_per_byte=2.0, bits_per_byte_over_dense=0.0, fact_recall=1.0, later_recall=0.9)
    rows = [
        dense,
        row("a", 4, bits_per_byte_over_dense=0.1, fact_recall=0.99, later_recall=0.9),
        row("b", 4, bits_per_byte_over_dense=0.02, fact_recall=0.5, later_recall=0.9),
        row("c", 8, bits_per_byte_over_dense=0.3, fact_recall=0.2, later_recall=0.1),
        row("d", 8, guided=True, fact_recall=1.0),
    ]
    found = {best.pop("name"): best for best in quality.best_rows(rows)}
    assert set(found) == {f"best/{asked}/{n}" for asked in ("facts", "later", "bits") for n in (4, 8)} | {"both/4"}
    assert found["best/later/4"] == {"method": "b", "recall": 0.9, "nbytes_share": 0.25}  # of equals the lower bits
    assert found["best/bits/4"] == {"method": "b", "over_dense": 0.01, "nbytes_share": 0.25}
    assert found["best/facts/8"] == {"method": "c", "recall": 0.2, "nbytes_share": 0.125}
    assert found["both/4"] == {"method": "a", "over_dense": 0.05, "facts": 0.99, "later": 0.9, "nbytes_share": 0.25}


def test_rows_measured_alone_take_their_places_in_a_file(tmp_path):
    def row(name, recall):
        return {"name": f"quality/example/{name}/keep0.5", "fact_recall_samples": recall}

    path, dense = tmp_path / "rows.json", row("dense", [1.0, 0.0])
    path.write_text(json.dumps({"rows": [dense, row("a", [0.0, 0.0]), {"name": "best/facts/2"}]}))
    assert quality.among([dense, row("b", [0.5, 0.5]), row("a", [1.0, 1.0])], path) == [
        dense, row("a", [1.0, 1.0]), row("b", [0.5, 0.5])
    ]  # fmt: skip
    with pytest.raises(ValueError, match="same model, sizes and texts"):
        quality.among([row("dense", [1.0, 1.0])], path)
