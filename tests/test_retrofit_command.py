"""Texts of training runs, and the command that runs them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import random_ids, tiny_model
from test_retrofit import RECIPE, lines, trainer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import kvcompress
from kvcompress import dmc
from kvcompress.cli import app
from kvcompress.models import load_example_model
from kvcompress.retrofit.data import collate, example_rows, text_windows
from kvcompress.retrofit.run import RunSettings, _check_same, load, pretrained


def test_text_is_cut_into_windows(tmp_path):
    _, tokenizer = load_example_model()
    (tmp_path / "a.txt").write_text("abcdefg\nh")
    (tmp_path / "b.txt").write_text("xyz")
    rows = text_windows(tokenizer, [tmp_path / "a.txt", tmp_path / "b.txt"], 5)
    assert [bytes(row) for row in rows["input_ids"]] == [b"abcde", b"fg\nh\0"]
    (tmp_path / "c.jsonl").write_text('{"body": "12345"}\n{"body": "6"}\n')
    rows = text_windows(tokenizer, [tmp_path / "c.jsonl"], 4, column="body")
    assert [bytes(row) for row in rows["input_ids"]] == [b"1234", b"5\x006\x00"]
    with pytest.raises(ValueError, match="column must be one of body"):
        text_windows(tokenizer, [tmp_path / "c.jsonl"], 4)
    with pytest.raises(ValueError, match=r"at least the 100 tokens of a row \(length\), got 10 in a.txt"):
        text_windows(tokenizer, [tmp_path / "a.txt"], 100)
    with pytest.raises(FileNotFoundError, match="missing"):
        text_windows(tokenizer, [tmp_path / "missing.txt"], 5)
    with pytest.raises(ValueError, match="one kind"):
        text_windows(tokenizer, [tmp_path / "a.txt", tmp_path / "c.jsonl"], 5)


def test_rows_of_the_example_hold_whole_documents():
    rows = [row for _, row in zip(range(24), example_rows(1024, 4, 0), strict=False)]
    for step in range(6):
        part = rows[4 * step : 4 * step + 4]
        batch = collate(part)
        begins = torch.tensor([row["position_ids"] for row in part]) == 0
        assert torch.equal(begins, begins[:1].expand(4, -1))  # one cut for all rows of a step
        size = 1024 // int(begins[0].sum())
        assert batch.keys() == {"input_ids", "labels"} and batch["input_ids"].shape == (4096 // size, size)
        assert torch.equal(batch["input_ids"].flatten(), torch.tensor([row["input_ids"] for row in part]).flatten())
        assert (batch["labels"][:, 0] == -100).all()
        assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])
    counts = {int((torch.tensor(row["position_ids"]) == 0).sum()) for row in rows}
    assert 1 in counts and len(counts) > 1


def test_rows_of_unequal_documents_stay_packed():
    rows = [{"input_ids": [5, 6, 7, 8], "position_ids": places} for places in ([0, 1, 0, 1], [0, 1, 2, 0])]
    batch = collate(rows)
    assert batch["input_ids"].shape == (2, 4) and batch["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
    assert collate([{"input_ids": [1, 2], "position_ids": [1, 2]}])["position_ids"].tolist() == [[1, 2]]


def test_files_that_are_no_text_are_named(tmp_path):
    tokenizer = kvcompress.load_example_model()[1]
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "other.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(ValueError, match=r"text must be readable as json, got bad\.jsonl"):
        text_windows(tokenizer, [tmp_path / "bad.jsonl"], 4)
    with pytest.raises(ValueError, match=r"column must be one of body, which other\.jsonl has, got 'text'"):
        text_windows(tokenizer, [tmp_path / "other.jsonl"], 4)


def test_a_folder_that_is_none_is_not_looked_for_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run", "run.json").write_text("{}")
    for name in ("", "./none", str(tmp_path / "none"), "run/checkpoint-5", "run/run.json", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="teacher must be a folder or a name on the Hub, got"):
            pretrained(AutoModelForCausalLM, name, argument="teacher")
    with pytest.raises(ValueError, match="model must be the name or folder of a transformers model, got 'run'"):
        pretrained(AutoModelForCausalLM, "run")


def test_a_run_of_before_methods_were_noted_goes_on(tmp_path):
    plan = {"settings": {"seed": 0}, "recipe": {"steps": 3}}
    (tmp_path / "run.json").write_text(json.dumps(plan))
    _check_same(tmp_path / "run.json", plan | {"method": {"mode": "dmc"}})
    (tmp_path / "run.json").write_text(json.dumps(plan | {"method": {"mode": "dms"}}))
    with pytest.raises(ValueError, match="mode must be 'dms' as in the run that is resumed, got 'dmc'"):
        _check_same(tmp_path / "run.json", plan | {"method": {"mode": "dmc"}})


def test_rows_longer_than_the_model_reaches(tmp_path):
    (tmp_path / "text.txt").write_text("a")
    for rope, fits in (({"rope_type": "default", "rope_theta": 1e4}, False),
                       ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, True)):  # fmt: skip
        tiny_model(vocab_size=300, max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path / "model")
        kvcompress.load_example_model()[1].save_pretrained(tmp_path / "model")
        settings = RunSettings(
            out=tmp_path / "out", model=str(tmp_path / "model"), text=(tmp_path / "text.txt",), length=65
        )
        if fits:
            assert load(settings)[0].config.max_position_embeddings == 64
        else:
            with pytest.raises(ValueError, match="length must be at most the 64 positions"):
                load(settings)


def test_what_is_logged_of_a_schedule_is_its_newest_value(tmp_path):
    run = trainer(tmp_path)
    run.args.logging_steps = run.state.logging_steps = 10
    run.train()
    (line,) = [line for line in lines(tmp_path) if "loss" in line]
    assert line["target_ratio"] == pytest.approx(RECIPE.target(9))
    assert line["loss"] == pytest.approx(line["lm_loss"] + line["compression_loss"], abs=2e-3)


def test_a_model_that_decides_is_not_annealed_again():
    model = tiny_model()
    dmc.convert(model, anneal=False)
    with pytest.raises(ValueError, match="anneal_steps must be 0 for a model that decides already, got 3"):
        replace(RECIPE, anneal_steps=3).begin_step(model, 0, passes=1)
    assert dmc.state(model).config.neuron_scale == 0
    replace(RECIPE, anneal_steps=0).begin_step(model, 0, passes=1)
    with pytest.raises(ValueError, match="passes at least 1, got 0 and 0"):
        RECIPE.begin_step(model, 0, passes=0)
    fresh = tiny_model()
    dmc.convert(fresh)
    fresh(random_ids(8))
    with pytest.raises(RuntimeError, match=r"neuron_scale is 1\.0: call begin_step before each step"):
        RECIPE.loss(fresh, 9)
    with pytest.raises(TypeError, match="config must be a DMCConfig or None, got dict"):
        dmc.convert(tiny_model(), {"mode": "dms"})


def test_the_command_trains_saves_and_goes_on(tmp_path):
    out, small = tmp_path / "run", ["--ramp-steps", "2", "--length", "128", "--rows", "2", "--float32"]
    begin = ["retrofit", "dmc", "--out", str(out), "--anneal-steps", "2", "--solidify-steps", "1", *small]
    done = CliRunner().invoke(app, begin)
    assert done.exit_code == 0, done.output
    said = done.stdout.splitlines()  # nothing but what came of it
    assert said[0] == f"Trained on 1,280 tokens in 5 steps, rows of 128; the model is in {out}"
    assert said[1].split()[0] == "cache" and said[-1] == f'Try it: kvcompress generate "a text" --model {out}'
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.use_cache is True
    before = (out / "model.safetensors").read_bytes()
    assert "method" not in json.loads((out / "training.json").read_text())
    done = CliRunner().invoke(app, [*begin, "--resume"])
    assert done.exit_code == 2 and "resume needs a run that is not over" in " ".join(done.output.split())
    assert (out / "model.safetensors").read_bytes() == before
    (tmp_path / "text.txt").write_text("a text of some words, again and again. " * 40)
    solid = [
        "retrofit", "dmc", "--model", str(out / "checkpoint-5"), "--text", str(tmp_path / "text.txt"),
        "--out", str(tmp_path / "solid"), "--target-ratio", "2", "--start-ratio", "2", "--solidify-steps", "1", *small,
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*solid, "--json"])  # a checkpoint is a model as it is
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((tmp_path / "solid" / "training.json").read_text())
    assert model.config.kvcompress["neuron_scale"] == 0 and model.config.kvcompress["shift"] == 2.0
    kvcompress.attach(model)
    assert json.loads((out / "training.json").read_text())["recipe"]["target_ratio"] == 4.0
    more = ["retrofit", "dmc", "--model", str(out), "--out", str(tmp_path / "more"), "--start-ratio", "2"]
    done = CliRunner().invoke(
        app, [*more, "--target-ratio", "3", "--solidify-steps", "0", "--distillation", "0.5", *small]
    )
    assert done.exit_code == 0, done.output
    assert [line["target_ratio"] for line in lines(tmp_path / "more") if "loss" in line] in ([], [2.0, 2.5])
    for bad, message in (
        ([], "no checkpoint of another run"),
        (["--resume", "--seed", "3", "--anneal-steps", "2", "--solidify-steps", "1", *small], "seed must be 0"),
        (["--model", str(out), "--shift", "4"], "shift must be 2.0"),
        (["--preset", "slow"], "quick, paper"),
        (["--model", "other"], "text must be given"),
        (["--model", f"{out}/checkpoint-1", "--text", str(tmp_path / "text.txt")], "model must be a folder or a name"),
        (["--model", str(out), "--length", "4096"], "length must be at most the 2,048 positions"),
        (["--resume", "--out", str(tmp_path / "none")], "checkpoint to resume"),
        (["--start-ratio", "5"], "start_ratio"),
    ):
        folder = [] if "--out" in bad else ["--out", str(tmp_path / "fresh" if "--model" in bad else out)]
        done = CliRunner().invoke(app, ["retrofit", "dmc", *folder, *bad])
        assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split()), done.output
