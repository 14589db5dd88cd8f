import gc
import sys
import warnings
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import accuracy
import helpers
import pytest
import torch
from backends import BACKENDS, CUDA, GPUS, TABLES
from hypothesis import settings

import kvcompress
from kvcompress import ops
from kvcompress.evaluate.reading import Reader

sys.path.insert(0, str(Path(__file__).parent / "cuda_emulation"))
import emulated

settings.register_profile("kvcompress", deadline=None)  # a busy machine is no failure
settings.load_profile("kvcompress")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=3, help="how often tests/test_kills.py kills a run")
    parser.addoption("--all", action="store_true", help="full products of parameters, where else pairs are covered")


def pytest_configure(config: pytest.Config) -> None:
    helpers.full_products = config.getoption("--all")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports leave is most of a process's objects and no garbage: the collector looks at none of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left = [item for item in items if item.get_closest_marker("release") is not None]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.get_closest_marker("release") is None]


def _run(name: str, node: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The ops on one backend. Memory that an op gets and does not write holds NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(accuracy, "on_cuda", name not in TABLES)
    start, library = ops.simd(), None
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if name == "emulated":
            # half of the tests, always the same half, run a block's threads from the last to the first
            monkeypatch.setenv("KVC_EMULATION_ORDER", ("forward", "reverse")[zlib.crc32(node.encode()) % 2])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that kernels are overridden
                library = emulated.serve()
            yield name
        elif name.startswith("cuda"):
            with torch.device(name):
                yield "cuda"
        else:
            ops.simd(name)
            yield name
    finally:
        if library is not None:
            library._destroy()
        ops.simd(start)
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Each table of inner loops, the CUDA kernels in the emulation, and a GPU if there is one."""
    yield from _run(request.param, request.node.name, monkeypatch)


@pytest.fixture(params=TABLES)
def cpu(request, monkeypatch):
    """The tables alone: for what only the CPU promises."""
    yield from _run(request.param, request.node.name, monkeypatch)


@pytest.fixture(params=CUDA)
def cuda(request, monkeypatch):
    """The CUDA kernels alone: for what they promise where they cannot raise."""
    yield from _run(request.param, request.node.name, monkeypatch)


@pytest.fixture(params=[TABLES[-1], *GPUS])
def hardware(request, monkeypatch):
    """The CPU's widest table, and a GPU if there is one: for sizes that the emulation takes too long for."""
    yield from _run(request.param, request.node.name, monkeypatch)


@pytest.fixture(params=GPUS or [pytest.param("cuda", marks=pytest.mark.skip("there is no GPU"))])
def gpu(request, monkeypatch):
    """A GPU: for what nothing else has."""
    yield from _run(request.param, request.node.name, monkeypatch)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """The shipped model, attached, as tasks of evaluation read with it."""
    model, tokenizer = kvcompress.load_example_model()
    with kvcompress.attach(model):
        yield Reader(model, tokenizer, kvcompress.CacheSpec("dense", {}))
