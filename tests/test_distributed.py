"""Several processes do what one does: losses, gradients and weights, whatever wraps the model and divides its steps."""

import json
from pathlib import Path

import pytest
import torch
from helpers import in_ranks, random_ids, tiny_model
from test_retrofit import Rows, arguments
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from kvcompress import dmc, pod
from kvcompress.dmc.neurons import neurons_of
from kvcompress.hf.attach import facts_of
from kvcompress.retrofit.data import collate
from kvcompress.retrofit.figures import METRICS
from kvcompress.retrofit.ranks import place_among_ranks
from kvcompress.retrofit.trainer import RetrofitTrainer

METHODS = ("dmc", "dms", "pod")
# 48 rows of keys: two shards cut the head in the middle
SIZES = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
ROWS = 4  # of a step
RECIPE = dmc.DMCRecipe(start_ratio=1.2, target_ratio=1.4, anneal_steps=2, ramp_steps=3, solidify_steps=2)


def model_of(method):
    model = tiny_model(**SIZES)
    if method == "pod":
        pod.convert(model, pod.PoDConfig(((0, 0, 0), (0, 1, 0), (0, 1, 0)), 2, 6))
    else:
        dmc.convert(model, dmc.DMCConfig(shift=1.0, mode=method, dms_window=4))
    return model


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def nothing(model):
    return model


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def trained(method, wrap, passes, checkpointing=False):
    """Losses (of which the ranks' mean is the step's), norms of gradients, figures and weights of a whole recipe."""
    rank, ranks = place_among_ranks()
    model = model_of(method).train()
    recipe = pod.PoDRecipe(steps=RECIPE.steps) if method == "pod" else RECIPE
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    run = wrap(model)
    optimizer = torch.optim.SGD(run.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(recipe.steps):
        recipe.begin_step(model, step, passes)
        batch = random_ids(24, ROWS, seed=step).view(passes, ranks, -1, 24)[:, rank]
        total = 0.0
        for ids in batch:
            loss = run(input_ids=ids, labels=ids).loss
            added, _ = recipe.loss(model, step)
            loss = (loss if added is None else loss + added) / passes
            loss.backward()
            total += loss.detach()
        losses.append(total)
        norms.append(whole(nn.utils.clip_grad_norm_(run.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    reached = None if method == "pod" else recipe.progress(model)["merged"]
    weights = [whole(x).detach() for x in model.parameters()]
    return torch.stack(losses), torch.stack(norms), reached, weights


def trained_in_both_ways():
    return {
        (method, name): trained(method, wrap, passes, checkpointing)
        for method in METHODS
        for name, wrap, passes, checkpointing in (
            ("DDP", DistributedDataParallel, 1, False),
            ("FSDP2", sharded, 1, False),
            ("FSDP2, accumulated, checkpointed", sharded, 2, True),
        )
    }


def assert_same(found, expected, what):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-4, msg=lambda m: f"{what}: {m}")


@pytest.fixture(scope="module")
def alone():
    """Of one process, a step in one pass."""
    return {method: trained(method, nothing, 1) for method in METHODS}


def test_two_processes_train_as_one(alone):
    ranks = in_ranks(2, trained_in_both_ways)
    for key, (_, norms, reached, weights) in ranks[0].items():
        losses = torch.stack([rank[key][0] for rank in ranks]).mean(0)
        assert_same((losses, norms, *weights), (*alone[key[0]][:2], *alone[key[0]][3]), key)
        if reached is not None:
            assert reached == pytest.approx(alone[key[0]][2], abs=1e-4) and max(reached) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_step_of_several_passes_is_that_of_one(alone, method):
    found = trained(method, nothing, ROWS)
    assert_same((*found[:2], *found[3]), (*alone[method][:2], *alone[method][3]), method)
    if method != "pod":
        assert found[2] == pytest.approx(alone[method][2], abs=1e-4)


def neurons_of_shards():
    """What FSDP2's shards hold of neurons after they were zeroed, and what is beside them; FSDP1's errors."""
    model = sharded(model_of("dmc"))
    before = {name: whole(x).clone() for name, x in model.named_parameters()}
    local = model.model.layers[0].self_attn.k_proj.weight.to_local().shape
    dmc.set_neuron_scale(model, 0.5)
    dmc.set_neuron_scale(model, 0.0)
    found = []
    for name, tensor, dim, rows in neurons_of(model.model, dmc.state(model).rows(model.model, facts_of(model.model))):
        now, was = whole(tensor), before["model." + name]
        others = torch.ones(now.shape[dim], dtype=torch.bool).index_fill_(0, rows, False)
        found.append((not now.index_select(dim, rows).any(), torch.equal(now[others], was[others])))
    errors = []
    for original in (True, False):
        model = model_of("dmc")
        FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
        try:
            dmc.set_neuron_scale(model, 0.0)
        except ValueError as error:
            errors.append((str(error), dmc.state(model).config.neuron_scale))
    return local, found, errors


def test_neurons_of_sharded_weights_are_zeroed_where_a_shard_cuts_a_head():
    for rank, (local, found, errors) in enumerate(in_ranks(4, neurons_of_shards)):
        assert local == (12, 96) and len(found) == 6
        assert found == [(True, True)] * 6, rank
        assert len(errors) == 2
        for message, scale in errors:
            assert "fully_shard" in message and "FSDP1" in message and scale == 1.0


def run_of_the_trainer(folder, passes):
    """Metrics and weights of a run, which is resumed in its middle once it is over."""
    ranks = place_among_ranks()[1]
    settings = {"per_device_train_batch_size": ROWS // passes // ranks, "gradient_accumulation_steps": passes}
    found = []
    for checkpoint in (None, f"{folder}/checkpoint-5"):
        run = RetrofitTrainer(
            model_of("dmc"), arguments(folder, **settings), RECIPE, train_dataset=Rows(), data_collator=collate
        )
        run.train(resume_from_checkpoint=checkpoint)
        lines = [json.loads(line) for line in Path(folder, METRICS).read_text().splitlines()]
        found.append(([line for line in lines if "loss" in line], [x.detach() for x in run.model.parameters()]))
    return found


def test_figures_of_the_trainer_are_of_all_ranks_and_passes(tmp_path):
    (expected, weights), _ = run_of_the_trainer(tmp_path / "alone", 1)
    for rank in in_ranks(2, run_of_the_trainer, tmp_path / "ranks", 2):
        (found, own), (resumed, again) = rank
        assert all(torch.equal(x, y) for x, y in zip(own, again, strict=True)) and found == resumed
        assert_same(own, weights, "weights")
        assert len(found) == len(expected) == RECIPE.steps
        for line, other in zip(found, expected, strict=True):
            assert line.keys() == other.keys()
            for name, value in other.items():
                torch.testing.assert_close(line[name], value, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
