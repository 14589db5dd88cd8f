"""Padded and packed batches as what they are: documents that know nothing of each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .positions import RotaryTables


@dataclass(frozen=True)
class Documents:
    """The documents of a batch, each from its first token on, and back.

    source: int64 [N, longest], where each token of a document is in the flattened batch [B*T]; beyond a document's
    end, any token: causal attention hides from every token what follows it. place: int64 [B*T], the inverse, -1 for
    padding. valid: bool [B, T], tokens. positions: int32 [N, longest] for rotation, None = 0 and up; none of them
    reaches bound. lengths: tokens of each document.
    """

    source: Tensor
    place: Tensor
    valid: Tensor
    positions: Tensor | None
    bound: int
    lengths: list[int]

    @property
    def within(self) -> Tensor:
        """int64 [B, T], place of each token in its document; any number for padding."""
        return (self.place % max(self.source.shape[1], 1)).view(self.valid.shape)

    @classmethod
    def of(cls, mask: Tensor | None, position_ids: Tensor | None, batch: int, columns: int) -> Documents | None:
        """mask: [B, T], zeros at one or both ends. position_ids: [B or 1, T]; a document begins where they do not go up
        by one. None: every row is one document at positions 0..T-1.

        Raises ValueError for other masks and shapes.
        """
        valid = None
        if mask is not None:
            if mask.ndim != 2 or tuple(mask.shape) != (batch, columns):
                raise ValueError(f"attention_mask must be [{batch}, {columns}], got shape {tuple(mask.shape)}")
            valid = mask != 0
            if bool(((valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0].long() > 1).any()):
                raise ValueError(
                    "attention_mask must be zeros at the ends of a row alone, got tokens in several pieces"
                )
            if bool(valid.all()):
                valid = None
        positions = None
        if position_ids is not None:
            if position_ids.ndim != 2 or position_ids.shape[1] != columns or position_ids.shape[0] not in (1, batch):
                raise ValueError(f"position_ids must be [{batch}, {columns}], got shape {tuple(position_ids.shape)}")
            positions = position_ids.expand(batch, -1)
            if torch.equal(positions, torch.arange(columns, device=positions.device).expand(batch, -1)):
                positions = None
        if valid is None and positions is None:
            return None
        device = (valid if valid is not None else position_ids).device  # type: ignore[union-attr]
        here = valid if valid is not None else torch.ones(batch, columns, dtype=torch.bool, device=device)
        begins = here.clone()
        begins[:, 1:] &= ~here[:, :-1]
        if positions is not None:
            begins[:, 1:] |= here[:, 1:] & (positions[:, 1:] != positions[:, :-1] + 1)
        number = begins.flatten().cumsum(0) - 1  # document of each token
        starts = begins.flatten().nonzero().flatten()
        flat = here.flatten().nonzero().flatten()
        within = flat - starts[number[flat]]
        if len(flat) == 0:
            raise ValueError("attention_mask must leave at least one token, got zeros alone")
        longest = int(within.max()) + 1
        # beyond a document's end its own first token: no padding, whose positions may be anything
        source = starts[:, None].repeat(1, longest)
        place = torch.full((batch * columns,), -1, dtype=torch.int64, device=device)
        source[number[flat], within] = flat
        place[flat] = number[flat] * longest + within
        own, bound = None, longest
        if positions is not None:
            own = positions.flatten()[source].int()
            bound = int(own.max()) + 1
            if bool((own < 0).any()):
                raise ValueError(f"position_ids must not be negative, got {int(own.min())}")
        return cls(source, place, here, own, bound, number[flat].bincount().tolist())

    def split(self, x: Tensor) -> Tensor:
        """[B, H, T, ...] as [N, H, longest, ...]."""
        return x.transpose(1, 2).flatten(0, 1)[self.source].transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """[N, H, longest, ...] as [B, H, T, ...]; 0 at padding."""
        flat = x.transpose(1, 2).flatten(0, 1)[self.place.clamp(min=0)]
        shape = (-1,) + (1,) * (flat.ndim - 1)
        flat = torch.where((self.place >= 0).view(shape), flat, 0)
        return flat.unflatten(0, tuple(self.valid.shape)).transpose(1, 2)


def rotated(x: Tensor, rotary: RotaryTables, documents: Documents | None) -> Tensor:
    """Queries or keys, [B, H, T, D] or those of documents, at their positions."""
    if documents is None:
        return rotary.rotate(x, None, x.shape[2], [x.shape[2]])
    return rotary.rotate(x, documents.positions, documents.bound, documents.lengths)
