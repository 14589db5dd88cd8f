"""`kvcompress needle`: at which lengths and depths a planted fact is recalled through a cache."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import set_verbosity_error

from .caches.spec import CacheSpec
from .models.text import fact, long_text, plant, question, random_name, random_pass_key
from .write_text import load, write


def needle(tokenizer: Any, length: int, depth: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """(ids [1, T] of about `length` tokens, the question's ids [g], the answer): source with a fact at depth 0 to 1."""
    rng = np.random.default_rng(seed)
    name, pass_key = random_name(rng), random_pass_key(rng)
    asked = tokenizer(question(name).decode(), return_tensors="pt", add_special_tokens=False).input_ids
    sample = long_text(4096).decode("utf-8", "ignore")
    per_token = 4096 / len(tokenizer(sample, add_special_tokens=False).input_ids)
    room = int((length - asked.shape[1]) * per_token) - len(fact(name, pass_key))
    if room < 0:
        raise ValueError(f"lengths must be large enough for the fact and its question, got {length}")
    text = plant(long_text(room), fact(name, pass_key), depth).decode("utf-8", "ignore")
    body = tokenizer(text, return_tensors="pt").input_ids
    return torch.cat([body, asked], dim=1), asked[0], pass_key.decode()


def run_needle(
    *, model: str, cache: str, lengths: list[int], depths: int, guided: bool, seed: int, device: str, as_json: bool,
    console: Console,
) -> None:  # fmt: skip
    """Prints which of the facts are recalled, by length and depth. Raises ValueError for wrong settings.

    depths: how many, spread evenly, their ends left out. guided: the question chooses what stays.
    """
    set_verbosity_error()  # texts may be longer than the model's trained length on purpose
    spec = CacheSpec.parse(cache)
    loaded, tokenizer = load(model, device)
    shares = [(i + 0.5) / depths for i in range(depths)]
    rows = []
    for length in lengths:
        for i, depth in enumerate(shares):
            ids, asked, answer = needle(tokenizer, length, depth, seed + i)
            ids, guide = ids.to(device), asked.to(device) if guided else None
            digits = tokenizer(answer, add_special_tokens=False, return_tensors="pt").input_ids.shape[1]
            out, nbytes = write(loaded, ids, guide, spec, max_new_tokens=digits + 1)
            written = tokenizer.decode(out[0, ids.shape[1] :])
            row = {"tokens": ids.shape[1], "depth": depth, "right": answer, "written": written, "cache_nbytes": nbytes}
            rows.append(row | {"recalled": written.strip().startswith(answer)})
    if as_json:
        print(json.dumps({"model": model, "cache": str(spec), "guided": guided, "rows": rows}))
        return
    table = Table(box=SIMPLE, title=f"{spec}, {'guided' if guided else 'unguided'}")
    table.add_column("tokens", justify="right")
    for depth in shares:
        table.add_column(f"{depth:.0%}", justify="right")
    table.add_column("recalled", justify="right")
    table.add_column("bytes held", justify="right")
    for k in range(len(lengths)):
        found = rows[k * depths : (k + 1) * depths]
        cells = ["yes" if row["recalled"] else "no" for row in found]
        share = sum(cell == "yes" for cell in cells) / depths
        table.add_row(
            f"{found[0]['tokens']:,}", *cells, f"{share:.2f}", f"{max(row['cache_nbytes'] for row in found):,}"
        )
    console.print(table)
