"""Memory in huge pages, where the host has them: rows' pages lie anywhere in it, and are found sooner then."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

HUGE = 2 << 20  # bytes of one
_DONTNEED, _HUGEPAGE = 4, 14  # of Linux's madvise


def advise_huge(x: Tensor, *, written: bool = False) -> None:
    """Asks Linux for huge pages under a tensor, as far as whole ones lie in it; nothing elsewhere, and where it has
    none to give. x: contiguous, of numbers that nobody needs. written: it has been written to, so that other pages are
    under it already: they are given back, and it is all zeros."""
    start = -(-x.data_ptr() // HUGE) * HUGE
    nbytes = (x.data_ptr() + x.nbytes - start) // HUGE * HUGE
    if not (x.is_cpu and sys.platform == "linux" and nbytes > 0):
        return
    madvise = ctypes.CDLL(None).madvise
    place = ctypes.c_void_p(start), ctypes.c_size_t(nbytes)
    if madvise(*place, _HUGEPAGE) == 0 and written:
        madvise(*place, _DONTNEED)
        x.zero_()  # takes the new pages at once, as whoever gave this memory had taken the old ones
