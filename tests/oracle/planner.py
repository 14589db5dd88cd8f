"""Chunk and memory sizes of iterative reading from their definitions, in fractions. IMDC ("Memorize Step by Step")."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple


class PlanLists(NamedTuple):
    """chunks, mean_memory [n]; clamped: iterations; memory, stored [layers][n]."""

    chunks: list[int]
    mean_memory: list[int]
    clamped: list[int]
    memory: list[list[int]]
    stored: list[list[int]]


def half_up(x: Fraction) -> int:
    return math.floor(x + Fraction(1, 2))


def root_half_up(x: Fraction) -> int:
    """The square root of x rounded half up."""
    below = math.isqrt(math.floor(x))
    return below + ((below + Fraction(1, 2)) ** 2 <= x)


def layer_schedules(schedule: str, layers: int) -> list[str]:
    """The rule of each layer: fixed, linear, square or sqrt."""
    if schedule == "square-sqrt":
        return ["square"] * (layers // 2) + ["linear"] * (layers % 2) + ["sqrt"] * (layers // 2)
    return ["linear" if schedule == "adaptive" else schedule] * layers


def real_memory(schedule: str, memory_size: int, initial_memory: Fraction, n: int) -> list[float]:
    """Equations 1, 8 and 9: the memory of one layer after each iteration, not rounded."""
    if schedule == "fixed" or n == 1:
        return [float(memory_size)] * n
    power = {"linear": 1.0, "square": 2.0, "sqrt": 0.5}[schedule]
    first = float(initial_memory)
    return [first + (memory_size - first) * (i / (n - 1)) ** power for i in range(n)]


def real_chunks(prompt_length: int, memory: list[float]) -> list[float]:
    """Equation 7 with the mean chunk prompt_length / n."""
    mean = prompt_length / len(memory)
    before = memory[:-1]
    return [mean, *(mean + sum(before) / len(before) - held for held in before)]


def plan(
    prompt_length: int,
    chunk_size: int,
    memory_size: int,
    *,
    initial_memory: int = -1,
    schedule: str = "fixed",
    dynamic: bool = False,
    layers: int = 1,
    min_chunk: int = 1,
) -> PlanLists:
    """The whole plan in whole numbers."""
    n = math.ceil(Fraction(prompt_length, chunk_size))
    if n == 0:
        return PlanLists([], [], [], [[] for _ in range(layers)], [[] for _ in range(layers)])
    first = initial_memory if initial_memory >= 0 else max(1, half_up(Fraction(memory_size, n)))
    memory = [_memory(rule, memory_size, first, n) for rule in layer_schedules(schedule, layers)]
    mean_memory = [half_up(Fraction(sum(sizes), layers)) for sizes in zip(*memory, strict=True)]
    clamped: list[int] = []
    if dynamic:
        chunks, clamped = _decremental(prompt_length, mean_memory, min_chunk)
    else:
        chunks = [min(chunk_size, prompt_length - start) for start in range(0, prompt_length, chunk_size)]
    stored = [[0] * n for _ in range(layers)]
    for held, sizes in zip(stored, memory, strict=True):
        for i in range(n):
            held[i] = min(sizes[i], (held[i - 1] if i else 0) + chunks[i])
    return PlanLists(chunks, mean_memory, clamped, memory, stored)


def _memory(rule: str, memory_size: int, first: int, n: int) -> list[int]:
    if rule == "fixed" or n == 1:
        return [memory_size] * n
    growth, last = memory_size - first, n - 1
    if rule == "linear":
        return [first + half_up(Fraction(growth * i, last)) for i in range(n)]
    if rule == "square":
        return [first + half_up(growth * Fraction(i, last) ** 2) for i in range(n)]
    return [first + root_half_up(growth**2 * Fraction(i, last)) for i in range(n)]


def _decremental(prompt_length: int, memory: list[int], min_chunk: int) -> tuple[list[int], list[int]]:
    n = len(memory)
    least = min(min_chunk, prompt_length // n)
    chunks = {0: math.ceil(Fraction(prompt_length, n))}
    rest, open_ones, clamped = prompt_length - chunks[0], list(range(1, n)), []
    while open_ones:
        level, larger = divmod(rest + sum(memory[i - 1] for i in open_ones), len(open_ones))
        for place, i in enumerate(open_ones):
            chunks[i] = level + (place < larger) - memory[i - 1]
        small = [i for i in open_ones if chunks[i] < least]
        if not small:
            break
        chunks.update(dict.fromkeys(small, least))
        clamped += small
        rest -= least * len(small)
        open_ones = [i for i in open_ones if i not in small]
    return [chunks[i] for i in range(n)], sorted(clamped)


def attended_pairs(chunks: list[int], stored: list[int]) -> int:
    """Pairs of a query and a key that it sees, in one layer that holds stored[i] after iteration i."""
    held, pairs = 0, 0
    for chunk, after in zip(chunks, stored, strict=True):
        pairs += sum(held + token + 1 for token in range(chunk))
        held = after
    return pairs


def memory_weights(total: int, ratios: list[Fraction]) -> list[Fraction]:
    """The ratios as they are where a common denominator is small enough, else rounded to the smallest unit there is."""
    unit = 1 << 31
    while len(ratios) * max(total, 1) * unit >= 1 << 63:
        unit //= 2
    if math.lcm(*(ratio.denominator for ratio in ratios)) <= unit:
        return ratios
    return [Fraction(half_up(ratio * unit), unit) for ratio in ratios]


def divide_memory(total: int, ratios: list[Fraction], lowest: list[int], highest: list[int]) -> list[int]:
    """Equation 3 within bounds: total divided by the ratios, exactly."""
    total = min(total, sum(highest))
    if sum(lowest) > total:
        lowest = [0] * len(ratios)
    shares: dict[int, Fraction] = {}
    settled: dict[int, int] = {}
    while len(settled) < len(ratios):
        rest = total - sum(settled.values())
        open_ones = [j for j in range(len(ratios)) if j not in settled]
        weights = {j: ratios[j] for j in open_ones}
        if sum(weights.values()) == 0:
            weights = dict.fromkeys(open_ones, Fraction(1))
        shares = {j: rest * weight / sum(weights.values()) for j, weight in weights.items()}
        above = {j: share - highest[j] for j, share in shares.items() if share > highest[j]}
        below = {j: lowest[j] - share for j, share in shares.items() if share < lowest[j]}
        if not above and not below:
            break
        if sum(above.values()) >= sum(below.values()):
            settled |= {j: highest[j] for j in above}
        else:
            settled |= {j: lowest[j] for j in below}
        shares = {}
    sizes = settled | {j: math.floor(share) for j, share in shares.items()}
    for _ in range(total - sum(sizes.values())):
        j = max((j for j in shares if sizes[j] < highest[j]), key=lambda j: (shares[j] - sizes[j], -j))
        sizes[j] += 1
    return [sizes[j] for j in range(len(ratios))]
