"""The folder for Hugging Face's kernels: named as it looks for it, its ops run where kvcompress is not installed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tools.hub_kernel import make

LOADED = """
import importlib.util, json, pathlib, sys
if not {beside}:
    sys.modules["kvcompress"] = None  # not installed
if {with_kernels}:
    import kernels
    made = kernels.get_local_kernel(pathlib.Path({folder!r}), backend="cpu")
else:  # what that does
    name = json.loads(pathlib.Path({folder!r}, "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, pathlib.Path({folder!r}, "__init__.py"))
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
import torch
q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
sdpa, mask = torch.nn.functional.scaled_dot_product_attention, torch.ones(3, 5, dtype=torch.bool).tril(2)
torch.testing.assert_close(made.ops.attention(q, k, v)[0], sdpa(q, k, v, attn_mask=mask, enable_gqa=True))
print(made.ops.__name__ == ("kvcompress.ops" if {beside} else made.__name__ + ".ops"))
"""


@pytest.mark.parametrize("beside", [False, True])
def test_its_ops_run_on_the_cpu(tmp_path, beside):
    build = make(tmp_path)
    assert build == tmp_path / f"build/torch-stable-abi211-cpu-{os.uname().machine}-linux"
    code = LOADED.format(beside=beside, with_kernels=find_spec("kernels") is not None, folder=str(build))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    with pytest.raises(SystemExit, match="BACKEND must be cpu or such as cu130, got 'gpu'"):
        make(tmp_path, "gpu")
