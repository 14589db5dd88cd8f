"""kvcompress.plan and `kvcompress plan` say what IterativeCache then does: its track is the witness."""

import re

import pytest
from helpers import attached, covering, random_ids
from typer.testing import CliRunner

import kvcompress
from kvcompress import IterativeCache, SnapKV, prefill
from kvcompress.cli import app
from kvcompress.ops import SCHEDULES
from kvcompress.pruners import H2O, StreamingLLM

pytestmark = pytest.mark.filterwarnings("ignore:memory_size = .* is large", "ignore:reading puts")
LAYERS = 3


def read(cache, model, tokens):
    """By iteration: the chunk, and of each layer the keys that it met in memory and the tokens that it kept."""
    prefill(model, random_ids(tokens + 1), cache)  # the last one is left to whoever goes on
    return [
        (r.chunk, [int(x.memory_size[0]) for x in r.layers], [len(x.positions[0]) for x in r.layers])
        for r in cache.track.readings[0]
    ]


def planned(plan, i):
    met = [0] * LAYERS if i == 0 else [stored[i - 1] for stored in plan.layer_stored]
    return plan.chunks[i], met, [stored[i] for stored in plan.layer_stored]


@pytest.mark.parametrize(
    ("schedule", "dynamic", "sizes", "initial", "prune", "pruner"),
    covering(
        SCHEDULES,
        [False, True],
        [(1, 64, 96), (63, 64, 96), (200, 64, 96), (333, 48, 200), (500, 64, 70), (700, 100, 40), (450, 150, 300)],
        [None, 0, 9],
        ["layer", "forward"],
        [SnapKV(), SnapKV(window=8, num_sink_tokens=60), StreamingLLM(), H2O()],
    ),
)
def test_a_cache_reads_as_planned(schedule, dynamic, sizes, initial, prune, pruner):
    tokens, chunk_size, memory_size = sizes
    initial = None if schedule == "fixed" else initial
    settings = {"chunk_size": chunk_size, "memory_size": memory_size, "schedule": schedule, "dynamic": dynamic}
    settings["initial_memory"] = initial
    model = attached(max_position_embeddings=4096)
    cache = IterativeCache(model.config, **settings, prune=prune, pruner=pruner, track=True)
    least = {} if pruner == SnapKV() else {"least_memory": max(64, pruner.num_sink_tokens + pruner.window + 32)}
    plan = kvcompress.plan(tokens, **settings, layers=LAYERS, **least)
    assert cache.plan_prompt(tokens) == plan
    found = read(cache, model, tokens)
    assert len(found) == len(plan)
    for i, (chunk, met, kept) in enumerate(found):
        if schedule == "adaptive":  # what layers retain divides it: their sum is planned
            wanted = planned(plan, i)
            assert (chunk, sum(met), sum(kept)) == (wanted[0], sum(wanted[1]), sum(wanted[2])), i
        else:
            assert (chunk, met, kept) == planned(plan, i), i


@pytest.mark.parametrize(
    ("schedule", "dynamic", "memory"), [("linear", False, 96), ("sqrt", True, 200), ("square", False, 90)]
)
def test_the_command_shows_what_is_read(schedule, dynamic, memory):
    model = attached(max_position_embeddings=4096)
    settings = {"chunk_size": 64, "memory_size": memory, "schedule": schedule, "dynamic": dynamic}
    found = read(IterativeCache(model.config, **settings, track=True), model, 400)
    given = ["plan", "--tokens", "400", "--chunk-size", "64", "--memory-size", str(memory), "--schedule", schedule]
    shown = CliRunner().invoke(app, given + ["--dynamic"] * dynamic).output
    bars = re.findall(r"^ *(\d+) +(\d+) +(\d+)  [█░#.]", shown, re.MULTILINE)
    assert [(int(met), int(chunk)) for _, met, chunk in bars] == [(met[0], chunk) for chunk, met, _ in found]


def test_the_papers_plan_is_one_of_no_least_memory():
    sizes = {"chunk_size": 64, "memory_size": 96, "schedule": "linear"}
    assert kvcompress.plan(384, **sizes, least_memory=0).memory == (16, 32, 48, 64, 80, 96)
    assert kvcompress.plan(384, **sizes).memory[0] == 64
    assert kvcompress.plan(384, **sizes | {"memory_size": 50}).memory == (50,) * 6
    with pytest.raises(ValueError, match="least_memory must be at least 0, got -1"):
        kvcompress.plan(384, **sizes, least_memory=-1)
