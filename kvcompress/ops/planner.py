"""Chunk and memory sizes of IMDC."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..support.checks import need, need_choice, need_integer, need_integers, need_sequence
from .native import native

SCHEDULES = ("fixed", "linear", "square", "sqrt", "square-sqrt", "adaptive")


def plan(
    prompt_length: int, chunk_size: int, memory_size: int, *, initial_memory: int = -1, schedule: str = "fixed",
    dynamic: bool = False, layers: int = 1, min_chunk: int = 1,
) -> Tensor:  # fmt: skip
    """Chunk and memory sizes of reading a prompt iteratively; see kvcompress.planner for the friendly face.

    prompt_length: at least 0. chunk_size, memory_size, layers, min_chunk: at least 1. initial_memory: memory after the
    first iteration, 0..memory_size, or -1: memory_size/n, rounded, at least 1. schedule: one of SCHEDULES. dynamic:
    chunks shrink as memory grows (those below min_chunk are set to it), else all but the last are chunk_size.
    Returns int64 [3 + 2*layers, n] on the CPU, n = ceil(prompt_length / chunk_size). Rows: 0 chunks; 1 scheduled
    memory, mean over the layers, rounded; 2 whether the chunk was clamped to min_chunk (0 or 1); then `layers` rows of
    scheduled memory, and as many of what can really be held.
    Raises ValueError for sizes out of range and for those with which the integers would reach 2**63 (see kvc_plan in
    csrc/kvc.h), or a plan 2**28 numbers.
    Source: IMDC ("Memorize Step by Step"), eq 1, 5-9; rounding is ours.
    """
    number = need_choice("schedule", schedule, SCHEDULES)
    need_integer("prompt_length", prompt_length, 0)
    for name, size in (("chunk_size", chunk_size), ("memory_size", memory_size), ("layers", layers),
                       ("min_chunk", min_chunk)):  # fmt: skip
        need_integer(name, size, 1)
    need(
        isinstance(initial_memory, int) and -1 <= initial_memory <= memory_size,
        f"initial_memory must be between 0 and memory_size = {memory_size}, or -1 (default), got {initial_memory!r}",
    )
    n = -(-prompt_length // chunk_size)
    need(
        (3 + 2 * layers) * n < 1 << 28,
        f"chunk_size must be larger for {prompt_length} tokens and {layers} layers, whose plan would have "
        f"{(3 + 2 * layers) * n} numbers, more than 2**28 - 1, got {chunk_size}",
    )
    try:
        return native.plan(prompt_length, chunk_size, memory_size, initial_memory, number, dynamic, layers, min_chunk)
    except RuntimeError as error:
        need(
            "2**63" not in str(error),
            f"memory_size must be smaller for {n} iterations of schedule {schedule!r} in {layers} layers, where a "
            f"product of sizes reaches 2**63, got {memory_size}",
        )
        raise


def divide_memory(
    total: int, kept: Sequence[int], stored: Sequence[int], *, lowest: Sequence[int], highest: Sequence[int]
) -> Tensor:
    """Sizes of all layers' memory in one iteration of the schedule "adaptive", from retention ratios.

    total: tokens to divide, L times the base size, at least 0. kept, stored: [L] each, ratios kept/stored of the
    iteration before: entries of the old memory that stayed, and all entries then, 0 <= kept <= stored < 2**31 (0/0 is
    0); another weight of 0..1 is a numerator over a common denominator. lowest, highest: [L], bounds of the sizes.
    Returns int64 [L] on the CPU: total * ratio / sum of ratios, within the bounds, in whole tokens that sum to
    min(total, sum of highest). Equal shares where all ratios are 0; no lower bounds where they sum to more than total.
    The result is the same on every machine: integers only, exact where the ratios have a common denominator of up to
    2**31 (less for a total*L above 2**32), else with weights rounded to that many parts; see csrc/kvc.h.
    Raises ValueError for sizes out of range, or total*L of 2**47 or more.
    Source: IMDC ("Memorize Step by Step"), eq 2 and 3, which leave the iteration, bounds and rounding open.
    """
    need_integer("total", total, 0)
    need_sequence("kept", kept, "integers")
    L, limit = len(kept), 1 << 31
    need(total * L < 1 << 47, f"total must be below 2**47 / {L} layers, got {total}")
    rows = [need_integers(name, values, L) for name, values in (
        ("kept", kept), ("stored", stored), ("lowest", lowest), ("highest", highest))]  # fmt: skip
    for j in range(L):
        need_integer(f"stored[{j}]", stored[j], 0, limit - 1)
        need(kept[j] <= stored[j], f"kept[{j}] must be at most stored[{j}] = {stored[j]}, got {kept[j]}")
        need(lowest[j] <= highest[j], f"lowest[{j}] must be at most highest[{j}] = {highest[j]}, got {lowest[j]}")
    return native.divide_memory(total, *rows)
