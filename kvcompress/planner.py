"""The reading plan of a prompt: how many tokens each iteration reads and how much memory it leaves."""

from __future__ import annotations

from dataclasses import dataclass

from . import ops


@dataclass(frozen=True)
class Plan:
    """chunks[i]: tokens read in iteration i; memory[i]: scheduled memory after it; stored[i]: what can be held then."""

    chunks: tuple[int, ...]
    memory: tuple[int, ...]
    stored: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def largest_context(self) -> int:
        """Most keys that one iteration sees (memory before it plus its chunk); positions stay below this."""
        return max((held + chunk for held, chunk in zip((0, *self.stored), self.chunks, strict=False)), default=0)


def plan(prompt_length: int, *, chunk_size: int, memory_size: int, schedule: str = "fixed") -> Plan:
    """Plan of reading prompt_length tokens (integers only, computed in C).

    chunk_size: tokens per iteration, at least 1. memory_size: tokens kept per layer and KV head, at least 1.
    schedule: "fixed" (the memory has its full size from the start). An empty prompt has an empty plan.
    Raises ValueError for sizes out of range or an unknown schedule, RuntimeError for a schedule not implemented yet.
    Source: IMDC ("Memorize Step by Step: Efficient Long-Context Prefilling with Incremental Memory and Decremental
    Chunk"), section 3.1; the paper leaves rounding open, ours is stated with kvc_plan in csrc/kvc.h.
    """
    rows = ops.plan(prompt_length, chunk_size, memory_size, schedule=schedule)
    chunks, memory, stored = (tuple(row) for row in rows.tolist())
    return Plan(chunks, memory, stored)
