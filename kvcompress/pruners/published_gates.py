"""Gates that others have published: KVzap's folders and Fast KVzip's files, as their authors write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..support.checks import FLOATS, need
from .gate_forms import GateForm, LinearGate, SinkGate, TwoLayerGate, formed

CONFIG = "config.json"
_LINEAR = {"weight": "weight", "bias": "bias"}  # our names of tensors, and theirs behind a layer's number
_TWO_LAYERS = {"weight1": "0.weight", "bias1": "0.bias", "weight2": "2.weight", "bias2": "2.bias"}
_SINKS = {
    "query_weight": "q_proj.weight", "query_bias": "q_proj.bias", "key_weight": "k_proj.weight",
    "query_norm": "q_norm.weight", "key_norm": "k_norm.weight", "sinks": "k_base", "bias": "b",
}  # fmt: skip
# beside its tensors a file holds curves of training as arrays of NumPy, whose module had another name before NumPy 2
_ARRAYS: list[Any] = [
    np.ndarray, np.dtype, np.dtypes.Float64DType, np.dtypes.Float32DType,
    *((np.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]  # fmt: skip


def need_kvzap(folder: Path, ours: str) -> None:
    """That its config.json says so. ours: what would make it a folder of ours. Raises FileNotFoundError without one,
    ValueError for another model's."""
    wish = f'gates must be a folder with {ours}, or with a {CONFIG} of "model_type": "kvzap"'
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{wish}, got neither in {folder}")
    kind = _json(folder / CONFIG).get("model_type")
    need(kind == "kvzap", f'{wish}, got "model_type": {json.dumps(kind)} in {folder}')


def kvzap(folder: Path) -> tuple[GateForm, ...]:
    """The layers of a folder of KVzap, linear ones or MLPs, its weights in one file or in several.

    Raises ValueError for anything else, FileNotFoundError for a missing file.
    Source: KVzap (NVIDIA 2026, arXiv:2601.07891), as kvpress reads it.
    """
    config = _json(folder / CONFIG)
    n, heads, layers = (_size(config, name) for name in ("input_dim", "output_dim", "n_modules"))
    hidden = None if config.get("hidden_dim") is None else _size(config, "hidden_dim")
    found: dict[str, Tensor] = {}
    for path in _parts(folder):
        found |= read_tensors(path, "KVzap gates")
    kind, names = (LinearGate, _LINEAR) if hidden is None else (TwoLayerGate, _TWO_LAYERS)
    theirs = {f"layers.{i}.{name}" for i in range(layers) for name in names.values()}
    _need_names(folder.name, theirs, set(found))
    made = formed(
        kind, [{own: _float(found, f"layers.{i}.{name}") for own, name in names.items()} for i in range(layers)]
    )
    for form in made:
        got = form.width, form.heads
        need(got == (n, heads), f"input_dim and output_dim of {CONFIG} must be those of the weights, {got}, "
             f"got {(n, heads)}")  # fmt: skip
        own = len(form.bias1) if isinstance(form, TwoLayerGate) else None
        need(own == hidden, f"hidden_dim of {CONFIG} must be that of the weights, {own}, got {hidden}")
    return made


def fast_kvzip(path: Path) -> tuple[GateForm, ...]:
    """The layers of a file of Fast KVzip. Nothing in it is run.

    Raises ValueError for anything else.
    Source: Fast KVzip (2026, arXiv:2601.17668), as kvpress reads it.
    """
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file is an error of many kinds
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        wish = f"{path} must be gates of Fast KVzip, which torch.load(weights_only=True) reads"
        raise ValueError(f"{wish}: {reason}") from None
    layers: Any = saved.get("module") if isinstance(saved, dict) else None
    good = isinstance(layers, list) and layers and all(isinstance(layer, dict) for layer in layers)
    need(bool(good), f"{path.name} must hold a list 'module' of each layer's tensors, got {type(layers).__name__}")
    made = []
    for number, layer in enumerate(layers):
        _need_names(f"layer {number} of {path.name}", set(_SINKS.values()), set(layer))
        tensors = {own: _float(layer, name) for own, name in _SINKS.items()}
        for own in ("sinks", "bias"):  # [Hkv, 1, ...]
            tensors[own] = tensors[own].squeeze(1) if tensors[own].ndim > 1 else tensors[own]
        made.append(tensors)
    return formed(SinkGate, made)


def read_tensors(path: Path, what: str) -> dict[str, Tensor]:
    """Of a file of safetensors. Raises FileNotFoundError for none, ValueError for a damaged one."""
    try:
        return dict(load_file(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"{what} must have a file of weights, got none at {path}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, or no file of gates: {error}") from None


def _parts(folder: Path) -> list[Path]:
    """The files of weights, those that the index names where there are several."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    names: Any = _json(index).get("weight_map")
    good = isinstance(names, dict) and all(isinstance(x, str) and Path(x).name == x for x in names.values())
    need(good, f"weight_map of {index.name} must say a file in its folder for each tensor")
    return [folder / name for name in sorted(set(names.values()))]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"KVzap gates must have a {path.name}, got none at {path}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} must be JSON: {error}") from None
    need(isinstance(found, dict), f"{path.name} must hold fields, got a JSON {type(found).__name__}")
    return dict(found)


def _need_names(where: str, wanted: set[str], found: set[str]) -> None:
    missing, more = sorted(wanted - found), sorted(found - wanted)
    need(not missing, f"{where} must hold {', '.join(missing[:3])}, got none{' and others not' * (len(missing) > 3)}")
    need(not more, f"{where} must hold no other tensors than its gates', got {', '.join(map(str, more[:3]))}")


def _size(config: dict[str, Any], name: str) -> int:
    size: Any = config.get(name)
    need(type(size) is int and size > 0, f"{name} of {CONFIG} must be a number of at least 1, got {size!r}")
    return int(size)


def _float(found: dict[str, Any], name: str) -> Tensor:
    x = found[name]
    got = x.dtype if isinstance(x, Tensor) else type(x).__name__
    need(isinstance(x, Tensor) and x.dtype in FLOATS, f"{name} must be a tensor of floating point, got {got}")
    return x.detach().float().contiguous()
