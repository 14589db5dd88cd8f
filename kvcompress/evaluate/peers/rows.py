"""kvpress's presses on the measures of `kvcompress eval`: rows beside those of our caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...caches.spec import CacheSpec
from ...support.checks import need
from ..equal_bytes import TOLERANCE, EqualBytes, dense_bytes
from ..measure import Measure
from ..reading import Reader
from ..run import PEER, Row, row_of
from .environment import Peer
from .exchange import PeerError, Refused, answers, request_of

PRESSES = (  # where none are named: the best of each kind, and what others are held to
    "SnapKV", "TOVA", "ExpectedAttention", "KeyDiff", "LagKV", "Compactor", "Knorm", "StreamingLLM", "AdaKV(SnapKV)",
    "KVzip", "KVgrad", "KVCompose",
)  # fmt: skip


@dataclass
class PeerRows:
    """rows, as they came. left_out: a press on a task that has none, and why. refused: why there are no rows at all.
    broken: what ended it too early; the rows before are good."""

    peer: Peer
    rows: list[Row] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    refused: str | None = None
    broken: str | None = None

    @property
    def hiding(self) -> list[str]:
        """Those that free no memory."""
        return list(dict.fromkeys(row.cache for row in self.rows if not row.frees_memory))

    def facts(self) -> dict[str, Any]:
        """For a file."""
        return {**self.peer.versions, "left_out": self.left_out, "refused": self.refused, "broken": self.broken}

    def notes(self) -> list[str]:
        """What a table does not show."""
        said = [f"{self.peer}, on the same prompts"]
        if self.hiding:
            said.append(f"{', '.join(self.hiding)}: hide what they drop and free no memory; bytes are those that a "
                        "cache without it would hold")  # fmt: skip
        for left in self.left_out:
            said.append(f"{left['cache']} is left out of {left['task']}, {left['length']:,} tokens: {left['reason']}")
        if self.refused is not None:
            said.append(f"kvpress is left out: {self.refused}")
        if self.broken is not None:
            said.append(f"kvpress's rows are not all there: {self.broken}")
        return said


def chosen(peer: Peer, names: Sequence[str]) -> tuple[str, ...]:
    """Raises ValueError for a press that is not measured."""
    for name in names:
        reason = peer.not_run.get(f"{name}Press")
        need(reason is None, f"peers_press must be one that can be held to bytes, got {name}: it {reason}")
        need(name in peer.presses, f"peers_press must be one of {', '.join(peer.presses)}, got {name!r}")
    return tuple(dict.fromkeys(names)) or PRESSES


def peer_rows(
    peer: Peer, presses: Sequence[str], reader: Reader, model: str, measures: Sequence[Measure], equal: EqualBytes,
    told: Callable[[str], object] = lambda text: None,
) -> PeerRows:  # fmt: skip
    """Rows of each measure, one for each press, held to the bytes that equal gives our caches.

    model: its name or folder. told: what came, of each sample, for who waits. Raises ValueError for measures that no
    peer does.
    """
    found = PeerRows(peer)
    samples = [[measure.sample(index) for index in range(measure.count)] for measure in measures]
    if (kind := CacheSpec.kind_of(reader.model.config)) is not None:
        found.refused = f"it does not compute what a model converted for {kind} does"
        return found
    dense = [dense_bytes(reader, measure) or 0 for measure in measures]
    targets = [equal.target(nbytes) or nbytes for nbytes in dense]
    plan = [(press, task, min(targets[task] / dense[task], 1.0)) for task in range(len(measures)) for press in presses]
    coming = answers(peer, reader.model, reader.tokenizer, request_of(reader.model, model, samples, plan))
    try:
        for (press, task, share), answer in zip(plan, coming, strict=True):
            cache, measure = PEER + press, measures[task]
            if (reason := answer.get("error")) is None:
                reason = _add(found, cache, reader, measure, answer, dense[task], share * dense[task])
            if reason is not None:
                found.left_out.append(
                    {"cache": cache, "task": measure.name, "length": measure.length, "reason": str(reason)}
                )
            for _ in range(measure.count):
                told(f"{measure.name}, {measure.length:,} tokens: {cache}")
    except Refused as error:
        found.refused = str(error)
    except (PeerError, OSError, torch.OutOfMemoryError) as error:  # our own rows are of use without
        found.broken = str(error)
    return found


def _add(found: PeerRows, cache: str, reader: Reader, measure: Measure, answer: dict[str, Any], dense: int,
         target: float) -> str | None:  # fmt: skip
    """A row, or why there is none. Raises PeerError for what is no answer."""
    try:
        outcomes = [
            measure.outcome(reader.tokenizer, index, answer["samples"][index]) for index in range(measure.count)
        ]
        row = row_of(measure, cache, answer["setting"], outcomes, dense, bool(answer["frees_memory"]))
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise PeerError(f"kvpress's program wrote what is no answer: {type(error).__name__}: {error}") from None
    if outcomes[0].nbytes > (1 + TOLERANCE) * target:
        return f"it holds {outcomes[0].nbytes:,} bytes where {target:,.0f} are given"
    found.rows.append(row)
    return None
