"""`kvcompress generate`: text in, text out, through any cache."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer
from transformers.cache_utils import Cache
from transformers.utils.logging import disable_progress_bar

from ..caches import CompressedCache
from ..caches.spec import CacheSpec, unasked
from ..hf import attach
from ..hf.argument import CACHE
from ..hf.load import load_named
from ..models import EXAMPLE_NAME, load_example_model
from ..reading.framing import Framing, framing_of, has_template
from ..reading.prefilling import generate
from ..reading.reader import Reading, read
from ..support.checks import need, need_dtype
from ..support.names import check_name
from .streamed import Streamed


def load(model: str, device: str, dtype: str = "auto") -> tuple[Any, Any]:
    """(model, tokenizer), attached. dtype: of the weights; auto: as the model's files say, the example in float32.

    Raises ValueError for a model that is not there or cannot be attached, and for another dtype.
    """
    asked = need_dtype(dtype)
    if model == EXAMPLE_NAME:
        disable_progress_bar()
        loaded, tokenizer = load_example_model(device=device, dtype=asked or torch.float32)
        attach(loaded)
        return loaded, tokenizer
    try:
        located = check_name("model", model)  # smollm2 may take half a minute, and shows it
    except OSError as error:
        raise ValueError(str(error)) from None
    disable_progress_bar()
    try:
        return load_named(located, dtype=asked or "auto").to(device), AutoTokenizer.from_pretrained(located)
    except OSError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"model must be the name or folder of a transformers model, got {model!r}: {reason}") from None


def read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt: as given, of a file, or of standard input. Raises ValueError for both, or for an empty one."""
    need(text is None or file is None, "text must not be given beside a file")
    if text is None:
        try:
            text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"file must be UTF-8 text, got {file or 'standard input'}: {error}") from None
    need(bool(text), "text must not be empty")
    return text


def write(model: Any, ids: Tensor, guide: Tensor | None, spec: CacheSpec, **options: Any) -> tuple[Tensor, Cache]:
    """(ids and what the model writes after them [1, T + n], greedily, the cache then).

    ids: [1, T]. guide: [g], the question at their end; left out where the cache keeps tokens without looking at one.
    """
    held = spec.make(model.config)
    if not isinstance(held, CompressedCache):
        return model.generate(ids, do_sample=False, **{CACHE: held}, **options), held
    if guide is not None:
        try:
            held.check_guide()
        except ValueError:
            guide = None
    return generate(model, ids, held, guide=guide, do_sample=False, **options), held


def held_nbytes(cache: Cache) -> int:
    """Bytes that a cache holds now; of transformers' own all tensors of its layers."""
    if isinstance(cache, CompressedCache):
        return cache.nbytes()
    held = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [x for value in held for x in (value.values() if isinstance(value, dict) else [value])]
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


def held_in_words(cache: Cache) -> str:
    """What a cache holds, and what a dense one would."""
    ours = held_nbytes(cache)
    if not isinstance(cache, CompressedCache):
        return f"{ours:,} bytes held"
    dense = cache.dense_nbytes()
    if ours < dense:
        return f"{ours:,} bytes held, {dense / ours:,.1f} times less than dense ({dense:,})"
    why = ": so far every token is kept" if cache.compression_ratio() <= 1 else ""
    return f"{ours:,} bytes held, no fewer than dense ({dense:,}){why}"


def run_generate(
    *, text: str | None, file: Path | None, question: str, raw: bool, model: str, cache: str | None,
    max_new_tokens: int, save: Path | None, saved: Path | None, device: str, dtype: str, as_json: bool, quiet: bool,
    console: Console,
) -> None:  # fmt: skip
    """Prints what the model writes after the text and the question, as it comes; then what the cache held. raw: text
    and question as they are, where they are a user's turn of the tokenizer's chat template, if it has one. cache: None
    = what `unasked` says. save: where the cache of the text goes before the question is asked;
    saved: one that such a call has saved, in place of a text.

    Raises ValueError for wrong settings, FileNotFoundError for a file that is not there.
    """
    asked = None if cache is None else CacheSpec.parse(cache)
    if saved is not None:
        need(text is None and file is None and cache is None and save is None,
             "load takes the place of a text, a file, a cache and save: give a question alone")  # fmt: skip
        need(bool(question), "question must be given with load")
    prompt = "" if saved is not None else read_prompt(text, file)
    loaded, tokenizer = load(model, device, dtype)
    framing = framing_of(tokenizer, raw)
    before, behind = framing.texts(prompt, question)
    ids, guide = (
        tokenizer(part, return_tensors="pt", add_special_tokens=whole and not framing.chat).input_ids.to(device)
        for part, whole in ((before + behind, True), (behind, False))
    )
    spec = asked or unasked(loaded.config, ids.shape[1] + max_new_tokens, later=None if save is None else "keep")
    if save is not None or saved is not None:
        _through_file(loaded, framing, prompt, question, spec, save, saved, max_new_tokens, as_json, quiet, console)
        return
    streamer = None if as_json else Streamed(tokenizer, answers=framing.chat or bool(question), note=not quiet)
    begin = time.perf_counter()
    known = guide[0] if question else None
    out, held = write(loaded, ids, known, spec, max_new_tokens=max_new_tokens, streamer=streamer)
    seconds, count = round(time.perf_counter() - begin, 3), out.shape[1] - ids.shape[1]
    if as_json:
        figures = {"tokens_read": ids.shape[1], "tokens_written": count, "seconds": seconds}
        written = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        print(json.dumps({"text": written, **figures, "cache": str(spec), "cache_nbytes": held_nbytes(held)}))
    elif not quiet:
        what = f"{ids.shape[1]:,} tokens read, {count:,} written in {seconds} s ({spec})"
        console.print(f"{what}\n{held_in_words(held)}", highlight=False, markup=False, soft_wrap=True)


def _need_same_framing(reading: Reading, framing: Framing) -> None:
    """Raises ValueError where a text was read as a user's turn and the question is not one's end, or the reverse."""
    opening = Framing(framing.tokenizer, True).parts("", "")[0][:-1] if has_template(framing.tokenizer) else []
    seen = reading.cache.read_ids
    assert seen is not None
    if opening:  # but for its last token, with which a text may merge
        was = seen[0, : len(opening)].tolist() == opening
        need(was == framing.chat, f"raw must be {not was}, as when the text was saved, got {not framing.chat}")


def _through_file(
    model: Any, framing: Framing, prompt: str, question: str, spec: CacheSpec, save: Path | None, saved: Path | None,
    max_new_tokens: int, as_json: bool, quiet: bool, console: Console,
) -> None:  # fmt: skip
    """Reads a text and saves its cache, or takes a saved one; then asks the question, if there is one."""
    begin, tokenizer = time.perf_counter(), framing.tokenizer
    before, behind = framing.texts(prompt, question)
    before = before.removeprefix(tokenizer.decode(framing.begin))  # which reading writes itself
    if saved is not None:
        reading = Reading.load(saved, model, tokenizer)
        _need_same_framing(reading, framing)
    else:
        held = spec.make(model.config, tokenizer)
        need(isinstance(held, CompressedCache), f"cache must be a compressed one for save, got {spec}")
        try:
            held.check_guide()
            guide = behind if question else None
        except ValueError:
            guide = None
        reading = read(model, tokenizer, before, cache=held, guide=guide)
        reading.save(Path(str(save)))
    streamer = None if as_json else Streamed(tokenizer, answers=True, note=not quiet)
    answer = reading.ask(behind, max_new_tokens=max_new_tokens, streamer=streamer) if question else ""
    seconds, nbytes = round(time.perf_counter() - begin, 3), reading.cache.nbytes()
    tokens = reading.cache.get_seq_length()
    if as_json:
        print(json.dumps({"text": answer, "tokens_read": tokens, "seconds": seconds, "cache_nbytes": nbytes}))
    elif not quiet:
        what = f"saved to {save}" if saved is None else f"from {saved}"
        said = f"{tokens:,} tokens read, {what}; {seconds} s\n{held_in_words(reading.cache)}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
