"""The model that `kvcompress analyze` measures, and the texts that it reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..hf.attach import base_model
from ..hf.method import saved_method
from ..models import EXAMPLE_NAME, load_example_model
from ..models.text import held_out_text
from ..pruners import Pruner
from ..retrofit.run import pretrained
from ..support.checks import need, need_choice, need_dtype

LONGEST, SHORTEST = 32_768, 64  # tokens of a text


def check_source(model: str, text: tuple[Path, ...], held_out: bool, device: str) -> None:
    """Raises ValueError for options that do not fit together, or a device that is not there."""
    need(model == EXAMPLE_NAME or not held_out, "held_out is the example model's; give --text for another model")
    need(not (text and held_out), "held_out must not be given beside text")
    need(model == EXAMPLE_NAME or len(text) > 0, "text must be given, one file at least, for a model but the example")
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    need_choice("device", device.partition(":")[0], kinds)


def length_within(config: Any, length: int | None) -> int:
    """Tokens of a text: as asked, or what the model reaches. Raises ValueError for more than that."""
    reach = getattr(config, "max_position_embeddings", LONGEST)
    length = min(reach, LONGEST) if length is None else length
    need(length <= reach, f"length must be at most the {reach:,} positions that the model was made for, got {length:,}")
    return length


def length_read_again(config: Any, pruner: Pruner, begin: int, usual: int, asked: int | None) -> int:
    """Tokens of a text behind `begin` others, after which it is read again: as asked, or the usual, as far as the model
    has positions. Raises ValueError for more than that."""
    reach = length_within(config, None)
    most = reach - begin - 1
    while most > 0 and begin + most + pruner.positions_behind(begin + most) > reach:
        most -= 1
    if asked is None:
        return min(usual, most)
    need(asked <= most, f"length must be at most {most:,} for a model of {reach:,} positions, as a text is read again "
         f"behind itself, got {asked:,}")  # fmt: skip
    return asked


def load_plain(model: str, device: str, dtype: str = "auto") -> tuple[nn.Module, Any]:
    asked = need_dtype(dtype)
    if model == EXAMPLE_NAME:
        return load_example_model(device=device, dtype=asked or torch.float32)
    loaded = pretrained(AutoModelForCausalLM, model, dtype=asked or "auto")
    need(
        saved_method(base_model(loaded)) is None,
        f"model must not be converted yet, got {model!r}, whose config has kvcompress",
    )
    tokenizer = pretrained(AutoTokenizer, model)
    return loaded.to(device).eval(), tokenizer


def texts(
    tokenizer: Any, text: tuple[Path, ...], held_out: bool, samples: int, length: int, seed: int
) -> tuple[list[Tensor], str]:
    """`samples` rows of `length` tokens, none twice, and what they are of."""
    rng = np.random.default_rng(seed)
    if text:
        from ..retrofit.data import text_windows
        from ..retrofit.packing import TooLittle

        name = ", ".join(path.name for path in text)
        try:
            windows = text_windows(tokenizer, text, length)
        except TooLittle as error:
            raise ValueError(_too_little(samples, length, 0, error.held, name)) from None
        count = len(windows)

        def row(j: int) -> Any:
            return windows[j]["input_ids"]
    elif not held_out:
        return _training_rows(samples, length, seed), "the example model's training data"
    else:
        source = np.frombuffer(held_out_text(), dtype=np.uint8)
        count, name = len(source) // length, "Python's standard library, held-out files"

        def row(j: int) -> Any:
            return source[j * length : (j + 1) * length].astype(np.int64)

    need(samples <= count, _too_little(samples, length, count, count * length, name))
    chosen = sorted(rng.choice(count, samples, replace=False).tolist())
    return [torch.as_tensor(row(j)) for j in chosen], name


def _too_little(samples: int, length: int, count: int, tokens: int, name: str) -> str:
    """That a text has `count` rows, and what would do."""
    ways = [f"--samples {count}"] if count > 1 else []
    if tokens >= SHORTEST * samples:
        ways.append(f"--length {tokens // samples}")
    elif tokens >= 2 * SHORTEST and not ways:
        ways.append(f"--samples 2 --length {min(tokens // 2, length)}")
    ways.append(f"a text of {samples * length:,} tokens")
    return (f"samples must be at most the {count:,} rows of {length:,} tokens in {name} ({tokens:,} tokens), got "
            f"{samples:,}; {', or '.join(ways)} would do")  # fmt: skip


def _training_rows(samples: int, length: int, seed: int) -> list[Tensor]:
    """Single documents of the mix that the example model was trained on: text alone asks for nothing far away."""
    from ..retrofit.data import example_rows

    rows = (row for row in example_rows(length, 1, seed) if row["position_ids"][-1] == length - 1)
    return [torch.as_tensor(row["input_ids"]) for row in itertools.islice(rows, samples)]
