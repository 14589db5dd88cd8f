"""vLLM's own model classes, whose attention layers hand over queries and keys as they are before rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from .attention import CompressedAttention
from .engine import ENGINES, Engine
from .scheduler import register_spec
from .settings import Settings


class Unrotated(nn.Module):
    """In the place of a rotary embedding."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


class Compressed:
    """Of a model class of vLLM's: makes its engine, and its attention layers that engine's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        register_spec()
        model, cache = vllm_config.model_config, vllm_config.cache_config
        settings = Settings.asked(vllm_config.additional_config, model.hf_config)
        assert settings is not None
        engine = Engine(settings, model.hf_config, model.dtype, cache.block_size)
        found = {}
        for module in self.modules():  # type: ignore[attr-defined]
            attention = getattr(module, "attn", None)
            if isinstance(attention, Attention):
                index = extract_layer_index(attention.layer_name)
                self._check(attention, index, engine)
                if not getattr(module.rotary_emb, "is_neox_style", True):
                    raise ValueError(
                        f"layer {index} rotates neighbouring dimensions, as vLLM's GGUF models do; take the model's "
                        "weights in transformers' form"
                    )
                found[index] = module
        if sorted(found) != sorted(engine.facts):
            raise ValueError(f"{type(self).__name__} must attend in layers {sorted(engine.facts)}, got {sorted(found)}")
        for index, module in found.items():
            module.rotary_emb = Unrotated()
            module.attn = CompressedAttention(module.attn, index, vllm_config)
        ENGINES[vllm_config.instance_id] = engine

    @staticmethod
    def _check(attention: Any, index: int, engine: Engine) -> None:
        facts = engine.facts[index]
        here = (attention.num_heads, attention.num_kv_heads, attention.head_size, attention.sliding_window)
        there = (facts.query_heads, facts.kv_heads, facts.head_dim, facts.window)
        if here != there:
            raise ValueError(
                f"layer {index} has {here} (query heads, KV heads, head dim, window) in vLLM, and {there} in "
                "transformers"
            )


class CompressedLlamaForCausalLM(Compressed, LlamaForCausalLM): ...


class CompressedMistralForCausalLM(Compressed, MistralForCausalLM): ...


class CompressedMixtralForCausalLM(Compressed, MixtralForCausalLM): ...


class CompressedQwen2ForCausalLM(Compressed, Qwen2ForCausalLM): ...


class CompressedQwen2MoeForCausalLM(Compressed, Qwen2MoeForCausalLM): ...


class CompressedQwen3ForCausalLM(Compressed, Qwen3ForCausalLM): ...


class CompressedQwen3MoeForCausalLM(Compressed, Qwen3MoeForCausalLM): ...
