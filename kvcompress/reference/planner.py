"""Chunk and memory sizes of iterative reading. IMDC ("Memorize Step by Step"), section 3.1."""

from __future__ import annotations


def plan(prompt_length: int, chunk_size: int, memory_size: int) -> tuple[list[int], list[int], list[int]]:
    """(chunks, memory, stored) of the fixed schedule: equal chunks, the last one takes the rest."""
    chunks = [min(chunk_size, prompt_length - start) for start in range(0, prompt_length, chunk_size)]
    memory = [memory_size] * len(chunks)
    stored, held = [], 0
    for chunk in chunks:
        held = min(memory_size, held + chunk)
        stored.append(held)
    return chunks, memory, stored
