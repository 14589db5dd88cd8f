"""The weights that feed the neurons: which they are, and how they are zeroed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.facts import Facts
from ..hf.projections import attention_linears, out_dim, projections_of
from .config import DMCConfig
from .shards import fill_slices, need_addressable

NeuronRows = dict[str, Tensor]  # rows, int64 [n], of linear layers, by their name in the decoder


def neuron_rows(decoder: Any, facts: Facts, config: DMCConfig) -> NeuronRows:
    """The rows whose outputs are the neurons of queries and keys, in the layers that see all tokens.

    DMS decides by keys alone; the queries' neuron is multiplied by the keys', which is zero.
    Raises ValueError, naming the layer, where a neuron is not one row of a linear layer for each head.
    """
    found: NeuronRows = {}
    for layer, made in projections_of(decoder, facts).items():
        own = facts[layer]
        if own.is_local:
            continue
        if len(made.keys.used) > 1:
            raise ValueError(
                f"{type(decoder).__name__} is not supported by DMC: layer {layer} makes its keys by several linear "
                f"layers ({', '.join(made.keys.used)}): keys made from latents (MLA)"
            )
        place = config.place(own.head_dim)
        for part in (made.keys,) if config.mode == "dms" else (made.queries, made.keys):
            for name, rows in part.rows_of(place).items():
                if len(rows.unique()) < len(rows):
                    raise ValueError(
                        f"{type(decoder).__name__} is not supported by DMC: layer {layer} makes several heads by the "
                        f"same rows of {name}, which would decide alike"
                    )
                found[name] = torch.cat([found[name], rows]) if name in found else rows
    for name, rows in found.items():
        for _ in neurons_of(decoder, {name: rows}):
            pass
    return found


def check_floating(decoder: nn.Module) -> None:
    """Raises ValueError for projections whose rows cannot be zeroed."""
    for some in attention_linears(decoder).values():
        for name, module in some:
            _check_floating(name, getattr(module, "base_layer", module))


def neurons_of(
    decoder: nn.Module, rows: NeuronRows, *, frozen_bases: bool = False
) -> Iterator[tuple[str, Tensor, int, Tensor]]:
    """The weights and biases that feed neurons: name, the tensor, and which slices of which of its dimensions.

    frozen_bases: only those of layers under an adapter that are not trained. Raises ValueError for weights that are not
    of floating point numbers, or cut up so that a row cannot be told (FSDP1, DeepSpeed's ZeRO-3).
    """
    for name, own in rows.items():
        module = decoder.get_submodule(name)
        for linear in _parts(name, module)[: 1 if frozen_bases else None]:
            _check_floating(name, linear)
            need_addressable(_short(name), linear)
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if tensor is None or (frozen_bases and (linear is module or tensor.requires_grad)):
                    continue
                yield f"{name}.{kind}", tensor, out_dim(linear) if tensor.ndim == 2 else 0, own


def zero_neurons(decoder: nn.Module, rows: NeuronRows, *, frozen_bases: bool = False) -> None:
    """Zeroes them, in every shard of weights that FSDP2 or tensor parallelism cut up; collective over their ranks.

    Raises ValueError as neurons_of does, before anything is zeroed, and RuntimeError where one is not zero afterwards.
    """
    for name, tensor, dim, own in list(neurons_of(decoder, rows, frozen_bases=frozen_bases)):
        fill_slices(name, tensor, dim, own, 0.0)


def _parts(name: str, module: nn.Module) -> list[Any]:
    """The linear layers whose sum a projection is: itself, or PEFT's base layer and the outer halves of its LoRA."""
    base = getattr(module, "base_layer", None)
    if base is None:
        return [module]
    if len(getattr(module, "lora_magnitude_vector", ())):
        raise ValueError(
            f"{_short(name)} must not have a DoRA adapter, which divides by the norm of a neuron's zeroed row"
        )
    outer = getattr(module, "lora_B", None)
    return [base, *(outer.values() if outer is not None else ())]


def _check_floating(name: str, linear: Any) -> None:
    weight = linear.weight
    if not weight.is_floating_point():
        raise ValueError(
            f"{_short(name)} must be a linear layer of floating point numbers, got {weight.dtype} "
            f"{tuple(weight.shape)}: quantised models must be converted before they are quantised"
        )


def _short(name: str) -> str:
    return name.rpartition(".")[2]
