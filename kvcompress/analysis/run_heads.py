"""`kvcompress analyze heads`: measures which heads retrieve, prints them by layer, writes the profile."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..heads import HeadProfile
from ..hf.config import decoder_config
from ..support.checks import need
from ..support.progress import showing
from .heads import measure_heads
from .passkeys import pass_keys
from .texts import check_source, length_within, load_plain, texts


def run_heads(
    *, out: Path, model: str, text: tuple[Path, ...], held_out: bool, samples: int, length: int | None, facts: int,
    method: str, sinks: int, recent: int, steps: int, lr: float, weight: float, seed: int, device: str, dtype: str,
    console: Console,
) -> HeadProfile:  # fmt: skip
    """Measures, saves and prints; returns the profile.

    Raises ValueError for settings that do not fit, FileNotFoundError for a missing text file.
    """
    check_source(model, text, held_out, device)
    need(out.parent.is_dir(), f"out must be in a folder that exists, got {out}")
    need(not out.is_dir(), f"out must be a file, got the folder {out}")
    loaded, tokenizer = load_plain(model, device, dtype)
    chosen, _ = texts(tokenizer, text, held_out, samples, length_within(decoder_config(loaded.config), length), seed)
    planted = pass_keys(tokenizer, chosen, facts=facts, seed=seed)
    whole = steps if method == "gates" else None
    with showing(True, whole, label="measuring", unit="steps", console=console) as show:

        def report(step: int, distance: float, mean: float) -> None:
            show(step + 1, f"distance {distance:.2e}, mean gate {mean:.2f}")

        profile = measure_heads(
            loaded, planted, method=method, sinks=sinks, recent=recent, steps=steps, lr=lr, weight=weight,
            tokenizer=tokenizer, report=report,
        )  # fmt: skip
    profile.save(out)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("how much each KV head retrieves")
    for layer, row in enumerate(profile.gates):
        table.add_row(str(layer), "  ".join(f"{gate:.2f}" for gate in row))
    console.print(profile.measured, highlight=False, markup=False)
    console.print(table)
    console.print(f"Profile written to {out}", highlight=False, markup=False, soft_wrap=True)
    return profile
