"""The benchmarks' command line; what they measure is not tested."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=BENCHMARKS.parent, capture_output=True, text=True)


def test_a_missing_directory_is_found_before_anything_is_measured(tmp_path):
    tried = run(BENCHMARKS / "append.py", "--json", tmp_path / "missing" / "rows.json")
    assert tried.returncode == 2 and not tried.stdout
    assert f"argument --json: the directory {tmp_path / 'missing'} does not exist" in " ".join(tried.stderr.split())


def test_a_file_that_is_no_script_names_one():
    tried = run(BENCHMARKS / "common.py")
    assert tried.returncode == 1 and "decode.py" in tried.stderr and "Traceback" not in tried.stderr
