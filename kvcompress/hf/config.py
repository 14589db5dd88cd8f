"""What a transformers config says of a decoder."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, __version__, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ..support.versions import numbers_of


def _known(*names: str) -> tuple[type, ...]:
    """Those of transformers' layers of caches that its version has: the oldest lack the last ones."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


EMPTY = _known("DummyLayer")  # hold nothing
# those that hold keys, values, recurrent states and index keys, and nothing else
LAYERS = (
    DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, *EMPTY, *_known(
        "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer", "DynamicIndexedLayer"
    ),
)  # fmt: skip


def decoder_config(config: PreTrainedConfig) -> Any:
    """The part of a model's config that describes its decoder. Raises TypeError for what is no config."""
    if not isinstance(config, PreTrainedConfig):
        what = "the model itself: pass model.config" if isinstance(config, nn.Module) else type(config).__name__
        raise TypeError(f"config must be a transformers config (model.config), got {what}")
    return config.get_text_config(decoder=True)


def ranks_of(config: Any) -> int:
    """Over how many processes the heads of a decoder of this config are cut (tensor parallelism)."""
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


def check_version(config: Any, layers: list[Any]) -> None:
    """Raises ValueError for a decoder that this version of transformers is too old for. layers: of its cache."""
    here = numbers_of(__version__)
    for what, needed, has in (
        ("softcapped attention", (5, 23), getattr(config, "attn_logit_softcapping", None) is not None),
        ("recurrent layers", (5, 23), recurs(layers)),
        ("dynamic RoPE", (5, 13), _is_dynamic(config)),  # before, frequencies of a long call stayed for all later ones
    ):
        if has and here is not None and here < needed:
            raise ValueError(
                f"models with {what} need transformers {needed[0]}.{needed[1]} or newer, got {__version__}"
            )


def _is_dynamic(config: Any) -> bool:
    """Whether its rotary frequencies follow the length of what is read."""
    given = getattr(config, "rope_parameters", None) or {}
    return any(x.get("rope_type") == "dynamic" for x in (given, *given.values()) if isinstance(x, dict))


def sizes_of(config: Any) -> dict[str, int | list[int]]:
    """What a cache and the model that it is used with must have in common; a list where layers differ."""
    # before 5.14 a config says the same of all its layers
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    if not any(getattr(x, "num_attention_heads", None) for x in layers):
        raise ValueError(f"config must be of a model with attention layers, got {type(config).__name__}")
    kv_heads = [getattr(x, "num_key_value_heads", None) or x.num_attention_heads for x in layers]
    head_dims = [getattr(x, "head_dim", None) or x.hidden_size // x.num_attention_heads for x in layers]

    def short(numbers: list[int]) -> int | list[int]:
        return numbers[0] if len(set(numbers)) == 1 else numbers

    return {"layers": len(layers), "KV heads": short(kv_heads), "head dim": short(head_dims)}


def cache_layers(config: Any) -> list[Any]:
    """The layers of a decoder's cache as transformers makes them. Raises ValueError, naming the layer, for one that
    holds more than keys, values, recurrent states and index keys."""
    layers = list(DynamicCache(config=config).layers)
    kinds = getattr(config, "layer_types", None) or ()
    for index, layer in enumerate(layers):
        if type(layer) not in LAYERS:
            kind = f"a {kinds[index]} layer" if index < len(kinds) else "a layer"
            raise ValueError(
                f"layer {index} is {kind}, whose cache ({type(layer).__name__}) holds more than keys and values"
            )
    return layers


def has_indexers(config: Any) -> bool:
    """Whether layers of a decoder choose the tokens that they attend to by an indexer."""
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def recurs(layers: list[Any]) -> bool:
    """Whether any of them holds a state that goes from token to token."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in layers)
