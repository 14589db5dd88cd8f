"""What every command of `kvcompress eval` does with its measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import set_verbosity_error

from ..caches.spec import DENSE, CacheSpec
from ..checks import need
from ..hf.config import decoder_config
from ..write_text import load
from .equal_bytes import EqualBytes
from .measure import Measure
from .reading import Reader
from .report import draw_depths, print_depths, print_rows, write_rows
from .run import Row, evaluate
from .texts import Source, source_of

MOST_TOKENS = 4096  # of a length that nobody gave

Make = Callable[[Any, Source, int], Sequence[Measure]]


def run_eval(
    make: Make, *, model: str, caches: list[str], lengths: list[int] | None, share: str | None, nbytes: str | None,
    text: tuple[Path, ...], json: Path | None, device: str, by_depth: bool, figure: Path | None, console: Console,
    settings: dict[str, Any],
) -> list[Row]:  # fmt: skip
    """Prints, writes and draws. make: the measures of (tokenizer, source of texts, length). Raises ValueError for wrong
    settings, before anything is measured where they are wrong by themselves."""
    for name, path in (("json", json), ("figure", figure)):
        need(path is None or path.parent.is_dir(), f"{name} must be in a folder that exists, got {path}")
    specs, equal, source = (
        [CacheSpec.parse(cache) for cache in caches],
        EqualBytes.parse(share, nbytes),
        source_of(text),
    )
    need(len({*map(str, specs)}) == len(specs), f"cache must be given once each, got {', '.join(caches)}")
    set_verbosity_error()  # texts may be longer than the model's trained length on purpose
    loaded, tokenizer = load(model, device)
    config = decoder_config(loaded.config)
    specs = specs or [CacheSpec(CacheSpec.kind_of(loaded.config) or DENSE, {})]
    reached = getattr(config, "max_position_embeddings", None) or MOST_TOKENS
    measures = [x for length in lengths or [min(reached, MOST_TOKENS)] for x in make(tokenizer, source, length)]
    rows: list[Row] = []
    with Console(stderr=True).status("reading") as status:
        rows += evaluate(Reader(loaded, tokenizer, specs[0]), specs, measures, equal, status.update)
    print_rows(rows, console)
    if by_depth:
        print_depths(rows, console)
    if json is not None:
        write_rows(json, rows, model=model, share=share, bytes=nbytes, **settings)
    if figure is not None:
        draw_depths(rows, figure)
    return rows
