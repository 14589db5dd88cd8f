"""Every CUDA kernel under AddressSanitizer and UndefinedBehaviorSanitizer, in a program of its own."""

import subprocess

import emulated

FLAGS = ["-O0", "-g1", "-fno-strict-aliasing", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]


def test_kernels_stay_within_their_arrays(tmp_path):
    sources = [*emulated.kernel_sources(), emulated.HERE / "sanitized_main.cpp"]
    program = emulated.compile_and_link(tmp_path, sources, [*FLAGS, "-fno-sanitize-recover=undefined"], [], "sanitized")
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout == "done\n"
