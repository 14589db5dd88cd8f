"""Model families whose attention we know: by attention class, as transformers names it."""

from __future__ import annotations

from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .attention import compressed_class

# A family belongs here if its attention has q_proj, k_proj, v_proj, o_proj, an optional q_norm and k_norm on the head
# dimension, rotate_half RoPE from one rotary_emb for all layers, and nothing else.
ATTENTION_CLASSES: tuple[type[nn.Module], ...] = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)

# under their own names in this module, so that an attached model can be pickled
COMPRESSED_CLASSES = {family: compressed_class(family, __name__) for family in ATTENTION_CLASSES}
globals().update({cls.__name__: cls for cls in COMPRESSED_CLASSES.values()})


def supported_families() -> str:
    return ", ".join(cls.__name__.removesuffix("Attention") for cls in ATTENTION_CLASSES)
