"""Adapters (PEFT) that say in their config how the model under them was converted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .argument import CACHE

FIELD = "kvcompress"  # of adapter_config.json, as of the model's config


_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")  # of keys and values


def check_adapter(model: nn.Module, *, reads: bool = False) -> None:
    """Raises ValueError where PEFT's active adapter stands in front of the tokens: a prefix for any compressed cache, a
    prompt of embeddings where tokens are handed to the decoder past PEFT (reads)."""
    active: Any = getattr(model, "active_peft_config", None)
    if not getattr(active, "is_prompt_learning", False):
        return
    kind = getattr(active.peft_type, "value", active.peft_type)
    if kind in _PREFIXES:
        raise ValueError(
            f"model must not be tuned by a prefix, got PEFT's {kind}: PEFT puts a cache of its own, which holds the "
            "prefix, in place of a compressed one; adapters in the weights (LoRA) and prompts (PROMPT_TUNING) are taken"
        )
    if reads:
        raise ValueError(
            f"model must not be tuned by a prompt to be read by kvcompress, got PEFT's {kind}: tokens go to the "
            f"decoder alone, without it; model.generate(input_ids=ids, {CACHE}=cache) puts it in front"
        )


class _Carrying:
    """Stands on the config of one adapter for its to_dict, which is what PEFT saves of it."""

    def __init__(self, adapter: Any, config: Any) -> None:
        self.adapter, self.config = adapter, config

    def __call__(self) -> dict[str, Any]:
        saved = getattr(self.config, FIELD, None)
        return asdict(self.adapter) | ({} if saved is None else {FIELD: saved})


def carry_conversion(model: nn.Module) -> None:
    """Makes the adapters of a converted model carry config.kvcompress as it is when they are saved; a model without
    adapters stays as it is."""
    top = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    adapters = getattr(model, "peft_config", None)
    if top is not None and isinstance(adapters, dict):
        for adapter in adapters.values():
            object.__setattr__(adapter, "to_dict", _Carrying(adapter, top.get_decoder().config))
