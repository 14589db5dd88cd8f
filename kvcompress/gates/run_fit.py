"""`kvcompress fit gates` from start to end: model, text, fit, folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..analysis.texts import check_source, length_read_again, load_plain, texts
from ..caches.pruned import PrunedCache
from ..caches.spec import CacheSpec
from ..hf.config import decoder_config
from ..pruners import Gates, KVzip
from ..reading.framing import Framing
from ..support.checks import need, need_number
from ..support.extras import need_packages
from ..support.progress import counted, showing
from .fitting import fit_gates
from .levels import with_levels
from .training import SINKS, WINDOW, check_lengths, train_gates

_LENGTH = 1024
_LITTLE = 0.3  # R2; SmolLM2's are 0.62, the example model's 0.4 to 0.5


def _trained(
    model: Any, gates: Gates, rows: list[torch.Tensor], pruner: KVzip, steps: int, lr: float, held: int,
    seed: int,
    console: Console,
) -> Gates:  # fmt: skip
    lost: list[float] = []
    with showing(True, steps, label="training", unit="steps", console=console) as show:

        def report(step: int, nats: float) -> None:
            lost.append(nats)
            show(step + 1)

        found = train_gates(model, gates, rows, pruner, steps=steps, lr=lr, held_out=held, seed=seed, report=report)
    few = max(min(steps // 4, 20), 1)
    first, last = (sum(part) / len(part) for part in (lost[:few], lost[-few:]))
    console.print(
        f"Trained on for {steps} steps. What is lost, in nats a token, cannot be compared from step to step, as "
        f"decisions get harder: {first:.4f} in the first {few}, {last:.4f} in the last", highlight=False, markup=False,
    )  # fmt: skip
    return found


def run_fit(
    *, out: Path, model: str, text: tuple[Path, ...], held_out: bool, samples: int, length: int | None, pruner: str,
    steps: int, lr: float, levels_of: str | None, figure: Path | None, seed: int, device: str, dtype: str,
    console: Console,
) -> Gates:  # fmt: skip
    """Fits, saves, draws and prints; returns the gates.

    Raises ValueError for settings that do not fit, FileNotFoundError for a missing text file.
    """
    check_source(model, text, held_out, device)
    need(not out.exists(), f"out must be a folder that does not exist, got {out}")
    need_number("lr", lr, 1e-12, 1e3)
    need(levels_of is None or (steps == 0 and figure is None), "steps and figure must not be given with levels_of, "
         "whose gates stay as they are")  # fmt: skip
    if figure is not None:
        need_packages("figure", "matplotlib")
        from ..plots.files import format_of

        format_of("figure", figure)
        need(figure.parent.is_dir(), f"figure must be in a folder that exists, got {figure}")
    spec = CacheSpec("pruned", {"pruner": pruner, "keep": "0.5"})
    loaded, tokenizer = load_plain(model, device, dtype)
    teacher = cast(PrunedCache, spec.make(loaded.config, tokenizer)).pruner
    begin = torch.tensor(Framing(tokenizer).begin, dtype=torch.int64)
    length = length_read_again(decoder_config(loaded.config), teacher, len(begin), _LENGTH, length)
    chosen, name = texts(tokenizer, text, held_out, samples, length, seed)
    rows = [torch.cat([begin, row.long()]) for row in chosen]
    shown = counted(rows, console=console)
    held = max(1, min(8, samples // 8))
    asking = KVzip().with_tokenizer(tokenizer)
    if steps:
        check_lengths([len(row) for row in rows], asking, WINDOW, SINKS)
    if levels_of is not None:
        found = with_levels(loaded, levels_of, shown)
        found.save(out)
        _say_how(out, console)
        return found
    gates = fit_gates(loaded, shown, teacher, held_out=held)
    if figure is not None:
        from ..plots import gates_fit, save

        save(gates_fit(gates), figure)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("R2 on texts held out, by KV head")
    for layer, row in enumerate(gates.r2):
        table.add_row(str(layer), "  ".join(f"{x:.2f}" for x in row))
    console.print(table)
    every = [x for row in gates.r2 for x in row]
    mean = sum(every) / len(every)
    console.print(
        f"Fitted on {samples - held} texts of {length:,} tokens of {name}: R2 on {held} held out {mean:.2f}, in the "
        f"worst head {min(every):.2f}", highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    if mean < _LITTLE:
        console.print(
            "That is little: such gates keep almost at random. Fit them on more text (--samples, --length), or to "
            "another --pruner", highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    try:
        found = gates
        if steps:
            found = _trained(loaded, gates, rows, asking, steps, lr, held, seed, console)
    finally:  # a fit is not lost where training ends before its end
        found.save(out)
    _say_how(out, console)
    return found


def _say_how(out: Path, console: Console) -> None:
    console.print(
        f"Take it as --cache gated,gates={out},keep=1/4 or pruned,pruner=gate:{out},keep=1/4,budget=globaltopk",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
