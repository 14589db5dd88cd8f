"""Converted models that are loaded and not attached say so, instead of running their weights as a plain model.

A converted model's config names its attention: attn_implementation "kvcompress". Transformers without kvcompress
refuses that name where the model is loaded, whatever class loads it; with kvcompress imported it stands for a function
that raises (support/converted). An architecture of its own would need a class for each family, and auto_map trust in a
checkpoint's code.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..support.converted import NAME

_FIELD = "attn_implementation"  # of a config file; a config in memory has another for it


def guard(model: nn.Module, decoder: Any) -> None:
    """Names the attention of a converted model in what save_pretrained will write of its config."""
    setattr(decoder.config, _FIELD, NAME)
    for around in model.modules():
        if isinstance(around, PreTrainedModel) and around.config is not decoder.config:
            for name in around.config.sub_configs:
                if getattr(around.config, name, None) is decoder.config:
                    setattr(around.config, _FIELD, {name: NAME})


def is_guarded(decoder: Any) -> bool:
    """Whether a decoder was loaded from such a config, and would raise."""
    return bool(decoder.config._attn_implementation == NAME)


def set_guard(decoder: Any, guarded: bool) -> None:
    """Makes a decoder raise, or attend as its family does where nothing else is asked for."""
    found = NAME if guarded else decoder.get_correct_attn_implementation(None)
    decoder.config._attn_implementation_internal = found
