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
import uuid

import pytest
import torch
from helpers import join, tiny_model

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


def run(folder, name, resume, rank, ranks, store):
    """A retrofit from start to end, or on from its newest whole checkpoint, by what the command calls: in this process,
    or with its weights cut over several, of which this is one."""
    from kvcompress.dmc.retrofit import retrofit
    from kvcompress.retrofit.run import RunSettings

    os.setsid()
    torch.set_num_threads(1)
    if ranks > 1:
        join(rank, ranks, store)
    settings = RunSettings(
        out=folder / name, model=str(folder / "source"), text=(folder / "text.txt",), length=32, rows=2 // ranks,
        accumulation=2, learning_rate=3e-3, bfloat16=False, save_steps=1, log_steps=1, shards=ranks,
    )  # fmt: skip
    with open(folder / f"{name}.log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        retrofit(RECIPE, settings, resume=resume, shift=1.0)


def losses(out):
    """Of each step, from the metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def started(folder, name, ranks):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["kvcompress.dmc.retrofit", "datasets", "peft", "transformers.models.llama.modeling_llama"]
    )
    resume, store = bool(checkpoints(folder / name)), folder / f"store-{uuid.uuid4()}"
    processes = [context.Process(target=run, args=(folder, name, resume, r, ranks, store)) for r in range(ranks)]
    for process in processes:
        process.start()
    return processes


def finished(processes):
    for process in processes:
        process.join(120)
    return all(process.exitcode == 0 for process in processes)


def kill(processes, out, writing, generator):
    """Somewhere in the next checkpoint, or at any time between two; True if the run was over before."""
    done = max([int(path.name.split("-")[1]) for path in checkpoints(out)], default=0)
    while all(process.is_alive() for process in processes):
        steps = [int(path.name.split("-")[1]) for path in checkpoints(out)]
        if writing and any((out / STAGING).glob("checkpoint-*/*")):
            time.sleep(generator.random() * 0.01)
            break
        if not writing and max(steps, default=0) > done:
            time.sleep(generator.random() * 0.3)
            break
        time.sleep(0.0002)
    for process in processes:
        process.kill()
    return finished(processes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_ends_as_one_that_is_not(source, request, ranks):
    assert finished(started(source, "whole", ranks)), (source / "whole.log").read_text()[-2000:]
    generator, kills, unfinished = random.Random(1), 0, 0
    for number in itertools.count():
        name, left = f"killed-{number}", request.config.getoption("kills") - kills
        if left <= 0:
            break
        out = source / name
        for writing in itertools.cycle((True, False)):
            processes = started(source, name, ranks)
            if left > 0 and not kill(processes, out, writing, generator):
                kills, left = kills + 1, left - 1
                unfinished += (out / STAGING).exists()
                continue
            assert finished(processes), (source / f"{name}.log").read_text()[-2000:]
            break
        assert (out / WEIGHTS).read_bytes() == (source / "whole" / WEIGHTS).read_bytes()
        assert losses(out) == losses(source / "whole")
    assert unfinished  # some were killed while a checkpoint was written
