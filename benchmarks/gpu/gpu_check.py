"""Everything that needs a GPU, in one command: measurements, the tests of every op and of models, sanitizer.

    python benchmarks/gpu/gpu_check.py [--budget SECONDS] [--part PART ...] [--quick] [--jobs N] [--json FILE]

Parts, in this order, of which --part takes some (several times):

    decode, codes, turns, score,
    attention                   single ops: medians of CUDA events, ours and the peer in turns behind a queue
                                that is never empty; decode: buffers that rotate through at least 1 GiB
    steps                       a decoded token in the layers of each cache: kernels, launches, bytes
    tokens, prompts             whole models of random weights beside DynamicCache and StaticCache
    serving                     many requests at once beside transformers' continuous batching
    ops                         the tests that have a GPU to run on (pytest -m gpu, two devices if they are there), each
                                file in a process of its own, some at a time, and what failed once more alone: after an
                                illegal access nothing else runs in that process
    models                      the same of tests of whole models
    memcheck, racecheck, synccheck  some of the tests of ops under compute-sanitizer, if it is on PATH

Each part measures in a process of its own. Ceilings are measured in the same run: copy bandwidth (read + write) and the
rate of a large bfloat16 product. --budget: what has not begun after so many seconds is named as not run, and what runs
then is ended. Writes benchmarks/results/gpu_<name of the GPU>.json, anew after every row. The extension is built with
KVC_CUDA=1 where none with CUDA kernels is there (`make gpu-kit` makes what a machine without network needs).
Without a GPU: nothing is built or measured, unless --rehearse is given, which runs every part on the CPU in sizes that
mean nothing and writes no results. Exit status: 0 all well, 1 a failure or a part that was not run, 2 no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FIXTURES = ("backend", "cuda", "gpu", "hardware")
MODELS = "tests/test_gpu_models.py"
SANITIZED = "as_the_reference"  # tests with this in their name run under compute-sanitizer
DAY = 86400.0
MOST_ALONE = 20  # failed tests of a file that are run once more alone
MEASURED = {  # module of benchmarks.gpu.measure, function
    "decode": ("ops", "decode_rows"),
    "codes": ("ops", "code_rows"),
    "turns": ("ops", "turn_rows"),
    "score": ("ops", "score_rows"),
    "attention": ("ops", "attention_rows"),
    "steps": ("steps", "step_rows"),
    "tokens": ("models", "token_rows"),
    "prompts": ("models", "prompt_rows"),
    "serving": ("serving", "serving_rows"),
}
TESTED = ("ops", "models")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
PARTS = (*MEASURED, *TESTED, *SANITIZERS)


class Clock:
    """What is left of a budget of seconds."""

    def __init__(self, budget: float) -> None:
        self.end = time.monotonic() + budget

    def left(self) -> float:
        return self.end - time.monotonic()


def has_kernels() -> bool:
    """Whether the extension that is there has CUDA kernels; asked of a process of its own, which loads it."""
    code = "from kvcompress.apps.info import facts; print(facts(None)['cuda_kernels'])"
    return run([sys.executable, "-c", code], 300)[1].strip().endswith("True")


def build() -> None:
    environment = os.environ | {"KVC_CUDA": "1"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=environment, check=True)


def run(command: list[str], timeout: float, **environment: str) -> tuple[int, str]:
    """Exit status (-9 after the time limit) and what was printed."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, timeout=max(timeout, 1),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        return -9, (printed if isinstance(printed, str) else printed.decode(errors="replace")) + "\ntoo late"
    return done.returncode, done.stdout


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", *arguments]


def files_with_tests(name: str = "") -> list[str]:
    """Files with a test that has a GPU to run on, by the fixtures of tests/conftest.py. name: that its name holds."""
    pattern = re.compile(rf"^def test_\w*{name}\w*\([^)]*\b(?:{'|'.join(FIXTURES)})\b", re.MULTILINE)
    files = sorted(ROOT.glob("tests/test_*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files if pattern.search(file.read_text())]


def failed_tests(printed: str) -> list[str]:
    """Names in the summary of pytest -rfE."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+?::[^[\s]+(?:\[.*?\])?)(?= - |$)", printed, flags=re.MULTILINE)


def check_file(name: str, *, marker: str = "gpu", timeout: float = 1800) -> dict:
    """What came of the tests of a file. failed: alone too; failed_after_others: not alone."""
    clock = Clock(timeout)
    status, printed = run(pytest("-m", marker, name), timeout)
    found: dict = {"name": name, "status": status, "summary": printed.strip().rpartition("\n")[2]}
    if status in (0, 5):
        return found
    failed = failed_tests(printed)
    retried = [test for test in failed[:MOST_ALONE] if len(failed) <= MOST_ALONE]
    alone = {test: run(pytest(test), min(600, clock.left())) for test in retried if clock.left() > 5}
    found["failed"] = {test: text[-4000:] for test, (code, text) in alone.items() if code}
    found["failed_after_others"] = [test for test, (code, _) in alone.items() if not code]
    found["not_run_alone"] = [test for test in failed if test not in alone]
    found["output"] = printed[-12000:]
    return found


def sanitize(check: str, files: list[str], clock: Clock) -> Iterator[dict]:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield {"name": check, "status": None, "summary": "compute-sanitizer is not on PATH"}
        return
    for name in files:
        if clock.left() < 5:
            yield not_run(f"{check}/{name}")
            continue
        command = [tool, "--tool", check, "--error-exitcode", "9", *pytest("-m", "gpu", "-k", SANITIZED, name)]
        status, printed = run(command, clock.left(), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        found = {"name": f"{check}/{name}", "status": status, "summary": printed.strip().rpartition("\n")[2]}
        yield found if status == 0 else found | {"output": printed[-4000:]}


def not_run(name: str) -> dict:
    return {"name": name, "status": None, "summary": "not run: no time was left"}


def measure(part: str, path: Path, size: str) -> None:
    """Writes the rows of a part to the file, one more each time."""
    module, function = MEASURED[part]
    rows = []
    for row in getattr(importlib.import_module(f"benchmarks.gpu.measure.{module}"), function)(size):
        rows.append(asdict(row))
        path.write_text(json.dumps(rows))
        print(f"{row.name} {row.ours * 1e6:.1f} us, {row.ratio or 0:.2f}x; {row.note}", flush=True)


def measured(part: str, size: str, clock: Clock) -> tuple[list[dict], dict]:
    """Rows of a part, measured in a process of its own, as far as it came; and how it ended."""
    if clock.left() < 5:
        return [], not_run(part)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--measure", part, "--size", size, "--json", str(path)]
        status, printed = run(command, clock.left())
        rows = json.loads(path.read_text()) if path.exists() else []
    found = {"name": part, "status": status, "summary": f"{len(rows)} rows"}
    return rows, found if status == 0 else found | {"output": printed[-4000:]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this, and others that are named so")
    parser.add_argument("--budget", type=float, default=DAY, help="seconds after which it ends, if not a day")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="files at a time")
    parser.add_argument("--rehearse", action="store_true", help="every part on the CPU, in sizes that mean nothing")
    parser.add_argument("--measure", choices=MEASURED, help=argparse.SUPPRESS)  # a part, in this process
    parser.add_argument("--size", default="full", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    choice = arguments()
    sys.path.insert(0, str(ROOT))
    if choice.measure:
        measure(choice.measure, choice.json, choice.size)
        return 0
    parts = [part for part in PARTS if choice.part is None or part in choice.part]
    rehearses = choice.rehearse and not torch.cuda.is_available()
    if not (torch.cuda.is_available() or rehearses):
        print(f"gpu_check: no GPU: torch {torch.__version__} sees no CUDA device. Nothing was built or run.")
        print(f"Parts: {', '.join(parts)}. --rehearse runs them on the CPU.")
        return 2
    clock = Clock(choice.budget)
    from benchmarks.common import write_json

    name = "the CPU, in sizes that mean nothing" if rehearses else torch.cuda.get_device_name()
    path = choice.json or RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
    writes = not rehearses or choice.json is not None
    print(f"on {name}, torch {torch.__version__}", flush=True)
    if not rehearses and not has_kernels():
        print("building", flush=True)
        build()
    checks: list[dict] = []
    rows: list[dict] = []
    size = "tiny" if rehearses else "quick" if choice.quick else "full"
    marker = "not gpu" if rehearses else "gpu"

    def keep(found: dict) -> None:
        checks.append(found)
        well = found["status"] in (0, 5)
        word = "passed" if well else "not run" if found["status"] is None else "FAILED"
        print(f"  {clock_of(begin)} {found['name']}: {word}: {found['summary']}", flush=True)
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, rows, gpu=name, cuda=torch.version.cuda, checks=checks)

    begin = time.monotonic()
    for part in parts:
        if part in MEASURED:
            more, found = measured(part, size, clock)
            rows += more
            keep(found)
        elif part in TESTED:
            files = [file for file in files_with_tests() if (file == MODELS) == (part == "models")]
            files = files[:1] if rehearses else files

            def checked(file: str) -> dict:
                return check_file(file, marker=marker, timeout=clock.left()) if clock.left() > 5 else not_run(file)

            with ThreadPoolExecutor(choice.jobs) as pool:
                for found in pool.map(checked, files):
                    keep(found)
        else:
            for found in sanitize(part, files_with_tests(SANITIZED), clock):
                keep(found)
    failures = [found["name"] for found in checks if found["status"] not in (0, 5)]
    print(f"{path if writes else 'rehearsed'}: {len(rows)} rows; failed or not run: {', '.join(failures) or 'nothing'}")
    return int(bool(failures))


def clock_of(begin: float) -> str:
    return f"{time.monotonic() - begin:5.0f} s"


if __name__ == "__main__":
    sys.exit(main())
