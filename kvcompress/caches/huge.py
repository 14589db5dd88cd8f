"""Memory of the host's: in huge pages, where it has them, as rows' pages lie anywhere in it and are found sooner then;
and only where numbers are written."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of one
_DONTNEED, _HUGEPAGE = 4, 14  # of Linux's madvise


def advise_huge(x: Tensor, *, written: bool = False) -> None:
    """Asks Linux for huge pages under a tensor, as far as whole ones lie in it; nothing elsewhere, and where it has
    none to give. x: contiguous, of numbers that nobody needs. written: it has been written to: its memory is given
    back, and comes again, as zeros, where somebody writes."""
    start = -(-x.data_ptr() // HUGE) * HUGE
    nbytes = (x.data_ptr() + x.nbytes - start) // HUGE * HUGE
    if not (gives_back(x.device) and nbytes > 0):
        return
    madvise = ctypes.CDLL(None).madvise
    place = ctypes.c_void_p(start), ctypes.c_size_t(nbytes)
    madvise(*place, _HUGEPAGE)
    if written:
        madvise(*place, _DONTNEED)


def gives_back(device: torch.device) -> bool:
    """Whether memory that nobody writes to costs nothing there."""
    return device.type == "cpu" and sys.platform == "linux"
