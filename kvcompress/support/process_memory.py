"""How much memory a piece of work took at its worst."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch


class PeakMemory:
    """Peak memory since construction: CUDA allocations on a GPU, else this process's resident memory (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):  # then the figure is the peak since the process started: never too small
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present size

    def nbytes(self) -> int | None:
        """Bytes, or None where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return None
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None
