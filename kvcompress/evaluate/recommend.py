"""Which cache to take: a handful of them, measured at the same bytes on the user's own text and machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import set_verbosity_error

from ..apps.bench import measured
from ..apps.info import facts
from ..apps.write_text import load
from ..caches.base import trained_length_of
from ..caches.spec import DENSE, CacheSpec
from ..reading.framing import Framing, framing_of
from ..support.checks import need, renamed
from ..support.files import write_text
from ..support.progress import telling
from ..support.units import size
from .equal_bytes import EqualBytes, dense_bytes
from .measure import Mean, Outcome
from .quotes import Quotes, quotes_measure, tokens_of
from .reading import Reader
from .report import LETTERS
from .texts import Prose as Files

SCORED = 96  # tokens behind what is read
ROOM = 256  # positions behind it, for what is asked
AGAIN = 640  # what a second reading takes there
MOST_TOKENS, LEAST_TOKENS = 2048, 128  # of a piece that nobody gave a length
WRITTEN = 16  # tokens that are timed
CLOSE = 0.005  # bits a token: no difference to anybody
FASTER = 0.8  # of the time: what is worth a change
CANDIDATES = (
    "pruned,dtype=int8,later=keep",
    "pruned,pruner=kvzip,mass=true,chunk=512,dtype=int8,budget=globaltopk,later=keep",
    "quantized,dtype=int8",
    "quantized,dtype=k8v4",
    "pruned,pruner=snapkv,kernel_size=31,pooling=max,budget=adakv,later=keep",
    "iterative",
    "streaming",
)


@dataclass(frozen=True)
class Candidate:
    """A cache, measured. cache: as text; sized: with the size that holds it to the bytes; pasted: with a size that does
    so for other prompts too, where bytes were given as a share. nbytes: after reading, mean over pieces. bits: per
    token of how the text goes on; quoted_bits: of passages of its own that are begun again; quoted: share of their
    tokens that are the likeliest: a number for each piece. read_seconds: a piece, median; token_seconds: a token
    behind it."""

    cache: str
    sized: str
    pasted: str
    nbytes: float
    bits: tuple[float, ...]
    quoted_bits: tuple[float, ...]
    quoted: tuple[float, ...]
    read_seconds: float
    token_seconds: float

    def lost(self, other: Candidate) -> tuple[float, ...]:
        """Bits per token over another's, of each piece: the mean of what follows and of what is quoted."""
        own, others = ((*zip(x.bits, x.quoted_bits, strict=True),) for x in (self, other))
        return tuple((sum(a) - sum(b)) / 2 for a, b in zip(own, others, strict=True))


@dataclass(frozen=True)
class Recommendation:
    """dense: transformers' own cache; candidates: those that fit, what loses least first; chosen: the one to take, None
    where the dense cache fits. tokens: of a piece; nbytes: that a cache may hold for it. refused: why others have no
    figures, by their text. reason: of the choice, in words."""

    dense: Candidate | None
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    tokens: int
    pieces: int
    nbytes: int
    dense_nbytes: int
    reason: str
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """What to paste into a program; behind --cache of a command its text alone."""
        pasted = DENSE if self.chosen is None else self.chosen.pasted
        return f'cache = kvcompress.CacheSpec.parse("{pasted}").make(model.config, tokenizer)'


@renamed(share="keep", nbytes="keep")
def recommend(
    model: Any, tokenizer: Any, text: str, *, keep: float | str,
    tokens: int | None = None, pieces: int = 4, caches: Sequence[str] = (), raw: bool = False,
    told: Callable[[str], object] = lambda text: None,
) -> Recommendation:  # fmt: skip
    """Measures caches on pieces of a text, each at the same bytes: nothing is known of what will be asked.

    model: an attached one that is not converted; tokenizer: its own. keep: that a cache gets for a piece, a share of
    the dense cache's bytes (0.25, "1/4") or bytes ("64MiB"). tokens: of a piece, None = half of the text, 2,048 at
    most. pieces: spread evenly over the text. caches: further ones, as text. raw: the text as it is, no user's turn of
    the tokenizer's chat template. told: what comes next, for who waits.

    A cache loses what bits per token rise over the dense cache's, of how the text goes on and of passages of the text
    that are begun again, on the mean. The least is taken; or what is not behind it by more than the standard error of
    the difference (0.005 bits at least) and takes less than 0.8 of its time for a piece.
    Raises ValueError for a text that is too short, a size at which no cache fits, and a converted model.
    """
    equal = EqualBytes.parse(keep)
    shares = equal.keep is not None and equal.keep.share is not None
    own = CacheSpec.kind_of(model.config)
    need(own is None, f"model must be one that is not converted, got one of {own}, whose cache is its own")
    need(pieces >= 1, f"pieces must be at least 1, got {pieces}")
    specs = [CacheSpec.parse(cache) for cache in dict.fromkeys((*CANDIDATES, *caches))]
    framing = framing_of(tokenizer, raw)
    measure = quotes_measure(framing, text, _length(framing, text, tokens, model), SCORED, pieces)
    reader = Reader(model, tokenizer, CacheSpec(DENSE, {}))
    told("dense")
    whole = dense_bytes(reader, measure)
    assert whole is not None
    target = equal.target(whole)
    assert target is not None
    about = (measure.tokens, pieces, int(target), whole)
    if target >= whole:
        reason = f"the dense cache of {measure.tokens:,} tokens takes {size(whole)}, which fits: nothing to compress"
        return Recommendation(None, (), None, *about, reason)
    dense = _measured(reader, measure, shares, told)
    found, refused = [], {}
    for spec in specs:
        told(f"{spec}: its size")
        try:
            sized = equal.sized(replace(reader, spec=spec), measure, whole)
            held = measure.held(replace(reader, spec=sized)) if spec.size_key is None else target
            need(held <= 1.05 * target, f"it held {size(held)}, more than {size(target)}, and has no size to set")
            found.append(_measured(replace(reader, spec=sized), measure, shares, told, str(spec)))
        except ValueError as error:
            refused[str(spec)] = str(error)
    if not found:
        reasons = "; ".join(f"{cache}: {why}" for cache, why in refused.items())
        raise ValueError(f"keep must leave room for a cache, got {size(target)}: "
                         f"{reasons}")  # fmt: skip
    found.sort(key=lambda candidate: Mean(candidate.lost(dense)).value)
    chosen, reason = choice(found, dense)
    return Recommendation(dense, tuple(found), chosen, *about, reason, refused)


def choice(candidates: Sequence[Candidate], dense: Candidate) -> tuple[Candidate, str]:
    """(what to take of those that lose least first, why)."""
    best = candidates[0]
    level = [
        x for x in candidates
        if (mean := Mean(x.lost(best))).value <= max(mean.error or 0.0, CLOSE)
    ]  # fmt: skip
    fastest = min(level, key=lambda x: x.read_seconds)
    few = "" if len(dense.bits) > 1 else ". One piece says little of the next: take more"
    if fastest is best or fastest.read_seconds > FASTER * best.read_seconds:
        return best, f"it loses least: {_loss(best, dense)}{few}"
    part = fastest.read_seconds / best.read_seconds
    within = f"{CLOSE} bits" if few else "the error"
    return fastest, (
        f"it loses {_loss(fastest, dense)}, level within {within} with {best.pasted}, and reads in {part:.2f} of its "
        f"time{few}"
    )


def _loss(candidate: Candidate, dense: Candidate) -> str:
    lost = round(Mean(candidate.lost(dense)).value, 3)
    return f"{lost:.3f} bits a token, mean of both +bits" if lost > 0 else "nothing that could be measured"


def _length(framing: Framing, text: str, tokens: int | None, model: Any) -> int:
    there, most = tokens_of(framing, text), trained_length_of(model.config) - SCORED - ROOM
    if tokens is not None:
        need(LEAST_TOKENS <= tokens <= most, f"tokens must be from {LEAST_TOKENS} to {most:,}, the model's length less "
             f"what is asked behind them, got {tokens:,}")  # fmt: skip
        return tokens
    found = min(there // 2, MOST_TOKENS, most - (AGAIN - ROOM))
    need(found >= LEAST_TOKENS, f"text must have at least {2 * LEAST_TOKENS} tokens, got about {there}")
    return found


def _measured(
    reader: Reader, measure: Quotes, shares: bool, told: Callable[[str], object], cache: str | None = None
) -> Candidate:
    """cache: as it was given. shares: what is pasted keeps a share, where the cache takes one."""
    spec, outcomes = reader.spec, []
    for index in range(measure.count):
        told(f"{spec}: piece {index + 1} of {measure.count}")
        outcomes.append(measure.run(reader, index))
    ids = torch.tensor([measure.context(0)], device=reader.device)
    told(f"{spec}: tokens behind it")
    written = measured(reader.model, ids, spec, WRITTEN, reader.tokenizer)
    pasted = spec
    if shares and spec.kind == "pruned" and spec.size_key is not None:
        pasted = spec.sized(min(max(round(int(spec.given[spec.size_key]) / measure.tokens, 3), 0.001), 1.0))
    return Candidate(
        cache or str(spec), str(spec), str(pasted), sum(x.nbytes for x in outcomes) / len(outcomes),
        tuple(x.score for x in outcomes), _each(outcomes, "bits"), _each(outcomes, "score"),
        statistics.median(x.first_seconds for x in outcomes), 1 / written["written_tokens_per_second"],
    )  # fmt: skip


def _each(outcomes: Sequence[Outcome], name: str) -> tuple[float, ...]:
    return tuple(sum(answer[name] for answer in x.said) / len(x.said) for x in outcomes)


# ---- the command ----


def run_recommend(
    *, model: str, text: tuple[Path, ...], keep: str, tokens: int | None, pieces: int,
    caches: list[str], raw: bool, json_file: Path | None, device: str, dtype: str, console: Console,
) -> None:  # fmt: skip
    """Prints a table, why, and the line to paste. Raises ValueError for wrong settings, FileNotFoundError."""
    need(json_file is None or json_file.parent.is_dir(), f"json must be in a folder that exists, got {json_file}")
    EqualBytes.parse(keep)
    for cache in caches:
        CacheSpec.parse(cache)
    words = Files(text).text
    set_verbosity_error()
    loaded, tokenizer = load(model, device, dtype)
    whole = (pieces + 2) * (1 + len({*CANDIDATES, *caches}))
    with telling(whole, unit="readings", console=Console(stderr=True)) as told:
        found = recommend(
            loaded, tokenizer, words, keep=keep, tokens=tokens, pieces=pieces, caches=caches, raw=raw, told=told
        )
    _print(found, console)
    if json_file is not None:
        said = {"model": model, "dtype": str(loaded.dtype).removeprefix("torch."), "line": found.line, **asdict(found)}
        write_text(json_file, json.dumps(said | {"installed": facts(None)}, indent=1) + "\n")


def _print(found: Recommendation, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if found.dense is not None:
        say(f"{found.pieces} pieces of {found.tokens:,} tokens; each cache is held to {size(found.nbytes)}, "
            f"{found.nbytes / found.dense_nbytes:.3f} of the dense cache")  # fmt: skip
        rows = {LETTERS[number]: row for number, row in enumerate((found.dense, *found.candidates))}
        for letter, row in rows.items():
            say(f"{letter}  {row.pasted}")
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("cache", no_wrap=True)
        for column in ("held", "+bits a token", "quotes", "+bits", "read, s", "a token, ms"):
            table.add_column(column, justify="right", no_wrap=True)
        for letter, row in rows.items():
            mark = "[bold]" if row is found.chosen else ""
            over = ["", ""] if row is found.dense else [
                _mean(Mean(tuple(a - b for a, b in zip(own, other, strict=True))))
                for own, other in ((row.bits, found.dense.bits), (row.quoted_bits, found.dense.quoted_bits))
            ]  # fmt: skip
            cells = (letter, size(row.nbytes), over[0], f"{Mean(row.quoted).value:.2f}", over[1],
                     f"{row.read_seconds:.2f}", f"{1e3 * row.token_seconds:.1f}")  # fmt: skip
            table.add_row(*(f"{mark}{cell}" for cell in cells))
        console.print(table)
        say("+bits: over the dense cache, of how the text goes on, and of its own passages begun again; quotes: their "
            "tokens that are said right")  # fmt: skip
    for cache, why in found.refused.items():
        say(f"left out: {cache}: {why}")
    say(f"Take {DENSE if found.chosen is None else found.chosen.pasted}: {found.reason}")
    if found.chosen is not None:
        say("It reads by kvcompress.generate(model, input_ids, cache) of an attached model, or by kvcompress.read(..., "
            "cache=cache)")  # fmt: skip
    say(found.line)


def _mean(mean: Mean) -> str:
    return f"{mean.value:+.3f}" + ("" if mean.error is None else f" +-{mean.error:.3f}")
