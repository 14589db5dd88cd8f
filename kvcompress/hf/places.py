"""Places of tokens on several axes (M-RoPE): an image's stand in time, height and width, text goes on behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .. import ops
from ..positions import RotaryTables, Unrotated


@dataclass(frozen=True, eq=False)
class Places:
    """Of one sequence. first: int64 [axes, N], where its first N tokens stand; on the host, beside what a cache counts
    as its bytes. later: a later token n stands at n + later on every axis, as text does."""

    first: Tensor
    later: int = 0

    def __deepcopy__(self, memo: object) -> Places:
        return self  # forks turn by the same tables

    @staticmethod
    def of_text(axes: int) -> Places:
        return Places(torch.empty(axes, 0, dtype=torch.int64, device="cpu"))

    def at(self, begin: int, end: int) -> Tensor:
        """int64 [axes, end - begin], of the tokens of these numbers."""
        known = self.first[:, begin:end]
        rest = torch.arange(max(begin, self.first.shape[1]), max(end, self.first.shape[1]), device="cpu") + self.later
        return torch.cat([known, rest.expand(len(known), -1)], 1)[:, : max(end - begin, 0)]

    def followed_by(self, new: Tensor, seen: int) -> Places:
        """The same with int64 [axes, n] of what follows the first `seen` tokens; text goes on behind the largest."""
        if not new.shape[1]:
            return self
        before, total = self.at(0, seen), seen + new.shape[1]
        after = max(seen + self.later, int(new.max()) + 1)  # where the next token stands
        every, later = torch.cat([before, new], 1), after - total
        odd = (every != torch.arange(total, device="cpu") + later).any(0).nonzero()
        return Places(every[:, : int(odd[-1]) + 1 if len(odd) else 0].clone(), later)

    def like(self, other: Places) -> bool:
        return self is other or (self.later == other.later and torch.equal(self.first, other.first))


def noted(before: Sequence[Places], axes: Tensor, counts: Sequence[int], had: Sequence[int]) -> list[Places]:
    """Places of all sequences once tokens have come that stand at axes [A, B, T], right-aligned, counts[b] of them.

    before: () where all that were seen, had[b] of each, are text. Waits for the device. Raises ValueError where tokens
    would stand among those that were seen, and for fractions: frames of Qwen3-Omni may stand between positions.
    """
    axes = axes.to("cpu")
    if axes.is_floating_point() and bool((fractions := axes.frac()).any()):
        raise ValueError(
            f"position_ids must be whole numbers, got {axes[fractions != 0][0].item():.6g}: the frames of a video "
            "stand between positions; give it at a rate whose frames do not"
        )
    axes, out = axes.to(torch.int64), []
    for b, (count, seen) in enumerate(zip(counts, had, strict=True)):
        old = before[b] if before else Places.of_text(len(axes))
        new = axes[:, b if axes.shape[1] > 1 else 0, axes.shape[2] - count :] if count else axes[:, 0, :0]
        if count and int(new.min()) < seen + old.later:
            raise ValueError(
                f"position_ids of an image or video must begin behind the tokens that sequence {b} has had, at "
                f"{seen + old.later}, got {int(new.min())}: a whole image comes in one call"
            )
        out.append(old.followed_by(new, seen))
    return out


class PlacedTables(RotaryTables):
    """Rotation of tokens by their number in a sequence, which stand where `places` says."""

    def __init__(self, plain: RotaryTables, places: Places) -> None:
        self.__dict__.update(vars(plain))
        self._plain, self._places, self._tables = plain, places, {}
        self._scaling = plain.scaling

    def _positions(self, rows: int, device: torch.device) -> Tensor:
        return self._places.at(0, rows)[:, None].to(device)

    def distances(self, end: int, tokens: int, first: int, last: int, chunk: int, device: torch.device) -> Tensor:
        at = self._places.at(end - tokens, end)
        # a chunk may begin amid an image, of which a later token stands further in front
        least = [int(at[:, a : a + chunk].min()) for a in range(0, tokens, chunk)]
        by_chunk = torch.tensor([end + self._places.later - x for x in least], dtype=torch.int32, device=device)
        return by_chunk[None, torch.arange(first, last, device=device) // chunk]

    def behind(self, x: Tensor, end: int, tokens: int, first: int, chunk: int, length: int) -> Tensor:
        own = torch.arange(first, first + x.shape[2], dtype=torch.int32, device=x.device)[None] + end - tokens
        distances = self.distances(end, tokens, first, first + x.shape[2], chunk, x.device)
        return self.move_on(self.rotate(x, own, end, [length]), distances, end + 1, length)

    def _moved(self, x: Tensor, distance: Tensor, bound: int, length: int, *, inverse: bool) -> Tensor:
        bound += max(self._places.later, 0)  # below it are numbers, and what they stand at may be more
        return self._plain._moved(x, distance, bound, length, inverse=inverse)  # as far on every axis


class PlacedBatch(RotaryTables):
    """The same of sequences that stand each elsewhere. every: of each sequence."""

    def __init__(self, plain: RotaryTables, every: Sequence[PlacedTables]) -> None:
        self.__dict__.update(vars(plain))
        self._every = list(every)
        self._joint: tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None

    def of(self, b: int) -> RotaryTables:
        return self._every[b]

    def step_tables(self, rows: int, lengths: list[int], device: torch.device) -> None:
        return None

    @torch.inference_mode(False)
    @torch.no_grad()
    def joint_tables(self, rows: int, lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        parts = [one.tables(rows, n, device) for one, n in zip(self._every, lengths, strict=True)]
        if self._joint is None or any(x is not part[0] for x, part in zip(self._joint[0], parts, strict=True)):
            most = min(len(part[0]) for part in parts)
            cos, sin = (torch.cat([part[i][:most] for part in parts]) for i in range(2))
            offsets = torch.arange(len(parts), dtype=torch.int32, device=device)[:, None] * most
            self._joint = [part[0] for part in parts], (cos, sin, offsets)
        return self._joint[1]

    def batch_tables(self, rows: int, lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        return self.joint_tables(rows, lengths, device)

    def _apply(
        self, x: Tensor, positions: Tensor | None, bound: int, lengths: list[int], *, inverse: bool,
        without: int | None = None,
    ) -> Tensor:  # fmt: skip
        assert without is None and not inverse  # a neuron's coordinate, and what a pruner asks of one sequence
        if positions is None:
            positions = torch.arange(x.shape[2], dtype=torch.int32, device=x.device)[None]
        cos, sin, offsets = self.joint_tables(bound, lengths, x.device)
        return ops.rope(x, cos, sin, positions + offsets, inverse=False)


# by what they are of, which they hold: no other object has its id meanwhile
_IN_USE: WeakValueDictionary[tuple[int, int], PlacedTables] = WeakValueDictionary()


def placed(plain: RotaryTables, places: Sequence[Places]) -> RotaryTables:
    """The rotation of a batch whose sequences stand at these places; raises ValueError for one that cannot (see
    RotaryTables.check_axes)."""
    if isinstance(plain, Unrotated):
        return plain
    plain.check_axes(len(places[0].first))
    found: list[PlacedTables] = []
    for one in places:
        same = next((x for x in found if x._places.like(one)), None) or _IN_USE.get((id(plain), id(one)))
        if same is None:
            same = _IN_USE[id(plain), id(one)] = PlacedTables(plain, one)
        found.append(same)
    return found[0] if all(x is found[0] for x in found) else PlacedBatch(plain, found)
