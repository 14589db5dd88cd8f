"""`kvcompress bench`: what caches take and how fast they are, for a model on this machine."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.utils.logging import set_verbosity_error

from ..caches import CompressedCache
from ..caches.spec import CacheSpec
from ..hf.argument import CACHE
from ..models.text import long_text
from ..reading.prefilling import prefill
from ..support.units import size
from .write_text import held_nbytes, load

WARM = 64  # tokens of a run before those that count


def _wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def measured(model: Any, ids: Tensor, spec: CacheSpec, new: int, tokenizer: Any = None) -> dict[str, Any]:
    """A prompt read and `new` tokens written after it, one by one, with a new cache. ids: [1, T]. tokenizer: of what a
    pruner asks in words."""
    cache: Any = spec.make(model.config, tokenizer)
    begin = _wait(ids.device)
    if isinstance(cache, CompressedCache):
        prefill(model, ids, cache)
    else:
        model(ids[:, :-1], logits_to_keep=1, **{CACHE: cache})
    read = _wait(ids.device)
    step = ids[:, -1:]
    for _ in range(new):
        step = model(step, **{CACHE: cache}).logits[:, -1].argmax(-1, keepdim=True)
    written = _wait(ids.device)
    return {
        "cache": str(spec), "read_tokens_per_second": (ids.shape[1] - 1) / (read - begin),
        "written_tokens_per_second": new / (written - read), "cache_nbytes": held_nbytes(cache),
    }  # fmt: skip


def run_bench(
    *, model: str, caches: list[str], tokens: int, max_new_tokens: int, device: str, dtype: str, as_json: bool,
    console: Console,
) -> None:  # fmt: skip
    """Prints a row for each cache, a dense one first. Raises ValueError for wrong settings."""
    set_verbosity_error()  # a prompt may be longer than the trained length
    specs = [CacheSpec.parse(text) for text in caches]
    loaded, tokenizer = load(model, device, dtype)
    own = CacheSpec.kind_of(loaded.config)
    specs = specs or ([CacheSpec(own, {})] if own else [CacheSpec.parse(text) for text in ("dense", *DEFAULT)])
    if own and any(spec.kind != own for spec in specs):
        raise ValueError(f"caches must be {own} for a model converted to it, got {', '.join(map(str, specs))}")
    text = long_text(16 * tokens).decode("utf-8", "ignore")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens].to(device)
    rows = []
    for spec in specs:
        measured(loaded, ids[:, :WARM], spec, 2)
        rows.append(measured(loaded, ids, spec, max_new_tokens))
    if as_json:
        print(json.dumps({"model": model, "tokens": ids.shape[1], "rows": rows}))
        return
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=f"{model}, {ids.shape[1]:,} tokens on {device}")
    table.add_column("cache", overflow="fold")  # a name is there to be copied
    for column in ("tok/s read", "written", "held"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        speeds = (f"{row[f'{kind}_tokens_per_second']:,.0f}" for kind in ("read", "written"))
        table.add_row(row["cache"], *speeds, size(row["cache_nbytes"]))
    console.print(table)


DEFAULT = ("pruned,pruner=snapkv,keep=1/4", "iterative,memory_size=512,chunk_size=512", "quest,token_budget=256")
