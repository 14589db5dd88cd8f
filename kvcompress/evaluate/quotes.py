"""Any text, and passages of its own that are begun again: what a user's text can be asked without knowing it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..reading.framing import Framing
from ..support.checks import need
from .fitting import TooShort, largest
from .followed import Followed
from .reading import Following

REQUEST = "\n\nRepeat a passage of the text above."
QUOTES = 8  # passages of a text that are begun again, at most
_CUE, _ANSWER = 48, 48  # characters of each that are given, and that the model is to say; words stay whole
_SAMPLE = 1 << 14  # characters whose tokens say how many a token has


@dataclass(frozen=True)
class Quoted:
    """A piece of a text. context: what is read, a chat's first turn from its beginning where there is a template.
    behind: how the text goes on. quotes: (how a passage begins, what follows there), by place."""

    context: list[int]
    behind: list[int]
    quotes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Quotes(Followed):
    """Beside how the text goes on, for each quote the share of its tokens that are the likeliest, and their bits per
    token."""

    pieces: tuple[Quoted, ...]
    framing: Framing

    @property
    def count(self) -> int:
        return len(self.pieces)

    def context(self, index: int) -> list[int]:
        return self.pieces[index].context

    def followings(self, index: int) -> list[Following]:
        """The text, then each quote."""
        piece = self.pieces[index]
        found = [Following("text", piece.behind, ((1, len(piece.behind)),))]
        for cue, answer in piece.quotes:
            asked, said = self._asked(cue), self.framing.bare(answer)
            spans = tuple((place, place + 1) for place in range(len(asked), len(asked) + len(said)))
            found.append(Following("quote", asked + said, spans))
        return found

    def _asked(self, cue: str) -> list[int]:
        if not self.framing.chat:
            return self.framing.bare(f"\n\n{cue}")
        return self.framing.parts("", REQUEST, cue)[1]

    def said_of(
        self, index: int, asked: Sequence[Following], scored: Sequence[tuple[float, tuple[bool, ...]]]
    ) -> list[dict[str, Any]]:
        return [
            {"kind": "quote", "score": sum(right) / len(right), "bits": nats / math.log(2) / len(right)}
            for nats, right in scored
        ]


def tokens_of(framing: Framing, text: str) -> int:
    """About how many tokens a text has, by its beginning."""
    sample = text[:_SAMPLE]
    return round(len(framing.bare(sample)) * len(text) / max(len(sample), 1))


def quotes_measure(framing: Framing, text: str, length: int, scored: int, count: int) -> Quotes:
    """`count` pieces of a text, spread evenly, which overlap where the text is short: `length` tokens of each are read
    at most. scored: tokens behind them. Raises ValueError for a text that is too short."""
    per_token = len(text) / max(tokens_of(framing, text), 1)
    behind = math.ceil(2 * scored * per_token)  # characters; a text is not as dense everywhere
    room = len(text) - math.ceil(length * per_token) - behind
    need(room >= 0, f"tokens must be at most about {max(int((len(text) - behind) / per_token), 0):,} for a text of "
         f"{len(text):,} characters, got {length:,}")  # fmt: skip
    pieces = []
    for number in range(count):
        begin = _word(text, round(room * number / max(count - 1, 1)))
        most = len(text) - begin - behind
        try:
            size = largest(
                lambda size: framing.count(text[begin : begin + size], ""),  # noqa: B023  (called in this round)
                1, length, near=round(length * per_token), most=most,
            )  # fmt: skip
        except TooShort as error:
            raise ValueError(f"tokens must be at least {error.count}, got {length}") from None
        read = text[begin : begin + size]
        ids = framing.bare(text[begin + size : begin + size + behind])[: scored + 1]
        pieces.append(Quoted(framing.parts(read, "")[0], ids, _quotes(read)))
    return Quotes("quotes", length, tuple(pieces), framing)


def _quotes(text: str) -> tuple[tuple[str, str], ...]:
    """Spread evenly; as many as leave as much between them as they take."""
    count = min(QUOTES, len(text) // (2 * (_CUE + _ANSWER)))
    need(count > 0, f"tokens must leave {2 * (_CUE + _ANSWER)} characters to be read, got {len(text):,}")
    span, found = len(text) // count, []
    for number in range(count):
        begin = _word(text, int((number + 0.25) * span))
        middle = _word(text, begin + _CUE)
        cue = text[begin:middle]
        bare = cue.rstrip()  # what the model says begins with the space between
        found.append((bare.lstrip(), text[begin + len(bare) : _word(text, middle + _ANSWER)].rstrip()))
    return tuple(found)


def _word(text: str, place: int) -> int:
    """Where the first word begins from a place on; the place itself where none does soon."""
    found = re.compile(r"(?<=\s)\S").search(text, max(place - 1, 0), place + 24) if place else None
    return place if found is None else found.start()
