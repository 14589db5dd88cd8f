"""Disks that are full at any byte, and files that were cut off: what was there stays, nothing half-written does, and
the file is named."""

import contextlib
import io
import resource
import shutil
from pathlib import Path

import pytest
from helpers import attached, random_ids
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from test_retrofit import lines, trainer

import kvcompress
from kvcompress import PrunedCache, SnapKV, load_cache, prefill
from kvcompress.heads import HeadProfile
from kvcompress.plots import save as save_figure
from kvcompress.pod.plan import PoDPlan
from kvcompress.profiles import BudgetProfile
from kvcompress.retrofit import checkpoints, run
from kvcompress.support.files import write_text

MOMENTS = 8
PLAN = PoDPlan([[0, 0], [0, 1], [2, 1]], sinks=1, recent=2, query_heads=4, head_dim=16)
SHARES = ((1.0, 0.5), (3.0, 0.2), (0.8, 0.5))


@contextlib.contextmanager
def full_at(nbytes):
    """No file can be longer: the disk says so to whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def filled():
    model = attached()
    return model, prefill(model, random_ids(100), PrunedCache(model.config, SnapKV(), keep=50))


WRITERS = {
    "cache": lambda path, filled: filled[1].save(path, filled[0]),
    "plan": lambda path, filled: PLAN.save(path),
    "heads": lambda path, filled: HeadProfile(SHARES).save(path),
    "profile": lambda path, filled: BudgetProfile(SHARES, "by hand").save(path),
    "text": lambda path, filled: write_text(path, "é" * 5000),
    "figure": lambda path, filled: save_figure(Figure(), path),
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_file_is_as_it_was_where_the_disk_is_full(writer, filled, tmp_path):
    path = tmp_path / "file.svg"
    size = writer(path, filled).stat().st_size
    before = contents(tmp_path)
    for nbytes in {size * i // MOMENTS for i in range(MOMENTS)} | {size - 1}:
        with full_at(nbytes), pytest.raises(OSError, match=r"file\.svg") as error:
            writer(path, filled)
        assert error.value.filename == str(path) and contents(tmp_path) == before
        path.unlink()
        with full_at(nbytes), pytest.raises(OSError, match=r"file\.svg"):
            writer(path, filled)
        assert not list(tmp_path.iterdir())
        for name, content in before.items():
            (tmp_path / name).write_bytes(content)


READERS = {
    "cache": lambda path, filled: load_cache(path, filled[0]),
    "cache, not verified": lambda path, filled: load_cache(path, filled[0], verify=False),
    "plan": lambda path, filled: PoDPlan.load(path),
    "heads": lambda path, filled: HeadProfile.load(path),
    "profile": lambda path, filled: BudgetProfile.load(path),
}


def cuts(size):
    return {*range(0, size, 4096), *(n for n in (1, 7, 8, 9, size // 3, size - 1) if n < size)}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_was_cut_off_is_named(kind, filled, tmp_path):
    path = WRITERS[kind.partition(",")[0]](tmp_path / "file.svg", filled)
    content = path.read_bytes().rstrip(b"\n")  # without its last line's end a text is whole
    for size in cuts(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"file\.svg"):
            READERS[kind](path, filled)


# ---- training ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 10 steps, of which each fifth is kept."""
    folder = tmp_path_factory.mktemp("trained")
    made = trainer(folder)
    made.train()
    return made


def test_a_checkpoint_that_was_cut_off_is_named(trained, tmp_path):
    whole = Path(trained.args.output_dir) / "checkpoint-10"
    for file in (file for file in whole.iterdir() if file.is_file()):
        folder = Path(shutil.copytree(whole, tmp_path / "checkpoint-10"))
        content = file.read_bytes()
        for size in cuts(len(content)):
            (folder / file.name).write_bytes(content[:size])
            with pytest.raises(ValueError, match=file.name):
                checkpoints.read_marker(folder)
            assert checkpoints.newest_whole(tmp_path)[0] is None
        shutil.rmtree(folder)


def test_no_checkpoint_is_half_there_where_the_disk_is_full(trained, monkeypatch):
    out = Path(trained.args.output_dir)
    before, size = contents(out), max(map(len, contents(out / "checkpoint-10").values()))
    for nbytes in [size * i // MOMENTS for i in range(MOMENTS)] + [size - 1]:
        with full_at(nbytes), pytest.raises(OSError, match=r"checkpoint-10") as error:
            trained._save_checkpoint(trained.model, None)
        assert "checkpoint-10" in error.value.filename and contents(out) == before
    trained._save_checkpoint(trained.model, None)
    assert contents(out).keys() == before.keys()


def test_a_model_is_exported_whole_or_not_at_all(trained, tmp_path):
    model, tokenizer = trained.model, kvcompress.load_example_model()[1]

    def export():
        run.save(model, tokenizer, tmp_path, {"steps": 10}, ModelCard("---\ntags:\n- kvcompress\n---\nA model\n"))

    export()
    before = contents(tmp_path)
    size = max(map(len, before.values()))
    for nbytes in [size * i // MOMENTS for i in range(MOMENTS)] + [size - 1]:
        with full_at(nbytes), pytest.raises(OSError, match=str(tmp_path)):
            export()
        assert contents(tmp_path) == before


def test_no_line_of_metrics_is_half_there(trained):
    path, found = Path(trained.args.output_dir) / "metrics.jsonl", lines(trained.args.output_dir)
    for more in (0, 1, 7):
        with full_at(path.stat().st_size + more), pytest.raises(OSError, match=r"metrics\.jsonl"):
            trained.metrics_file.on_log(trained.args, trained.state, trained.control, logs={"loss": 1.0})
        assert lines(trained.args.output_dir) == found


def test_a_marker_or_plan_that_cannot_be_written_leaves_nothing(tmp_path):
    path = tmp_path / "run.json"
    checkpoints.write_whole(path, b"old")
    with full_at(100), pytest.raises(OSError, match=r"run\.json'$"):
        checkpoints.write_whole(path, b"x" * 200)
    assert contents(tmp_path) == {"run.json": b"old"}
