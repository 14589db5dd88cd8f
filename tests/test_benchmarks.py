"""Every benchmark runs from beginning to end at a size for tests; files that are named are there."""

import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("speed", "quality", "serving")
PROGRAMS = sorted(x.relative_to(ROOT).as_posix() for name in FOLDERS for x in ROOT.glob(f"benchmarks/{name}/*.py"))
for needs_vllm in ("serving_vllm", "workloads", "hostile"):  # make test-vllm runs them
    PROGRAMS.remove(f"benchmarks/serving/{needs_vllm}.py")
POSITIVE = ("ours", "peer", "ratio", "seconds", "nbytes", "nbytes_share")


def run(program, *arguments):
    """As a user does: 4 seconds, most of which import PyTorch and transformers."""
    return subprocess.run([sys.executable, program, *arguments], cwd=ROOT, capture_output=True, text=True)


def numbers(x):
    if isinstance(x, dict | list):
        for value in x.values() if isinstance(x, dict) else x:
            yield from numbers(value)
    elif isinstance(x, int | float):
        yield x


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_writes_rows_of_finite_numbers(program, tmp_path, monkeypatch, capfd):
    path = tmp_path / "rows.json"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program, "--tiny", "--json", str(path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "exit", lambda status=0: None if not status else pytest.fail(f"exit status {status}"))
    runpy.run_path(program, run_name="__main__")
    written = json.loads(path.read_text())
    assert written["command"] == f"python {program} --tiny --json {path}"
    rows = written["rows"]
    assert rows and len({(row["name"], row.get("tokens")) for row in rows}) == len(rows)
    for row in rows:
        assert all(map(math.isfinite, numbers(row))), row
        assert all(row[field] > 0 for field in POSITIVE if row.get(field) is not None), row
    assert len(capfd.readouterr().out.splitlines()) > 4  # a table


def test_a_missing_directory_is_found_before_anything_is_measured(tmp_path):
    tried = run("benchmarks/speed/append.py", "--tiny", "--json", tmp_path / "missing" / "rows.json")
    assert tried.returncode == 2 and not tried.stdout
    assert f"argument --json: the directory {tmp_path / 'missing'} does not exist" in " ".join(tried.stderr.split())


def test_a_file_that_is_no_script_names_one():
    tried = run("benchmarks/common.py")
    assert tried.returncode == 1 and "decode.py" in tried.stderr and "Traceback" not in tried.stderr


def test_commands_of_results_and_files_in_texts_are_there():
    for path in ROOT.glob("benchmarks/results/*.json"):
        begin, program = json.loads(path.read_text())["command"].split()[:2]
        assert (begin, program) == ("kvcompress", "eval") or ROOT.joinpath(program).is_file(), path.name
    for text in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("kvcompress/models/*/README.md")):
        for file in re.findall(r"benchmarks/[\w/]+\.(?:py|json|png)", text.read_text()):
            assert ROOT.joinpath(file).is_file(), f"{text}: {file}"
