"""Turning a model into one that decides: the neurons of queries and keys leave attention and carry the decisions."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..hf.attach import base_model, facts_of
from ..hf.convert import install, installed
from .config import DMCConfig
from .method import DMCMethod
from .neurons import check_floating, neurons_of, zero_neurons


def convert(model: nn.Module, config: DMCConfig | None = None, *, anneal: bool = True) -> DMCMethod:
    """Converts an attached or plain model to DMC or DMS, in place, and attaches it.

    config: None = DMCConfig(). anneal: the neurons stay in attention at first; lower what is left of them by
    set_neuron_scale(model, s) from 1 to 0 while training (DMC: over 250 steps). False: they are zeroed at once. No
    parameter is added. Layers that see all tokens are converted (the method's `layers` says which); those that see a
    window or a chunk, and those that recur, stay as they are. model.config.kvcompress says what was done, so that
    save_pretrained, from_pretrained and kvcompress.attach bring the converted model back.
    Returns the model's method (see state).
    Raises ValueError for a model that cannot be attached or converted, with the reason: converted already, quantised
    projections, a norm that subtracts a mean, keys made from latents (MLA) or read from another layer.
    Source: DMC, section 3.2.
    """
    if config is not None and not isinstance(config, DMCConfig):
        raise TypeError(f"config must be a DMCConfig or None, got {type(config).__name__}")
    method = DMCMethod(replace(config or DMCConfig(), neuron_scale=1.0))
    # a model may not run because of weights that are no numbers
    install(model, method, method.rows, refused=check_floating)
    set_neuron_scale(model, 1.0 if anneal else 0.0)
    return method


def state(model: nn.Module) -> DMCMethod:
    """What convert made of an attached model: config, converted layers, seed and step of the noise, the last pass.

    Raises ValueError if the model is not attached or was not converted to DMC.
    """
    return installed(model, DMCMethod, "kvcompress.dmc.convert(model)")


def set_neuron_scale(model: nn.Module, scale: float) -> None:
    """What is left of the neurons in attention, 1 to 0; at 0 their weights are zeroed and decisions begin.

    model: converted and attached. Decisions begin at -shift for every token, weights at +shift. Raises ValueError for a
    scale out of range, and for weights whose neurons cannot be zeroed (see neurons_of), even where that is still to
    come; nothing is changed then.
    """
    decoder, found = base_model(model), state(model)
    if found.config.neuron_scale > 0:
        rows = found.rows(decoder, facts_of(decoder))
        for _ in neurons_of(decoder, rows):
            pass
        if scale == 0:  # once: afterwards the rows hold what was learned
            zero_neurons(decoder, rows)
    found.set_neuron_scale(decoder, scale)


def resume_decisions(model: nn.Module) -> None:
    """Sets a model up whose weights come from a checkpoint made after its annealing.

    An adapter's checkpoint lacks the frozen layers under it: their neurons are zeroed again.
    """
    decoder, found = base_model(model), state(model)
    found.set_neuron_scale(decoder, 0.0)
    zero_neurons(decoder, found.rows(decoder, facts_of(decoder)), frozen_bases=True)
