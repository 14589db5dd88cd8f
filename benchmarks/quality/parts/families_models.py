"""A tiny model of any decoder family: the fields of its config that all have, and weights that make tokens matter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128
IMAGE, VIDEO, IMAGE_START = 120, 121, 122  # tokens, where a prompt has images
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
PARTS: dict[str, Any] = {  # experts, indexers, recurrent layers
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32, "shared_intermediate_size": 32, "index_topk": 16, "index_head_dim": 16,
    "index_n_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 2, "short_conv_kernel_size": 4,
}  # fmt: skip
OTHERS: dict[str, Any] = {  # of a multimodal model's other parts
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "num_hidden_layers": 1, "depth": 1, "num_layers": 1,
    "num_attention_heads": 2, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "image_size": 28,
    "patch_size": 14, "projection_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """kind: the model type. settings: fields of its config, besides those of BASE and PARTS that it knows. text: fields
    of its text_config, where the model is a multimodal one; vision: those of its vision_config."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] | None = None
    vision: dict[str, Any] = field(default_factory=dict)
    implementation: str | None = None  # of attention; None = what transformers takes by itself
    images: bool = False  # it is shown images
    grows: bool = False  # its frequencies change with every token, so that the dense model's keys do not fit together

    def config(self) -> Any:
        if self.text is None:
            return CONFIG_MAPPING[self.kind](**tiny_fields(CONFIG_MAPPING[self.kind]) | self.settings)
        return _multimodal(self)

    def model(self, seed: int = 0) -> Any:
        """A model with random weights, in float32, whose tokens depend on all they attend to."""
        torch.manual_seed(seed)
        causal = self.text is None and self.kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        auto: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        model = auto.from_config(self.config(), attn_implementation=self.implementation).eval()
        enlarge(model)
        return model


@torch.no_grad()
def enlarge(model: Any, size: float = 0.12) -> None:
    """Weights as large as trained ones would be in so narrow a model; norms that are not 1, biases that are not 0."""
    seen: set[int] = set()
    for parameter in model.parameters():
        if id(parameter) in seen or not parameter.is_floating_point():
            continue
        seen.add(id(parameter))
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
        elif (spread := float(parameter.std())) > 1e-6:
            parameter.mul_(size / spread)
        else:
            parameter.add_(size * torch.randn_like(parameter))


def tiny_fields(config_class: Any) -> dict[str, Any]:
    """What of BASE and PARTS this config has."""
    known = {f.name for f in dataclasses.fields(config_class)} | set(getattr(config_class, "attribute_map", {}))
    return {name: value for name, value in (PARTS | BASE).items() if name in known}


def _multimodal(what: Configuration) -> Any:
    """Its text part is tiny, its other parts too: nobody shows it a picture here."""
    config_class = CONFIG_MAPPING[what.kind]
    whole, text = config_class(), what.text or {}
    parts: dict[str, Any] = {}
    for name in config_class.sub_configs:
        part = getattr(whole, name, None)
        if name == "text_config":
            own = CONFIG_MAPPING[text["model_type"]] if "model_type" in text else type(part)
            parts[name] = own(**tiny_fields(own) | {k: v for k, v in text.items() if k != "model_type"})
        elif name not in what.settings and dataclasses.is_dataclass(part):
            known = {f.name for f in dataclasses.fields(part)} | set(type(part).attribute_map)
            fields = {k: v for k, v in OTHERS.items() if k in known}
            parts[name] = type(part)(**fields | (what.vision if name == "vision_config" else {}))
    own_fields = {k: v for k, v in tiny_fields(config_class).items() if k in ("vocab_size", "hidden_size")}
    return config_class(**own_fields | parts | {"pad_token_id": 0} | what.settings)
