"""A run that is killed at any moment, and goes on from what it left, ends with the weights that it would have had.

`pytest tests/test_kills.py --kills 20` kills as often as that.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import time

import pytest
import torch
from helpers import tiny_model

import kvcompress
from kvcompress import dmc
from kvcompress.retrofit.checkpoints import STAGING, checkpoints

RECIPE = dmc.DMCRecipe(target_ratio=2.0, anneal_steps=2, ramp_steps=4, solidify_steps=2)
WEIGHTS = "model.safetensors"


@pytest.fixture
def source(tmp_path):
    """A model and a text to train it on."""
    tiny_model(vocab_size=256).save_pretrained(tmp_path / "source")
    kvcompress.load_example_model()[1].save_pretrained(tmp_path / "source")
    generator = random.Random(0)
    (tmp_path / "text.txt").write_text("".join(chr(generator.randrange(32, 127)) for _ in range(4000)))
    return tmp_path


def run(folder, name, resume):
    """A retrofit from start to end, or on from its newest whole checkpoint, by what the command calls."""
    from kvcompress.dmc.retrofit import retrofit
    from kvcompress.retrofit.run import RunSettings

    os.setsid()
    torch.set_num_threads(1)
    settings = RunSettings(
        out=folder / name, model=str(folder / "source"), text=(folder / "text.txt",), length=32, rows=2, accumulation=2,
        learning_rate=3e-3, bfloat16=False, save_steps=1, log_steps=1,
    )  # fmt: skip
    with open(folder / f"{name}.log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        retrofit(RECIPE, settings, resume=resume, shift=1.0)


def losses(out):
    """Of each step, from the metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def started(folder, name):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["kvcompress.dmc.retrofit", "datasets", "peft", "transformers.models.llama.modeling_llama"]
    )
    process = context.Process(target=run, args=(folder, name, bool(checkpoints(folder / name))))
    process.start()
    return process


def kill(process, out, writing, generator):
    """Somewhere in the next checkpoint, or at any time between two; True if the run was over before."""
    done = max([int(path.name.split("-")[1]) for path in checkpoints(out)], default=0)
    while process.is_alive():
        steps = [int(path.name.split("-")[1]) for path in checkpoints(out)]
        if writing and any((out / STAGING).glob("checkpoint-*/*")):
            time.sleep(generator.random() * 0.01)
            break
        if not writing and max(steps, default=0) > done:
            time.sleep(generator.random() * 0.3)
            break
        time.sleep(0.0002)
    process.kill()
    process.join()
    return process.exitcode == 0


def test_a_run_that_is_killed_ends_as_one_that_is_not(source, request):
    whole = started(source, "whole")
    whole.join(120)
    assert whole.exitcode == 0, (source / "whole.log").read_text()[-2000:]
    generator, kills, unfinished = random.Random(1), 0, 0
    for number in itertools.count():
        name, left = f"killed-{number}", request.config.getoption("kills") - kills
        if left <= 0:
            break
        out = source / name
        for writing in itertools.cycle((True, False)):
            process = started(source, name)
            if left <= 0:
                process.join(120)
            elif not kill(process, out, writing, generator):
                kills, left = kills + 1, left - 1
                unfinished += (out / STAGING).exists()
                continue
            assert process.exitcode == 0, (source / f"{name}.log").read_text()[-2000:]
            break
        assert (out / WEIGHTS).read_bytes() == (source / "whole" / WEIGHTS).read_bytes()
        assert losses(out) == losses(source / "whole")
    assert unfinished  # some were killed while a checkpoint was written
