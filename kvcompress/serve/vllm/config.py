"""Which models the plugin is for, and what vLLM's configuration must be where a compressed cache is asked for."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform

from ...caches.graphs import check_records
from .engine import Engine
from .settings import BLOCK_SIZE, KEY, Settings

logger = init_logger("vllm.kvcompress")  # of vLLM's, which show no others

PREFIX = "Compressed"
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_ONE = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size",
    "decode_context_parallel_size",
)  # fmt: skip


class ConfigOfV1(VllmConfig):
    """vLLM's configuration of a model whose batches its V1 model runner makes: V2, the choice for GPUs, has others."""

    use_v2_model_runner = False


def register_families() -> None:
    """Makes vLLM ask us for the configuration of every model. May be called again."""
    for name in [name for name in ModelRegistry.get_supported_archs() if not name.startswith(PREFIX)]:
        before = MODELS_CONFIG_MAP.get(name)
        if getattr(before, "of_kvcompress", False):
            continue
        ModelRegistry.register_model(PREFIX + name, f"kvcompress.serve.vllm.models:{PREFIX}{name}")
        MODELS_CONFIG_MAP[name] = _hook(before)


def _hook(before: type[VerifyAndUpdateConfig] | None) -> type[VerifyAndUpdateConfig]:
    """before: what vLLM asked already."""

    class Asked(before or VerifyAndUpdateConfig):  # type: ignore[misc]
        of_kvcompress = True

        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            super().verify_and_update_config(vllm_config)
            model = vllm_config.model_config
            settings = Settings.asked(vllm_config.additional_config, model.hf_config)
            if settings is not None:
                configure(vllm_config, settings)

    return Asked


def configure(vllm_config: Any, settings: Settings) -> None:
    """Refuses what cannot be done with compressed caches, and sets what they need."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    for name in _ONE:
        _must_be(name, getattr(parallel, name), (1,))
    _must_be("distributed_executor_backend", parallel.distributed_executor_backend, (None, "uni", EXECUTOR))
    for name in ("speculative_config", "kv_transfer_config", "kv_events_config"):
        _must_be(name, getattr(vllm_config, name), (None,))
    _must_be("kv_cache_dtype", cache.cache_dtype, ("auto", str(model.dtype).removeprefix("torch.")))
    _must_be("scheduling_policy", scheduler.policy, ("fcfs",))
    _must_be("scheduler_cls", scheduler.scheduler_cls, (None,))
    _must_be("async_scheduling", scheduler.async_scheduling, (None, False))
    _must_be("runner", model.runner_type, ("generate",))
    if compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE):
        raise ValueError(
            f"cudagraph_mode must be NONE with a compressed cache, got {compilation.cudagraph_mode.name}: "
            f"additional_config[{KEY!r}] takes cuda_graphs = True"
        )
    if settings.cuda_graphs:
        check_records("model", torch.device(current_platform.device_type))
        reason = "cuda_graphs = True"
        _must_be("enable_prompt_embeds", model.enable_prompt_embeds, (False,), reason)
        _must_be("enable_lora", vllm_config.lora_config is not None, (False,), reason)  # a recording has one or none
    if current_platform.is_cpu() and parallel.worker_cls in ("auto", CPU_WORKER):
        parallel.worker_cls = "kvcompress.serve.vllm.worker.CompressedWorker"
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        raise ValueError("VLLM_USE_V2_MODEL_RUNNER must be unset or 0 with a compressed cache, got 1")
    _must_be("hisparse_config", vllm_config.attention_config.hisparse_config, (None,))
    _must_be("watermark_config", getattr(vllm_config, "watermark_config", None), (None,))
    vllm_config.__class__ = ConfigOfV1
    if model.multimodal_config is not None and not model.multimodal_config.language_model_only:
        raise ValueError(
            f"language_model_only must be True with a compressed cache, which takes text alone, got "
            f"{model.architecture}, which takes more"
        )
    if not cache.user_specified_block_size:
        cache.block_size, cache.user_specified_block_size = BLOCK_SIZE, True
    if settings.cuda_graphs and cache.block_size < 2:
        raise ValueError(f"block_size must be at least 2 with cuda_graphs = True, got {cache.block_size}")
    engine = Engine(settings, model.hf_config, model.dtype, cache.block_size)
    if engine.whole:
        reason = f"{settings.cache!r}, which chooses by all of a prompt"
        _must_be("long_prefill_token_threshold", scheduler.long_prefill_token_threshold, (0,), reason)
    if engine.one_pass:
        reason = f"{settings.cache!r}, which reads prompts whole, in one step"
        _must_be("enable_chunked_prefill", scheduler.enable_chunked_prefill, (False,), reason)
    elif settings.prefixes and not engine.whole:
        reason = f"prefixes = {settings.prefixes}, which are read up to their borders first"
        _must_be("enable_chunked_prefill", scheduler.enable_chunked_prefill, (True,), reason)
    in_parts = scheduler.enable_chunked_prefill or engine.whole
    if settings.prefixes is None and (engine.recurs or not (cache.enable_prefix_caching and in_parts)):
        settings = replace(settings, prefixes=0)
    given = vllm_config.additional_config or {}
    vllm_config.additional_config = {**given, KEY: asdict(settings)}  # for the engine
    cache.enable_prefix_caching = False  # vLLM's own, which knows blocks: a prefix is a fork of a cache
    parallel.distributed_executor_backend = EXECUTOR  # scheduler and worker ask one engine
    scheduler.async_scheduling = False  # pages are counted after each step
    scheduler.scheduler_cls = "kvcompress.serve.vllm.scheduler.CompressedScheduler"
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    names, model.model_impl = [PREFIX + model.architecture], "auto"
    model.hf_config.architectures = model.model_arch_config.architectures = names
    logger.info("Compressed KV cache: %s", settings.cache)


def _must_be(name: str, value: Any, allowed: tuple[Any, ...], reason: str = "") -> None:
    if value not in allowed:
        why = reason or f"a compressed cache (additional_config[{KEY!r}])"
        raise ValueError(f"{name} must be {allowed[-1]!r} with {why}, got {value!r}")
