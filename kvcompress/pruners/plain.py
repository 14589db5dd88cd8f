"""Pruners that look at keys and values alone, or at nothing: small baselines that users know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..support.checks import need_integer
from .base import Candidates, Pruner


@dataclass(frozen=True)
class KeyNorm(Pruner):
    """Keeps the keys of the smallest L2 norm: those tend to receive the most attention.

    Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, section 3.
    """

    num_sink_tokens: int = 0
    by_head = True
    at_once = 0

    def __post_init__(self) -> None:
        self._check()

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        return -torch.linalg.vector_norm(candidates.own_keys[0, :, : candidates.count].float(), dim=-1)


@dataclass(frozen=True)
class Random(Pruner):
    """Keeps tokens by chance, per KV head: what any other pruner should beat.

    seed: the same seed, layer and number of candidates give the same choice on every device.
    """

    seed: int = 0
    num_sink_tokens: int = 0
    at_once = 0

    def __post_init__(self) -> None:
        self._check()
        need_integer("seed", self.seed, 0)

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, candidates.layer, candidates.count)) % (1 << 63))
        drawn = torch.rand(candidates.heads, candidates.count, generator=generator, device="cpu")
        return drawn.to(candidates.keys.device)
