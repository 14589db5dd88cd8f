"""The extension: loads it, and names its ops. Only the files of this package touch torch.ops."""

from __future__ import annotations

import os
from importlib import import_module

import torch

_FILE = f"{__package__.rpartition('.')[0]}._C"  # by whichever name the package was imported (tools/hub_kernel.py)
try:
    import_module(_FILE)  # registers torch.ops.kvcompress
except ImportError as error:
    if not isinstance(error, ModuleNotFoundError) or error.name != _FILE:
        raise  # the file is there but does not load: its own message says why
    raise ImportError(
        f"kvcompress was imported from {os.path.dirname(os.path.dirname(__file__))}, where its extension (_C.abi3.so) "
        "is not built. If this is a clone, run `pip install --no-build-isolation -e .` in it; if kvcompress is "
        "installed elsewhere, run Python in another directory"
    ) from None

MAX_HEAD_DIM = 512  # of attention, decode and the ops of DMC; of the others on CUDA
native = torch.ops.kvcompress
_wish = os.environ.get("KVC_SIMD")
if _wish and native.simd("") != _wish:
    raise ValueError(
        f"KVC_SIMD must name inner loops that this CPU can run (portable, avx2, avx512, avx512_bf16), got {_wish!r}"
    )


def simd(name: str = "") -> str:
    """Name of the CPU's inner loops in use: portable, avx2, avx512 or avx512_bf16; a name switches to those first.

    Raises RuntimeError if the CPU cannot run it. For tests and bug reports; KVC_SIMD sets it for a whole process.
    """
    return native.simd(name)
