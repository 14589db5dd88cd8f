"""The reading plan of a prompt: how many tokens each iteration reads and how much memory it leaves."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from . import ops
from .support.checks import need_integer

__all__ = ["Adaptive", "Plan", "plan"]

LEAST = 64  # tokens that memory starts with: with fewer, 2 facts of 43 outlasted long prompts; with these 369 of 370


@dataclass(frozen=True)
class Plan:
    """n iterations over L layers.

    chunks [n]: tokens read in iteration i. memory [n]: scheduled memory after it, mean over the layers, rounded.
    stored [n]: what the layer that holds most can hold then. layer_memory, layer_stored [L][n]: the same per layer, not
    rounded; not given, there is one layer. clamped: iterations whose chunk is larger than the schedule has it, because
    it would be below min_chunk.
    """

    chunks: tuple[int, ...]
    memory: tuple[int, ...]
    stored: tuple[int, ...]
    layer_memory: tuple[tuple[int, ...], ...] = ()
    layer_stored: tuple[tuple[int, ...], ...] = ()
    clamped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, of_one_layer in (("layer_memory", self.memory), ("layer_stored", self.stored)):
            if not getattr(self, name):
                object.__setattr__(self, name, (of_one_layer,))

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return sum(self.chunks)

    @property
    def largest_context(self) -> int:
        """Most keys that one iteration sees (memory before it plus its chunk); positions stay below this."""
        return max((held + chunk for held, chunk in zip((0, *self.stored), self.chunks, strict=False)), default=0)

    @property
    def mean_memory(self) -> float:
        """Scheduled memory that an iteration after the first meets, mean over these and the layers; 0 if there is none.

        The paper's m-hat: the last memory, which only generation reads, does not count.
        """
        return float(self._mean_memory())

    @property
    def attended_pairs(self) -> Fraction:
        """Pairs of a query and a key that it sees while the prompt is read, mean over the layers, exact."""
        pairs = sum(
            chunk * held + chunk * (chunk + 1) // 2
            for stored in self.layer_stored
            for held, chunk in zip((0, *stored), self.chunks, strict=False)
        )
        return Fraction(pairs, len(self.layer_stored))

    def key_ratio(self, other: Plan | None = None) -> float:
        """Keys per iteration under `other` over keys per iteration under this plan: q of equation 4.

        (mean memory + mean chunk) of both, iteration 0 left out. other: a plan of the same prompt; None: memory of this
        plan's last size from the start, in the same chunks. 1 where nothing is read with memory.
        """
        if len(self) <= 1 and other is None:
            return 1.0
        if other is not None:
            self._check_same_prompt(other)
        chunk = Fraction(self.prompt_length, max(len(self), 1))
        keys = self._mean_memory() + chunk
        if other is None:
            others = Fraction(sum(sizes[-1] for sizes in self.layer_memory), len(self.layer_memory)) + chunk
        else:
            others = other._mean_memory() + Fraction(other.prompt_length, max(len(other), 1))
        return float(others / keys) if keys else 1.0

    def speedup(self, share: float, other: Plan | None = None, *, share_of: str = "self") -> float:
        """How many times faster than `other` (None: fixed memory) this plan reads, by counting keys: equation 4.

        share: attention's part of the run time, 0..1. share_of: "self", measured while reading by this plan (as the
        paper has it), 1 + share*(q - 1); "other", measured while reading by the other plan, 1 / (1 - share + share/q).
        Raises ValueError for another share or share_of, or plans of different prompts.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share must be between 0 and 1, got {share}")
        if share_of not in ("self", "other"):
            raise ValueError(f"share_of must be one of self, other, got {share_of!r}")
        ratio = self.key_ratio(other)
        return 1 + share * (ratio - 1) if share_of == "self" else 1 / (1 - share + share / ratio)

    def pair_ratio(self, other: Plan) -> float:
        """Attended pairs under `other` over those under this plan: what a kernel that skips masked pairs can gain."""
        self._check_same_prompt(other)
        return float(other.attended_pairs / self.attended_pairs) if len(self) else 1.0

    def peak_keys(self, prune: str = "layer") -> tuple[int, int]:
        """Most keys that are held while reading, per sequence and KV head: (in the rows of all layers, besides).

        prune: "layer", each layer is pruned right after its attention: rows hold their memory, the larger of old and
        new, and besides there is memory and chunk of the layer at work; "forward", all layers are pruned after the
        whole forward pass: rows hold memory and chunk, and there is nothing besides.
        """
        if prune not in ("layer", "forward"):
            raise ValueError(f"prune must be one of layer, forward, got {prune!r}")
        peak, before = (0, 0), (0,) * len(self.layer_stored)
        for chunk, after in zip(self.chunks, zip(*self.layer_stored, strict=True), strict=True):
            if prune == "forward":
                held = sum(before) + chunk * len(before), 0
            else:
                held = sum(map(max, before, after)), max(before) + chunk
            peak, before = max(peak, held, key=sum), after
        return peak

    def _mean_memory(self) -> Fraction:
        if len(self) < 2:
            return Fraction(0)
        return Fraction(sum(sum(sizes[:-1]) for sizes in self.layer_memory), len(self.layer_memory) * (len(self) - 1))

    def _check_same_prompt(self, other: Plan) -> None:
        if other.prompt_length != self.prompt_length:
            raise ValueError(f"other must read {self.prompt_length} tokens, got {other.prompt_length}")


def plan(
    prompt_length: int,
    *,
    chunk_size: int,
    memory_size: int,
    schedule: str = "fixed",
    dynamic: bool = False,
    initial_memory: int | None = None,
    least_memory: int = LEAST,
    layers: int = 1,
    min_chunk: int = 1,
    strict: bool = False,
) -> Plan:
    """Plan of reading prompt_length tokens, as IterativeCache does (integers only, computed in C).

    chunk_size: tokens per iteration, at least 1. memory_size: tokens kept per layer and KV head after the last
    iteration, at least 1. schedule: how memory grows: "fixed" (full size from the start), "linear", "square" (late),
    "sqrt" (early), "square-sqrt" (low layers late, high ones early), "adaptive" (this plan is the linear base, which
    ops.divide_memory divides over the layers by what they retain). dynamic: chunks shrink as memory grows, so that both
    together keep one size (decremental chunk); their mean stays. initial_memory: memory after the first iteration,
    0..memory_size; None = memory_size / iterations, but where a layer would have less, least_memory, at most
    memory_size. least_memory: a cache gives its pruner's sinks and window and 32 tokens, 64 at least; 0 is the paper's
    plan. layers: of the model; they differ under "square-sqrt" only.
    min_chunk: at least 1; shrinking chunks that would be shorter are set to it, with a UserWarning where memory_size is
    too large for the schedule (linear: above 2 * chunk_size). strict: ValueError instead, in any case.
    An empty prompt has an empty plan. Raises ValueError for sizes out of range or an unknown schedule.
    Source: IMDC ("Memorize Step by Step: Efficient Long-Context Prefilling with Incremental Memory and Decremental
    Chunk"), section 3 and A.1; the paper leaves rounding open, ours is stated with kvc_plan in csrc/kvc.h.
    """
    if not isinstance(dynamic, bool):
        raise ValueError(f"dynamic must be True or False, got {dynamic!r}")
    if initial_memory is not None and isinstance(memory_size, int):
        whole = isinstance(initial_memory, int) and not isinstance(initial_memory, bool)
        if not (whole and 0 <= initial_memory <= memory_size):
            raise ValueError(
                f"initial_memory must be between 0 and memory_size = {memory_size}, got {initial_memory!r}"
            )
    need_integer("least_memory", least_memory, 0)

    def planned(initial: int) -> Tensor:
        return ops.plan(
            prompt_length, chunk_size, memory_size, initial_memory=initial, schedule=schedule, dynamic=dynamic,
            layers=layers, min_chunk=min_chunk,
        )  # fmt: skip

    rows = planned(-1 if initial_memory is None else initial_memory)
    least = min(least_memory, memory_size)
    if initial_memory is None and rows.shape[1] and int(rows[3 : 3 + layers, 0].min()) < least:
        rows = planned(least)
    chunks, memory, was_clamped = (tuple(row) for row in rows[:3].tolist())
    same = schedule != "square-sqrt"  # then one row stands for all, which saves memory
    layer_memory, layer_stored = (
        tuple(map(tuple, part[:1].tolist())) * layers if same else tuple(map(tuple, part.tolist()))
        for part in (rows[3 : 3 + layers], rows[3 + layers :])
    )
    result = Plan(
        chunks=chunks,
        memory=memory,
        stored=layer_stored[0] if same else tuple(map(max, zip(*layer_stored, strict=True))),
        layer_memory=layer_memory,
        layer_stored=layer_stored,
        clamped=tuple(i for i, flag in enumerate(was_clamped) if flag),
    )
    if result.clamped:
        short = (
            f"{len(result.clamped)} of {len(result)} chunks, from iteration {result.clamped[0]} on, would be shorter "
            f"than min_chunk = {min_chunk}"
        )
        if strict:
            raise ValueError(
                f"memory_size must be smaller or chunk_size larger for schedule {schedule!r} if strict: {short}, got "
                f"memory_size = {memory_size} and chunk_size = {chunk_size}"
            )
        if memory_size > 2 * chunk_size or schedule not in ("linear", "adaptive"):
            warnings.warn(
                f"memory_size = {memory_size} is large for chunk_size = {chunk_size} and schedule {schedule!r}: "
                f"{short} and were set to it",
                stacklevel=2,
            )
    return result


@dataclass(frozen=True)
class Adaptive:
    """Schedule of IterativeCache: layers that retain more of their memory get more of it; the sum over layers grows
    linearly.

    ratio: "last" weighs with the last iteration's retention ratio, "mean" with the mean of all so far. normalise: "sum"
    (weights are the ratios) or "softmax" of them. Raises ValueError for other words. Source: IMDC, eq 2 and 3.
    """

    ratio: str = "last"
    normalise: str = "sum"

    def __post_init__(self) -> None:
        for name, choices in (("ratio", ("last", "mean")), ("normalise", ("sum", "softmax"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def weights(self, history: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
        """One weight per layer. history: of each layer and iteration, tokens kept from memory, and all that it kept."""
        ratios = [[old / max(kept, 1) for old, kept in past] for past in history]
        # the first iteration has no memory to retain
        each = [past[-1] if self.ratio == "last" else statistics.fmean(past[1:]) for past in ratios]
        if self.normalise == "sum":
            return each
        shares = [math.exp(ratio) for ratio in each]
        return [share / sum(shares) for share in shares]
