"""What stays of a pool's rows: the one place where slots are chosen, and where they go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from .origins import Origins
from .room import Room
from .store import Rows, locked


class Keeping(Room):
    """Of a pool. origins: which tokens of their sequences the slots hold; whatever moves a slot moves that.

    Layers choose by their own keep() alone, which moves what they note of a slot besides.
    """

    origins: Origins

    @property
    @abstractmethod
    def counts(self) -> list[int]: ...

    @abstractmethod
    def append(self, tokens: Sequence[Tensor], counts: Sequence[int] | Tensor | None = None) -> None: ...

    @abstractmethod
    def _refresh(self) -> None: ...

    @abstractmethod
    def _named(self) -> Tensor: ...

    @locked
    def fill(self, tokens: Sequence[Tensor], counts: Sequence[int], origins: Origins) -> None:
        """Gives empty rows their first tokens, which were chosen elsewhere: the last counts[r] of S.

        tokens: as append takes them. origins: which they are. Raises ValueError where a row is not empty, and as append
        does; nothing is changed then.
        """
        if (most := max(self.counts, default=0)) > 0:
            raise ValueError(f"fill must find empty rows, got one of {most} slots")
        self.append(tokens, counts)
        self.origins = origins

    @locked
    def keep(self, slots: Tensor, kept: Sequence[int], anew: Sequence[Tensor] | None = None) -> None:
        """Keeps the chosen slots of every row in all arrays; pages that become empty are free again.

        slots: int32 [R, K]: slot j of row r becomes what its slot slots[r, j] was, rising strictly, for j < kept[r].
        kept: 0..K; negative leaves a row as it is. anew: what the slots that stay hold from then on, one [B, H, S, ...]
        for each name, right-aligned; None = what they held.
        Raises ValueError for kept out of range, RuntimeError if copies of shared pages need more than max_pages;
        nothing is changed then.
        """
        before, K = self.counts, slots.shape[1]
        for row, (count, held) in enumerate(zip(kept, before, strict=True)):
            if count > min(K, held):
                raise ValueError(f"kept must be at most the {min(K, held)} that can stay of row {row}, got {count}")
        left = [held if count < 0 else count for count, held in zip(kept, before, strict=True)]
        if anew is not None:
            self._rewrite(anew, left)
        elif left != before:
            self._compact(slots, kept, left)
        self.origins.follow(slots, kept, before)

    @property
    def shares(self) -> bool:
        """Whether any page may be another row's too."""
        return self._shares

    @locked
    def shared_pages(self) -> int:
        """Pages that these rows share, once for each row: the most that keep copies. Waits for the device."""
        if not self._shares or self.store.pages == 0:
            return 0
        named = self._named()
        return int((named & (self.store.refs[torch.where(named, self.block_table, 0)] > 1)).sum())

    def pages_anew(self, counts: Sequence[int]) -> int:
        """Pages that counts[r] slots of each row take with other contents, where rows share any."""
        return sum(self.store.settings.blocks(count) for count in counts)

    @locked
    def make_room(self, slots: Tensor | None, kept: Sequence[int]) -> None:
        """Takes the free pages that keep(slots, kept) will need; slots None = with other contents (anew). Raises
        RuntimeError as that does; no row is changed."""
        if not self._shares:
            return
        self.store.count_free()
        if slots is None:
            self.store.provide(self.pages_anew(kept))
            return
        self._refresh()
        self.store.provide(self._count_copies(slots, torch.tensor(kept, dtype=torch.int32, device=self.lengths.device)))

    @locked
    def drop_last(self, tokens: int | Sequence[int]) -> None:
        """Takes back the last tokens of every row, or tokens[r] of row r; pages left empty become free.

        Raises ValueError for more than a row holds, or for what stayed when others went: before that there is a gap.
        Nothing is changed then.
        """
        counts = self.counts
        taken = [tokens] * len(counts) if isinstance(tokens, int) else list(tokens)
        for row, (count, held, first) in enumerate(zip(taken, counts, self.origins.chosen, strict=True)):
            if not 0 <= count <= held - first:
                raise ValueError(
                    f"tokens must be between 0 and the {held - first} that row {row} can give back, got {count}"
                )
        if any(taken):
            left = [held - count for held, count in zip(counts, taken, strict=True)]
            self._truncate(left)
            self.origins.end(left)

    @locked
    def drop_pages(self, first: int, pages: Sequence[int]) -> None:
        """Takes pages[r] pages out of every row r, from its page number `first` on; what follows moves up by as many.

        A page that is not full may be the last one taken. Copies nothing. Raises ValueError for pages that a row has
        not; nothing is changed then.
        """
        P, blocks, counts = self.page_size, self.store.settings.blocks, self.counts
        for row, (count, held) in enumerate(zip(pages, counts, strict=True)):
            if count < 0 or (count > 0 and first + count > blocks(held)):
                raise ValueError(f"pages must be between 0 and those of row {row} from {first} on, got {count}")
        most = max(pages, default=0)
        if most == 0:
            return
        table, device = self.block_table, self.lengths.device
        taken = torch.tensor(pages, dtype=torch.int32, device=device)
        place = torch.arange(table.shape[1], device=device)
        source = (place + torch.where(place < first, 0, taken[:, None])).clamp_(max=table.shape[1] - 1)
        with torch.inference_mode(False):
            given = torch.nn.functional.pad(table[:, first:], (0, most))[:, :most].contiguous()
            kept = [max(held - n * P, first * P) if n else held for n, held in zip(pages, counts, strict=True)]
            # memory may run out above the release, and not below it: pages would be given up twice
            left = Rows(table.gather(1, source), torch.tensor(kept, dtype=torch.int32, device=device))
            self.store.release(Rows(given, taken * P))
            self._rows.block_table, self._rows.lengths = left.block_table, left.lengths
        self.bounds = kept
        self._last_shared = [self._shares] * len(kept)
        self.origins.drop(first * P, [held - rest for held, rest in zip(counts, kept, strict=True)])

    # ---- within ----

    def _truncate(self, lengths: Sequence[int]) -> None:
        ops.truncate_rows_(
            self._table(), torch.tensor(lengths, dtype=torch.int32, device=self.lengths.device), self.page_size
        )
        self.bounds = list(lengths)
        self._last_shared = [self._shares] * len(self.bounds)

    def _rewrite(self, tokens: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Makes every row r the last counts[r] of S tokens, no more than it had."""
        (claim, beside), needed = self.unclaim(), 0
        if self._shares:  # others keep the pages of before
            needed = self.pages_anew(counts)
            self.store.count_free()
            self.store.provide(needed)
        self._truncate([0] * len(counts))
        self._shares, self._last_shared = False, [False] * len(counts)
        self.append(tokens, counts)
        self._hold(claim - needed, beside - needed)

    def _compact(self, slots: Tensor, kept: Sequence[int], left: list[int]) -> None:
        store, needed = self.store, 0
        claim, beside = self.unclaim()
        on_device = torch.tensor(kept, dtype=torch.int32, device=self.lengths.device)
        if self._shares:
            store.count_free()
            self._refresh()
            needed = self._count_copies(slots, on_device)
            store.provide(needed)
        store.free_at_least -= needed  # as in extend
        ops.compact_pages_(list(store.arrays.values()), self._table(), slots, kept=on_device)
        self._hold(claim - needed, beside - needed)
        self.bounds = left
        self._last_shared = [self._shares] * len(left)

    def _count_copies(self, slots: Tensor, kept: Tensor) -> int:
        """Shared pages that a compaction would write. Waits for the device."""
        K, table, named = slots.shape[1], self.block_table, self._named()
        if K == 0 or not self._shares:
            return 0
        starts = torch.arange(table.shape[1], device=table.device) * self.page_size
        ends = torch.minimum((starts + self.page_size).clamp(max=K).expand_as(table), kept[:, None])
        stays = named & (starts < K) & (starts < kept[:, None])
        last = (ends - 1).clamp_(min=0)
        moves = slots.gather(1, last) != last
        return int((stays & moves & (self.store.refs[torch.where(named, table, 0)] > 1)).sum())
