"""One forward pass over a compressed cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..hf.facts import Facts
from ..hf.method import Pass
from ..ops.softmax import Softmax
from .contest import Contest
from .pool import PagePool

View = Callable[[Tensor, Softmax], Tensor]  # attention of un-rotated queries to what a layer holds in this pass


@dataclass(frozen=True)
class Iteration:
    """One iteration of reading a prompt. memory[b][n]: tokens per KV head that layer n of those that compress keeps of
    sequence b; () for a sequence that has no tokens in it. guide_length: how many of its last tokens are the guide, at
    most. prompt: tokens of each sequence's whole prompt, None = not known. compresses: whether what is held is cut to
    its budget. repeated: where the guide repeats what is held, (back, length) of each sequence (see Candidates); None
    for one that has no tokens in it."""

    memory: tuple[tuple[int, ...], ...]
    guide_length: int = 0
    prompt: tuple[int, ...] | None = None
    compresses: bool = True
    repeated: tuple[tuple[int, int] | None, ...] | None = None


class CachePass(Pass):
    """counts[b]: tokens of sequence b in it, right-aligned; columns before them are padding. layers: the cache's, by
    the model's numbers. iteration: of the prompt that is being read by kvcompress.prefill, None = none is. more:
    whether the rest of the prompt is to come in other passes; continues: whether some of it has come."""

    chooses = True

    def __init__(
        self, facts: Facts, layers: Sequence[Any], counts: Sequence[int], columns: int,
        iteration: Iteration | None = None, *, more: bool = False, continues: bool = False,
    ) -> None:  # fmt: skip
        self.facts, self.layers = facts, layers
        self.more, self.continues = more, continues
        self.counts, self.columns, self.iteration = tuple(counts), columns, iteration
        self.compressing = sum(getattr(layer, "number", -1) >= 0 for layer in layers)  # how many layers of the cache do
        self.contest: Contest | None = None  # where layers share a budget
        self.later = False  # whether its tokens follow a prompt that is compressed, and are kept whole
        self.prompts: tuple[int, ...] | None = None  # tokens of whole prompts of which this pass reads a part
        self.lent: dict[int, Any] = {}  # what layers lend to others above them in this pass
        self._views: dict[int, tuple[View, Callable[[], None] | None]] = {}
        self._claiming: list[PagePool] = []

    @property
    def one(self) -> bool:
        """Every sequence has one token, which is not of a prompt that is being read."""
        return self.columns == 1 and self.iteration is None and min(self.counts) == 1

    @property
    def padded(self) -> bool:
        return min(self.counts) < self.columns

    @property
    def guide_length(self) -> int:
        return 0 if self.iteration is None else self.iteration.guide_length

    @property
    def guides(self) -> list[int]:
        """Tokens of the guide in each sequence."""
        return [min(self.guide_length, count) for count in self.counts]

    @property
    def kept(self) -> tuple[int, ...]:
        """Tokens of each sequence that are not the guide's."""
        if self.guide_length == 0:
            return self.counts
        return tuple(count - guide for count, guide in zip(self.counts, self.guides, strict=True))

    @property
    def whole(self) -> list[int]:
        """Tokens of each sequence by which frequencies that depend on length are settled: of a prompt that is read in
        chunks all of them, and no more of one that is read again with what followed it."""
        if self.iteration is None and self.prompts is not None:
            return [max(n, 1) for n in self.prompts]
        known = None if self.iteration is None else self.iteration.prompt
        return [max(count, n, 1) for count, n in zip(self.counts, known or self.counts, strict=True)]

    def ends_unheard(self, layer: int) -> bool:
        """Whether nobody looks at what a layer gives: the last one, in a pass that only scores."""
        return self.iteration is not None and self.iteration.repeated is not None and layer == max(self.facts)

    def claim(self, pool: PagePool, counts: Sequence[int], beside: int = 0) -> None:
        """Pages that nobody else gets before this pass has ended; see PagePool.claim."""
        pool.claim(counts, beside)
        self._claiming.append(pool)

    def unclaim(self) -> None:
        """What was claimed for this pass and not taken is anybody's."""
        for pool in self._claiming:
            pool.unclaim()
        self._claiming = []

    def on(self, device: torch.device) -> Tensor:
        """counts, int32 [B, 1] on a device."""
        return torch.tensor(self.counts, dtype=torch.int32, device=device)[:, None]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        facts = self.facts[layer]
        if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            with torch.inference_mode(False), torch.no_grad():  # what is stored must be usable outside inference mode
                return self.attend(layer, queries, keys, values, softmax)
        if facts.reads is None:
            out: Tensor = self.layers[layer].attend(self, queries, keys, values, softmax)
            return out
        view, after = self._views[facts.reads]
        # a family may go on with the last tokens alone (gemma4, in front of its head)
        missing = self.columns - queries.shape[2]
        out = view(torch.nn.functional.pad(queries, (0, 0, missing, 0)), softmax)[:, :, missing:]
        if layer == self.facts[facts.reads].readers[-1]:
            del self._views[facts.reads]
            if after is not None:
                after()
        return out

    def answer(
        self, layer: int, view: View, queries: Tensor, softmax: Softmax, after: Callable[[], None] | None = None
    ) -> Tensor:
        """What a layer's queries find; the same view serves the layers that read its keys. after: what changes it, done
        when the last of them has attended."""
        out = view(queries, softmax)
        self.lend_view(layer, view, after)
        return out

    def lend_view(self, layer: int, view: View, after: Callable[[], None] | None = None) -> None:
        """The same, where the layer's own queries have been answered."""
        if self.facts[layer].readers:
            self._views[layer] = (view, after)
        elif after is not None:
            after()
