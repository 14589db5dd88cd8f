"""Decoders that attend to an encoder besides: their own keys are ours, the encoder's stay transformers' own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache

STATES = "encoder_hidden_states"  # by which a decoder takes what its encoder says


def beside_encoder(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model, in which a cache that comes alone has another beside it for an encoder's keys. The model
    returns both, and generate hands both on; where only the first comes again, the others are made again."""
    alone = {n: x for n, x in given.items() if isinstance(x, Cache) and not isinstance(x, EncoderDecoderCache)}
    return given | {name: EncoderDecoderCache(cache, DynamicCache()) for name, cache in alone.items()}


def silent_encoder(decoder: Any, tokens: Tensor, batch: int) -> dict[str, Any]:
    """What a decoder is given of an encoder that says nothing, three times. tokens: on its device."""
    size = getattr(decoder.config, "cross_attention_hidden_size", None) or decoder.config.hidden_size
    return {STATES: tokens.new_zeros(batch, 3, size, dtype=decoder.dtype)}
