"""csrc/cuda/*.cu built with g++ against the emulation, by the Makefile of this folder. No nvcc and no GPU is needed."""

from __future__ import annotations

import fcntl
import functools
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
BUILD = HERE / "build"


def make(target: str) -> None:
    """Builds what is not up to date; the compiler's messages are the error's."""
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # several processes of the tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-s", "-j2", "-C", str(HERE), target, f"TORCH={Path(torch.__file__).parent}"]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


@functools.cache
def library() -> Path:
    """The kernels, the ops kvcompress_emulated on tensors of the CPU, and the checks of the emulation itself."""
    make("library")
    path = BUILD / "library" / "emulated.so"
    torch.ops.load_library(path)
    return path


def serve() -> torch.library.Library:
    """Has the ops of kvcompress run in the emulation, until the library that it returns is destroyed."""
    library()
    instead = torch.library.Library("kvcompress", "IMPL")
    for name in sorted({full.split("::")[1].split(".")[0] for full in torch._C._dispatch_get_all_op_names()
                        if full.startswith("kvcompress_emulated::")}):  # fmt: skip
        instead.impl(name, getattr(torch.ops.kvcompress_emulated, name).default, "CPU", allow_override=True)
    return instead
