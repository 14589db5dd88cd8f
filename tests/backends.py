"""What the ops can run on here: values of the fixtures `backend`, `cpu`, `cuda` and `hardware`."""

from __future__ import annotations

import pytest
import torch

from kvcompress import ops


def _tables() -> list[str]:
    """The tables of inner loops that this CPU can run."""
    start, found = ops.simd(), []
    for name in ("portable", "avx2", "avx512", "avx512_bf16"):
        try:
            ops.simd(name)
        except RuntimeError:
            continue
        found.append(name)
    ops.simd(start)
    return found


TABLES = _tables()
# A second device too: while the first is the current one
GPUS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda:1")[: torch.cuda.device_count()]]
CUDA = ["emulated", *GPUS]
BACKENDS = [*TABLES, *CUDA]
