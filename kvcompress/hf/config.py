"""What a transformers config says of a decoder."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig


def decoder_config(config: PreTrainedConfig) -> Any:
    """The part of a model's config that describes its decoder. Raises TypeError for what is no config."""
    if not isinstance(config, PreTrainedConfig):
        what = "the model itself: pass model.config" if isinstance(config, nn.Module) else type(config).__name__
        raise TypeError(f"config must be a transformers config (model.config), got {what}")
    return config.get_text_config(decoder=True)


def sizes_of(config: Any) -> dict[str, int]:
    """What a cache and the model that it is used with must have in common."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {"layers": config.num_hidden_layers, "KV heads": kv_heads, "head dim": head_dim}
