"""benchmarks/gpu/gpu_check.py where there is no GPU: it runs tests apart from each other, and says what is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
import torch

from benchmarks.gpu import gpu_check

PROGRAM = emulated.HERE.parent.parent / "benchmarks" / "gpu" / "gpu_check.py"
PLANTED = """
import os
import pytest
import torch

pytestmark = pytest.mark.skipif("PLANTED" not in os.environ, reason="planted")
spoiled = []

def test_right():
    assert not spoiled

@pytest.mark.parametrize("what", ["a name with - a dash"])
def test_wrong(what):
    spoiled.append(1)
    assert 1 == 2

def test_spoiled_by_the_one_before():
    assert not spoiled

@pytest.mark.skipif(os.environ.get("PLANTED") != "crash", reason="planted")
def test_that_kills_its_process():
    os.abort()
"""


@pytest.fixture
def planted(tmp_path):
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED)
    return str(file)


def test_what_fails_only_after_another_test_is_told_apart(monkeypatch, planted):
    monkeypatch.setenv("PLANTED", "yes")
    found = gpu_check.check_file(planted, marker="not gpu")
    assert found["status"] == 1 and "2 failed, 1 passed, 1 skipped" in found["summary"]
    assert [name.rpartition("::")[2] for name in found["failed"]] == ["test_wrong[a name with - a dash]"]
    assert [name.rpartition("::")[2] for name in found["failed_after_others"]] == ["test_spoiled_by_the_one_before"]
    assert "assert 1 == 2" in next(iter(found["failed"].values()))


def test_a_process_that_dies_is_a_failure(monkeypatch, planted):
    monkeypatch.setenv("PLANTED", "crash")
    found = gpu_check.check_file(planted, marker="not gpu")
    assert found["status"] not in (0, 5) and "Abort" in found["output"]


def test_a_file_whose_tests_pass_passes(planted):
    assert gpu_check.check_file(planted, marker="not gpu")["status"] == 0


def test_a_command_that_takes_too_long_is_ended():
    wait = "import time; print(1, flush=True); time.sleep(999)"
    assert gpu_check.run([sys.executable, "-c", wait], 3) == (-9, "1\n\ntoo late")


def test_files_of_every_op_are_found():
    found = {Path(name).name for name in gpu_check.files_with_tests()}
    ops = ("rope", "score", "similarity", "select", "decode", "decode_shared", "attention", "pages", "dmc_gates",
           "dmc_accumulate", "dmc_append", "steps", "quest_step", "ring_step", "pod_attention", "logits",
           "real_sizes")  # fmt: skip
    assert {f"test_{op}.py" for op in ops} <= found
    assert {f"test_{op}.py" for op in ("planner", "notebooks", "gpu_check")}.isdisjoint(found)
    assert "tests/test_rope.py" in gpu_check.files_with_tests(gpu_check.SANITIZED)


def test_a_budget_that_is_over_names_what_was_not_run(monkeypatch):
    over = gpu_check.Clock(0)
    rows, found = gpu_check.measured("decode", "tiny", over)
    assert rows == [] and found == {"name": "decode", "status": None, "summary": "not run: no time was left"}
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: f"/{name}")
    assert list(gpu_check.sanitize("memcheck", ["a"], over)) == [gpu_check.not_run("memcheck/a")]


def test_a_part_is_measured_in_a_process_of_its_own():
    """Seconds, for what that imports."""
    rows, found = gpu_check.measured("score", "tiny", gpu_check.Clock(120))
    assert found["status"] == 0, found["output"]
    assert [row["name"] for row in rows] == [
        "score/bfloat16/T256/Hq32/Hkv8/D128/W64", "score/bfloat16/T96/Hq32/Hkv8/D128/W96",
    ]  # fmt: skip


@pytest.mark.parametrize("part", gpu_check.MEASURED)
def test_every_part_is_measured_without_a_gpu_in_sizes_that_mean_nothing(tmp_path, part):
    path = tmp_path / "rows.json"
    gpu_check.measure(part, path, "tiny")
    rows = json.loads(path.read_text())
    assert rows and all(row["ours"] > 0 and "failed" not in row["name"] for row in rows), rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_no_gpu_is_there():
    command = [sys.executable, str(PROGRAM)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 2
    assert "no GPU" in result.stdout and all(part in result.stdout for part in gpu_check.PARTS)


def test_files_of_ops_and_of_models_are_parts_apart():
    assert gpu_check.MODELS in gpu_check.files_with_tests()
