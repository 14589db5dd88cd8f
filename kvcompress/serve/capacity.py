"""What a server says of itself when it starts: model, cache, pages, and how many requests these hold."""

from __future__ import annotations

from typing import Any

from ..caches.base import UNLIMITED
from ..units import size
from .batching import Batching
from .bounds import paged_layers

LENGTHS = (1024, 8192, 65536)  # tokens of prompts that are said to fit, as far as the model takes them


def prompts_at_once(serving: Batching, tokens: int) -> int:
    """How many prompts of so many tokens fit at once into the pages, at most `requests`; with a learned ratio, of which
    nothing is known before prompts are read, as if the model kept every token."""
    bounds = serving.served.bounds
    pages = bounds.expected(tokens)
    return serving.requests if pages == 0 else min(serving.requests, serving.pages // pages)


def start_lines(serving: Batching, name: str, length: int) -> list[str]:
    """length: most tokens of a prompt and its answer."""
    bounds, model = serving.served.bounds, serving.model
    most = "any length" if length >= UNLIMITED else f"at most {length:,} tokens of prompt and answer"
    lines = [f"model    {name}: {type(model).__name__}, {_dtype(model)}, on {model.device}; {most}"]
    if paged_layers(bounds.cache):
        held = size(serving.pages * bounds.page_nbytes)
        pages = f"{serving.pages:,} pages of {serving.page_size} tokens of a KV head, {size(bounds.page_nbytes)} each"
        lines.append(f"cache    {serving.spec}: {pages}, {held} in all")
    else:
        lines.append(f"cache    {serving.spec}: its windows lie beside pages")
    known = sorted({min(tokens, length) for tokens in LENGTHS})
    fits = ", ".join(f"{prompts_at_once(serving, tokens):,} of {tokens:,} tokens" for tokens in known)
    guess = " where nothing is merged or dropped" if bounds.learned else ""
    return [*lines, f"requests {serving.requests:,} at once; prompts that fit{guess}: {fits}"]


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")
