"""Steps of those who decode as CUDA graphs: one for each size of a batch, which the device does alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..caches import graphs
from .served_pass import ServedPass
from .slots import Slots


class Recording(NamedTuple):
    """end: below which position it turns. held: what it knows by address."""

    replay: Callable[[], None]
    result: Tensor
    end: int
    held: list[Tensor]


class Recordings:
    """Does the passes of those who decode alone (ServedPass.size). The first of a size runs op by op, as libraries take
    their workspaces then; the second is recorded, and those that follow are replayed.

    run: called with a size, runs the model over one token of each of so many sequences, which lies where it always
    does, and returns what is asked of it, [size, ...].
    """

    def __init__(self, slots: Slots, device: torch.device, run: Callable[[int], Tensor]) -> None:
        self.slots, self.device, self._run = slots, device, run
        self._pool: Any = None  # memory of all recordings
        self.count = 0  # how often a step was recorded
        self._moved = slots.moved  # when they were made
        self._warm: set[int] = set()
        self._recordings: dict[int, Recording] = {}

    def step(self, current: ServedPass) -> Tensor:
        """What run gives, good until the next step of this size."""
        size = current.size
        assert size is not None
        if size not in self._warm:
            self._warm.add(size)
            self._open(current, size)
            return self._padded(size)
        if self._moved != self.slots.moved:
            self._recordings, self._moved = {}, self.slots.moved
        found = self._recordings.get(size)
        if found is None or current.place >= found.end:
            self._recordings.pop(size, None)  # its memory comes back first
            found = self._recordings[size] = self._record(current, size)
        found.replay()
        return found.result

    def _open(self, current: ServedPass, size: int) -> tuple[int, list[Tensor]]:
        current.together, end, held = self.slots.step(size, current.place)
        current.decoding = size
        return end, held

    def _record(self, current: ServedPass, size: int) -> Recording:
        end, held = self._open(current, size)
        if self._pool is None and self.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        replay, result = graphs.record(lambda: self._padded(size), self.device, self._pool)
        self.count += 1
        return Recording(replay, result, end, held)

    def _padded(self, size: int) -> Tensor:
        self.slots.settle_padding()
        return self._run(size)
