"""Padded and packed batches as what they are: documents that know nothing of each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..positions import RotaryTables

ALIKE = 0.7  # of the longest in a group: at most half of its attention is spent on what is behind a document's end
SHORT = 64  # tokens, up to which all documents are alike: a group has calls of its own


@dataclass(frozen=True)
class Group:
    """Documents about as long as each other, each from its first token on.

    source: int64 [N, longest], where each token of a document is in the flattened batch [B*T]; beyond a document's
    end its own first token: causal attention hides from every token what follows it. positions: int32 [N, longest] for
    rotation, None = 0 and up; none of them reaches bound. lengths: tokens of each document.
    """

    source: Tensor
    positions: Tensor | None
    bound: int
    lengths: list[int]

    def split(self, x: Tensor) -> Tensor:
        """[B, H, T, ...] as [N, H, longest, ...]."""
        return x.transpose(1, 2).flatten(0, 1)[self.source].transpose(1, 2)


@dataclass(frozen=True)
class Documents:
    """The documents of a batch, in groups, and back.

    place: int64 [B*T], where each token is in the groups, one behind the other; -1 for padding. within: int64 [B, T],
    place of each token in its document; 0 for padding. valid: bool [B, T], tokens. lengths: tokens of each document.
    """

    groups: list[Group]
    place: Tensor
    within: Tensor
    valid: Tensor
    lengths: list[int]

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
        if len(flat) == 0:
            raise ValueError("attention_mask must leave at least one token, got zeros alone")
        within = torch.zeros(batch * columns, dtype=torch.int64, device=device)
        within[flat] = flat - starts[number[flat]]
        lengths = number[flat].bincount().tolist()
        place = torch.full((batch * columns,), -1, dtype=torch.int64, device=device)
        groups, behind = [], 0
        for members in _alike(lengths):
            longest = lengths[members[0]]
            column = torch.arange(longest, device=device)
            sizes = torch.tensor([lengths[i] for i in members], device=device)[:, None]
            # beyond a document's end its own first token: no padding, whose positions may be anything
            source = starts[members][:, None] + torch.where(column < sizes, column, 0)
            place[source[column < sizes]] = behind + (column < sizes).flatten().nonzero().flatten()
            behind += source.numel()
            own, bound = None, longest
            if positions is not None:
                own = positions.flatten()[source].int()
                bound = int(own.max()) + 1
                if bool((own < 0).any()):
                    raise ValueError(f"position_ids must not be negative, got {int(own.min())}")
            groups.append(Group(source, own, bound, sizes.flatten().tolist()))
        return cls(groups, place, within.view(batch, columns), here, lengths)

    def join(self, parts: list[Tensor]) -> Tensor:
        """[N, H, longest, ...] of each group as [B, H, T, ...]; 0 at padding."""
        flat = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in parts])[self.place.clamp(min=0)]
        shape = (-1,) + (1,) * (flat.ndim - 1)
        flat = torch.where((self.place >= 0).view(shape), flat, 0)
        return flat.unflatten(0, tuple(self.valid.shape)).transpose(1, 2)


def _alike(lengths: list[int]) -> list[list[int]]:
    """Numbers of documents, the longest first, in groups of about the same length."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (longest <= SHORT or lengths[i] >= ALIKE * longest):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def rotated(x: Tensor, rotary: RotaryTables, group: Group | None) -> Tensor:
    """Queries or keys, [B, H, T, D] or those of a group of documents, at their positions."""
    if group is None:
        return rotary.rotate(x, None, x.shape[2], [x.shape[2]])
    return rotary.rotate(x, group.positions, group.bound, group.lengths)
