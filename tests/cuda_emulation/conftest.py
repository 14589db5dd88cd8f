import zlib

import emulated
import emulated_dmc
import pytest
import torch

FLAGS = ["-O1", "-g", "-fPIC", "-fno-strict-aliasing"]


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """Every CUDA kernel of csrc/cuda and the checks of the emulation, built once per session."""
    sources = [*emulated.kernel_sources(), emulated.HERE / "emulator_checks.cu"]
    folder = tmp_path_factory.mktemp("cuda_emulation")
    return emulated_dmc.DmcKernels(emulated.compile_and_link(folder, sources, FLAGS, ["-shared"], "kernels.so"))


@pytest.fixture(scope="session")
def reference():
    return emulated.load_reference()


@pytest.fixture(autouse=True)
def _same_run_every_time(request, monkeypatch):
    """Half of the tests, always the same half, run a block's threads from the last to the first."""
    order = ("forward", "reverse")[zlib.crc32(request.node.name.encode()) % 2]
    monkeypatch.setenv("KVC_EMULATION_ORDER", order)
    torch.manual_seed(0)
