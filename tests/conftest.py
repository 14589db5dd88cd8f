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


@pytest.fixture(params=_tables())
def simd(request):
    """Runs the test with each table of inner loops."""
    start = ops.simd()
    ops.simd(request.param)
    yield request.param
    ops.simd(start)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
