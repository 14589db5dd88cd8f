"""`kvcompress analyze scores`: measures how the scores of heads compare, prints it by layer, writes the profile."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..hf.config import decoder_config
from ..pruners import KVzip, ScoreProfile
from ..reading.framing import Framing
from ..support.checks import need
from ..support.progress import showing
from ..support.units import Keep
from .scores import measure_scores
from .texts import check_source, length_read_again, load_plain, texts

_LENGTH = 1120
_LEAST = 256  # how a text goes on, a part of it to say again, and what there is to drop
_LATE = 40  # last steps that what is said is of


def run_scores(
    *, out: Path, model: str, text: tuple[Path, ...], held_out: bool, samples: int, length: int | None, chunk: int,
    keep: str, steps: int, lr: float, seed: int, device: str, dtype: str, console: Console,
) -> ScoreProfile:  # fmt: skip
    """Measures, saves and prints; returns the profile.

    Raises ValueError for settings that do not fit, FileNotFoundError for a missing text file.
    """
    check_source(model, text, held_out, device)
    cuts = _shares(keep)
    need(out.parent.is_dir(), f"out must be in a folder that exists, got {out}")
    need(not out.is_dir(), f"out must be a file, got the folder {out}")
    loaded, tokenizer = load_plain(model, device, dtype)
    pruner = KVzip(chunk=chunk, mass=True).with_tokenizer(tokenizer)
    begin = torch.tensor(Framing(tokenizer).begin, dtype=torch.int64)
    length = length_read_again(decoder_config(loaded.config), pruner, len(begin), _LENGTH, length)
    need(length >= _LEAST, f"length must be at least {_LEAST} tokens, got {length}")
    chosen, data = texts(tokenizer, text, held_out, samples, length, seed)
    rows = [torch.cat([begin, row.long()]) for row in chosen]
    late: list[tuple[list[float], list[float]]] = []
    with showing(True, steps, unit="steps", console=console) as show:

        def report(step: int, lost: list[float], whole: list[float]) -> None:
            late.append((lost, whole))
            show(step + 1, f"lost: {_words(lost)}")

        profile = measure_scores(loaded, rows, pruner, keep=cuts, steps=steps, lr=lr, seed=seed, report=report)
    profile.save(out)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("layer", "KV head", "power of most", "power of mean", "log factor"):
        table.add_column(name, justify="right")
    for layer, row in enumerate(profile.heads):
        for number, head in enumerate(row):
            table.add_row(str(layer), str(number), *(f"{x:.2f}" for x in head))
    console.print(f"{profile.measured} ({data})", highlight=False, markup=False)
    console.print(table)
    last = late[-_LATE:]
    lost, whole = ([sum(x) / len(x) for x in zip(*part, strict=True)] for part in zip(*last, strict=True))
    console.print(
        f"Nats a token that a soft cut loses, last {len(last)} steps: {_words(lost)}; KVzip with mass, cut more "
        f"softly: {_words(whole)}", highlight=False, markup=False,
    )  # fmt: skip
    console.print(f"Profile written to {out}", highlight=False, markup=False, soft_wrap=True)
    return profile


def _shares(text: str) -> tuple[float, ...]:
    try:
        found = [Keep.of(part).share for part in text.split(",")]
    except ValueError:
        found = [None]
    shares = [float(share) for share in found if share is not None]
    need(len(shares) == len(found), f"keep must be shares such as 1/4,1/8, got {text!r}")
    return tuple(shares)


def _words(lost: list[float]) -> str:
    return ", ".join(f"{x:.4f} {what}" for x, what in zip(lost, ("going on", "said again"), strict=True))
