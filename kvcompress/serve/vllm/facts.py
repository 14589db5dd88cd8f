"""What the layers of a model are to attention, by its config alone: vLLM has no transformers model to probe."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from ...hf.config import cache_layers, decoder_config
from ...hf.facts import Facts, LayerFacts
from ...positions import RotaryTables

# classes of models that the plugin is for
FAMILIES = tuple(
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
)
REFUSED = ("llama_4_scaling", "dual_chunk_attention_config")  # fields of configs whose attention is another


class Decoder(nn.Module):
    """In the place of a transformers decoder, for caches: its config and dtype."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(1, 1, dtype=dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def facts_from(config: Any) -> Facts:
    """Of a Llama, Mistral, Qwen2, Qwen3 or one of their mixtures of experts: every layer attends to its own keys, and
    rotates them by transformers' rotary embedding of this config.

    Raises ValueError for configs whose attention is another.
    """
    config = decoder_config(config)
    for name in REFUSED:
        if getattr(config, name, None) is not None:
            raise ValueError(f"{name} must be unset in the model's config, got {getattr(config, name)!r}")
    rotary = RotaryTables(_rotary_class(config)(config))
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    facts = Facts()
    for index, layer in enumerate(cache_layers(config)):
        window = getattr(layer, "sliding_window", None)
        facts[index] = LayerFacts(index, heads, kv_heads, size, size, rotary, rotary, window=window)
    return facts


def _rotary_class(config: Any) -> type:
    """transformers' rotary embedding of a config's family."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    found = [x for key, x in vars(importlib.import_module(name)).items() if key.endswith("RotaryEmbedding")]
    if len(found) != 1:
        raise ValueError(f"{type(config).__name__} must be of a family with one rotary embedding, got {len(found)}")
    return found[0]
