"""Every CUDA kernel under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, in programs of their own.

Planted faults show that each of them would be seen.
"""

import subprocess

import emulated
import pytest


@pytest.fixture(scope="module", autouse=True)
def _programs():
    emulated.make("programs")


def run(kind: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """kind: bounds or races."""
    command = [str(emulated.BUILD / kind / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("cases", [["few"], pytest.param([], marks=pytest.mark.release)], ids=["few", "all"])
def test_kernels_stay_within_their_arrays(cases):
    result = run("bounds", "sanitized_main", *cases)
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout == "done\n"


def test_threads_of_a_block_do_not_race():
    """Only barriers order the fibers: a missing __syncthreads or __syncwarp is a race."""
    result = run("races", "sanitized_main", "few")
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout == "done\n"


@pytest.mark.parametrize("kernel", ["none", "turns", "tails", "returns", "groups", "shuffles"])
def test_kernel_without_a_fault_passes(kernel):
    for kind in ("bounds", "races"):
        result = run(kind, "planted_faults", kernel)
        assert (result.returncode, result.stdout) == (0, "right\n"), result.stderr


@pytest.mark.parametrize(
    ("build", "fault", "report"),
    [
        ("bounds", "read past shared memory", "heap-buffer-overflow"),
        ("bounds", "copy past the end", "heap-buffer-overflow"),
        ("bounds", "read past the stack", "stack-buffer-overflow"),
        ("races", "missing barrier", "data race"),
        ("races", "missing second barrier", "data race"),
        ("races", "write after the last barrier", "data race"),
        ("races", "return without barrier", "data race"),
        ("races", "barrier of other lanes", "data race"),
        ("races", "shuffle for a barrier", "data race"),
    ],
)
def test_planted_fault_is_reported(build, fault, report):
    result = run(build, "planted_faults", fault)
    assert result.returncode != 0
    assert report in result.stderr


def test_copy_that_nobody_waits_for_has_not_arrived():
    assert run("bounds", "planted_faults", "copy without wait").stdout == "wrong\n"
