"""`kvcompress generate`: text in, text out, through any cache."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer, TextStreamer
from transformers.utils.logging import disable_progress_bar

from .caches import CompressedCache
from .caches.spec import CacheSpec
from .checks import need
from .hf import attach, from_pretrained
from .models import load_example_model
from .prefill import generate

EXAMPLE_NAME = "example"


def load(model: str, device: str) -> tuple[Any, Any]:
    """(model, tokenizer), attached. Raises ValueError for one that is not there or cannot be attached."""
    disable_progress_bar()
    if model == EXAMPLE_NAME:
        loaded, tokenizer = load_example_model(device=device)
        attach(loaded)
        return loaded, tokenizer
    try:
        return from_pretrained(model, dtype="auto").to(device), AutoTokenizer.from_pretrained(model)
    except OSError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"model must be the name or folder of a transformers model, got {model!r}: {reason}") from None


def read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt: as given, of a file, or of standard input. Raises ValueError for both, or for an empty one."""
    need(text is None or file is None, "text must be None where a file is given")
    if text is None:
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    need(bool(text), "text must not be empty")
    return text


def write(model: Any, ids: Tensor, guide: Tensor | None, spec: CacheSpec, **options: Any) -> tuple[Tensor, int]:
    """(ids and what the model writes after them [1, T + n], greedily, bytes in the cache then).

    ids: [1, T]. guide: [g], the question at their end; left out where the cache keeps tokens without looking at one.
    """
    held = spec.make(model.config)
    if not isinstance(held, CompressedCache):
        out = model.generate(ids, past_key_values=held, do_sample=False, **options)
        return out, sum(layer.keys.nbytes + layer.values.nbytes for layer in cast(Any, held).layers)
    if guide is not None:
        try:
            held.check_guide()
        except ValueError:
            guide = None
    return generate(model, ids, held, guide=guide, do_sample=False, **options), held.nbytes()


def run_generate(
    *, text: str | None, file: Path | None, question: str, model: str, cache: str | None, max_new_tokens: int,
    device: str, as_json: bool, quiet: bool, console: Console,
) -> None:  # fmt: skip
    """Prints what the model writes after the text and the question, as it comes; then what the cache held. cache: None
    = the converted model's own, or IterativeCache.

    Raises ValueError for wrong settings, FileNotFoundError for a file that is not there.
    """
    asked = None if cache is None else CacheSpec.parse(cache)
    prompt = read_prompt(text, file)
    loaded, tokenizer = load(model, device)
    spec = asked or CacheSpec(CacheSpec.kind_of(loaded.config) or "iterative", {})
    ids = tokenizer(prompt + question, return_tensors="pt").input_ids.to(device)
    guide = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids[0].to(device)
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True)
    begin = time.perf_counter()
    out, nbytes = write(
        loaded, ids, guide if question else None, spec, max_new_tokens=max_new_tokens, streamer=streamer
    )
    seconds, count = round(time.perf_counter() - begin, 3), out.shape[1] - ids.shape[1]
    if as_json:
        figures = {"tokens_read": ids.shape[1], "tokens_written": count, "seconds": seconds}
        written = tokenizer.decode(out[0, ids.shape[1] :])
        print(json.dumps({"text": written, **figures, "cache": str(spec), "cache_nbytes": nbytes}))
    elif not quiet:
        console.print(f"{ids.shape[1]:,} tokens read, {count:,} written in {seconds} s; {nbytes:,} bytes held ({spec})")
