"""Rotation tables for any position, from the model's own rotary embedding."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from . import ops


class RotaryTables:
    """Cosines and sines of the positions that a cache gives out, with the model's own frequencies.

    Works on a copy of the model's rotary embedding, because those that depend on length (dynamic, longrope) change
    themselves when called. Their length is the number of keys in sight, never the position in the prompt.
    """

    def __init__(self, rotary_emb: nn.Module) -> None:
        rope_type = getattr(rotary_emb, "rope_type", None)
        if not isinstance(rope_type, str) or not hasattr(rotary_emb, "inv_freq"):
            raise ValueError(
                f"{type(rotary_emb).__name__} is not supported: rotary_emb must have one rope_type and inv_freq for "
                "all layers"
            )
        self._module: Any = copy.deepcopy(rotary_emb).requires_grad_(False)
        self._type = rope_type
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def _regime(self, length: int) -> int:
        """A number that is the same for all lengths with the same frequencies."""
        if "dynamic" in self._type:
            return length if length > self._module.original_max_seq_len else 0
        if self._type == "longrope":
            limit = self._module.config.rope_parameters["original_max_position_embeddings"]
            return int(length > limit)
        return 0

    @torch.no_grad()
    def tables(self, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin), float32 [at least `rows`, rotary_dim/2], for `length` keys in sight."""
        key = (self._regime(length), device)
        held = self._tables.get(key)
        if held is not None and held[0].shape[0] >= rows:
            return held
        if len(self._tables) >= 8:
            self._tables.clear()
        module = self._module.to(device)
        if "dynamic" in self._type:  # a larger length seen before must not linger
            module.inv_freq = module.original_inv_freq.to(device)
            module.max_seq_len_cached = module.original_max_seq_len
        probe = torch.empty(0, dtype=torch.float32, device=device)
        module(probe, torch.tensor([[max(length, 1) - 1]], device=device))  # settles the frequencies for this length
        rows = max(rows, 2 * held[0].shape[0] if held is not None else 256)
        angles = torch.arange(rows, device=device).float()[:, None] * module.inv_freq.float()
        scaling = module.attention_scaling
        self._tables[key] = (angles.cos() * scaling, angles.sin() * scaling)
        return self._tables[key]

    @property
    def scaling(self) -> float:
        """Factor that cosines and sines carry (yarn, longrope); 1 elsewhere."""
        return float(self._module.attention_scaling)

    def rotate(self, x: Tensor, positions: Tensor | None, bound: int, lengths: list[int]) -> Tensor:
        """x [B, H, T, D] rotated to positions (int32 [B, T] below bound; None = 0..T-1), lengths[b] keys in sight."""
        return self._apply(x, positions, bound, lengths, inverse=False)

    def unrotate(self, x: Tensor, bound: int, lengths: list[int]) -> Tensor:
        """Undoes rotate(x, None, bound, lengths)."""
        return self._apply(x, None, bound, lengths, inverse=True)

    def move_back(self, x: Tensor, distance: Tensor, bound: int, length: int) -> Tensor:
        """Rotated x [B, H, T, D] moved to positions smaller by distance (int32 [B, T] below bound)."""
        cos, sin = self.tables(bound, length, x.device)
        return ops.rope(x, cos / self.scaling, sin / self.scaling, distance, inverse=True)

    def _apply(self, x: Tensor, positions: Tensor | None, bound: int, lengths: list[int], *, inverse: bool) -> Tensor:
        if len({self._regime(length) for length in lengths}) > 1:  # sequences with frequencies of their own
            parts = []
            for b, length in enumerate(lengths):
                own = None if positions is None else positions[b : b + 1]
                parts.append(self._apply(x[b : b + 1], own, bound, [length], inverse=inverse))
            return torch.cat(parts)
        cos, sin = self.tables(bound, lengths[0], x.device)
        if inverse and self.scaling != 1.0:  # (a R)^-1 = R^T / a
            cos, sin = cos / self.scaling**2, sin / self.scaling**2
        return ops.rope(x, cos, sin, positions, inverse=inverse)
