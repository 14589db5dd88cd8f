"""Training runs: schedules, the trainer, resuming, several processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import random_ids, tiny_model
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from test_dmc_training import converted
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments, logging

import kvcompress
from kvcompress import dmc
from kvcompress.dmc import CompressionLoss, DMCRecipe
from kvcompress.retrofit.callback import RetrofitCallback
from kvcompress.retrofit.data import collate
from kvcompress.retrofit.figures import METRICS, MetricsFile
from kvcompress.retrofit.report import logged_in_words, summary
from kvcompress.retrofit.trainer import RetrofitTrainer

RECIPE = DMCRecipe(target_ratio=3.0, anneal_steps=3, ramp_steps=4, solidify_steps=3, warmup_steps=1)


# ---- schedules ----


def test_schedules_are_those_of_the_three_stages():
    recipe = DMCRecipe(target_ratio=4.0, anneal_steps=10, ramp_steps=30, solidify_steps=20, warmup_steps=4)
    assert recipe.steps == 60
    assert [recipe.neuron_scale(step) for step in (0, 5, 9, 10, 40)] == [1.0, 0.5, pytest.approx(0.1), 0.0, 0.0]
    assert [recipe.target(step) for step in (0, 9, 10, 20, 40, 59)] == [1.0, 1.0, 1.0, 2.0, 4.0, 4.0]
    assert [recipe.learning_rate(step) for step in (0, 4, 40, 50)] == [0.2, 1.0, 1.0, pytest.approx(0.55)]
    assert recipe.learning_rate(60) == pytest.approx(0.1)
    on = DMCRecipe(start_ratio=2.0, target_ratio=4.0, anneal_steps=0, ramp_steps=10, solidify_steps=0)
    assert [on.target(step) for step in (0, 5, 10)] == [2.0, 3.0, 4.0]
    assert DMCRecipe(anneal_steps=2, ramp_steps=0, solidify_steps=5).target(2) == 4.0  # immediate


def test_neurons_can_fade_before_their_steps_are_over():
    recipe = DMCRecipe(anneal_steps=10, anneal_fraction=0.8)
    model = tiny_model()
    dmc.convert(model)
    for step, scale in ((0, 1.0), (4, 0.5), (8, 1e-6), (9, 1e-6), (10, 0.0)):
        recipe.begin_step(model, step, 1)
        assert dmc.state(model).config.neuron_scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("field", "value"),
    [("target_ratio", 0.5), ("anneal_steps", -1), ("ramp_steps", 1.5), ("anneal_fraction", 0.0), ("end_rate", 2.0)],
)
def test_recipe_fields_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        DMCRecipe(**{field: value})


# ---- the trainer ----


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"input_ids": random_ids(24, seed=i)[0].tolist()}


def arguments(folder, **settings):
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", logging_steps=1, save_steps=5,
        seed=0, remove_unused_columns=False, disable_tqdm=True,
        **{"per_device_train_batch_size": 4, "learning_rate": 3e-3, **settings},
    )  # fmt: skip


def trainer(folder, recipe=RECIPE, **settings):
    given = {name: settings.pop(name) for name in ("teacher", "distillation") if name in settings}
    model = tiny_model()
    dmc.convert(model, dmc.DMCConfig(shift=1.0))
    return RetrofitTrainer(
        model, arguments(folder, **settings), recipe, train_dataset=Rows(), data_collator=collate, **given
    )


def lines(folder):
    return [json.loads(line) for line in Path(folder, METRICS).read_text().splitlines()]


def test_the_card_that_a_push_takes_says_how_the_model_is_loaded(tmp_path):
    run = trainer(tmp_path)
    run.train()
    run.create_model_card(model_name="small", tags="mine")
    card = ModelCard.load(tmp_path / "README.md")
    assert {"mine", "kvcompress", "dmc"} <= {*card.data.tags}
    assert f'model = kvcompress.from_pretrained("{tmp_path}")' in card.text and "# small" in card.text
    run.hub_model_id = "you/small"
    run.create_model_card()
    again = ModelCard.load(tmp_path / "README.md")
    assert 'from_pretrained("you/small")' in again.text and again.text.count("## Use") == 1
    assert {"mine", "kvcompress"} <= {*again.data.tags}


def test_a_run_anneals_ramps_and_logs_each_step(tmp_path):
    run = trainer(tmp_path)
    run.train()
    found = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in found] == list(range(1, 11))
    assert [line["target_ratio"] for line in found] == pytest.approx(
        [RECIPE.target(step) for step in range(10)], abs=1e-4
    )
    assert [line["learning_rate"] for line in found[4:8]] == pytest.approx(
        [3e-3 * RECIPE.learning_rate(s) for s in range(4, 8)]
    )
    assert all(len(line["ratio_layers"]) == 3 and len(line["ratio_layers"][0]) == 2 for line in found[3:])
    for line in found[3:]:
        assert line["loss"] == pytest.approx(line["lm_loss"] + line["compression_loss"], abs=2e-4)
    assert dmc.state(run.model).config.neuron_scale == 0
    assert found[-1]["ratio_soft"] > found[3]["ratio_soft"] + 0.05  # the loss pushes


class OwnTrainer(Trainer):
    """Somebody's own, with the parts of a retrofit; its loss is divided by the tokens of whole steps, by default."""

    def __init__(self, model, args, recipe, **given):
        self.retrofit = RetrofitCallback(recipe)
        args.max_steps = recipe.steps
        super().__init__(model, args, callbacks=[self.retrofit], **given)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            loss = self.retrofit.add_loss(model, loss, num_items_in_batch, self.current_gradient_accumulation_steps)
        return (loss, outputs) if return_outputs else loss


def test_any_trainer_retrofits_with_the_parts(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    recipe = DMCRecipe(target_ratio=1.5, start_ratio=1.2, anneal_steps=3, ramp_steps=7, solidify_steps=0)
    ours = trainer(tmp_path / "ours", recipe, **settings)
    ours.train()
    runs = []
    for resumed in (None, str(tmp_path / "own" / "checkpoint-5")):
        model = tiny_model()
        dmc.convert(model, dmc.DMCConfig(shift=1.0))
        own = OwnTrainer(
            model, arguments(tmp_path / "own", **settings), recipe, train_dataset=Rows(), data_collator=collate
        )
        own.train(resume_from_checkpoint=resumed)
        runs.append(list(model.parameters()))
    for x, y, again in zip(ours.model.parameters(), *runs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
        assert torch.equal(y, again)
    logged, expected = ([x for x in run.state.log_history if "loss" in x] for run in (own, ours))
    assert logged[-1]["ratio_soft"] == pytest.approx(expected[-1]["ratio_soft"], abs=1e-3)
    (tmp_path / "own" / "checkpoint-5" / "retrofit.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-5/retrofit\.json must be"):
        own.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-5"))


@pytest.mark.parametrize(
    ("logs", "line"),
    [
        ({"loss": 1.25, "grad_norm": 3, "learning_rate": 3e-4, "epoch": 0.1},
         "step 20: loss 1.25, learning rate 0.0003"),
        ({"eval_loss": 2.0, "eval_bits_per_byte": 2.885, "eval_runtime": 1.0},
         "step 20: held-out loss 2, bits per byte 2.885"),
        ({"train_runtime": 9.9, "train_loss": 1.4}, ""),
    ],
)  # fmt: skip
def test_what_is_logged_is_a_line_of_words(logs, line):
    assert logged_in_words(20, logs) == line


def test_a_run_ends_with_what_came_of_it():
    figures = {"settings": {"length": 64}, "steps": 2000, "tokens": 128000, "last": [{"loss": 1.5, "ratio_hard": 3.9}],
               "validation": [], "measured_ratio": 3.75}  # fmt: skip
    assert summary(figures, Path("run")).splitlines() == [
        "Trained on 128,000 tokens in 2,000 steps, rows of 64; the model is in run",
        "  loss in training        1.5 nats per token",
        "  tokens per cache entry  3.9",
        "  cache                   3.75 times less than dense, after a text of 64 tokens",
        'Try it: kvcompress generate "a text" --model run',
    ]
    held_out = [{"eval_loss": 2.5, "eval_bits_per_byte": 3.0}, {"eval_loss": 2.0, "eval_bits_per_byte": 2.5}]
    said = summary(figures | {"validation": held_out, "measured_ratio": 0.5}, Path("run"))
    assert "  bits per byte           3 before, 2.5 now (held-out text)" in said
    assert "2.00 times what dense takes" in said


def test_weights_that_are_tied_are_no_missing_ones(tmp_path, caplog):
    def tied():
        model = tiny_model(tie_word_embeddings=True)
        dmc.convert(model, dmc.DMCConfig(shift=1.0))
        return RetrofitTrainer(model, arguments(tmp_path), RECIPE, train_dataset=Rows(), data_collator=collate)

    whole = tied()
    whole.train()
    resumed = tied()
    logging.enable_propagation()
    try:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    finally:
        logging.disable_propagation()
    assert "missing keys" not in caplog.text
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight
    torch.testing.assert_close(resumed.model.lm_head.weight, whole.model.lm_head.weight, rtol=0, atol=0)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, accumulation):
    whole = trainer(tmp_path / "whole", gradient_accumulation_steps=accumulation)
    whole.train()
    resumed = trainer(tmp_path / "whole", gradient_accumulation_steps=accumulation)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    for (name, x), y in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, msg=name)
    assert [line["step"] for line in lines(tmp_path / "whole") if "loss" in line] == list(range(1, 11))


@pytest.mark.parametrize(
    "broken",
    [b'{"step": 7, "lo', b"[1]", b"{}", b'{"step": "7"}', b'{"step": null}', b"7", b"null", b'"step"', b"\xff\xfe"],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_broken_line_of_metrics_is_named_and_nothing_is_lost(tmp_path, broken, at):
    good = [b'{"step": 4, "loss": NaN}', b'{"step": 9}']
    good.insert(at, broken)
    path = tmp_path / METRICS
    path.write_bytes(b"\n".join(good))
    settings, state = TrainingArguments(output_dir=str(tmp_path), report_to=[]), TrainerState(global_step=5)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line {at + 1}, must be a JSON object with a step"):
        MetricsFile().on_train_begin(settings, state, TrainerControl())
    assert path.read_bytes() == b"\n".join(good)
    path.write_bytes(b"\n".join(line for line in good if line != broken) + b"\n\n")
    MetricsFile().on_train_begin(settings, state, TrainerControl())
    assert path.read_bytes() == b'{"step": 4, "loss": NaN}\n'


def test_a_resumed_adapter_stands_on_the_zeroed_neurons_of_its_base(tmp_path):
    def adapted():
        model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj", "k_proj"], r=4))
        dmc.convert(model, dmc.DMCConfig(shift=1.0))
        return RetrofitTrainer(
            model, arguments(tmp_path), RECIPE, train_dataset=Rows(), data_collator=collate
        )  # fmt: skip

    whole, resumed = adapted(), adapted()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    for (name, x), y in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        torch.testing.assert_close(x, y[1], rtol=0, atol=0, msg=name)


def test_figures_are_means_over_the_passes_that_have_them(tmp_path):
    run = trainer(tmp_path, DMCRecipe(target_ratio=3.0, anneal_steps=3, ramp_steps=1, solidify_steps=1))
    run.args.logging_steps = 5
    run.state.logging_steps = 5
    run.train()
    (line,) = [line for line in lines(tmp_path) if "loss" in line]
    assert line["neuron_scale"] == 0 and line["target_ratio"] == 3  # as they are now
    assert line["ratio_soft"] > 1 and line["ratio_hard"] >= 1
    assert all(ratio >= 1 for layer in line["ratio_layers"] for ratio in layer)


def test_accumulated_passes_are_a_mean_of_losses(tmp_path):
    recipe = DMCRecipe(target_ratio=3.0, anneal_steps=0, ramp_steps=0, solidify_steps=1)
    run = trainer(tmp_path, recipe, gradient_accumulation_steps=2)
    dmc.set_neuron_scale(run.model, 0.0)
    run.train()
    (line,) = [line for line in lines(tmp_path) if "loss" in line]
    assert line["loss"] == pytest.approx(line["lm_loss"] + line["compression_loss"], abs=1e-3)
    assert dmc.state(run.model).sequences == 8


def test_a_step_of_fewer_passes_has_the_mean_of_those(tmp_path):
    """An epoch of 3 passes is a step of 2 and a step of 1."""
    recipe = DMCRecipe(
        target_ratio=3.0, start_ratio=3.0, anneal_steps=0, ramp_steps=2, solidify_steps=0, warmup_steps=0
    )
    settings = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "optim": "sgd", "learning_rate": 0.1}
    rows, trained = torch.utils.data.Subset(Rows(), range(12)), []
    for kind in (RetrofitTrainer, OwnTrainer):
        model = tiny_model()
        dmc.convert(model, dmc.DMCConfig(shift=1.0))
        dmc.set_neuron_scale(model, 0.0)
        own = kind(model, arguments(tmp_path, **settings), recipe, train_dataset=rows, data_collator=collate)
        own.train()
        assert own.current_gradient_accumulation_steps == 1
        trained.append(list(model.parameters()))
    for x, y in zip(*trained, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"passes must be the Trainer's current_gradient_accumulation_steps.* got None"
    ):
        own.retrofit.add_loss(model, torch.tensor(0.0), 96)


def test_distillation_from_the_model_itself_costs_nothing_at_first(tmp_path):
    run = trainer(tmp_path, teacher=tiny_model(), distillation=0.25)
    run.train()
    found = [line for line in lines(tmp_path) if "loss" in line]
    assert found[0]["distillation_loss"] == pytest.approx(0, abs=1e-4) and found[-1]["distillation_loss"] > 1e-3
    assert found[0]["loss"] == pytest.approx(0.75 * found[0]["lm_loss"], abs=1e-3)
    with pytest.raises(ValueError, match="teacher and distillation"):
        trainer(tmp_path, distillation=0.5)
    with pytest.raises(ValueError, match="distillation must be between"):
        trainer(tmp_path, teacher=tiny_model(), distillation=1.5)


def test_evaluation_is_of_hard_decisions_and_of_the_language_model_alone(tmp_path):
    run = trainer(tmp_path)
    dmc.set_neuron_scale(run.model, 0.0)
    first, second = (run.evaluate(Rows())["eval_loss"] for _ in range(2))
    assert first == second


# ---- several processes ----

OBJECTIVES = [
    {"hinge": "global"},
    {"hinge": "sequence"},
    {"hinge": "layer"},
    {"hinge": "global", "equal_weight": 5.0},
    {"weight": 0.0, "equal_weight": 5.0, "equal_per": "head"},
]
WORKER = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_retrofit import OBJECTIVES, losses_and_gradients
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
found = losses_and_gradients(torch.nn.parallel.DistributedDataParallel, slice(2 * rank, 2 * rank + 2))
torch.save(found, store + f".{{rank}}")
torch.distributed.barrier()  # who leaves first must not cut off the other
torch.distributed.destroy_process_group()
"""


def losses_and_gradients(wrap, part):
    """Of each objective, for a part of a batch of 4 whose sequences differ in length; the second has no token."""
    ids = random_ids(40, 4)
    mask = torch.ones_like(ids)
    mask[0, :25], mask[1] = 0, 0
    found = []
    for objective in OBJECTIVES:
        model = converted(shift=2.0).train()
        run = wrap(model)
        logits = run(input_ids=ids[part], attention_mask=mask[part]).logits
        loss = CompressionLoss(**objective)(dmc.last_decisions(model), 4.0)
        (loss + 0.0 * logits.sum()).backward()
        found.append((loss.detach(), {name: x.grad for name, x in model.named_parameters()}))
    return found


def test_two_processes_have_the_losses_and_gradients_of_one(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=str(Path(__file__).parent)))
    store = str(tmp_path / "store")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(kvcompress.__file__).parents[1])}
    running = [subprocess.Popen([sys.executable, str(script), str(rank), store], env=environment) for rank in (0, 1)]
    assert [process.wait(120) for process in running] == [0, 0]
    alone = losses_and_gradients(lambda model: model, slice(4))
    ranks = [torch.load(f"{store}.{rank}") for rank in (0, 1)]
    for number, (objective, (expected, gradients)) in enumerate(zip(OBJECTIVES, alone, strict=True)):
        assert expected > 0.1
        for found in ranks:
            loss, grads = found[number]
            torch.testing.assert_close(loss, expected, msg=lambda m, o=objective: f"{o}: {m}")
            for name, x in gradients.items():
                torch.testing.assert_close(
                    grads[name], x, rtol=1e-3, atol=1e-6, msg=lambda m, o=objective, n=name: f"{o}, {n}: {m}"
                )
