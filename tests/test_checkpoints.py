"""Checkpoints are whole or absent; a run goes on from the newest whole one with all its state, or says what lacks."""

import json
import logging
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from test_retrofit import lines, trainer

from kvcompress.retrofit import checkpoints
from kvcompress.retrofit.run import _check_same

STATE = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors", "checkpoint.json",
         "retrofit.json")  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of 10 steps with checkpoints at 5 and 10."""
    folder = tmp_path_factory.mktemp("finished")
    trainer(folder).train()
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_checkpoint_says_what_is_in_it_and_nothing_else_is_left(folder):
    assert {path.name for path in folder.iterdir()} == {"checkpoint-5", "checkpoint-10", "metrics.jsonl"}
    for found in checkpoints.checkpoints(folder):
        marker = checkpoints.read_marker(found)
        there = {str(path.relative_to(found)): path.stat().st_size for path in found.rglob("*") if path.is_file()}
        assert marker["files"] == {name: size for name, size in there.items() if name != checkpoints.MARKER}
        assert set(STATE) < set(there) and marker["step"] == checkpoints.step_of(found)
        assert marker["run"] == {"ranks": 1, "sequences of a step": 4}
        assert len(json.loads((found / "retrofit.json").read_text())["merged"]) == 3


@pytest.mark.parametrize("run", [None, {}, {"ranks": "two"}])
def test_a_run_does_not_go_on_from_a_marker_that_does_not_name_its_ranks(folder, run):
    path = folder / "checkpoint-10" / checkpoints.MARKER
    marker = json.loads(path.read_text()) | {"run": run}
    with pytest.raises(ValueError, match=f"{path} must name the ranks of its run"):
        checkpoints.need_state(folder / "checkpoint-10", marker)


@pytest.mark.parametrize("name", STATE)
def test_a_newest_checkpoint_that_is_cut_off_is_left_out(folder, name, caplog):
    for break_it in (Path.unlink, cut):
        shutil.rmtree(folder / "checkpoint-10")
        shutil.copytree(folder / "checkpoint-5", folder / "checkpoint-10")
        break_it(folder / "checkpoint-10" / name)
        found, faults = checkpoints.newest_whole(folder)
        assert found == folder / "checkpoint-5" and len(faults) == 1
        assert faults[0].startswith(str(folder / "checkpoint-10" / name))
        with pytest.raises(ValueError, match=f"checkpoint-10/{name}"):
            trainer(folder).train(resume_from_checkpoint=str(folder / "checkpoint-10"))
    (folder / "checkpoint-5" / name).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"checkpoint to resume from.*checkpoint-10/{name}.*checkpoint-5/{name}"
    ):
        trainer(folder).train(resume_from_checkpoint=True)


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_so(folder, finished, caplog):
    cut(folder / "checkpoint-10" / "optimizer.pt")
    run = trainer(folder)
    with caplog.at_level(logging.WARNING, "kvcompress"):
        run.train(resume_from_checkpoint=True)
    assert (
        "checkpoint-10/optimizer.pt must have" in caplog.text and f"resuming from {folder}/checkpoint-5" in caplog.text
    )
    wanted = (finished / "checkpoint-10" / "model.safetensors").read_bytes()
    assert (folder / "checkpoint-10" / "model.safetensors").read_bytes() == wanted
    assert lines(folder)[:10] == lines(finished)[:10]
    assert checkpoints.newest_whole(folder) == (folder / "checkpoint-10", [])


@pytest.mark.parametrize("name", STATE)
def test_a_file_that_cannot_be_read_is_named(folder, name):
    path = folder / "checkpoint-5" / name
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(ValueError, match=f"checkpoint-5/{name} must be"):
        trainer(folder).train(resume_from_checkpoint=str(path.parent))


def test_weights_of_another_model_are_named(folder):
    found = folder / "checkpoint-5"
    state = {"model.embed_tokens.weight": torch.zeros(97, 64)}
    from safetensors.torch import save_file

    save_file(state, found / "model.safetensors")
    marker = json.loads((found / checkpoints.MARKER).read_text())
    marker["files"]["model.safetensors"] = (found / "model.safetensors").stat().st_size
    (found / checkpoints.MARKER).write_text(json.dumps(marker))
    with pytest.raises(ValueError, match=r"checkpoint-5/model.safetensors must be .* lacks"):
        trainer(folder).train(resume_from_checkpoint=str(found))


def test_state_that_was_not_saved_is_named(tmp_path):
    trainer(tmp_path, save_only_model=True).train()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-10/optimizer\.pt must be there"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_run_divided_otherwise_is_refused(folder):
    with pytest.raises(ValueError, match=r"sequences of a step must be 4, as .*checkpoint-5 was trained, got 8"):
        trainer(folder, gradient_accumulation_steps=2).train(resume_from_checkpoint=str(folder / "checkpoint-5"))


def test_a_stream_of_several_files_goes_on_with_as_many_processes(folder):
    """Each process would read files of its own, in another order than one process does."""
    found = folder / "checkpoint-5"
    marker = json.loads((found / checkpoints.MARKER).read_text())
    marker["run"]["ranks"] = 2
    (found / checkpoints.MARKER).write_text(json.dumps(marker))
    (found / "rng_state.pth").rename(found / "rng_state_0.pth")
    shutil.copy(found / "rng_state_0.pth", found / "rng_state_1.pth")
    marker["files"] = {str(x.relative_to(found)): x.stat().st_size for x in found.rglob("*") if x.is_file()}
    del marker["files"][checkpoints.MARKER]
    (found / checkpoints.MARKER).write_text(json.dumps(marker))
    run = trainer(folder)
    run.train_dataset = datasets.Dataset.from_list([{"input_ids": [1, 2]}] * 2).to_iterable_dataset(num_shards=2)
    with pytest.raises(ValueError, match=r"processes must be 2, as .*checkpoint-5 was trained, got 1: .* of the 2"):
        run.train(resume_from_checkpoint=str(found))


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(OSError, match=r"a checkpoint needs .* bytes, and 100,000 are free"):
        trainer(tmp_path).train()
    assert not checkpoints.checkpoints(tmp_path)


def test_what_fails_while_it_is_written_leaves_no_checkpoint(tmp_path, monkeypatch):
    run, save = trainer(tmp_path), torch.save

    def fails(state, path, **settings):
        if run.state.global_step == 10:
            raise OSError("No space left on device")
        return save(state, path, **settings)

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="No space left"):
        run.train()
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-5"]
    monkeypatch.setattr(torch, "save", save)
    trainer(tmp_path).train(resume_from_checkpoint=True)
    assert not (tmp_path / checkpoints.STAGING).exists()
    assert checkpoints.newest_whole(tmp_path) == (tmp_path / "checkpoint-10", [])


def sealed(out, step):
    staged = checkpoints.begin(out) / f"checkpoint-{step}"
    staged.mkdir()
    (staged / "weights").write_bytes(b"1" * step)
    return checkpoints.seal(staged, out, step=step, run={})


def steps(out):
    return [checkpoints.step_of(path) for path in checkpoints.checkpoints(out)]


def test_old_checkpoints_go_and_the_best_one_stays(tmp_path):
    newest = [sealed(tmp_path, step) for step in (2, 4, 6, 8)][-1]
    checkpoints.rotate(tmp_path, 2, newest, also=["elsewhere/checkpoint-2", None])
    assert steps(tmp_path) == [2, 6, 8]
    assert not (tmp_path / checkpoints.STAGING).exists()


def test_a_damaged_checkpoint_takes_no_whole_ones_place(tmp_path):
    for step in (10, 20):
        sealed(tmp_path, step)
    cut(tmp_path / "checkpoint-20" / "weights")
    checkpoints.rotate(tmp_path, 1, sealed(tmp_path, 15))
    assert steps(tmp_path) == [15, 20] and checkpoints.newest_whole(tmp_path)[0] == tmp_path / "checkpoint-15"
    checkpoints.rotate(tmp_path, 1, sealed(tmp_path, 20))  # in the damaged one's place
    assert steps(tmp_path) == [20] and checkpoints.newest_whole(tmp_path) == (tmp_path / "checkpoint-20", [])
    checkpoints.rotate(tmp_path, 1, sealed(tmp_path, 5))  # of a run that went back
    assert steps(tmp_path) == [5]


@pytest.mark.parametrize("keep", [None, 1])
def test_checkpoints_of_other_tools_stay(tmp_path, keep):
    for step in (3, 500):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "pytorch_model.bin").write_bytes(b"theirs")
    checkpoints.rotate(tmp_path, keep, sealed(tmp_path, 10))
    assert steps(tmp_path) == [3, 10, 500]
    assert (tmp_path / "checkpoint-500" / "pytorch_model.bin").read_bytes() == b"theirs"
    assert not (tmp_path / checkpoints.STAGING).exists()


def test_a_plan_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "run.json"
    for content in (b'{"settings": {', b"[1]", b"{}", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"run\.json must be"):
            _check_same(path, {"settings": {}, "recipe": {}, "method": {}})
    path.unlink()
    with pytest.raises(ValueError, match=r"run\.json must be"):
        _check_same(path, {"settings": {}, "recipe": {}, "method": {}})
