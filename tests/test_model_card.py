"""The card that a retrofit leaves: what was done, what came of it, how to load it; a card of one's own stays."""

import logging

import pytest
import torch
from helpers import random_ids, tiny_model
from huggingface_hub import ModelCard
from test_retrofit import RECIPE
from test_retrofit_data import TOKENIZER, run_settings

import kvcompress
from kvcompress import dmc, pod
from kvcompress.pod import PoDConfig
from kvcompress.retrofit.card import measured_ratio
from kvcompress.retrofit.run import train


def test_a_run_leaves_a_card_that_says_what_was_done(tmp_path, caplog):
    model = tiny_model(vocab_size=256)
    dmc.convert(model, dmc.DMCConfig(shift=1.0))
    settings = run_settings(tmp_path, validation=4)
    train(model, TOKENIZER, RECIPE, settings)
    card = ModelCard.load(settings.out / "README.md")
    assert card.data.to_dict()["tags"] == ["kvcompress", "dmc"] and card.data.library_name == "transformers"
    for words in (
        "- Method: DMC, mode dmc", "- Base model: example", "- Data: corpus.jsonl,weight=1.0",
        "- Trained on 640 tokens in 10 steps, rows of 32 tokens", "- Target: 3 tokens per cache entry",
        "- Reached in training: ", "- Measured: a dense cache takes ", "| | step 0 | step 10 |", "| bits per byte | ",
        'kvcompress.from_pretrained("run")', '"learning_rate": 0.003',
    ):  # fmt: skip
        assert words in card.text, (words, card.text)
    assert str(tmp_path) not in card.content
    assert kvcompress.from_pretrained(str(settings.out)).config.kvcompress["method"] == "dmc"

    again = run_settings(tmp_path, out=tmp_path / "again")
    for own, stays in (("my own words", True), (card.content, False)):
        again.out.mkdir(exist_ok=True)
        (again.out / "README.md").write_text(own)
        model = tiny_model(vocab_size=256)
        dmc.convert(model, dmc.DMCConfig(shift=1.0))
        with caplog.at_level(logging.WARNING):
            train(model, TOKENIZER, RECIPE, again)
        assert ((again.out / "README.md").read_text() == own) is stays
        assert ("is not ours and stays as it is" in caplog.text) is stays
        caplog.clear()
        for checkpoint in again.out.glob("checkpoint-*"):
            (checkpoint / "checkpoint.json").unlink()
            checkpoint.rename(again.out / f"gone-{checkpoint.name}-{stays}")


@pytest.mark.parametrize(("recent", "share"), [(63, 1 / 3), (64, 1 / 3)])
def test_the_ratio_is_of_bytes_that_are_held(recent, share):
    model = tiny_model()
    pod.convert(model, PoDConfig([[0, 0], [0, 0], [2, 2]], sinks=1, recent=recent))
    T = 4 * 64
    ratio = measured_ratio(model, random_ids(T))
    near = 64 * -(-(1 + recent) // 64)
    assert ratio == pytest.approx(1 / (1 - 0.5 * share * (T - near) / T), rel=0.1)
    assert measured_ratio(tiny_model(), random_ids(8)) is None


def test_a_model_that_merges_nothing_holds_what_a_dense_one_does():
    model = tiny_model()
    dmc.convert(model, dmc.DMCConfig(shift=100.0), anneal=False)
    assert measured_ratio(model, torch.ones(1, 128, dtype=torch.long)) == pytest.approx(1.0, rel=0.1)


def test_the_ratio_is_measured_under_a_trainers_autocast():
    """accelerate wraps the model's forward, not its decoder's."""
    model = tiny_model()
    dmc.convert(model, dmc.DMCConfig(shift=100.0), anneal=False)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    assert measured_ratio(model, torch.ones(1, 128, dtype=torch.long)) == pytest.approx(1.0, rel=0.1)
