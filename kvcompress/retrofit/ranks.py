"""What the ranks of a distributed run do together; one process alone is a run of one rank."""

from __future__ import annotations

import torch
from torch import Tensor


def place_among_ranks() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def summed(x: Tensor) -> Tensor:
    """The sum of all ranks' tensors, on each of them; collective. x is unchanged."""
    if place_among_ranks()[1] == 1:
        return x
    total = x.clone()
    torch.distributed.all_reduce(total)
    return total
