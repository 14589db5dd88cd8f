"""Weights cut up over the ranks of a run, by FSDP2 or HSDP: what is asked of accelerate, on CPUs as on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments

_FLAG, _SIZES, _FRUGAL = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_CPU_RAM_EFFICIENT_LOADING"


def sharding(shards: int, ranks: int) -> dict[str, Any]:
    """Arguments of TrainingArguments for weights that are cut over `shards` of the ranks, a divisor; 1 = each rank has
    all of them. The other ranks hold copies of the parts (HSDP)."""
    if shards == 1:
        return {}
    found: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    if shards < ranks:
        found["parallelism_config"] = ParallelismConfig(dp_replicate_size=ranks // shards, dp_shard_size=shards)
    return found


def sum_gradients_in_float32(args: TrainingArguments) -> None:
    """With bfloat16, gradients travel between the ranks in float32, where accelerate's own choice is bfloat16."""
    if args.fsdp_plugin_args is not None and args.bf16:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        args.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def asked_for(args: TrainingArguments) -> bool:
    """Whether FSDP is: by the arguments, or by what `accelerate launch` puts into the environment."""
    return args.fsdp_plugin_args is not None or _is_set(_FLAG)


def _version(args: TrainingArguments) -> int:
    if args.fsdp_plugin_args is not None:
        return int(args.fsdp_plugin_args["fsdp_version"])
    return int(os.environ.get("FSDP_VERSION", 1))  # as accelerate has it


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def need_whole_loading() -> None:
    """Raises ValueError where all ranks but one would load a model without its weights: what a conversion learns of a
    model, it learns from a forward pass on each of them."""
    if _is_set(_FLAG) and _is_set(_FRUGAL):
        raise ValueError(
            f"fsdp_cpu_ram_efficient_loading must be false, got {os.environ[_FRUGAL]} ({_FRUGAL}): a rank learns what "
            "it converts from a forward pass of its own, and would have no weights for it"
        )


def need_whole_rows(args: TrainingArguments) -> None:
    """Raises ValueError where tokens of a row would be on several ranks, or heads of a layer."""
    sizes = args.parallelism_config or (ParallelismConfig() if _is_set(_SIZES) else None)
    for name, why in (
        ("cp_size", "(context parallelism) a token is merged with the one before it, and masked by what others decide"),
        ("sp_size", "(sequence parallelism) a token is merged with the one before it"),
        ("tp_size", "(tensor parallelism) noise and plans are of all heads of a layer"),
    ):
        size = getattr(sizes, name, 1)
        if size != 1:
            raise ValueError(f"{name} must be 1, got {size}: {why}; cut weights over ranks instead (FSDP2), and take "
                             "gradient checkpointing for long rows")  # fmt: skip


@contextmanager
def on_cpus_too(args: TrainingArguments) -> Iterator[None]:
    """While its body makes an Accelerator, FSDP is not left out because processes run on CPUs.

    accelerate looks whether it was asked for only where processes have accelerators, and goes on with DDP without a
    word elsewhere, though all that it then does works on any device.
    Raises ValueError for FSDP1, and RuntimeError where accelerate's state was set up before, without FSDP.
    """
    _ = args.device  # sets the state up
    shared = PartialState._shared_state
    before = shared.get("distributed_type")
    wanted = asked_for(args) and before == DistributedType.MULTI_CPU
    if wanted and (version := _version(args)) != 2:
        raise ValueError(f"fsdp_version must be 2 on CPUs, got {version}")
    if wanted:
        shared["distributed_type"] = DistributedType.MULTI_GPU
    try:
        yield
    finally:
        if wanted and shared.get("distributed_type") == DistributedType.MULTI_GPU:
            shared["distributed_type"] = before
    if wanted and shared.get("distributed_type") != DistributedType.FSDP:
        raise RuntimeError("FSDP was asked for after an Accelerator had been made without it in this process")
