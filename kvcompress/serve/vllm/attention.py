"""vLLM's attention layer over compressed caches: its KV cache spec, its backend and what a step's metadata is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from ...ops.softmax import Softmax
from .engine import ENGINES, Engine, Row


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(FullAttentionSpec):
    """A layer whose keys and values are pages of the whole engine's store. engine: its key in ENGINES."""

    engine: str
    prefix_cacheable = False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        blocks = ENGINES[self.engine].blocks_for(vllm_config.model_config.max_model_len)
        return int(blocks * self.page_size_bytes)  # vLLM itself counts the one that is never given out

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        return KVCacheSpec.merge.__func__(cls, specs)


@dataclass
class Metadata:
    """engine: None in a trial run of vLLM's, which has no requests. states: what recurrent layers ask, by layer."""

    engine: Engine | None
    states: dict[str, Any]


class Builder(AttentionMetadataBuilder):
    """Begins a step. Knows requests by the first of their blocks."""

    def __init__(
        self, kv_cache_spec: CompressedSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.engine = ENGINES[kv_cache_spec.engine]
        if self.engine.states is not None:
            self.engine.states.open(device)
            self._init_reorder_batch_threshold(1)  # recurrent layers want those that decode first

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        given = common_attn_metadata
        starts, blocks = given.query_start_loc_cpu.tolist(), given.block_table_tensor[:, 0].tolist()
        rows = [Row(blocks[i], starts[i], starts[i + 1] - starts[i]) for i in range(given.num_reqs)]
        states = {}
        if self.engine.states is not None:
            states = self.engine.states.told(given, [self.engine.name_of(row.block) for row in rows])
        return Metadata(self.engine if self.engine.begin(rows) else None, states)


class Impl(AttentionImpl):
    """Takes queries and keys before rotation; of a layer that reads another's keys none."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any, **kwargs: Any
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.like: Any = None  # what vLLM has made of this layer
        self.index = -1  # of the layer

    def forward(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is not None and attn_metadata.engine is not None:
            attn_metadata.engine.attend(self.index, query, key, value, softmax_of(self.like), output)
        return output


def softmax_of(impl: Any) -> Softmax:
    """That of a layer as vLLM has made it; its sink logits have values once weights are loaded."""
    sinks = getattr(impl, "sinks", None)
    cap = getattr(impl, "logits_soft_cap", None) or None  # 0: none
    return Softmax(float(impl.scale), cap, None if sinks is None else sinks.float())


class Backend(AttentionBackend):
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012  (as vLLM declares it)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def is_ssm(cls) -> bool:
        return True  # to vLLM, which else makes blocks as large as recurrent states

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class CompressedAttention(Attention):
    """In the place of an attention layer that vLLM has made."""

    def __init__(self, like: Attention, index: int, vllm_config: VllmConfig) -> None:
        del vllm_config.compilation_config.static_forward_context[like.layer_name]
        super().__init__(
            like.num_heads, like.head_size, like.impl.scale, num_kv_heads=like.num_kv_heads,
            cache_config=vllm_config.cache_config, quant_config=like.quant_config,
            per_layer_sliding_window=like.sliding_window, prefix=like.layer_name, attn_backend=Backend,
            kv_sharing_target_layer_name=like.kv_sharing_target_layer_name, head_size_v=like.head_size_v,
        )  # fmt: skip
        self.impl.like, self.impl.index = like.impl, index

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CompressedSpec:
        block_size, name = vllm_config.cache_config.block_size, vllm_config.instance_id
        engine = ENGINES[name]
        # a slot is bytes to vLLM, codes and scales or numbers; as many in every layer, so that all are one group
        heads = [facts.kv_heads for facts in engine.facts.values() if facts.reads is None]
        nbytes = -(-sum(heads) * (engine.page_nbytes // block_size) // len(heads))
        return CompressedSpec(
            block_size=block_size, num_kv_heads=1, head_size=nbytes, head_size_v=0, dtype=torch.uint8, engine=name
        )
