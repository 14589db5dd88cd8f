"""`kvcompress analyze budget`: measures how layers and heads share a budget, prints it by layer, writes the profile."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..caches.pruned import PrunedCache
from ..caches.spec import CacheSpec
from ..hf.attach import attach
from ..hf.config import decoder_config
from ..profiles import BudgetProfile
from ..support.checks import need
from ..support.progress import counted
from .shares import measure_profile
from .texts import check_source, length_within, load_plain, texts


def run_shares(
    *, out: Path, model: str, text: tuple[Path, ...], held_out: bool, samples: int, length: int | None, pruner: str,
    keep: str, floor: float, seed: int, device: str, dtype: str, console: Console,
) -> BudgetProfile:  # fmt: skip
    """Measures, saves and prints; returns the profile.

    Raises ValueError for settings that do not fit, FileNotFoundError for a missing text file.
    """
    check_source(model, text, held_out, device)
    need(out.parent.is_dir(), f"out must be in a folder that exists, got {out}")
    need(not out.is_dir(), f"out must be a file, got the folder {out}")
    spec = CacheSpec("pruned", {"pruner": pruner, "keep": keep, "budget": f"globaltopk:floor={floor}"})
    loaded, tokenizer = load_plain(model, device, dtype)
    cache = cast(PrunedCache, spec.make(loaded.config, tokenizer))
    reach = length_within(decoder_config(loaded.config), length)
    if length is None:  # room for queries that are asked behind the text
        reach -= cache.pruner.positions_behind(reach)
    chosen, data = texts(tokenizer, text, held_out, samples, reach, seed)
    with attach(loaded):
        shown = counted(chosen, console=console)
        on_device = (ids.to(device) for ids in shown)
        profile = measure_profile(loaded, on_device, keep=keep, pruner=cache.pruner, floor=floor)
    profile.save(out)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("share of the mean, by KV head")
    for layer, row in enumerate(profile.shares):
        table.add_row(str(layer), "  ".join(f"{share:.2f}" for share in row))
    console.print(f"{profile.measured} ({data})", highlight=False, markup=False)
    console.print(table)
    console.print(f"Profile written to {out}", highlight=False, markup=False, soft_wrap=True)
    return profile
