"""A driver that is too old for the CUDA runtime in the extension is named, with what is needed."""

import json
import os
import subprocess
import sys

import emulated
import pytest
import torch
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.hf.attach import is_attached
from kvcompress.ops import driver
from kvcompress.ops.native import native

OLD = "serves CUDA up to 12.8, and these kernels were built with CUDA 13.0, which needs driver 580 or newer: update the"


@pytest.fixture
def ops_emulated(monkeypatch):
    """The ops of the emulation, whose runtime is CUDA 13.0; a test says which driver there is."""
    emulated.library()
    monkeypatch.setenv("KVC_EMULATION_DRIVER", "12080")
    return torch.ops.kvcompress_emulated


def test_an_op_names_the_driver_and_what_it_needs(ops_emulated):
    x, half = torch.randn(1, 2, 3, 8), torch.ones(3, 4)
    with pytest.raises(RuntimeError, match=f"rope: the NVIDIA driver of this machine.* {OLD}"):
        ops_emulated.rope(x, half, half, None, False)


@pytest.mark.parametrize("version", [13000, 13010, 14000])
def test_any_driver_of_the_runtimes_major_version_or_a_newer_one_serves(version, ops_emulated, monkeypatch):
    monkeypatch.setenv("KVC_EMULATION_DRIVER", str(version))
    x, half = torch.randn(1, 2, 3, 8), torch.zeros(3, 4)
    assert ops_emulated.cuda_fault() == ""
    assert ops_emulated.rope(x, half + 1, half, None, False).equal(x)


@pytest.mark.parametrize(("version", "named"), [(0, None), (12090, "12.9"), (11040, "11.4")])
def test_the_fault_needs_a_driver_that_is_there(version, named, ops_emulated, monkeypatch):
    monkeypatch.setenv("KVC_EMULATION_DRIVER", str(version))
    assert ops_emulated.cuda_version(True) == version and ops_emulated.cuda_version(False) == 13000
    fault = ops_emulated.cuda_fault()
    assert (f"CUDA up to {named}, " in fault) if named else not fault


def test_another_error_is_told_as_it_is(ops_emulated, monkeypatch):
    monkeypatch.setenv("KVC_EMULATION_DRIVER", "13000")
    wide = torch.zeros(1, 1, 1, 600)  # beyond what the kernels take
    with pytest.raises(RuntimeError, match="attention: invalid argument"):
        ops_emulated.attention(wide, wide, wide, None, None, 0.1, True, 0, 0, False, None, 0.0)


def old_driver(monkeypatch):
    numbers = {False: 13000, True: 12080}
    fake = type("Native", (), {"cuda_version": staticmethod(numbers.get), "cuda_fault": staticmethod(lambda: OLD)})
    monkeypatch.setattr(driver, "native", fake)


def test_info_says_it(monkeypatch):
    old_driver(monkeypatch)
    found = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert (found["cuda_runtime"], found["cuda_driver"], found["cuda_fault"]) == ("13.0", "12.8", OLD)


def test_info_has_no_fault_where_there_is_no_driver():
    runtime, newest = driver.cuda_versions()
    assert driver.driver_fault() is None or newest is not None
    assert (runtime is None) == (native.cuda_version(False) == 0)
    table = CliRunner().invoke(app, ["info"]).stdout
    assert "cuda runtime" in table and "cuda driver" in table


def test_a_model_on_a_gpu_is_not_attached_with_an_old_driver(monkeypatch):
    model, _ = kvcompress.load_example_model()
    old_driver(monkeypatch)
    with kvcompress.attach(model):  # on a CPU the driver is nothing to it
        pass
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    with pytest.raises(RuntimeError, match="needs driver 580 or newer"):
        kvcompress.attach(model)
    monkeypatch.undo()
    assert not is_attached(model)


def test_asking_starts_no_cuda_and_a_fork_can_ask_too():
    code = (
        "import os, kvcompress.ops; from kvcompress.ops import driver; import torch\n"
        "first = driver.cuda_versions(), driver.driver_fault()\n"
        "assert not torch.cuda.is_initialized()\n"
        "if (child := os.fork()) == 0: os._exit(int((driver.cuda_versions(), driver.driver_fault()) != first))\n"
        "print(os.waitpid(child, 0)[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "0\n", done.stderr
