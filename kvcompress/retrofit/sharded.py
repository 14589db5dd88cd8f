"""Checkpoints of models that are cut up over ranks: every rank writes its parts, any number of ranks reads them.

By torch.distributed.checkpoint: weights as safetensors, so that a checkpoint is a model that from_pretrained loads, the
optimizer's state by the names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

WEIGHTS, OPTIMIZER = "shard-*.safetensors", "optimizer"  # files and a folder of a checkpoint
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by names, however parameters are grouped


@contextmanager
def _own_error() -> Iterator[None]:
    """What went wrong on a rank comes out as a RuntimeError of all: that of torch.distributed.checkpoint is none that
    `except Exception` sees."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def has_parts(folder: Path) -> bool:
    """Whether the weights of a checkpoint are in parts."""
    return any(folder.glob(WEIGHTS))


def _tied(model: nn.Module) -> set[str]:
    """Names of weights that have another one too."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def save_weights(model: Any, folder: Path, *, writes: bool) -> None:
    """Collective. writes: whether this rank writes what is no weight."""
    if writes:
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    state: dict[str, Any] = get_model_state_dict(model)
    for name in _tied(model) & set(state):
        state[name] = state[name].clone()  # a file holds no tensor by two names, and from_pretrained asks for both
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _own_error():
        dcp.save(state, storage_writer=writer)


def load_weights(model: nn.Module, folder: Path) -> None:
    """From parts, or a model that save_pretrained wrote; collective where the model is sharded or ranks are several.

    Raises ValueError for weights of another model.
    """
    state, reader = get_model_state_dict(model), dcp.HuggingFaceStorageReader(str(folder))
    there = set(reader.read_metadata().state_dict_metadata)
    tied = _tied(model)
    state = {name: x for name, x in state.items() if name in there or name not in tied}
    missing, more = sorted(set(state) - there), sorted(there - set(state) - tied)
    if missing or more:
        raise ValueError(f"it lacks {missing[:3]} and has {more[:3]}, which the model has not")
    with _own_error():
        dcp.load(state, storage_reader=reader)
    set_model_state_dict(model, state, options=StateDictOptions(strict=False))  # what is tied is there once


def gathered(model: nn.Module, *, trained_alone: bool = False) -> dict[str, Any]:
    """The whole weights, each once, on the CPU, on rank 0 alone; collective. trained_alone: only those that are."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_alone)
    tied = _tied(model)
    return {name: x for name, x in get_model_state_dict(model, options=options).items() if name not in tied}


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """torch.distributed.checkpoint takes no group without parameters, as adapters leave the one that does not decay."""
    every = optimizer.param_groups
    optimizer.param_groups = [group for group in every if group["params"]]
    try:
        yield
    finally:
        loaded = iter(optimizer.param_groups)
        optimizer.param_groups = [next(loaded) if group["params"] else group for group in every]


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Collective."""
    with _without_empty_groups(optimizer), _own_error():
        state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        dcp.save(state, checkpoint_id=folder / OPTIMIZER)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """What save_optimizer wrote, from any number of ranks to any other; collective."""
    with _without_empty_groups(optimizer), _own_error():
        state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        dcp.load(state, checkpoint_id=folder / OPTIMIZER)
        set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


def load_whole_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """What an optimizer of whole weights had, for one of the same parameters that are sharded: each rank takes its part
    of what all have read."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parts = {
        number: {
            name: distribute_tensor(x, p.device_mesh, p.placements)
            if isinstance(p, DTensor) and isinstance(x, Tensor) and x.shape == p.shape
            else x
            for name, x in state["state"].get(number, {}).items()
        }
        for number, p in enumerate(parameters)
    }
    optimizer.load_state_dict({"state": parts, "param_groups": state["param_groups"]})
