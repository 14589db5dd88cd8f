"""IMDC with every schedule against its definition; positions, tracking, wrong settings."""

import pytest
import torch
from helpers import attached, covering, left_padded, random_ids, tiny_model
from oracle import divide_memory
from oracle import plan as plain_plan
from reading_definition import plain_reading

import kvcompress
from kvcompress import AdaKV, IterativeCache, PyramidKV, prefill
from kvcompress.planner import Adaptive
from kvcompress.positions import RotaryTables
from kvcompress.pruners import H2O, SnapKV, StreamingLLM

SNAPKV = SnapKV(window=4, num_sink_tokens=1)
STREAMING = StreamingLLM(num_sink_tokens=2)
SCHEDULES = ["fixed", "linear", "square", "sqrt", "square-sqrt", "adaptive"]


def iterative(model, **settings):
    return IterativeCache(model.config, **{"memory_size": 30, "chunk_size": 24, "pruner": SNAPKV, **settings})


def growing(schedule, initial=4):
    """A memory that grows from few tokens, as the paper has it."""
    return {} if schedule == "fixed" else {"initial_memory": initial}


def plain_sizes(plan, chunks, schedule, pruner, *, most):
    """Memory of each layer after iteration i by the definition."""
    L = len(plan.memory)

    def sizes(i, ratios):
        if schedule != "adaptive":
            return [layer[i] for layer in plan.memory]
        if i < 2:
            return [plan.mean_memory[i]] * L
        held = list(stored[-1])
        highest = [e + chunks[i] for e in held]
        if i + 1 < len(chunks) and most - chunks[i + 1] >= plan.mean_memory[i]:
            highest = [min(hi, most - chunks[i + 1]) for hi in highest]
        lowest = [min(plan.mean_memory[i], hi, pruner.num_sink_tokens + pruner.window) for hi in highest]
        return divide_memory(L * plan.mean_memory[i], ratios[i - 1], lowest, highest)

    stored = []

    def noting(i, ratios):
        chosen = sizes(i, ratios)
        held = stored[-1] if stored else [0] * L
        stored.append([min(size, e + chunks[i]) for size, e in zip(chosen, held, strict=True)])
        return chosen

    return noting


@torch.no_grad()
@pytest.mark.parametrize(
    ("prune", "pruner", "dynamic", "schedule"),
    covering(["layer", "forward"], [SNAPKV, STREAMING], [False, True], SCHEDULES),
)
def test_every_schedule_is_what_the_definition_says(schedule, dynamic, pruner, prune):
    model, ids = attached(), random_ids(151)
    settings = {"schedule": schedule, "dynamic": dynamic, "layers": 3, **growing(schedule)}
    plan = plain_plan(150, 24, 30, **settings)
    most = model.config.max_position_embeddings
    expected = plain_reading(
        model, ids, plan.chunks, plain_sizes(plan, plan.chunks, schedule, pruner, most=most), pruner
    )
    cache = IterativeCache(
        model.config, memory_size=30, chunk_size=24, pruner=pruner, schedule=schedule, dynamic=dynamic, prune=prune,
        track=True, **growing(schedule),
    )  # fmt: skip
    prefill(model, ids, cache)
    assert len(cache.track.readings[0]) == len(plan.chunks)
    for i, reading in enumerate(cache.track.readings[0]):
        assert reading.chunk == plan.chunks[i]
        assert reading.start == sum(plan.chunks[:i])
        for j, layer in enumerate(reading.layers):
            assert [places.tolist() for places in layer.positions] == expected.kept[i][j]
            torch.testing.assert_close(layer.memory_attention, expected.memory_attention[i][j], atol=1e-4, rtol=1e-4)
        ratio = cache.track.retention()[i].mean(1)
        torch.testing.assert_close(ratio, torch.tensor([float(p) for p in expected.ratios[i]]))
    logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected.logits, atol=3e-4, rtol=3e-4)


@torch.no_grad()
@pytest.mark.parametrize("pruner", [SNAPKV, STREAMING], ids=["snapkv", "streaming"])
def test_append_only_memory_is_what_the_definition_says(pruner):
    model, ids = attached(), random_ids(151)
    plan = plain_plan(150, 24, 40, schedule="linear", layers=3, initial_memory=6)
    expected = plain_reading(
        model, ids, plan.chunks, lambda i, ratios: [layer[i] for layer in plan.memory], pruner, append=True
    )
    cache = IterativeCache(
        model.config, memory_size=40, chunk_size=24, pruner=pruner, schedule="linear", append=True, track=True,
        initial_memory=6,
    )  # fmt: skip
    prefill(model, ids, cache)
    for i, reading in enumerate(cache.track.readings[0]):
        for j, layer in enumerate(reading.layers):
            assert [places.tolist() for places in layer.positions] == expected.kept[i][j]
    before = [set(places.tolist()) for places in cache.track.readings[0][3].layers[1].positions]
    after = [set(places.tolist()) for places in cache.track.readings[0][4].layers[1].positions]
    assert all(old < new for old, new in zip(before, after, strict=True))
    logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected.logits, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_positions_stay_below_memory_and_chunk(schedule, dynamic, monkeypatch):
    """What keys and queries are rotated to, in every iteration."""
    model, ids = attached(), random_ids(300)
    cache = IterativeCache(
        model.config, memory_size=32, chunk_size=20, schedule=schedule, dynamic=dynamic, pruner=SNAPKV,
        **growing(schedule),
    )  # fmt: skip
    places, rotate = [], RotaryTables.rotate

    def noting(self, x, positions, bound, lengths):
        places.append(int(positions.max()) if positions is not None else x.shape[2] - 1)
        return rotate(self, x, positions, bound, lengths)

    monkeypatch.setattr(RotaryTables, "rotate", noting)
    prefill(model, ids, cache)
    plan = (
        cache.track_plan
        if hasattr(cache, "track_plan")
        else kvcompress.plan(
            299, chunk_size=20, memory_size=32, schedule=schedule, dynamic=dynamic, layers=3, **growing(schedule)
        )
    )
    if schedule != "adaptive":
        assert max(places) == plan.largest_context - 1
    most = max(32, *(max(sizes) for sizes in plan.layer_memory)) + max(plan.chunks)
    assert max(places) < (3 if schedule == "adaptive" else 1) * most


@torch.no_grad()
def test_adaptive_over_streaming_is_linear():
    model, ids = attached(), random_ids(200)
    out = []
    for schedule in ("adaptive", "linear"):
        cache = iterative(model, pruner=STREAMING, schedule=schedule, **growing(schedule))
        prefill(model, ids, cache)
        out.append(model(ids[:, -1:], past_key_values=cache).logits)
    assert torch.equal(*out)


@pytest.mark.parametrize("schedule", [Adaptive("mean"), Adaptive("last", "softmax"), Adaptive("mean", "softmax")])
def test_adaptive_conserves_the_total(schedule):
    model, ids = attached(), random_ids(300)
    cache = iterative(model, schedule=schedule, track=True, **growing(schedule))
    prefill(model, ids, cache)
    plan = kvcompress.plan(299, chunk_size=24, memory_size=30, schedule="linear", **growing(schedule))
    for i, reading in enumerate(cache.track.readings[0][2:], 2):
        assert sum(len(layer.positions[0]) for layer in reading.layers) == 3 * plan.memory[i]
    assert len({len(layer.positions[0]) for layer in cache.track.readings[0][-1].layers}) > 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("budget", "schedule", "dynamic"),
    covering([None, AdaKV(), PyramidKV(window=4)], SCHEDULES, [False, True]),
)
def test_each_prompt_of_a_padded_batch_gives_what_it_gives_alone(schedule, dynamic, budget):
    if isinstance(budget, PyramidKV) and schedule in ("square-sqrt", "adaptive"):
        with pytest.raises(ValueError, match="divides memory over layers itself"):
            IterativeCache(tiny_model().config, budget=budget, schedule=schedule)
        return
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (140, 77, 24, 1)]
    ids, mask = left_padded(prompts)

    def next_logits(ids, mask=None):
        cache = IterativeCache(
            model.config, memory_size=30, budget=budget, chunk_size=24, pruner=SNAPKV, schedule=schedule,
            dynamic=dynamic, **growing(schedule),
        )  # fmt: skip
        prefill(model, ids, cache, mask)
        return model(ids[:, -1:], past_key_values=cache, attention_mask=mask).logits[:, -1]

    together = next_logits(ids, mask)
    for b, prompt in enumerate(prompts):
        torch.testing.assert_close(together[b], next_logits(prompt)[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("pruner", [SNAPKV, H2O()], ids=["snapkv", "h2o"])
@pytest.mark.parametrize("schedule", ["linear", "adaptive"])
def test_a_later_prompt_continues_with_the_full_memory(schedule, pruner):
    model, ids = attached(), random_ids(120)
    cache = IterativeCache(
        model.config, memory_size=30, chunk_size=24, pruner=pruner, schedule=schedule, dynamic=True, track=True,
        **growing(schedule),
    )  # fmt: skip
    prefill(model, ids, cache)
    assert sum(rows[0][0] for rows in cache.stored_lengths()) == 90
    longer = torch.cat([ids, random_ids(60, seed=4)], 1)
    prefill(model, longer, cache)
    assert sum(rows[0][0] for rows in cache.stored_lengths()) == 90
    later = cache.track.readings[0][5:]
    assert [reading.start for reading in later] == [119, 139, 159]
    assert all(sum(len(layer.positions[0]) for layer in reading.layers) == 90 for reading in later)
    for reading in later:
        for layer in reading.layers:
            for places in layer.positions:
                assert (places.diff() > 0).all()
                assert int(places.max()) < reading.start + reading.chunk


def test_tracking_knows_decoded_tokens():
    model, ids = attached(), random_ids(60)
    cache = IterativeCache(model.config, memory_size=200, chunk_size=24, track=True)
    answer = kvcompress.generate(model, ids, cache, max_new_tokens=5, do_sample=False)
    prefill(model, torch.cat([answer, random_ids(9)], 1), cache)
    for layer in cache.track.readings[0][-1].layers:
        for places in layer.positions:
            assert places.tolist() == list(range(73))


def test_prompts_up_to_dense_below_are_read_whole():
    model = attached()
    for length, stored in ((101, 100), (102, 20)):
        cache = IterativeCache(
            model.config, memory_size=20, chunk_size=16, pruner=SNAPKV, schedule="linear", dense_below=100
        )
        prefill(model, random_ids(length), cache)
        assert cache.stored_lengths() == [[[stored] * 2]] * 3


def test_pruning_after_the_forward_pass_holds_every_layers_chunk():
    """Bytes at the end of each layer's forward: of memory alone, or of memory and chunk of all layers."""
    model, ids = attached(), random_ids(200)
    most = {}
    for prune in ("layer", "forward"):
        cache = IterativeCache(model.config, memory_size=32, chunk_size=16, pruner=SNAPKV, prune=prune)
        seen = []
        handle = model.model.norm.register_forward_pre_hook(
            lambda *_, cache=cache, seen=seen: seen.append(cache.nbytes())
        )
        prefill(model, ids, cache)
        handle.remove()
        most[prune] = max(seen)
    token = 3 * 2 * 2 * 16 * 4
    assert most == {"layer": 32 * token, "forward": (32 + 16) * token}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cubic"}, "schedule must be one of fixed, linear, square, sqrt, square-sqrt, adaptive"),
        ({"initial_memory": 31, "schedule": "sqrt"}, "initial_memory must be between 0 and memory_size = 30, got 31"),
        ({"initial_memory": 5}, "initial_memory must be None with schedule='fixed', got 5"),
        ({"dynamic": "no"}, "dynamic must be True or False, got 'no'"),
        ({"memory_size": 0}, "memory_size must be at least 1, got 0"),
        ({"prune": "never"}, "prune must be one of layer, forward, got 'never'"),
        ({"dense_below": -1}, "dense_below must be at least 0, got -1"),
        ({"track": True, "every": 4}, "track follows prompts only: every must be None with it, got 4"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        iterative(tiny_model(), **settings)
    with pytest.raises(ValueError, match="ratio must be one of last, mean, got 'first'"):
        Adaptive("first")


# ---- what a review found ----


@torch.no_grad()
@pytest.mark.parametrize("pruner", [SNAPKV, STREAMING], ids=["snapkv", "streaming"])
@pytest.mark.parametrize("append", [False, True])
def test_memory_may_begin_with_nothing(pruner, append):
    model, ids = attached(), random_ids(101)
    plan = plain_plan(100, 24, 30, schedule="linear", layers=3, initial_memory=0)
    assert plan.memory[0][0] == 0
    expected = plain_reading(
        model, ids, plan.chunks, lambda i, ratios: [layer[i] for layer in plan.memory], pruner, append=append
    )
    cache = iterative(model, pruner=pruner, schedule="linear", initial_memory=0, append=append)
    prefill(model, ids, cache)
    assert iterative(model, memory_size=30, budget=PyramidKV(), initial_memory=0, schedule="linear").layers
    logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected.logits, atol=3e-4, rtol=3e-4)


@torch.no_grad()
@pytest.mark.parametrize("pruner", [StreamingLLM(4), SnapKV(window=4, num_sink_tokens=4)], ids=["streaming", "snapkv"])
def test_appended_memory_shorter_than_the_sinks_takes_none_from_a_chunk(pruner):
    model, ids = attached(), random_ids(151)
    plan = plain_plan(150, 15, 10, schedule="linear", layers=3, initial_memory=1)
    expected = plain_reading(
        model, ids, plan.chunks, lambda i, ratios: [layer[i] for layer in plan.memory], pruner, append=True
    )
    cache = iterative(
        model, memory_size=10, chunk_size=15, pruner=pruner, schedule="linear", append=True, track=True,
        initial_memory=1,
    )  # fmt: skip
    prefill(model, ids, cache)
    for reading, kept in zip(cache.track.readings[0], expected.kept, strict=True):
        assert [[places.tolist() for places in layer.positions] for layer in reading.layers] == kept


@torch.no_grad()
def test_tracking_follows_the_batch_and_tokens_that_came_without_a_reading():
    model, ids = attached(), random_ids(60)
    cache = iterative(model, memory_size=200, track=True)
    model(ids[:, :10], past_key_values=cache)
    prefill(model, ids, cache)
    assert [places.tolist() for places in cache.track.readings[0][-1].layers[2].positions] == [list(range(59))] * 2
    batch, mask = left_padded([random_ids(100), random_ids(60, seed=3)])
    cache = prefill(model, batch, iterative(model, track=True), mask)
    cache.batch_select_indices(torch.tensor([1]))
    longer = torch.cat([batch[1:], random_ids(30, seed=5)], 1)
    prefill(model, longer, cache, torch.cat([mask[1:], torch.ones(1, 30, dtype=torch.long)], 1))
    assert [reading.start for reading in cache.track.readings[0]] == [0, 24, 48, 59, 83]
    cache.batch_repeat_interleave(2)
    assert len(cache.track.readings) == 2


def test_the_warning_of_long_contexts_knows_the_largest_layer():
    model = attached(max_position_embeddings=64)
    with pytest.warns(UserWarning, match="keys in sight, more than the 64"):
        prefill(model, random_ids(200), iterative(model, memory_size=30, budget=PyramidKV(window=4), schedule="linear"))
