"""`kvcompress info`: what is installed here, and what a model's cache takes."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from .. import ops
from ..ops.driver import cuda_versions, driver_fault
from .plan_report import model_shape


def facts(model: str | None, dtype: str = "auto") -> dict[str, Any]:
    """By name; of a model what its config says, without its weights. Raises ValueError as model_shape does."""
    from .. import __version__

    has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("kvcompress::rope", "CUDA")
    runtime, driver = cuda_versions()
    found: dict[str, Any] = {
        "kvcompress": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "inner_loops": ops.simd(),
        "threads": torch.get_num_threads(),
        "cuda_kernels": has_cuda,
        "cuda_runtime": runtime,
        "cuda_driver": driver,
        "cuda_fault": driver_fault(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    shape = model_shape(model, None, None, None, dtype)
    if shape is None:
        return found
    return found | {
        "model": model,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "trained_length": shape.trained_length,
        "cache_nbytes_per_token": shape.nbytes(shape.layers),
    }


def run_info(*, model: str | None, dtype: str, as_json: bool, console: Console) -> None:
    found = facts(model, dtype)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(box=None, show_header=False)
    for name, value in found.items():
        if isinstance(value, bool):
            shown = "built" if value else "not built"
        elif isinstance(value, list):
            shown = ", ".join(value) or "none"
        elif value is None:
            shown = "none"
        else:
            shown = f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(name.replace("_", " "), shown)
    console.print(table)
