"""Gates as others publish them: random ones in their formats, and their formulas in plain PyTorch."""

import functools
import json
import math
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

FORMS = ("linear", "mlp", "mlp in shards", "fast")
_kept = []


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def write_kvzap(folder, layers=3, n=64, heads=2, hidden=None, shards=1, dtype=torch.float32):
    """As save_pretrained of kvpress's KVzapModel has it. Returns its tensors."""
    shapes = {"weight": (heads, n), "bias": (heads,)}
    if hidden is not None:
        shapes = {"0.weight": (hidden, n), "0.bias": (hidden,), "2.weight": (heads, hidden), "2.bias": (heads,)}
    tensors = {
        f"layers.{i}.{name}": (numbers(10 * i + j, *shape) / math.sqrt(shape[-1])).mul(3).to(dtype)
        for i in range(layers)
        for j, (name, shape) in enumerate(shapes.items())
    }
    folder.mkdir(parents=True)
    config = {"model_type": "kvzap", "input_dim": n, "output_dim": heads, "hidden_dim": hidden, "n_modules": layers}
    (folder / "config.json").write_text(json.dumps({"architectures": ["KVzapModel"], "dtype": "float32", **config}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    names = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: x for name, x in tensors.items() if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tensors


def fast_layers(layers=3, n=64, heads=2, groups=2, size=16, sinks=16, dtype=torch.bfloat16):
    shapes = {
        "b": (heads, 1, groups), "k_base": (heads, 1, sinks, size), "q_proj.weight": (heads * groups * size, n),
        "q_proj.bias": (heads * groups * size,), "k_proj.weight": (heads * size, n),
    }  # fmt: skip
    made = []
    for i in range(layers):
        layer = {name: numbers(20 * i + j, *shape).to(dtype) for j, (name, shape) in enumerate(shapes.items())}
        layer["k_base"] = layer["k_base"].float()
        layer |= {f"{x}_norm.weight": 1 + 0.2 * numbers(20 * i + j, size) for j, x in enumerate("qk")}
        made.append(layer)
    return made


def write_fast(path, **sizes):
    """As Fast KVzip's training saves it, its curves included. Returns its layers' tensors."""
    layers = fast_layers(**sizes)
    torch.save({"module": layers, "loss": np.zeros((2, 3)), "acc": np.zeros((2, 3))}, path)
    return layers


def write(form, folder):
    """Of one of FORMS in a new folder: what Gates.load takes, and says(layer, x [T, n]): float64 [Hkv, T]."""
    folder.mkdir()
    if form == "fast":
        layers = write_fast(folder / "q2_dim16_sink16.pt")
        return folder / "q2_dim16_sink16.pt", lambda i, x: fast(layers[i], x).log()
    hidden, shards = {"linear": (None, 1), "mlp": (24, 1), "mlp in shards": (24, 3)}[form]
    tensors = write_kvzap(folder / "KVzap", hidden=hidden, shards=shards)
    return folder / "KVzap", lambda i, x: kvzap(tensors, i, x)


def kvzap(tensors, i, x):
    """KVzapModel of kvpress 0.5.5, of one layer: [Hkv, T]."""
    prefix = f"layers.{i}."
    own = {name.removeprefix(prefix): t.double() for name, t in tensors.items() if name.startswith(prefix)}
    if "weight" in own:
        return (x.double() @ own["weight"].T + own["bias"]).T
    inner = nn.functional.gelu(x.double() @ own["0.weight"].T + own["0.bias"])
    return (inner @ own["2.weight"].T + own["2.bias"]).T


def fast(layer, x):
    """FastKVzipGate.forward of kvpress 0.5.5: scores in 0..1, [Hkv, T]."""
    w = {name: t.double() for name, t in layer.items()}
    heads, size = w["b"].shape[0], w["q_norm.weight"].shape[0]

    def normed(y, name):
        y = y.view(len(x), heads, -1, size)
        return w[name] * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))

    queries = normed(x.double() @ w["q_proj.weight"].T + w["q_proj.bias"], "q_norm.weight")
    keys = normed(x.double() @ w["k_proj.weight"].T, "k_norm.weight").transpose(0, 1)
    queries = queries.transpose(0, 1).transpose(-1, -2)
    logit = keys @ queries / math.sqrt(size) + w["b"].unsqueeze(2)
    base = w["k_base"] @ queries / math.sqrt(size)
    return (1 / (1 + torch.exp(base - logit).sum(2, keepdim=True))).mean(-1).squeeze(-1)


@functools.cache
def hidden_gates_folder(form="mlp"):
    """Of tiny_model, of one of FORMS, there until the tests are over."""
    _kept.append(tempfile.TemporaryDirectory(prefix="published"))
    return str(write(form, Path(_kept[-1].name, "gates"))[0])


@contextmanager
def entering(model):
    """What enters the attention modules of a model's layers, by layer: [calls][B, T, n]."""
    found, hooks = {}, []

    def noting(number):
        return lambda module, args, kwargs: found.setdefault(number, []).append(kwargs["hidden_states"].detach())

    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.self_attn.register_forward_pre_hook(noting(number), with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
