"""Devices, and how many blocks of a kernel one of their multiprocessors holds at a time."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cubins import BUILD, toolkit_headers

REGISTERS = 65_536  # of a block, and of a multiprocessor: 32 bits each
LIMITS = ("registers", "shared memory", "warps", "blocks")


@dataclass(frozen=True)
class Device:
    """shared: bytes that a block may have, after opting in. shared_of_processor: of all its blocks. CUDA's table of
    technical specifications per compute capability. A block of sm_89 or sm_120 has what one of sm_86 has, one of sm_100
    what one of sm_90 has."""

    name: str
    shared: int
    shared_of_processor: int
    threads_of_processor: int


DEVICES = {
    device.name: device
    for device in (
        Device("sm_80", 163 * 1024, 164 * 1024, 2048),
        Device("sm_86", 99 * 1024, 100 * 1024, 1536),
        Device("sm_90", 227 * 1024, 228 * 1024, 2048),
    )
}


@dataclass(frozen=True)
class Occupancy:
    """blocks of a multiprocessor; limited_by: what allows no more of them."""

    blocks: int
    limited_by: str


def _calculator() -> Path:
    source, program = Path(__file__).with_name("occupancy.cpp"), BUILD / "occupancy"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        includes = [option for folder in toolkit_headers() for option in ("-isystem", str(folder))]
        command = ["g++", "-O1", *includes, "-o", str(program), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    return program


def occupancies(device: Device, kernels: Sequence[tuple[int, int, int, int]]) -> list[Occupancy]:
    """Of (registers of a thread, static bytes, dynamic bytes, threads of a block) each."""
    major, minor = device.name[3:-1], device.name[-1]
    head = f"{major} {minor} {device.shared} {device.shared_of_processor} {device.threads_of_processor}"
    questions = "".join(f"{head} {' '.join(map(str, kernel))}\n" for kernel in kernels)
    answers = subprocess.run([str(_calculator())], input=questions, capture_output=True, text=True, check=True).stdout
    found = []
    for line in answers.splitlines():
        blocks, *limits = map(int, line.split())
        found.append(Occupancy(blocks, LIMITS[limits.index(min(limits))]))
    if len(found) != len(kernels):
        raise RuntimeError(f"cuda_occupancy.h answered {len(found)} of {len(kernels)} questions")
    return found
