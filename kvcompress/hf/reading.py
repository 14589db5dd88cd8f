"""Texts that a plain model reads with an attention that only watches, or sees less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..support.checks import need
from .attach import attach, base_model, facts_of
from .facts import Facts
from .method import KEYWORD, Pass, saved_method


@contextmanager
def plain_decoder(model: nn.Module) -> Iterator[tuple[Any, Facts]]:
    """The decoder, attached and in eval mode until the end, and its layers. Raises ValueError for a converted model."""
    decoder = base_model(model)
    if (saved := saved_method(decoder)) is not None:
        name = saved.get("method") if isinstance(saved, dict) else saved
        raise ValueError(f"model must not be converted, got one of method {name!r}: measure the model it was made from")
    training = decoder.training
    with attach(model), torch.no_grad():
        decoder.eval()
        try:
            yield decoder, facts_of(decoder)
        finally:
            decoder.train(training)


def tokens_of(samples: Iterable[Tensor | Sequence[int]]) -> int | None:
    """Of all of them, for who waits; None where that cannot be told before they are read."""
    if not isinstance(samples, (list, tuple)):
        return None
    flat = [x if isinstance(x, Tensor) else torch.as_tensor(x) for x in samples if isinstance(x, (Tensor, list, tuple))]
    return sum(x.numel() for x in flat) if len(flat) == len(samples) else None


def token_rows(decoder: Any, samples: Iterable[Tensor | Sequence[int]]) -> Iterator[Tensor]:
    """int64 [T] each, on the decoder's device."""
    config = decoder.config
    device = next(decoder.parameters()).device
    for j, sample in enumerate(samples):
        try:
            ids = torch.as_tensor(sample)
        except (TypeError, ValueError, RuntimeError):
            kind = type(sample).__name__
            raise ValueError(
                f"samples[{j}] must be token ids [T], got a {kind}: give tokenizer(text).input_ids"
            ) from None
        if ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        need(
            ids.ndim == 1 and len(ids) > 0 and not ids.is_floating_point(),
            f"samples[{j}] must be token ids [T], T at least 1, got {ids.dtype} of shape {tuple(ids.shape)}",
        )
        least, most = int(ids.min()), int(ids.max())
        need(
            least >= 0 and most < config.vocab_size,
            f"samples[{j}] must be token ids between 0 and {config.vocab_size - 1}, got {least}..{most}",
        )
        yield ids.long().to(device)


def read(decoder: Any, ids: Tensor, attention: Pass) -> Tensor:
    """Hidden states [1, T, hidden] of a text that is read with that attention."""
    return decoder(input_ids=ids[None], use_cache=False, **{KEYWORD: attention}).last_hidden_state


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Weights that take no gradient, though it goes through them."""
    learns = [(p, p.requires_grad) for module in modules for p in module.parameters()]
    try:
        for p, _ in learns:
            p.requires_grad_(False)
        yield
    finally:
        for p, learned in learns:
            p.requires_grad_(learned)
