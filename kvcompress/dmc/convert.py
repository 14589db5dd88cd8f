"""Turning a model into one that decides: the neurons of queries and keys leave attention and carry the decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.attach import attach, base_model
from ..retrofit.method import method_of, saved_method, set_method
from .config import DMCConfig
from .method import DMCMethod


def convert(model: nn.Module, config: DMCConfig | None = None, *, anneal: bool = True) -> DMCMethod:
    """Converts an attached or plain model to DMC or DMS, in place, and attaches it.

    config: None = DMCConfig(). anneal: the neurons stay in attention at first; lower what is left of them by
    set_neuron_scale(model, s) from 1 to 0 while training (DMC: over 250 steps). False: they are zeroed at once. No
    parameter is added. model.config.kvcompress says what was done, so that save_pretrained, from_pretrained and
    kvcompress.attach bring the converted model back.
    Returns the model's method (see state).
    Raises ValueError for a family that is not supported, a model that is converted already, or quantised projections.
    Source: DMC, section 3.2.
    """
    decoder = base_model(model)
    if config is not None and not isinstance(config, DMCConfig):
        raise TypeError(f"config must be a DMCConfig or None, got {type(config).__name__}")
    if saved_method(decoder) is not None:
        raise ValueError(f"model must not be converted yet, got one with config.kvcompress = {saved_method(decoder)}")
    method = DMCMethod(
        decoder, replace(config or DMCConfig(), neuron_scale=1.0)
    )  # checks the config before anything is attached
    try:
        for _ in _neurons(decoder, method.config):
            pass
        attach(model)
    except BaseException:
        del decoder.config.kvcompress
        raise
    set_method(decoder, method)
    set_neuron_scale(model, 1.0 if anneal else 0.0)
    return method


def state(model: nn.Module) -> DMCMethod:
    """What convert made of an attached model: config, seed and draws of the noise, the last pass.

    Raises ValueError if the model is not attached or was not converted to DMC.
    """
    found = method_of(base_model(model))
    if not isinstance(found, DMCMethod):
        raise ValueError(
            f"{type(model).__name__} must be converted to DMC and attached: kvcompress.dmc.convert(model), or "
            "kvcompress.attach(model) after loading a converted one"
        )
    return found


def set_neuron_scale(model: nn.Module, scale: float) -> None:
    """What is left of the neurons in attention, 1 to 0; at 0 their weights are zeroed and decisions begin.

    Decisions begin at -shift for every token, weights at +shift. ValueError out of range.
    """
    decoder, found = base_model(model), state(model)
    begins = scale == 0 and found.config.neuron_scale > 0
    found.set_neuron_scale(decoder, scale)
    if begins:  # once: afterwards the rows hold what was learned
        with torch.no_grad():
            for rows in _neurons(decoder, found.config):
                rows.zero_()


def resume_decisions(model: nn.Module) -> None:
    """Sets a model up whose weights come from a checkpoint made after its annealing.

    An adapter's checkpoint lacks the frozen layers under it: their neurons are zeroed again.
    """
    decoder, found = base_model(model), state(model)
    found.set_neuron_scale(decoder, 0.0)
    with torch.no_grad():
        for rows in _neurons(decoder, found.config, frozen_bases=True):
            rows.zero_()


def _neurons(decoder: Any, config: DMCConfig, *, frozen_bases: bool = False) -> Iterator[Tensor]:
    """Views of the weights and biases that feed the neurons; ValueError where they cannot be written.

    frozen_bases: only those of layers under an adapter that are not trained.
    """
    for layer in decoder.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj"):
            if name == "q_proj" and config.mode == "dms":
                continue  # DMS decides by keys alone; the queries' neuron is multiplied by the keys', which is zero
            module = getattr(attention, name)
            for linear in _linears(name, module)[: 1 if frozen_bases else None]:
                for tensor in (linear.weight, linear.bias):
                    if frozen_bases and (linear is module or (tensor is not None and tensor.requires_grad)):
                        continue
                    if tensor is not None:
                        yield _rows(name, tensor, attention.head_dim, config)


def _linears(name: str, module: nn.Module) -> list[Any]:
    """The linear layers whose sum a projection is: itself, or PEFT's base layer and the outer halves of its LoRA."""
    base = getattr(module, "base_layer", None)
    if base is None:
        return [module]
    if len(getattr(module, "lora_magnitude_vector", ())):
        raise ValueError(f"{name} must not have a DoRA adapter, which divides by the norm of a neuron's zeroed row")
    outer = getattr(module, "lora_B", None)
    return [base, *(outer.values() if outer is not None else ())]


def _rows(name: str, tensor: Tensor, head_dim: int, config: DMCConfig) -> Tensor:
    if not tensor.is_floating_point() or tensor.shape[0] % head_dim:
        raise ValueError(
            f"{name} must be a linear layer of floating point numbers with {head_dim} rows per head, got "
            f"{tensor.dtype} {tuple(tensor.shape)}: quantised models must be converted before they are quantised"
        )
    return tensor.unflatten(0, (-1, head_dim))[:, config.place(head_dim)]
