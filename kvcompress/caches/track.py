"""What a prompt's reading did, iteration by iteration: for figures and for users who want to see what is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class LayerReading:
    """One layer in one iteration of one sequence.

    positions: of the tokens kept, by KV head, int32, counted from the first token that the cache read. retention:
    float32 [Hkv], share of the new memory that was in the old one (IMDC, eq 2). memory_attention: float32 [Hkv], share
    of the chunk's attention that memory received, mean over the chunk's queries and the query heads of a KV head.
    memory_size: float32 [Hkv], keys in memory that they saw.
    """

    positions: tuple[Tensor, ...]
    retention: Tensor
    memory_attention: Tensor
    memory_size: Tensor

    def __repr__(self) -> str:
        kept = [len(row) for row in self.positions]
        return f"LayerReading(tokens kept by KV head: {kept})"


@dataclass(frozen=True, eq=False, repr=False)
class ChunkReading:
    """One iteration of one sequence: where its chunk began, its tokens, and what each layer did."""

    start: int
    chunk: int
    layers: tuple[LayerReading, ...]

    def __repr__(self) -> str:
        return f"ChunkReading({self.chunk} tokens from {self.start:,} on, {len(self.layers)} layers)"


@dataclass(eq=False, repr=False)
class Track:
    """readings[b][i]: iteration i of sequence b. All tensors are on the CPU: 4 bytes per token that a row of
    memory keeps, in every iteration; 1,000 iterations with 1,024 tokens in 8 heads of 32 layers are 1 GiB."""

    readings: list[list[ChunkReading]] = field(default_factory=list)

    def __repr__(self) -> str:
        layers = next((len(x.layers) for one in self.readings for x in one), 0)
        chunks = ", ".join(str(len(one)) for one in self.readings) or "none"
        return f"Track(chunks of each sequence: {chunks}; {layers} layers)"

    def retention(self, sequence: int = 0) -> Tensor:
        """float32 [n, L, Hkv]: retention ratio of each iteration."""
        readings = self._of(sequence)
        return torch.stack([torch.stack([layer.retention for layer in r.layers]) for r in readings])

    def memory_attention(self, sequence: int = 0) -> Tensor:
        """float32 [n, L, Hkv]: share of a chunk's attention that memory received."""
        readings = self._of(sequence)
        return torch.stack([torch.stack([layer.memory_attention for layer in r.layers]) for r in readings])

    def memory_probability(self, sequence: int = 0) -> Tensor:
        """float32 [n, L, Hkv]: mean attention probability of a key in memory; nan in the first iteration."""
        readings = self._of(sequence)
        sizes = torch.stack([torch.stack([layer.memory_size for layer in r.layers]) for r in readings])
        return self.memory_attention(sequence) / sizes.masked_fill(sizes == 0, torch.nan)

    def memory_map(self, sequence: int = 0) -> Tensor:
        """float32 [L, n]: share of a layer's final memory, over all its KV heads, that came from each chunk."""
        readings = self._of(sequence)
        edges = torch.tensor([r.start for r in readings], device="cpu")
        rows = []
        for layer in readings[-1].layers:
            positions = torch.cat(layer.positions).long()
            chunk = torch.bucketize(positions, edges, right=True) - 1
            rows.append(torch.bincount(chunk.clamp(min=0), minlength=len(edges)) / max(len(positions), 1))
        return torch.stack(rows)

    def _of(self, sequence: int) -> list[ChunkReading]:
        if not 0 <= sequence < len(self.readings) or not self.readings[sequence]:
            raise ValueError(f"sequence must be one of the {len(self.readings)} that were read, got {sequence}")
        return self.readings[sequence]
