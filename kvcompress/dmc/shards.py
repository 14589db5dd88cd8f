"""Rows of weights that are cut up over the ranks of a distributed run: which part of them a rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


def need_addressable(name: str, linear: Any) -> None:
    """Raises ValueError for a linear layer whose weight is neither whole nor a DTensor, so that its rows have no place
    that could be known: one that FSDP1 or DeepSpeed's ZeRO-3 flattened."""
    weight = linear.weight
    flattened = getattr(weight, "_fsdp_flattened", False) or hasattr(weight, "ds_id")
    if flattened or weight.ndim != 2 or not isinstance(weight, nn.Parameter):  # FSDP1 leaves freed views
        raise ValueError(
            f"{name} must have its weight whole or sharded by FSDP2 (torch.distributed.fsdp.fully_shard; in "
            f"accelerate fsdp_version: 2), got a flat one of shape {tuple(weight.shape)}: FullyShardedDataParallel "
            "(FSDP1) and DeepSpeed's ZeRO-3 lose which rows are a neuron's"
        )


@torch.no_grad()
def fill_slices(name: str, tensor: Tensor, dim: int, index: Tensor, value: float) -> None:
    """Sets the slices `index` (int64 [n]) of a dimension to a value, of the whole tensor: of a DTensor each rank those
    that its shard holds. Afterwards every rank looks at the whole.

    Raises RuntimeError, on all ranks alike, if a slice holds anything else then.
    """
    if not isinstance(tensor, DTensor):
        tensor.index_fill_(dim, index.to(tensor.device), value)
        return
    local, own = tensor.to_local(), _held(tensor, dim)
    inside = torch.isin(own.to(local.device), index.to(local.device)).nonzero()[:, 0]
    local.index_fill_(dim, inside, value)
    whole = tensor.full_tensor().index_select(dim, index.to(local.device))
    if bool((whole != value).any()):
        raise RuntimeError(
            f"{name} must be {value} in the rows of its neurons after they were set, over all ranks, but is not: its "
            f"placements {tensor.placements} on {tensor.device_mesh} are not supported"
        )


def _held(tensor: Any, dim: int) -> Tensor:
    """int64 [n]: the slices of a dimension that this rank's shard holds, in its order.

    Cuts the numbers of the slices as the mesh cuts the tensor: by each of its dimensions in turn, the first parts
    larger where it does not divide them.
    """
    numbers = torch.arange(tensor.shape[dim])
    for size, place, placement in zip(
        tensor.device_mesh.shape, tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True
    ):
        if isinstance(placement, Shard) and placement.dim % tensor.ndim == dim:
            parts = numbers.chunk(size)
            numbers = parts[place] if place < len(parts) else numbers[:0]
    return numbers
