"""How many bytes the caches of all requests may take: as users say it, and what is free where they do not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from ..support.checks import need_integer
from ..support.units import nbytes_of, size

_CGROUP = Path("/sys/fs/cgroup")  # where a container's limit stands
_NODES = Path("/sys/devices/system/node")
_FREE = ("MemFree:", "Active(file):", "Inactive(file):", "SReclaimable:")  # of a node: what is free, or soon may be


def memory_nbytes(memory: int | str) -> int:
    """Of a number of bytes or a text such as "8GiB". Raises ValueError for what is neither, or not above 0."""
    if isinstance(memory, str):
        memory = nbytes_of(memory, "memory", "bytes, such as 8GiB")
    need_integer("memory", memory, 1)
    return memory


def swap_nbytes(swap: int | str) -> int:
    """As memory_nbytes, but none are allowed."""
    if isinstance(swap, str):
        swap = 0 if swap == "0" else nbytes_of(swap, "swap", "bytes, such as 1GiB, or 0")
    need_integer("swap", swap, 0)
    return swap


def free_nbytes(device: torch.device) -> int:
    """What is free on a device now: of a GPU, or of this machine within the limit of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # no limit is "max"
        most, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(most - used, 0))
    return free


def check_free(memory: int, free: int, device: torch.device) -> None:
    """Raises ValueError for more bytes than are free."""
    if memory > free:
        where = "in the machine's memory" if device.type == "cpu" else f"on {device}"
        raise ValueError(f"memory must be at most {size(free)}, which are free {where}, got {size(memory)}")


def free_node_nbytes() -> int:
    """What is free on the fullest NUMA node of this machine: vLLM takes a CPU's memory of one."""
    free = [free_nbytes(torch.device("cpu"))]
    for path in _NODES.glob("node*/meminfo"):
        lines = [line.split() for line in path.read_text().splitlines()]  # Node 0 MemFree: 123 kB
        if any(words[2] == "MemTotal:" and int(words[3]) for words in lines):  # some have processors alone
            free.append(sum(int(words[3]) << 10 for words in lines if words[2] in _FREE))
    return min(free)
