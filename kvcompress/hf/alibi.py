"""ALiBi as a rotation: biases slope * (key's position - query's) are products of a few more coordinates of a head.

A rotation turns a pair (x, y) as the complex number x + iy times cos + i sin. With 1 and n for these at place n, a
query (0, s) at m becomes (-s m, s), a key (1, 0) at n becomes (1, n), and their product is s (n - m). So every op that
rotates by tables knows ALiBi. In 16 bits a place is not exact: n = STEP a + b, each of which is, and a slope is the sum
of two numbers; the rounding of -s m is the same for all keys. That makes four pairs. Keys are UNIT times as large and
queries as much smaller, or s m would be too large for float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..positions import RotaryTables

STEP, MOST = 512, 256 * 512  # bfloat16 is exact from -256 to 256
UNIT = 64
_PAIRS = 4


class AlibiTables(RotaryTables):
    """Of layers whose logits are q.k * scale + slope * (key's position - query's). slopes: float32 [Hq], divided by
    scale. Queries and keys have beside coordinates in front of their own (see framed)."""

    beside = 2 * _PAIRS

    def __init__(self, slopes: Tensor) -> None:
        self._type, self._switch, self._scaling, self._axes = "alibi", 0, 1.0, ()
        self._slopes, self._tables = slopes.to("cpu", torch.float32), {}
        self._framing: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def _in_front(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """[1, Hq, 1, 8] of queries and [1, 1, 1, 8] of keys, before rotation."""
        found = self._framing.get((like.device, like.dtype))
        if found is None:
            near = self._slopes / UNIT
            parts = [y for x in (STEP * near, near) for y in (x.to(like.dtype), (x - x.to(like.dtype)).to(like.dtype))]
            slopes = torch.stack(parts, -1).to(like.device)
            units = torch.full((1, _PAIRS), UNIT, dtype=like.dtype, device=like.device)
            both = torch.cat([torch.zeros_like(slopes), slopes], -1), torch.cat([units, torch.zeros_like(units)], -1)
            found = self._framing[like.device, like.dtype] = both[0][None, :, None], both[1][None, :, None]
        return found

    def framed(self, x: Tensor, *, keys: bool) -> Tensor:
        """Queries or keys [B, H, T, D] with what turns in front: [B, H, T, 8 + D]."""
        front = self._in_front(x)[keys]
        return torch.cat([front.expand(*x.shape[:3], -1), x], -1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _grown(
        self, key: tuple[int, torch.device, int | None], rows: int, length: int, held: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if rows > MOST:
            raise ValueError(f"tokens of a model with ALiBi stand below position {MOST:,}, got {rows:,} of them")
        places = torch.arange(min(max(rows, 2 * len(held[0]) if held else 256), MOST), device=key[1])
        table = self._spelt(places)
        self._tables[key] = torch.ones_like(table), table
        return self._tables[key]

    @staticmethod
    def _spelt(places: Tensor) -> Tensor:
        """float32 [..., 4] of places [...]: a, a, b, b."""
        far = (places + STEP // 2) // STEP
        near = places - STEP * far
        return torch.stack([far, far, near, near], -1).float()

    def _moved(self, x: Tensor, distance: Tensor, bound: int, length: int, *, inverse: bool) -> Tensor:
        """x: keys."""
        front = x[..., _PAIRS : self.beside].float() / UNIT
        places = (STEP * front[..., 0] + front[..., 2]).round().to(torch.int64)
        moved = places - distance[:, None] if inverse else places + distance[:, None]
        return torch.cat([x[..., :_PAIRS], (UNIT * self._spelt(moved)).to(x.dtype), x[..., self.beside :]], -1)

    def _apply(self, x: Tensor, *args: Any, inverse: bool, **kwargs: Any) -> Tensor:
        if not inverse:
            return super()._apply(x, *args, inverse=False, **kwargs)
        rest = x.new_zeros(1).expand(*x.shape[:3], _PAIRS)  # keys: nothing else is turned back
        return torch.cat([x[..., :_PAIRS], rest, x[..., self.beside :]], -1)

    def check_axes(self, axes: int) -> None:
        raise ValueError(
            "position_ids must be the same on every axis, got those of an image or video: this model's positions are "
            "biases of attention (ALiBi); give text"
        )
