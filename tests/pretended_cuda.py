"""Tensors that say that they are on cuda:0 and lie on the CPU: what a GPU would refuse or wait for shows without one.

Every function of Torch is called on the CPU. One that takes tensors of both devices is an error, as on a GPU, but where
PyTorch allows it: copies, numbers (tensors without a dimension) and indices. Where the host asks for what a device
holds, or gives it something, it waits for the device: `waits` has the name of each such call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

CUDA = torch.device("cuda:0")
ASKS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy", "equal", "unique",
        "masked_select", "repeat_interleave", "bincount", "argwhere", "__contains__"}  # fmt: skip
COPIES = {"to", "copy_", "type_as"}
INDEXES = {"__getitem__", "__setitem__", "index_put_", "index_put"}
waits: list[str] = []


class Pretended(Tensor):
    """held: where it really lies."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        made = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=CUDA, requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.held!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was not seen as a function of Torch")


class PretendedCuda(TorchFunctionMode):
    """In it device="cuda" makes such tensors."""

    def __enter__(self) -> Any:
        self.properties = torch.cuda.get_device_properties
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 40)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.cuda.get_device_properties = self.properties
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})


def device_of(x: Any) -> torch.device | None:
    if isinstance(x, torch.device):
        return x
    return torch.device(x) if isinstance(x, str) and x.split(":")[0] in ("cuda", "cpu") else None


def called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    flat, spec = tree_flatten((args, kwargs))
    there = [x for x in flat if isinstance(x, Pretended)]
    here = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, Pretended) and x.dim() > 0]
    wished = next((device for x in flat if (device := device_of(x)) is not None), None)
    makes = wished is not None and wished.type == "cuda"
    if func is torch.device or not (there or makes):
        return func(*args, **kwargs)
    if name == "__get__":
        found = func(there[0].held)
        if isinstance(found, Tensor):  # T, mT, data
            return Pretended(found)
        with torch._C.DisableTorchFunctionSubclass():  # device, shape, dtype
            return func(*args, **kwargs)
    if there and here and name not in COPIES:
        assert name in INDEXES and here[0] is not args[0], f"{name} of tensors on {CUDA} and on the CPU"
    to_host = bool(there) and wished is not None and not makes
    leaves = to_host or (name == "copy_" and not isinstance(args[0], Pretended))
    masks = name in INDEXES and any(x.dtype == torch.bool for x in there[1:])
    enters = bool(there and here) or (makes and not there and name in ("to", "tensor"))
    if name in ASKS or leaves or masks or enters:
        waits.append(name)
    wrappers = {id(x.held): x for x in there}
    held = [x.held if isinstance(x, Pretended) else x if device_of(x) is None else "cpu" for x in flat]
    args, kwargs = tree_unflatten(held, spec)
    out = func(*args, **kwargs)
    if leaves or name in ("cpu", "numpy"):
        return out
    return tree_map_only(Tensor, lambda x: wrappers[id(x)] if id(x) in wrappers else Pretended(x), out)


def moved(model: nn.Module) -> nn.Module:
    """The same model with parameters and buffers that pretend."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = Pretended(tensor.detach())
    return model
