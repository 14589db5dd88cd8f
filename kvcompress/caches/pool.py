"""Storage of rotated keys and values: rows of any length in pages taken from one pool."""

from __future__ import annotations

import torch
from torch import Tensor


class PagePool:
    """Keys and values of R rows (row r = b*Hkv + h), each of its own length, in pages of P tokens.

    k_pages, v_pages: [pages, P, D]. block_table: int32 [R, blocks], the pages of each row in order. lengths: int32 [R]
    on the device, mirrored in `counts` on the host, so that no step waits for the device. The pool grows by what is
    needed and at least an eighth; pages of dropped tokens return to the free list.
    """

    def __init__(self, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device, page_size: int) -> None:
        self.page_size = page_size
        self.k_pages = torch.empty(0, page_size, head_dim, dtype=dtype, device=device)
        self.v_pages = torch.empty_like(self.k_pages)
        self.block_table = torch.zeros(rows, 0, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.counts = [0] * rows
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        self._free: list[int] = []

    def nbytes(self) -> int:
        """Bytes that the pool holds, free pages included."""
        tensors = (self.k_pages, self.v_pages, self.block_table, self.lengths)
        return sum(t.numel() * t.element_size() for t in tensors)

    def append(self, keys: Tensor, values: Tensor, counts: list[int]) -> None:
        """Adds the last counts[r] tokens of keys[r], values[r] ([R, S, D]) to row r."""
        R, S, D = keys.shape
        self._reserve([length + count for length, count in zip(self.counts, counts, strict=True)])
        longest = max(counts, default=0)
        if longest == 0:
            return
        places = self.lengths[:, None] + torch.arange(longest, dtype=torch.int32, device=keys.device)
        if min(counts) == longest:
            added: Tensor | int = longest
            source = slice(None), slice(S - longest, S)
            k, v = keys[source].reshape(-1, D), values[source].reshape(-1, D)
            slots = self._slots(places).flatten()
        else:
            added = torch.tensor(counts, dtype=torch.int32).to(keys.device)
            taken = torch.arange(longest, device=keys.device) < added[:, None]
            row, offset = taken.nonzero(as_tuple=True)
            column = offset + S - added[row]
            k, v = keys[row, column], values[row, column]
            slots = self._slots(torch.where(taken, places, 0))[taken]
        self.k_pages.view(-1, D).index_copy_(0, slots, k)
        self.v_pages.view(-1, D).index_copy_(0, slots, v)
        self.lengths += added
        self.counts = [length + count for length, count in zip(self.counts, counts, strict=True)]

    def drop_last(self, tokens: int) -> None:
        """Forgets the last tokens of every row; pages left empty return to the free list."""
        shortest = min(self.counts, default=0)
        if not 0 <= tokens <= shortest:
            raise ValueError(f"tokens must be between 0 and the shortest row's {shortest}, got {tokens}")
        self.lengths -= tokens
        self.counts = [count - tokens for count in self.counts]
        for pages, count in zip(self._pages, self.counts, strict=True):
            while len(pages) > self._blocks(count):
                self._free.append(pages.pop())

    def select_rows(self, rows: list[int]) -> None:
        """Keeps copies of the given rows, in this order, each in pages of its own."""
        source = [page for row in rows for page in self._pages[row]]
        index = torch.tensor(source, dtype=torch.long).to(self.k_pages.device)
        self.k_pages, self.v_pages = self.k_pages[index], self.v_pages[index]
        self.lengths = self.lengths[torch.tensor(rows, dtype=torch.long).to(self.lengths.device)]
        self.counts = [self.counts[row] for row in rows]
        sizes, self._pages, self._free = [len(self._pages[row]) for row in rows], [], []
        for size in sizes:
            start = sum(map(len, self._pages))
            self._pages.append(list(range(start, start + size)))
        self._write_table()

    def gather(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Keys and values as [R, capacity, D], zeros past each row's length. capacity: at least the longest row."""
        R, D = len(self.counts), self.k_pages.shape[2]
        k = self.k_pages.new_zeros(R, capacity, D)
        v = torch.zeros_like(k)
        longest = max(self.counts, default=0)
        if longest:
            places = torch.arange(longest, dtype=torch.int32, device=k.device).expand(R, longest)
            held = places < self.lengths[:, None]
            slots = self._slots(torch.where(held, places, 0))
            k[:, :longest] = self.k_pages.view(-1, D)[slots].masked_fill_(~held[..., None], 0)
            v[:, :longest] = self.v_pages.view(-1, D)[slots].masked_fill_(~held[..., None], 0)
        return k, v

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _slots(self, places: Tensor) -> Tensor:
        """Index of each token [R, n] in the pages seen as [pages*P, D]."""
        pages = self.block_table.gather(1, (places // self.page_size).long())
        return pages.long() * self.page_size + places % self.page_size

    def _reserve(self, lengths: list[int]) -> None:
        missing = [self._blocks(length) - len(pages) for length, pages in zip(lengths, self._pages, strict=True)]
        needed = sum(count for count in missing if count > 0)
        if needed == 0:
            return
        if needed > len(self._free):
            self._grow(needed - len(self._free))
        for pages, count in zip(self._pages, missing, strict=True):
            pages.extend(self._free.pop() for _ in range(count))
        self._write_table()

    def _grow(self, pages: int) -> None:
        old, size, D = self.k_pages.shape[0], self.page_size, self.k_pages.shape[2]
        total = old + max(pages, old // 8)
        for name in ("k_pages", "v_pages"):
            bigger = self.k_pages.new_empty(total, size, D)
            bigger[:old] = getattr(self, name)
            setattr(self, name, bigger)
        # handed out from the end of the list: lower pages first
        self._free = list(range(total - 1, old - 1, -1)) + self._free

    def _write_table(self) -> None:
        blocks = max((len(pages) for pages in self._pages), default=0)
        table = [pages + [0] * (blocks - len(pages)) for pages in self._pages]
        device = self.block_table.device
        self.block_table = torch.tensor(table, dtype=torch.int32).reshape(len(table), blocks).to(device)
