"""`kvcompress chat`: a conversation over one cache, which can be kept in a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers.utils.logging import set_verbosity_error

from ..caches import CompressedCache
from ..caches.saving import load_cache
from ..caches.spec import CacheSpec, unasked
from ..models import EXAMPLE_NAME
from ..reading.framing import has_template, next_turn, unended
from ..reading.prefilling import generate
from .streamed import Streamed
from .write_text import load

COMMANDS = """/memory       what the cache has seen and holds
/save FILE    the conversation, to go on with later
/load FILE    a saved one in place of this one
/reset        begin anew
/help         these lines
/quit         or the end of the input: leave"""

EXAMPLE_HINT = (
    "The example model cannot talk: it goes on from source code, and recalls facts. Tell it\n"
    "# The pass key of iron-lake is 48213. and ask with # The pass key of iron-lake is"
)


class Chat:
    """A conversation. model: attached. spec: of its cache, a compressed one."""

    def __init__(self, model: Any, tokenizer: Any, spec: CacheSpec, max_new_tokens: int) -> None:
        self.model, self.tokenizer, self.spec, self.max_new_tokens = model, tokenizer, spec, max_new_tokens
        self.reset()

    def reset(self) -> None:
        made = self.spec.make(self.model.config, self.tokenizer)
        if not isinstance(made, CompressedCache):
            raise ValueError(f"cache must be a compressed one (pruned,keep=1.0 drops nothing), got {self.spec}")
        self.cache = made

    def turn(self, text: str, streamer: Any = None) -> str:
        """What the model answers; it reads what is new."""
        said, template = self.cache.read_ids, self.tokenizer.apply_chat_template
        if not has_template(self.tokenizer):
            new = self._tokens(text if said is None else f"\n{text}", said is None)
        elif said is None:
            first = [{"role": "user", "content": text}]
            new = self._tokens(str(template(first, add_generation_prompt=True, tokenize=False)), False)
        else:
            new = self._tokens(next_turn(self.tokenizer, text), False)
            said = said[:, : len(unended(self.model, said[0].tolist()))]
        ids = new if said is None else torch.cat([said, new], dim=1)
        out = generate(
            self.model, ids, self.cache, max_new_tokens=self.max_new_tokens, do_sample=False, streamer=streamer
        )  # fmt: skip
        self.cache.read_ids = out
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def _tokens(self, text: str, begins: bool) -> Tensor:
        """[1, n]. begins: with what the tokenizer writes before a text."""
        ids: Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=begins).input_ids
        return ids.to(self.model.device)

    def save(self, path: str | Path) -> Path:
        return self.cache.save(path, self.model)

    def load(self, path: str | Path) -> None:
        """Raises what load_cache does, and ValueError for a cache that holds no conversation."""
        cache = load_cache(path, self.model)
        if cache.read_ids is None:
            raise ValueError(f"{path} must hold a conversation, got a cache alone")
        self.cache = cache


def run_chat(
    *, model: str, cache: str | None, max_new_tokens: int, device: str, lines: Iterable[str], console: Console,
    prompt: bool, dtype: str = "auto",
) -> None:  # fmt: skip
    """Answers lines as they come. prompt: whether somebody sits there. Raises ValueError for wrong settings."""
    set_verbosity_error()  # a conversation may outgrow the trained length: the cache does not
    asked = None if cache is None else CacheSpec.parse(cache)
    loaded, tokenizer = load(model, device, dtype)
    spec = asked or unasked(loaded.config)
    chat = Chat(loaded, tokenizer, spec, max_new_tokens)
    if prompt:
        console.print(f"{model}, {spec}. Commands:\n{COMMANDS}", highlight=False, markup=False)
        if model == EXAMPLE_NAME:
            console.print(EXAMPLE_HINT, highlight=False, markup=False)
        console.print("> ", end="")
    for line in lines:
        text = line.rstrip("\n")
        if text.split(" ")[0] in ("/quit", "/exit"):
            return
        if text.startswith("/"):
            console.print(_command(chat, text), highlight=False, markup=False)
        elif text:
            chat.turn(text, Streamed(tokenizer, answers=True))
        if prompt:
            console.print("> ", end="")


def _command(chat: Chat, text: str) -> str:
    """Does it; what to say of it, an error too: a conversation goes on."""
    name, _, path = text.partition(" ")
    if text == "/help":
        return COMMANDS
    try:
        if name == "/memory":
            return chat.cache.summary()
        if name == "/reset":
            chat.reset()
            return "empty"
        if name == "/save" and path:
            return f"saved to {chat.save(path.strip())}"
        if name == "/load" and path:
            chat.load(path.strip())
            return repr(chat.cache)
    except (OSError, ValueError, RuntimeError) as error:
        return str(error)
    if name in ("/save", "/load"):
        return f"no file given: {name} FILE"
    return f"no such command: {text}\n{COMMANDS}"
