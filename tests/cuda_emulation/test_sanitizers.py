"""Every CUDA kernel under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, in programs of their own.

Planted faults show that each of them would be seen.
"""

import subprocess
from pathlib import Path

import emulated
import pytest

FLAGS = ["-O0", "-g1", "-fno-strict-aliasing", "-fno-omit-frame-pointer"]
BOUNDS = [*FLAGS, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
RACES = [*FLAGS, "-fsanitize=thread", "-DKVC_EMULATE_THREADS"]


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The program of planted faults by the flags it is built with."""
    sources = [emulated.HERE / "planted_faults.cu", emulated.HERE / "block_threads.cpp"]
    return {
        name: emulated.compile_and_link(tmp_path_factory.mktemp(name), sources, flags, [], "faults")
        for name, flags in (("bounds", BOUNDS), ("races", RACES))
    }


def test_kernels_stay_within_their_arrays(tmp_path):
    sources = [*emulated.kernel_sources(), emulated.HERE / "sanitized_main.cpp"]
    result = run(emulated.compile_and_link(tmp_path, sources, BOUNDS, [], "sanitized"))
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout == "done\n"


def test_threads_of_a_block_do_not_race(tmp_path):
    """Real threads: a missing __syncthreads or __syncwarp is a race."""
    sources = [*emulated.kernel_sources(), emulated.HERE / "sanitized_main.cpp"]
    result = run(emulated.compile_and_link(tmp_path, sources, RACES, [], "sanitized"), "few")
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout == "done\n"


def test_kernel_without_a_fault_passes(faults):
    for program in faults.values():
        result = run(program, "none")
        assert (result.returncode, result.stdout) == (0, "right\n"), result.stderr


@pytest.mark.parametrize(
    ("build", "fault", "report"),
    [
        ("bounds", "read past shared memory", "heap-buffer-overflow"),
        ("bounds", "copy past the end", "heap-buffer-overflow"),
        ("races", "missing barrier", "data race"),
    ],
)
def test_planted_fault_is_reported(faults, build, fault, report):
    result = run(faults[build], fault)
    assert result.returncode != 0
    assert report in result.stderr


def test_copy_that_nobody_waits_for_has_not_arrived(faults):
    assert run(faults["bounds"], "copy without wait").stdout == "wrong\n"
