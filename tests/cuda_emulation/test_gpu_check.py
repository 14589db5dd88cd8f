"""gpu/gpu_check.py where there is no GPU: its checks of the ops run on the CPU, and it says what is missing."""

import subprocess
import sys

import emulated
import pytest
import torch

from benchmarks.gpu import gpu_ops


def test_checks_pass_on_the_cpu():
    results = dict(gpu_ops.run_checks("cpu", few=True))
    assert len(results) == len(gpu_ops.CHECKS) * len(gpu_ops.DTYPES)
    assert not {name: error for name, error in results.items() if error}


def test_wrong_result_fails_its_check(monkeypatch):
    right = gpu_ops.ops.decode
    monkeypatch.setattr(gpu_ops.ops, "decode", lambda *args, **options: right(*args, **options | {"scale": 0.5}))
    failed = {name for name, error in gpu_ops.run_checks("cpu", few=True) if error}
    assert failed == {"decode/float32", "decode/bfloat16", "decode/float16"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_no_gpu_is_there():
    command = [sys.executable, str(emulated.HERE.parent.parent / "benchmarks" / "gpu" / "gpu_check.py")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "no GPU" in result.stdout
