"""Figures 10 and 11 of DMC: which tokens one head merged, as coloured text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from rich.console import Console
from rich.text import Text
from torch import Tensor

from ..support.checks import need

INK = "#1a1a1a"
# neighbours differ in hue for every kind of colour vision, and each is light enough for INK at a contrast above 9
FILLS = ("#ffd98e", "#a8d8f0", "#d5e8a8", "#f2c4de")


class Segment(NamedTuple):
    """One cache entry. text: of its tokens. first: place of the first of them. tokens: how many they are."""

    text: str
    first: int
    tokens: int


def segments(pieces: Sequence[str], decisions: Tensor | ArrayLike) -> list[Segment]:
    """The entries that one head of one layer made of a text.

    pieces: the text of each token, [tokenizer.decode([token]) for token in ids]. decisions: [T], 0 (opens an entry) or
    1 (merged into the one before), of one sequence and head: DMCCache(config, track=True).decisions(layer)[b, head]
    after reading the ids. The first token opens one whatever it decided.
    Raises ValueError for another number of decisions, and for other ones than 0 and 1.
    """
    try:
        merged = torch.as_tensor(decisions).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"decisions must be numbers [T]: {error}") from error
    need(tuple(merged.shape) == (len(pieces),),
         f"decisions must be [{len(pieces)}], one per piece, got shape {tuple(merged.shape)}")  # fmt: skip
    need(bool(((merged == 0) | (merged == 1)).all()), "decisions must be 0 or 1: hard ones, without noise")
    starts = [t for t, merges in enumerate(merged.tolist()) if t == 0 or not merges]
    ends = [*starts[1:], len(pieces)]
    return [
        Segment("".join(pieces[start:end]), start, end - start)
        for start, end in zip(starts, ends if starts else [], strict=True)
    ]


def segments_html(pieces: Sequence[str], decisions: Tensor | ArrayLike, *, title: str = "") -> str:
    """Text whose tokens of one entry have one colour, as a piece of HTML without scripts or outer files.

    pieces, decisions: as for segments. title: above the text, such as "layer 0, head 14". Entries next to each other
    differ in colour, and a line stands where each begins, for eyes and printers that see no colours; the pointer over
    one shows its places. Line ends are shown as such and as arrows, other control characters as their pictures.
    In a notebook: IPython.display.HTML(segments_html(...)). Raises as segments does.
    """
    spans = []
    for number, segment in enumerate(segments(pieces, decisions)):
        last = segment.first + segment.tokens - 1
        places = f"token {last}" if segment.tokens == 1 else f"tokens {segment.first} to {last}"
        spans.append(
            f'<span style="background:{FILLS[number % len(FILLS)]};border-left:1px solid {INK}" '
            f'title="entry {number}: {places}">{html.escape(_visible(segment.text))}</span>'
        )
    head = f"<figcaption>{html.escape(title)}</figcaption>" if title else ""
    style = f"white-space:pre-wrap;overflow-wrap:anywhere;color:{INK};background:#ffffff;padding:0.5em;line-height:1.5"
    return f'<figure style="margin:0">{head}<pre style="{style}">{"".join(spans)}</pre></figure>'


def segments_text(pieces: Sequence[str], decisions: Tensor | ArrayLike) -> Text:
    """The same for rich: console.print(segments_text(...)). Every second entry is underlined too.

    pieces, decisions: as for segments. Raises as segments does.
    """
    text = Text()
    for number, segment in enumerate(segments(pieces, decisions)):
        style = f"{INK} on {FILLS[number % len(FILLS)]}" + (" underline" if number % 2 else "")
        text.append(_visible(segment.text), style)
    return text


def print_segments(
    pieces: Sequence[str], decisions: Tensor | ArrayLike, *, title: str = "", console: Console | None = None
) -> None:
    """segments_text on a terminal.

    pieces, decisions: as for segments. title: above the text. console: None = standard output. Raises as segments does.
    """
    shown, console = segments_text(pieces, decisions), console or Console()
    if title:
        console.print(Text(title, "bold"))
    console.print(shown, soft_wrap=True)


def _visible(text: str) -> str:
    """Control characters as their pictures; a line end keeps ending the line."""
    pictures = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {127: "\u2421", 10: "\u21b5\n"}
    return text.translate(pictures)
