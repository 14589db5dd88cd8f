"""Fewer KV heads by averaging them, and up-training: what DMC is compared with at the same cache size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import need
from ..hf.attach import base_model
from ..hf.families import ATTENTION_CLASSES, supported_families
from ..hf.plain import use_plain_attention
from .method import saved_method
from .recipe import Recipe, cosine_decay, need_end_rate
from .run import RunSettings, load, train

FIELD = "num_key_value_heads"


def convert_to_gqa(model: nn.Module, kv_heads: int) -> nn.Module:
    """Makes a model one with fewer KV heads, in place: each is the mean of r consecutive ones, their weights' and
    biases'; queries, and Qwen3's norm of keys, which all heads share, stay as they are.

    model: a plain transformers model of a supported family, attached or not. kv_heads: a divisor of its own number,
    the same number changes nothing. model.config.num_key_value_heads says what was done, so that save_pretrained,
    from_pretrained and any cache treat it as the plain model that it is. Returns the model.
    Raises ValueError for another number, a family that is not supported, projections that are not nn.Linear (PEFT,
    quantised), or a model that is converted to another method; nothing is changed then.
    Source: GQA (Ainslie et al. 2023), section 2.1; the baseline of DMC, section 4.
    """
    decoder = base_model(model)
    if saved_method(decoder) is not None:
        raise ValueError(f"model must not be converted yet, got one with config.kvcompress = {saved_method(decoder)}")
    attentions: list[Any] = [layer.self_attn for layer in decoder.layers]
    for attention in attentions:
        need(isinstance(attention, ATTENTION_CLASSES),
             f"{type(attention).__name__} is not supported; supported families: {supported_families()}")  # fmt: skip
        for name in ("k_proj", "v_proj"):
            found = getattr(attention, name)
            need(type(found) is nn.Linear and found.weight.is_floating_point(),
                 f"{name} must be nn.Linear of floating point numbers, got {type(found).__name__}")  # fmt: skip
    had = decoder.config.num_key_value_heads
    fits = isinstance(kv_heads, int) and not isinstance(kv_heads, bool) and kv_heads >= 1 and had % kv_heads == 0
    need(fits, f"kv_heads must divide the model's {had} KV heads, got {kv_heads!r}")
    for attention in attentions:
        for name in ("k_proj", "v_proj"):
            setattr(attention, name, _averaged(getattr(attention, name), kv_heads, attention.head_dim))
        attention.num_key_value_groups = decoder.config.num_attention_heads // kv_heads
    for config in {id(m.config): m.config for m in (model, decoder) if hasattr(m, "config")}.values():
        setattr(config, FIELD, kv_heads)
    return model


def _averaged(linear: nn.Linear, kv_heads: int, head_dim: int) -> nn.Linear:
    out = nn.Linear(
        linear.in_features, kv_heads * head_dim, linear.bias is not None, linear.weight.device, linear.weight.dtype
    )
    out.train(linear.training)
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            given: Tensor = getattr(linear, name)
            blocks = given.unflatten(0, (kv_heads, -1, head_dim))  # [kv_heads, r, D, ...]
            parameter.copy_(blocks.double().mean(1).flatten(0, 1))
            parameter.requires_grad_(given.requires_grad)
    return out


@dataclass(frozen=True)
class PlainRecipe(Recipe):
    """Continued pre-training and nothing else. warmup_steps: of the learning rate, at the start. decay_steps: the last
    of steps, in which it falls by a cosine to end_rate of it; between them it is constant, as in DMC's ramp.

    Defaults are as many steps as DMCRecipe's. Raises ValueError for a field out of range.
    """

    steps: int = 20250
    warmup_steps: int = 0
    decay_steps: int = 2000
    end_rate: float = 0.1

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup_steps", 0), ("decay_steps", 0)):
            value = getattr(self, name)
            need(isinstance(value, int) and value >= least,
                 f"{name} must be an integer of at least {least}, got {value!r}")  # fmt: skip
        need(self.decay_steps <= self.steps,
             f"decay_steps must be at most steps = {self.steps}, got {self.decay_steps}")  # fmt: skip
        need_end_rate(self.end_rate)

    def learning_rate(self, step: int) -> float:
        rate = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return rate * cosine_decay(step - (self.steps - self.decay_steps), self.decay_steps, self.end_rate)

    def begin_step(self, model: nn.Module, step: int, passes: int) -> None:
        pass

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor | None, dict[str, Any]]:
        return None, {}


def retrofit_gqa(recipe: PlainRecipe, settings: RunSettings, kv_heads: int, *, resume: bool = False) -> dict[str, Any]:
    """Loads, converts, trains and saves a model; see convert_to_gqa, PlainRecipe, RunSettings and run.train."""
    model, tokenizer = load(settings)
    convert_to_gqa(model, kv_heads)
    use_plain_attention(model)
    return train(model, tokenizer, recipe, settings, resume=resume)
