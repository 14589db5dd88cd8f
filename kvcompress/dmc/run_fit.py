"""`kvcompress fit dms` from start to end: model, text, fit, folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..analysis.texts import check_source, length_read_again, load_plain, texts
from ..hf.attach import attach
from ..hf.config import decoder_config
from ..pruners.kvzip import KVzip
from ..reading.framing import Framing
from ..retrofit.checkpoints import flush
from ..support.checks import need
from ..support.progress import counted
from .config import DMCConfig
from .costs import neuron_costs, said_again
from .fitting import Fitted, fit, norms_keys

_LENGTH = 1024


def run_fit(
    *, out: Path, model: str, text: tuple[Path, ...], ratio: float, window: int, samples: int, length: int | None,
    neuron: int | None, seed: int, device: str, dtype: str, console: Console,
) -> Fitted:  # fmt: skip
    """Fits, saves and prints; returns what fit did.

    Raises ValueError for settings that do not fit, FileNotFoundError for a missing text file.
    """
    check_source(model, text, False, device)
    need(not out.exists(), f"out must be a folder that does not exist, got {out}")
    loaded: Any
    loaded, tokenizer = load_plain(model, device, dtype)
    pruner = KVzip(mass=True).with_tokenizer(tokenizer)
    begin = torch.tensor(Framing(tokenizer).begin, dtype=torch.int64)
    length = length_read_again(decoder_config(loaded.config), pruner, len(begin), _LENGTH, length)
    chosen, name = texts(tokenizer, text, False, samples, length, seed)
    rows = [torch.cat([begin, row.long()]).to(device) for row in chosen]
    if neuron is None:
        again = said_again(pruner, rows[0], length)
        costs = neuron_costs(loaded, torch.stack([again, rows[1][: len(again)]]), mode="dms")
        neuron = int(costs.nan_to_num(nan=torch.inf).argmin())
        said = f"Decisions take coordinate {neuron} of the keys, without which a token costs {costs[neuron]:+.4f} nats"
        console.print(f"{said} (the last: {costs[-1]:+.4f})", highlight=False)
    attach(loaded)
    scale = 100.0 if norms_keys(loaded) else 1.0
    config = DMCConfig(
        mode="dms", dms_window=window, dms_decides="own", neuron=neuron, shift=0.0, dms_scale=scale
    )  # fmt: skip
    shown = counted(rows, console=console)
    found = fit(loaded, config, shown, pruner, ratio=ratio, held_out=max(1, min(8, samples // 8)))
    _save(loaded, tokenizer, out)
    heads = [x for layer in found.r2 for x in layer]
    mean = sum(heads) / len(heads)
    console.print(
        f"Fitted on {samples} texts of {length:,} tokens of {name}: R2 on those held out {mean:.2f}, in the worst head "
        f"{min(heads):.2f}. The model, with {ratio:g} tokens an entry beyond its newest {window + 1}, is in {out}",
        highlight=False, markup=False,
    )  # fmt: skip
    return found


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    """Written beside it and then renamed: where the folder is, all of it is."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        fresh = Path(temporary, out.name)
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        flush(fresh)
        fresh.rename(out)
