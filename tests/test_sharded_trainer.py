"""RetrofitTrainer with weights that are cut up over ranks: it trains as one process does, and any number of ranks goes
on from its checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate import ParallelismConfig
from helpers import in_ranks
from peft import LoraConfig, get_peft_model
from test_distributed import RECIPE, ROWS, assert_same, model_of
from test_retrofit import Rows, arguments
from torch.distributed.tensor import DTensor

import kvcompress
from kvcompress.retrofit import checkpoints, fsdp
from kvcompress.retrofit.data import collate
from kvcompress.retrofit.figures import METRICS
from kvcompress.retrofit.ranks import place_among_ranks
from kvcompress.retrofit.trainer import RetrofitTrainer


def trainer(folder, shards, model=None, **settings):
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate leaves it there for the next one of a process
    ranks = place_among_ranks()[1]
    settings = {"per_device_train_batch_size": ROWS // ranks, **settings}
    args = arguments(folder, **settings, **fsdp.sharding(shards, ranks))
    fsdp.sum_gradients_in_float32(args)
    return RetrofitTrainer(model or model_of("dmc"), args, RECIPE, train_dataset=Rows(), data_collator=collate)


def figures(folder):
    lines = [json.loads(line) for line in Path(folder, METRICS).read_text().splitlines()]
    return [[line[name] for name in ("loss", "grad_norm", "ratio_soft") if name in line] for line in lines[:-1]]


def trained(folder, shards, resume=None, **settings):
    """Figures of the steps and the weights of a run: its own, or on from another's checkpoint."""
    run = trainer(folder, shards, **settings)
    run.train(resume_from_checkpoint=resume and str(resume))
    assert isinstance(next(run.model.parameters()), DTensor) == (shards > 1)
    mesh = None if shards == 1 else tuple(next(run.model.parameters()).device_mesh.shape)
    state = run.gathered() if shards > 1 else run.model.state_dict()
    run.save_model(str(Path(folder, "whole")))
    return [x for line in figures(folder) for x in line], [x.detach() for _, x in sorted(state.items())], mesh


def several(jobs):
    return [trained(*job) for job in jobs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of the same run, with checkpoints at 5 and 7 of 7 steps, and what came of it."""
    out = tmp_path_factory.mktemp("runs")
    found = {"alone": trained(out / "alone", 1)}
    found["2 parts"] = in_ranks(2, several, [(out / "2 parts", 2)])[0][0]
    found["2 copies of 2 parts"] = in_ranks(4, several, [(out / "2 copies of 2 parts", 2)])[0][0]
    return out, found


def test_parts_and_copies_of_parts_train_as_one_process(runs):
    _, found = runs
    assert [mesh for *_, mesh in found.values()] == [None, (2,), (2, 2)]
    for name, (lines, weights, _) in found.items():
        assert_same((*torch.tensor(lines), *weights), (*torch.tensor(found["alone"][0]), *found["alone"][1]), name)


def resumed(out, came_from, name):
    """A copy of a run's folder with its first checkpoint alone."""
    folder = out / f"{came_from}, then {name}"
    shutil.copytree(out / came_from, folder)
    shutil.rmtree(folder / "checkpoint-7")
    return folder


def test_any_number_of_ranks_goes_on_from_a_checkpoint(runs):
    out, found = runs
    to = {
        name: resumed(out, *name)
        for name in (
            ("2 parts", "4 parts"), ("2 parts", "2 parts"), ("2 parts", "copies"), ("alone", "2 parts"),
            ("2 parts", "alone"), ("2 copies of 2 parts", "alone"),
        )
    }  # fmt: skip
    jobs = {name: (folder, {"4": 4, "2": 2}.get(name[1][0], 1), folder / "checkpoint-5") for name, folder in to.items()}
    ends = {name: trained(*jobs[name]) for name in jobs if name[1] == "alone"}
    on_two = [("alone", "2 parts"), ("2 parts", "copies"), ("2 parts", "2 parts")]
    ends |= dict(zip(on_two, in_ranks(2, several, [jobs[name] for name in on_two])[0], strict=True))
    ends["2 parts", "4 parts"] = in_ranks(4, several, [jobs["2 parts", "4 parts"]])[0][0]
    for name, (lines, weights, _) in ends.items():
        assert_same((*torch.tensor(lines), *weights), (*torch.tensor(found["alone"][0]), *found["alone"][1]), name)
    same, own = ends["2 parts", "2 parts"], found["2 parts"]
    assert same[0] == own[0] and all(torch.equal(x, y) for x, y in zip(same[1], own[1], strict=True))


def test_a_checkpoint_in_parts_is_a_model_and_so_is_what_a_run_leaves(runs):
    out, _ = runs
    ids = torch.arange(2, 14)[None]
    for run in ("2 parts", "2 copies of 2 parts"):
        answers = []
        for folder in ("checkpoint-7", "whole"):
            model = kvcompress.from_pretrained(out / run / folder)
            assert model.config.architectures == ["LlamaForCausalLM"] and model.dtype == torch.float32
            answers.append(model.generate(ids, max_new_tokens=8, do_sample=False))
        assert torch.equal(*answers)
        assert {path.suffix for path in (out / run / "whole").iterdir()} <= {".json", ".safetensors", ".bin"}
        names = [path.name for path in (out / run / "whole").glob("*.safetensors")]
        assert names == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", ["shard-00002-model-00001-of-00001.safetensors", "optimizer/__1_0.distcp", "optimizer/.metadata"]
)
def test_a_part_that_cannot_be_read_is_named(runs, tmp_path, name):
    folder = Path(shutil.copytree(runs[0] / "2 parts" / "checkpoint-5", tmp_path / "checkpoint-5"))
    path = folder / name
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(ValueError, match=f"checkpoint-5/{name} must be"):
        trainer(tmp_path, 1).train(resume_from_checkpoint=str(folder))


def test_parts_of_an_optimizer_that_were_not_saved_are_named(runs, tmp_path):
    folder = Path(shutil.copytree(runs[0] / "2 parts" / "checkpoint-5", tmp_path / "checkpoint-5"))
    marker = json.loads((folder / checkpoints.MARKER).read_text())
    marker["files"] = {file: size for file, size in marker["files"].items() if not file.startswith("optimizer")}
    (folder / checkpoints.MARKER).write_text(json.dumps(marker))
    with pytest.raises(FileNotFoundError, match=r"optimizer\.pt must be there"):
        trainer(tmp_path, 1).train(resume_from_checkpoint=str(folder))


def message(*given, **more):
    with pytest.raises(ValueError, match="must be") as error:
        trainer(*given, **more)
    return str(error.value)


def trained_adapter(folder, shards, resume=None):
    model = model_of("dmc")
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"]))
    run = trainer(folder, shards, model, learning_rate=1e-2)
    run.train(resume_from_checkpoint=resume and str(resume))
    return safetensors.torch.load_file(folder / "checkpoint-7" / "adapter_model.safetensors")


def in_two(folder):
    """An adapter's run and its resumption; a run in bfloat16 and what FSDP2 computes in; errors."""
    adapters = [trained_adapter(folder, 2, resume) for resume in (None, folder / "checkpoint-5")]
    run = trainer(folder, 2, bf16=True, save_strategy="no")
    run.train()
    policy = run.model.model.layers[0]._get_fsdp_state()._mp_policy
    errors = [
        message(folder, 1, parallelism_config=ParallelismConfig(cp_size=2)),
        message(folder, 1, fsdp=True, fsdp_config={"version": 1}),
    ]
    return adapters, figures(folder), (policy.param_dtype, policy.reduce_dtype, run.model.dtype), errors


def test_adapters_and_bfloat16_in_parts_and_what_is_refused(runs, tmp_path):
    alone = trained_adapter(tmp_path / "alone", 1)
    adapters, lines, dtypes, (context, flat) = in_ranks(2, in_two, tmp_path)[0]
    assert alone.keys() == adapters[0].keys() and all(x.any() for x in alone.values())
    assert_same(adapters[0].values(), alone.values(), "adapter")
    assert all(torch.equal(x, adapters[1][name]) for name, x in adapters[0].items())
    assert dtypes == (torch.bfloat16, torch.float32, torch.float32)
    found, expected = (torch.tensor([x for line in of for x in line]) for of in (lines, figures(runs[0] / "alone")))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.08, atol=0.03)
    assert context.startswith("cp_size must be 1, got 2") and flat == "fsdp_version must be 2 on CPUs, got 1"
