"""A tape of PyTorch's operations, which stands for a CUDA graph on the CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKS = tuple(getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero"))


class Tape(TorchDispatchMode):
    """Operations and the tensors that they were given and gave; played, each is done again with the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in ASKS:
            raise AssertionError("the host asked the device for a number")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        for func, args, kwargs, out in self.calls:
            given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


def recorder(changed):
    """In the place of graphs.record: the operations are undone, what they changed with them; the host has counted the
    step. changed: gives all tensors that a step may change."""

    def record(run, device, pool=None, stream=None):
        tape, tensors = Tape(), changed()
        before = [x.clone() for x in tensors]
        with tape:
            out = run()
        for x, old in zip(tensors, before, strict=True):
            x.copy_(old)
        return tape.play, out

    return record
