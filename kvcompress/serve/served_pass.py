"""A forward pass over the tokens of many requests: those that decode in one call of a layer, each part in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..caches.passes import CachePass
from ..hf.facts import Facts
from ..hf.method import Pass
from ..ops.softmax import Softmax


@dataclass
class Part:
    """The next tokens of a request whose prompt is being read. prompt: all tokens that are read before it decodes.
    given: those of them that are the user's, by which frequencies that depend on length are settled."""

    request: str
    tokens: int
    prompt: int
    given: int


class ServedPass(Pass):
    """One forward pass over packed tokens [1, T]: one of each request that decodes, and parts of prompts. at: where the
    tokens of those that decode are, in their order; starts: where each part begins.

    All decoding requests attend in one call of a layer, and each part in one of its own. A part whose cache refuses it
    (positions that the model does not know, NaN scores) gets zeros from there on; failed says which, and why. Those who
    decode have one cache. guarded: it scores while they do, and would refuse all for what one of them holds: the
    queries, keys and values of one that are not finite are zeros to it, and that request fails alone at the end.

    size: where those who decode are taken a step by a recording, or as one would (see Slots): of how many sequences,
    those of padding behind their own; None = they are not. place: where their tokens stand at most. fill() says what
    they attend by, where they run op by op.

    turn: where the tokens come in several forward passes (see apart), which of them it is: -1 = those that decode,
    [n, 1], i = part i, [1, tokens]; None = all come in one.
    """

    ends_cache = False
    turn: int | None = None
    size: int | None = None
    place = 0

    def __init__(
        self, facts: Facts, together: CachePass | None, names: Sequence[str], guarded: bool = False,
        at: Tensor | None = None, starts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """at: int64 [n]; None = the first n tokens. starts: None = one part after the other, behind those."""
        self.facts, self.together, self.names, self.guarded = facts, together, names, guarded
        self.at, self.starts = at, starts
        self._broken: Tensor | None = None  # bool [n, 1, 1, 1], whose numbers were not finite so far
        self.decoding = 0 if together is None else len(together.counts)
        self.parts: list[tuple[Part, CachePass | None]] = []  # None of those that have failed already
        self.failed: dict[str, str] = {}

    def fill(self, together: CachePass) -> None:
        self.together, self.decoding = together, len(together.counts)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """queries, keys, values: [1, H, T, D]. Returns [1, Hq, T, D], with 0 for padding behind the last token. In a
        turn: those of its forward pass alone."""
        if self.turn is not None:
            given, turn = self._given(queries, keys, values), self.turn
            return self._decode(layer, softmax, given) if turn < 0 else self._read(turn, layer, softmax, given)
        out = values.new_empty(*queries.shape[:3], values.shape[3])
        q, k, v, attended = (x.transpose(0, 2) for x in (queries, keys, values, out))
        self.attend_to(layer, q, k, v, softmax, attended)
        out[:, :, self.decoding + sum(part.tokens for part, _ in self.parts) :] = 0
        return out

    def attend_to(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax, out: Tensor
    ) -> None:
        """The same of tokens that are a batch, [T, H, 1, D], into out [T, Hq, 1, D]; other tokens' are left as they
        are."""
        given, n = self._given(queries, keys, values), self.decoding
        if n and self.at is not None:
            out.index_copy_(0, self.at, self._decode(layer, softmax, [x.index_select(0, self.at) for x in given]))
        elif n == len(out):
            out.copy_(self._decode(layer, softmax, given))
        elif n:
            out[:n] = self._decode(layer, softmax, [x[:n] for x in given])
        end = n
        for i, (part, _) in enumerate(self.parts):
            start = end if self.starts is None else self.starts[i]
            end = start + part.tokens
            own = self._read(i, layer, softmax, [x[start:end].transpose(0, 2) for x in given])
            out[start:end] = own.transpose(0, 2)

    def _given(self, queries: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Queries, keys and values, and what enters attention where that is asked for."""
        if self.entering is None:
            return [queries, keys, values]
        entering = self.entering if self.turn is not None else self.entering.transpose(0, 2)
        return [queries, keys, values, entering]

    def _decode(self, layer: int, softmax: Softmax, given: Sequence[Tensor]) -> Tensor:
        """given: [n, H, 1, D] each. Returns [n, Hq, 1, D], zeros once those who decode have failed."""
        if self.together is not None:
            q, k, v, *entering = self._finite(*given) if self.guarded else given
            self.together.entering = entering[0] if entering else None
            try:
                return self.together.attend(layer, q, k, v, softmax)
            except RuntimeError as error:
                self.failed.update(dict.fromkeys(self.names, str(error)))
                self.together = None
        return given[2].new_zeros(*given[0].shape[:3], given[2].shape[3])

    def _read(self, i: int, layer: int, softmax: Softmax, given: Sequence[Tensor]) -> Tensor:
        """given: [1, H, T, D] each, of a part. Returns [1, Hq, T, D], zeros once it has failed."""
        part, step = self.parts[i]
        if step is not None and part.request not in self.failed:
            q, k, v, *entering = given
            step.entering = entering[0] if entering else None
            try:
                return step.attend(layer, q, k, v, softmax)
            except RuntimeError as error:
                self.failed[part.request] = str(error)
        return given[2].new_zeros(*given[0].shape[:3], given[2].shape[3])

    def _finite(self, *given: Tensor) -> list[Tensor]:
        """given: [n, H, 1, D] each, with zeros for requests some of whose numbers are not finite."""
        if given[0].is_cpu and all(x.sum(dtype=torch.float32).isfinite() for x in given):  # nobody waits for it there
            return list(given)
        sums = torch.stack([x.sum((1, 2, 3), dtype=torch.float32) for x in given]).sum(0)
        broken = ~sums.isfinite()[:, None, None, None]
        self._broken = broken if self._broken is None else self._broken | broken
        return [x.masked_fill(broken, 0) for x in given]

    def fail_broken(self) -> None:
        """Those of the requests that decode whose numbers were not finite have failed. Waits for the device."""
        if self._broken is None:
            return
        for name, broken in zip(self.names, self._broken.flatten().tolist(), strict=True):
            if broken:
                reason = f"request {name} cannot go on: its queries, keys or values hold NaN or overflowed"
                self.failed.setdefault(name, reason)
