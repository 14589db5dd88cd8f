"""Steps that repeat without the host (StepGraph): what a layer must answer for them, and what a cache does."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from ..hf.facts import Facts, LayerFacts
from .layer import CompressedLayer
from .states import RecurrentStates
from .summary import Summary


class RepeatingLayer(CompressedLayer):
    """A layer whose decoded tokens can follow each other with nothing done on the host (StepGraph)."""

    @property
    @abstractmethod
    def repeats(self) -> bool:
        """Whether they can with these settings."""

    @property
    def placeable(self) -> bool:
        """Whether steps of whoever decodes can be done again in memory that stays: step_rows has all that they read and
        write of a sequence (see kvcompress.serve.slots)."""
        return False

    def step_rows(self) -> dict[str, Tensor]:
        """What a step of a placeable layer reads and writes of each row, or sequence, by name; the rest is of no batch
        (pages, rotation)."""
        raise NotImplementedError(f"{type(self).__name__} is not placeable")

    def place_rows(self, rows: dict[str, Tensor], *, borrowed: int | None = None) -> None:
        """That lies in these tensors from now on, as step_rows gave it. borrowed: it is another layer's over the same
        store, and this one, which holds nothing, takes steps in its place, of tokens that stand at most there."""
        raise NotImplementedError(f"{type(self).__name__} is not placeable")

    @abstractmethod
    def prepare_steps(self) -> None:
        """Does on the host what a step to come would do there, as far as that can be done before it; raises
        RuntimeError where there are no pages for it."""

    @abstractmethod
    def steps_ahead(self, facts: LayerFacts) -> int:
        """How many one-token steps can come now with nothing done on the host but to count them."""

    @abstractmethod
    def count_step(self) -> None:
        """Counts such a step, which the device has done alone."""

    @abstractmethod
    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        """What a step reads and writes; while these are the same, a recorded step can be done again."""


class Repeats(Summary, RecurrentStates):
    """Of a cache: one-token steps that a device does alone."""

    facts: Facts | None
    seen: int

    @abstractmethod
    def placed(self, facts: Facts) -> Facts:
        """Those of a pass."""

    @abstractmethod
    def check_complete(self) -> None: ...

    def check_repeats(self) -> None:
        """Raises NotImplementedError if decoded tokens need the host each."""
        for index, layer in enumerate(self.layers):
            own = None if self.facts is None else self.facts.get(index)
            if own is not None and own.reads is not None:
                raise NotImplementedError(
                    f"layer {index} reads the keys of layer {own.reads}, by an op of its own: a step cannot be recorded"
                )
            if self.recurs or not isinstance(layer, RepeatingLayer) or not layer.repeats:
                raise NotImplementedError(
                    f"layer {index} of {type(self).__name__} ({type(layer).__name__}) needs the host for each token, "
                    "as recurrent states and what is compressed while decoding do: a step cannot be recorded"
                )

    @property
    def _repeating(self) -> list[RepeatingLayer]:
        return [layer for layer in self.layers if isinstance(layer, RepeatingLayer)]

    def prepare_steps(self) -> None:
        """Takes pages for one-token steps to come, so that they need nothing of the host. Raises RuntimeError where
        there are none; nothing that is stored changes."""
        for layer in self._repeating:
            layer.prepare_steps()

    def steps_ahead(self) -> int:
        """How many one-token steps can come now with nothing done on the host but to count them."""
        assert self.facts is not None
        self.check_complete()
        facts = self.placed(self.facts)
        return min(layer.steps_ahead(facts[layer.index]) for layer in self._repeating)

    def count_step(self) -> None:
        """Counts such a step, which the device has done alone."""
        self.seen += 1
        self._count([1] * self._batch)
        for layer in self._repeating:
            layer.count_step()
            layer.seen = self.seen

    def held_tensors(self) -> list[Tensor]:
        """What a step reads and writes: the same tensors, as objects, as long as a recorded step can be done again."""
        assert self.facts is not None
        facts = self.placed(self.facts)
        return [x for layer in self._repeating for x in layer.held_tensors(facts[layer.index])]
