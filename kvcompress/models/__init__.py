"""The small byte-level Llama that ships with the package."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .tokenizer import byte_tokenizer

EXAMPLE = Path(__file__).parent / "example"


def load_example_model(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The shipped model (3 M parameters, trained to 2,048 bytes) and its tokenizer (one token per byte); no network.

    dtype: float32, bfloat16 or float16. Returns (model in eval mode, tokenizer). See models/example/README.md.
    """
    model = LlamaForCausalLM.from_pretrained(EXAMPLE, dtype=dtype, local_files_only=True)
    return model.to(device).eval(), byte_tokenizer()
