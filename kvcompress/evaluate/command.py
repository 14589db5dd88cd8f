"""What every command of `kvcompress eval` does with its measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import set_verbosity_error

from ..apps.write_text import load
from ..caches.spec import DENSE, CacheSpec
from ..hf.config import decoder_config
from ..support.checks import need
from ..support.extras import need_packages
from ..support.progress import telling
from .equal_bytes import EqualBytes
from .measure import Measure
from .peers.environment import peer_of
from .peers.exchange import PeerError
from .peers.rows import chosen, peer_rows
from .reading import Reader
from .report import draw_depths, print_depths, print_rows, write_rows
from .run import Row, evaluate
from .texts import Source, source_of

MOST_TOKENS = 4096  # of a length that nobody gave

Make = Callable[[Any, Source, int], Sequence[Measure]]


def run_eval(
    make: Make, *, model: str, caches: list[str], lengths: list[int] | None, keep: str | None,
    text: tuple[Path, ...], json: Path | None, device: str, dtype: str, by_depth: bool, figure: Path | None,
    console: Console, settings: dict[str, Any], peers: bool = False, peers_python: Path | None = None,
    peers_press: tuple[str, ...] = (),
) -> list[Row]:  # fmt: skip
    """Prints, writes and draws. make: the measures of (tokenizer, source of texts, length). peers: kvpress beside our
    caches. Raises ValueError for wrong settings, before anything is measured where they are wrong by themselves, and
    PeerError at the end where kvpress's side broke off."""
    for name, path in (("json", json), ("figure", figure)):
        need(path is None or path.parent.is_dir(), f"{name} must be in a folder that exists, got {path}")
    if figure is not None:
        need_packages("figure", "matplotlib")
        from ..plots.files import format_of

        format_of("figure", figure)
    specs, equal, source = [CacheSpec.parse(cache) for cache in caches], EqualBytes.parse(keep), source_of(text)
    need(len({*map(str, specs)}) == len(specs), f"cache must be given once each, got {', '.join(caches)}")
    need(
        peers or (peers_python is None and not peers_press), "peers must be given where peers_python or peers_press is"
    )
    need(not peers or equal != EqualBytes(), "peers must come with keep, which kvpress is held to as well")
    set_verbosity_error()  # texts may be longer than the model's trained length on purpose
    loaded, tokenizer = load(model, device, dtype)
    config = decoder_config(loaded.config)
    specs = specs or [CacheSpec(CacheSpec.kind_of(loaded.config) or DENSE, {})]
    reached = getattr(config, "max_position_embeddings", None) or MOST_TOKENS
    measures = [x for length in lengths or [min(reached, MOST_TOKENS)] for x in make(tokenizer, source, length)]
    peer = peer_of(peers_python, Console(stderr=True, soft_wrap=True).print) if peers else None
    presses = chosen(peer, peers_press) if peer else ()
    rows: list[Row] = []
    whole = sum(measure.count for measure in measures) * (len(specs) + len(presses))
    with telling(whole, unit="samples", console=Console(stderr=True)) as comes:
        reader = Reader(loaded, tokenizer, specs[0])
        rows += evaluate(reader, specs, measures, equal, comes)
        theirs = peer_rows(peer, presses, reader, model, measures, equal, comes) if peer else None
    rows += theirs.rows if theirs else []
    print_rows(rows, console, theirs.notes() if theirs else ())
    if by_depth:
        print_depths(rows, console)
    if json is not None:
        told = {"peers": theirs.facts()} if theirs else {}
        kind = str(loaded.dtype).removeprefix("torch.")
        write_rows(json, rows, model=model, dtype=kind, keep=keep, **settings, **told)
    if figure is not None:
        draw_depths(rows, figure)
    if theirs is not None and theirs.broken is not None:
        raise PeerError(theirs.broken)
    return rows
