"""Steps of those who decode as CUDA graphs: one for each size of a batch, which the device does alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    their workspaces then; the second is recorded, and those that follow are replayed. Where tensors of the model are
    replaced, all is recorded anew; what its code decides besides (adapters that are switched) must stay.

    run: called with a size, runs the model over one token of each of so many sequences, which lies where it always
    does, and returns what is asked of it, [size, ...].
    """

    def __init__(self, model: nn.Module, slots: Slots, device: torch.device, run: Callable[[int], Tensor]) -> None:
        self.slots, self.device, self._run = slots, device, run
        self._pool: Any = None  # memory of all recordings
        self._stream: Any = None
        self.count = 0  # how often a step was recorded
        self._warm: set[int] = set()
        self._recordings: dict[int, Recording] = {}
        self._tensors = [
            (held, name) for module in model.modules() for held in (module._parameters, module._buffers)
            for name, x in held.items() if x is not None
        ]  # fmt: skip
        self._made_of = self._state()

    def step(self, current: ServedPass) -> Tensor:
        """What run gives, good until the next step of this size."""
        size = current.size
        assert size is not None
        if size not in self._warm:
            self._warm.add(size)
            self._open(current, size)
            return self._padded(size)
        if (state := self._state()) != self._made_of:
            self._recordings, self._made_of = {}, state
        found = self._recordings.get(size)
        if found is None or current.place >= found.end:
            self._recordings.pop(size, None)  # its memory comes back first
            found = self._record(current, size)
            if current.failed:  # as all that decode have: what was recorded is not their step
                return found.result
            self._recordings[size] = found
        found.replay()
        return found.result

    def try_out(self, current: ServedPass) -> None:
        """A step of padding alone, before there are requests. Raises NotImplementedError where the model asks the
        device in it."""
        assert current.size is not None
        self._open(current, current.size)
        with graphs.AsksNothing():
            self._padded(current.size)

    def _state(self) -> tuple[int, ...]:
        """Differs where memory was replaced: of the slots, or of the model's tensors."""
        addresses = (0 if (x := held[name]) is None else x.data_ptr() for held, name in self._tensors)
        return self.slots.moved, *addresses

    def _open(self, current: ServedPass, size: int) -> tuple[int, list[Tensor]]:
        together, end, held = self.slots.step(size, current.place)
        current.fill(together)
        return end, held

    def _record(self, current: ServedPass, size: int) -> Recording:
        end, held = self._open(current, size)
        if self._pool is None and self.device.type == "cuda":
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        replay, result = graphs.record(lambda: self._padded(size), self.device, self._pool, self._stream)
        self.count += 1
        return Recording(replay, result, end, held)

    def _padded(self, size: int) -> Tensor:
        self.slots.settle_padding()
        return self._run(size)
