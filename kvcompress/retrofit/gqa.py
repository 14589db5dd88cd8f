"""Fewer KV heads by averaging them, and up-training: what DMC is compared with at the same cache size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.attach import attach, base_model, facts_of, learn_again
from ..hf.facts import Facts
from ..hf.method import saved_method
from ..hf.plain import use_plain_attention
from ..hf.projections import attention_linears, projections_of
from ..support.checks import need
from .recipe import Recipe, cosine_decay, need_end_rate
from .run import RunSettings, load, train

FIELD = "num_key_value_heads"
COUNTS = (FIELD, "num_kv_heads", "n_kv_heads")  # as attention modules name it


def convert_to_gqa(model: nn.Module, kv_heads: int) -> nn.Module:
    """Makes a model one with fewer KV heads, in place: each is the mean of r consecutive ones, their weights' and
    biases'; queries, and a norm of keys that all heads share (Qwen3), stay as they are.

    model: a plain transformers model, attached or not, whose keys and values come from a linear layer each. kv_heads: a
    divisor of its own number, the same number changes nothing. model.config.num_key_value_heads says what was done, so
    that save_pretrained, from_pretrained and any cache treat it as the plain model that it is. Returns the model.
    Raises ValueError for another number, a model that cannot be attached, projections that are fused, made from latents
    or not nn.Linear (PEFT, quantised), or a model that is converted to another method; nothing is changed then.
    Source: GQA (Ainslie et al. 2023), section 2.1; the baseline of DMC, section 4.
    """
    decoder = base_model(model)
    if saved_method(decoder) is not None:
        raise ValueError(f"model must not be converted yet, got one with config.kvcompress = {saved_method(decoder)}")
    had = getattr(decoder.config, FIELD, None)
    if had is None:
        raise ValueError(f"{type(decoder).__name__} is not supported: its config has no {FIELD}")
    fits = isinstance(kv_heads, int) and not isinstance(kv_heads, bool) and kv_heads >= 1 and had % kv_heads == 0
    need(fits, f"kv_heads must divide the model's {had} KV heads, got {kv_heads!r}")
    with attach(model):
        facts = facts_of(decoder)
        facts.check_alone("convert_to_gqa")
        sources = _sources(decoder, facts, had)
    for name, head_dim in sources.items():
        owner, _, own = name.rpartition(".")
        attention: Any = decoder.get_submodule(owner)
        setattr(attention, own, _averaged(getattr(attention, own), kv_heads, head_dim))
        for field in COUNTS:
            if getattr(attention, field, None) == had:
                setattr(attention, field, kv_heads)
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = decoder.config.num_attention_heads // kv_heads
    for config in {id(m.config): m.config for m in (model, decoder) if hasattr(m, "config")}.values():
        setattr(config, FIELD, kv_heads)
    learn_again(model)
    return model


def _check_plain(decoder: nn.Module) -> None:
    """Raises ValueError for projections that are linear layers in some of a model's layers, but not in all."""
    names = [name.rpartition(".") for some in attention_linears(decoder).values() for name, _ in some]
    for owner in {owner for owner, _, _ in names}:
        for own in {own for _, _, own in names}:  # what is linear in some layers is in all
            module = getattr(decoder.get_submodule(owner), own, None)
            if module is not None:
                _need_plain(own, module)


def _need_plain(name: str, module: Any) -> None:
    need(type(module) is nn.Linear and module.weight.is_floating_point(),
         f"{name} must be nn.Linear of floating point numbers, got {type(module).__name__}")  # fmt: skip


def _sources(decoder: Any, facts: Facts, had: int) -> dict[str, int]:
    """The linear layers that make keys and values, and the size of a head of each."""
    found: dict[str, int] = {}
    try:
        every = projections_of(decoder, facts)
    except ValueError:
        _check_plain(decoder)
        raise
    for layer, made in every.items():
        what = f"{type(decoder).__name__} is not supported: layer {layer}"
        need(facts[layer].kv_heads == had, f"{what} has {facts[layer].kv_heads} KV heads, its config says {had}")
        need(facts[layer].reads is None, f"{what} reads the keys of layer {facts[layer].reads}")
        parts = {"keys": (made.keys, facts[layer].head_dim), "values": (made.values, facts[layer].value_dim)}
        names = [part.used for part, _ in parts.values()]
        need(
            all(len(used) == 1 for used in names) and names[0] != names[1],
            f"{what} makes its keys by {', '.join(names[0])} and its values by {', '.join(names[1])}; each must come "
            "from a linear layer of its own",
        )
        for kind, (part, size) in parts.items():
            (name,), order = part.used, torch.arange(had)[:, None]
            module: Any = decoder.get_submodule(name)
            _need_plain(name.rpartition(".")[2], module)
            whole = bool((part.row // size == order).all()) and module.out_features == had * size
            need(whole, f"{what} has {kind} that are not rows of {name} head by head")
            found[name] = size
        owner = decoder.get_submodule(names[0][0].rpartition(".")[0])
        linear = {name.rpartition(".")[2] for used in names for name in used}
        size = had * facts[layer].head_dim
        for name, child in owner.named_children():
            weight = getattr(child, "weight", None)
            if name not in linear and isinstance(weight, Tensor) and weight.shape == (size,) and had > 1:
                raise ValueError(
                    f"{what} norms all heads of its keys together ({name}), which fewer heads would change"
                )
    return found


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
    if not (settings.sources and settings.borders):  # which need a mask, as transformers makes it
        use_plain_attention(model)
    return train(model, tokenizer, recipe, settings, resume=resume)
